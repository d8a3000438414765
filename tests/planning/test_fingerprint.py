"""Layout files tell whether the function is still the one that they were made for."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

from shardfn import AUTO, load_layout, plan
from shardfn.planning.layout_rules.fingerprint import fingerprint
from shardfn.runtime.layout_check import check_layout


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def step(params, x):
    def loss(params):
        hidden = jnp.tanh(x @ params["up"])
        return jax.nn.log_softmax(hidden @ params["down"]).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


PARAMS, X = {"up": _array(16, 64), "down": _array(64, 16)}, _array(32, 16)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("layouts") / "layout.toml"
    plan(step, PARAMS, X, device="cpu:8").save(file)
    return file


def _changed_ops():
    def step(params, x):
        return jax.tree.map(lambda p: p * jnp.exp(x).mean(), params)

    return step


def _changed_arguments():
    def step(params, x):
        return _original({key: params[key] for key in PARAMS}, x)

    return step


_original = step


@pytest.mark.parametrize(
    ("size", "device"),
    [
        (32, "cpu:8"),
        pytest.param(64, "cpu:8", marks=pytest.mark.slow),
        pytest.param(32, "tpu-v5e:2x2", marks=pytest.mark.slow),
    ],
)
def test_layout_file_of_an_unchanged_function_gives_no_warning(path, size, device):
    layout = load_layout(path)
    layout = layout if device == "cpu:8" else load_layout(plan(step, PARAMS, X, device=device))
    assert load_layout(path).fingerprint == plan(step, PARAMS, _array(size, 16), device=device).fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = plan(step, PARAMS, _array(size, 16), device=device, layout=layout)
    assert not any("has changed" in note for note in made.diagnostics)


@pytest.mark.parametrize(
    ("changed", "params", "what"),
    [
        (_changed_ops(), PARAMS, "its ops differ"),
        (_changed_arguments(), {**PARAMS, "bias": _array(16)}, "its arguments differ"),
    ],
    ids=["ops", "arguments"],
)
def test_layout_file_of_a_changed_function_warns_and_the_fix_works(path, changed, params, what, tmp_path):
    file = tmp_path / "layout.toml"
    file.write_text(path.read_text())
    with pytest.warns(UserWarning, match=f"`step` has changed since .*layout.toml was made: {what}"):
        made = plan(changed, params, X, device="cpu:8", layout=file)
    assert any("has changed since" in note for note in made.diagnostics)
    made.save(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(changed, params, X, device="cpu:8", layout=file)


def test_layout_file_without_a_fingerprint_or_of_another_function_is_taken_as_it_is(path, tmp_path):
    bare = tmp_path / "bare.toml"
    bare.write_text("\n".join(line for line in path.read_text().split("\n") if not line.startswith("fingerprint")))
    other = _changed_ops()
    other.__name__ = "infer"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(_changed_ops(), PARAMS, X, device="cpu:8", layout=bare)
        plan(other, PARAMS, X, device="cpu:8", layout=path)


def test_check_layout_names_a_changed_function(path):
    with pytest.warns(UserWarning, match="has changed since"):
        problems = check_layout(path, _changed_ops(), (PARAMS, X), device="cpu:8")
    assert ["has changed since" in problem.what for problem in problems] == [True]


def test_fingerprint_is_the_same_on_every_release():
    found = fingerprint(
        [("params/up", (16, 64))], jax.make_jaxpr(step)(*jax.tree.map(lambda s: jnp.ones(s.shape), (PARAMS, X))).jaxpr
    )
    assert found == "e55fd8e95a82-fc48752a45be"


@pytest.mark.parametrize("entry", [(4, 1), (1, 4), None])
def test_moved_rows_are_the_same_function_in_every_form(tmp_path, entry):
    """The plan's program has shifts in the place of what the user wrote, or not."""

    def blurred(x):
        return x.at[1:-1].set((x[:-2] + x[2:]) / 2).at[0].add(1.0)

    made = plan(blurred, _array(64, 12), in_strategy=(AUTO if entry is None else entry,), device="cpu:4")
    made.save(tmp_path / "layout.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = plan(blurred, _array(64, 12), layout=tmp_path / "layout.toml", device="cpu:4")
        plan(blurred, _array(64, 12), in_strategy=((1, 1),), layout=tmp_path / "layout.toml", device="cpu:4")
    assert again.cost == made.cost and again.fingerprint == made.fingerprint

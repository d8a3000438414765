"""What would be silently wrong is refused: batches that differ in dimension 0, blocks frozen by half, rows of another pipeline."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardfn import checkpoint, train
from shardfn.errors import ShardError, StrategyError
from tests.messages import refusal

X = jax.random.normal(jax.random.key(1), (32, 8))
LAYERS = {"l": [{"w": jnp.eye(8) * (1 + i / 10)} for i in range(4)]}


def deep(params, x):
    for layer in params["l"]:
        x = x + jnp.tanh(x @ layer["w"])
    return jnp.mean(x**2)


def weighted(params, x, columns):
    return jnp.mean((x @ params["w"]) ** 2 * columns)


@pytest.mark.parametrize(
    "options",
    [
        dict(mode="data_parallel"),
        dict(mode="semi_auto_parallel", cross_batch=True),
        dict(mode="stand_alone", micro_batches=2),
    ],
    ids=str,
)
def test_a_batch_whose_arrays_differ_in_dim_0(options):
    step = train.step(weighted, optax.sgd(0.1), **options)
    state = step.init({"w": jnp.eye(8)})
    with pytest.raises(StrategyError, match="the arrays of the batch differ in dimension 0"):
        step(state, X, jnp.arange(8.0))
    whole = train.step(weighted, optax.sgd(0.1), mode="semi_auto_parallel", in_strategy=((8, 1), (1,)))
    _, value = whole(whole.init({"w": jnp.eye(8)}), X, jnp.arange(8.0))
    np.testing.assert_allclose(value, weighted({"w": jnp.eye(8)}, X, jnp.arange(8.0)), rtol=1e-5)


@pytest.mark.parametrize("options", [dict(reuse="auto"), dict(recompute=2)], ids=str)
def test_some_of_folded_blocks_frozen(options):
    step = train.step(deep, optax.sgd(1.0), mode="data_parallel", frozen=["l/0/w"], **options)
    with pytest.raises(StrategyError, match="`frozen` names some of the layers"):
        step.init(LAYERS, X)
    every = train.step(deep, optax.sgd(1.0), mode="data_parallel", frozen=["l/*"], **options)
    state, _ = every(every.init(LAYERS, X), X)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (every.model(state), LAYERS)), strict=True))


def cut_at(*stages):
    names = {f"l/{i}": stage for i, stage in enumerate(stages)}
    return train.pipeline(deep, 4, pipeline_stages=2, stage_config=names, device=jax.devices()[:2])


def test_packed_parameters_of_another_split_are_refused_by_the_pipeline_and_by_a_restore(tmp_path):
    one, two = cut_at(0, 1, 1, 1), cut_at(0, 0, 0, 1)
    packed, other = one.pack(LAYERS, X), two.pack(LAYERS, X)
    np.testing.assert_allclose(one(packed, X), deep(LAYERS, X), rtol=1e-5)
    assert [x.shape for x in jax.tree.leaves(packed)] == [x.shape for x in jax.tree.leaves(other)]
    with pytest.raises(StrategyError, match="packed parameters of another pipeline"):
        two(packed, X)
    checkpoint.save(tmp_path, {"params": packed}, step=0)
    back = checkpoint.restore(tmp_path, like={"params": packed})["params"]
    np.testing.assert_allclose(one(back, X), deep(LAYERS, X), rtol=1e-5)
    with pytest.raises(ShardError, match=re.escape("params/buffers_")):
        checkpoint.restore(tmp_path, like={"params": other})


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm, self.down = (
            nnx.Linear(8, 8, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Linear(8, 1, rngs=rngs),
        )

    def __call__(self, x):
        return jnp.mean(self.down(self.norm(self.up(x))) ** 2)


def test_a_pipeline_refuses_a_loss_that_changes_the_model():
    model = Normed(nnx.Rngs(0))
    pipe = train.pipeline(lambda model, x: model(x), 4, pipeline_stages=2, auto_pipeline=True, device=jax.devices()[:2])
    with pytest.raises(StrategyError, match="changes the model's state") as caught:
        pipe(model, X)
    assert "norm/mean" in str(caught.value)


def test_a_scan_that_no_stage_boundary_divides_warns():
    def scanned(params, x):
        x = jnp.tanh(x @ params["head"])
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["l"])[0] ** 2)

    params = {"l": jnp.stack([jnp.eye(8)] * 20), "head": jnp.eye(8)}
    pipe = train.pipeline(scanned, 4, pipeline_stages=2, auto_pipeline=True, device=jax.devices()[:2])
    with pytest.warns(UserWarning, match="`scan` has .*% of the work, an even stage 50%") as told:
        pipe.pack(params, X)
    assert told[0].filename == __file__


def test_keys_among_the_parameters():
    params = {**LAYERS, "key": jax.random.key(0)}
    pipe = cut_at(0, 0, 1, 1)
    np.testing.assert_allclose(pipe(pipe.pack(params, X), X), deep(LAYERS, X), rtol=1e-5)
    assert pipe.unpack(pipe.pack(params, X))["key"] == params["key"]
    step = train.step(deep, optax.adam(1e-2), mode="data_parallel", reuse="auto")
    _, value = step(step.init(params, X), X)
    assert step.scanned_layers.groups
    np.testing.assert_allclose(value, deep(LAYERS, X), rtol=1e-5)


def test_a_state_that_was_given_away():
    step = train.step(deep, optax.sgd(0.1), mode="data_parallel")
    state = step.init(LAYERS)
    step(state, X)
    with pytest.raises(StrategyError, match="the state was given away"):
        step(state, X)


def test_a_first_state_made_without_the_batch_goes_to_the_hosts_memory():
    step = train.step(deep, optax.adam(1e-2), mode="semi_auto_parallel", opt_state_memory_kind="pinned_host")
    plain = train.step(deep, optax.adam(1e-2), mode="semi_auto_parallel")
    state, value = step(step.init(LAYERS), X)
    state, after = step(state, X)
    other, first = plain(plain.init(LAYERS), X)
    np.testing.assert_allclose([value, after], [first, plain(other, X)[1]], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(compute_dtype="foo"), "`compute_dtype` cannot be 'foo'"),
        (dict(compute_dtype=jnp.int32), "`compute_dtype` cannot be"),
        (dict(layerwise_parallel=3), "globs of paths are strings"),
        (dict(microbatches=2), "micro_batches"),
    ],
    ids=str,
)
def test_bad_options_are_told_with_what_to_do(options, text):
    with pytest.raises(ShardError, match=re.escape(text)):
        train.step(deep, optax.sgd(0.1), mode="data_parallel", **options)


def mean_square(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("has_batch", [True, False])
def test_state_on_a_target_is_refused_with_the_plan_that_works(mode, has_batch):
    step = train.step(mean_square, optax.sgd(0.1), mode=mode, device="tpu-v5e:8")
    params, batch = {"w": jnp.eye(8)}, (X, X)
    error = refusal(step.init, params, *(batch if has_batch else ()))
    assert "tpu-v5e:8, which is not here" in str(error)
    assert (
        "state = jax.eval_shape(lambda: step.init(params, *batch)), then step.plan(state, *batch)"
        in error.problems[0].fix
    )
    state = jax.eval_shape(lambda: step.init(params, *batch))
    assert step.plan(state, *batch).hardware.name == "tpu-v5e:8"
    assert f"train.step(mean_square, mode='{mode}')" in str(refusal(step, state, *batch))


@pytest.mark.parametrize(
    ("mode", "size", "count", "says", "works"),
    [
        ("data_parallel", 48, 4, "4 micro-batches on each of 8 devices", [3, 6]),
        ("semi_auto_parallel", 48, 4, "4 micro-batches on each of 8 devices", [3, 6]),
        ("semi_auto_parallel", 12, 5, "5 micro-batches", [4, 6]),
        ("stand_alone", 7, 2, "2 micro-batches", [1, 7]),
    ],
)
def test_micro_batches_that_do_not_divide_are_refused_with_a_count_that_works(mode, size, count, says, works):
    def step_of(n):
        return train.step(mean_square, optax.sgd(0.1), mode=mode, micro_batches=n)

    params, batch = {"w": jnp.eye(8)}, (jnp.ones((size, 8)), jnp.ones((size, 8)))
    error = refusal(step_of(count).init, params, *batch)
    for problem, name in zip(error.problems, "xy", strict=True):
        assert problem.what == f"`{name}` of the batch cannot be split into {says}"
        assert f"size {size}" in problem.why and f"micro_batches = {count}" in problem.where
        assert f"set micro_batches={works[0]} or {works[1]}; or use a batch of" in problem.fix
    for n in works:
        step = step_of(n)
        assert np.isfinite(step(step.init(params, *batch), *batch)[1])
    for n in map(int, re.findall(r"\d+", error.problems[0].fix.partition("a batch of")[2])):
        batch = (jnp.ones((n, 8)), jnp.ones((n, 8)))
        assert step_of(count).init(params, *batch)

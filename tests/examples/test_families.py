"""The families of benchmarks: they learn, and their hand-written layouts compute what the unsharded step computes."""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from examples.models.families import FAMILIES
from examples.models.layouts import data_axes, lay_out
from tests.marks import some_slow

SLOW = {"t5", "moe", "gpt2 scanned", "vit", "gpt2", "llama", "dlrm", "mindspore transformer", "resnet"}
"""Quick here: perceptrons and the forward pass of a transformer. tests/test_truth.py has convolutions, look-ups and experts."""
TRAINED = [name for name, family in FAMILIES.items() if family.donated]


@pytest.fixture(scope="module")
def unsharded():
    """The first result of each family's tiny step, its arguments, and the jitted step: compiled once."""
    made = {}

    def get(name):
        if name not in made:
            family = FAMILIES[name]
            fn, _ = family.on_paper(family.tiny)
            args = jax.jit(lambda: family.make(family.tiny)[1])()  # jitted: op by op it takes seconds
            jitted = jax.jit(fn)
            made[name] = fn, args, jitted, jitted(*args)
        return made[name]

    return get


@pytest.mark.parametrize("name", some_slow(TRAINED, {"t5", "vit", "moe", "gpt2", "gpt2 scanned", "llama", "resnet"}))
def test_three_steps_lower_the_loss(name, unsharded):
    _, args, step, out = unsharded(name)
    losses = [float(out[-1])]
    for _ in range(3):
        out = step(*out[:-1], *args[len(out) - 1 :])
        losses.append(float(out[-1]))
    assert np.isfinite(losses).all()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def close(path, one, other):
    """Equal up to rounding. Adam's first step has the sign of the gradient: near zero, rounding decides a parameter's."""
    step = 7e-4 if path and path[0].idx == 0 else 0.0
    scale = float(jnp.max(jnp.abs(one)))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=max(1e-4 * scale, step), err_msg=str(path))


@pytest.mark.parametrize("name", some_slow([*FAMILIES], SLOW))
def test_data_parallel_is_unsharded(name, unsharded):
    fn, args, _, wanted = unsharded(name)
    by_hand = FAMILIES[name].hand_written(FAMILIES[name].tiny, 8)["data parallel"]
    got = shardfn.shard(by_hand.written(fn), by_hand.in_strategy)(*args)
    jax.tree_util.tree_map_with_path(close, wanted, got)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("devices", [8, 64, 512])
def test_every_layout_fits_its_arrays_and_uses_all_devices(name, devices):
    family = FAMILIES[name]
    size = family.small if devices == 8 else family.large
    _, args = family.on_paper(size)
    for by_hand in family.hand_written(size, devices).values():
        cut = jax.tree.map(lambda layout, leaf: layout.slice_shape(leaf.shape) != leaf.shape, by_hand.in_strategy, args)
        assert any(jax.tree.leaves(cut))
        assert {layout.size for layout in jax.tree.leaves(by_hand.in_strategy)} == {devices}


def test_hand_written_layouts_of_gpt2():
    family = FAMILIES["gpt2"]
    found = {name: by_hand.in_strategy for name, by_hand in family.hand_written(family.small, 8).items()}
    w1 = {name: layouts[0]["blocks"][0]["mlp"]["w1"].spec for name, layouts in found.items()}
    assert w1["data parallel"] == w1["ZeRO-1"] == ((), ())
    assert w1["FSDP"] == ((), ("data",))
    assert w1["tensor parallel"] == w1["data x tensor, 2 x 4"] == ((), ("model",))
    assert w1["FSDP x tensor, 2 x 4"] == (("data",), ("model",))
    assert found["ZeRO-1"][1][0].mu["blocks"][0]["mlp"]["w1"].spec == ((), ("data",))
    assert {layouts[2].spec[0] for layouts in found.values()} == {("data",), ()}


def test_fully_sharded_means_every_array_that_divides():
    args = ({"w": jnp.ones((4, 6)), "b": jnp.ones(3)}, jnp.ones((8, 2)))
    (params, x) = lay_out(args, data_axes(8, 4), {"*/w": ("data", None)}, pieces="data", trained=1).in_strategy
    assert (params["w"].strategy, params["b"].strategy, x.strategy) == ((4, 1), (1,), (4, 1))
    (params, _) = lay_out(args, {"data": 2, "model": 4}, {"*/w": ("model", None)}, pieces="data", trained=1).in_strategy
    assert params["w"].strategy == (4, 2)
    assert data_axes(4, 8) == {"data": 4, "rest": 2}


PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "plan_quality.py"
SPEC = importlib.util.spec_from_file_location("plan_quality", PATH)
assert SPEC is not None and SPEC.loader is not None
quality = importlib.util.module_from_spec(SPEC)
sys.modules["plan_quality"] = quality
SPEC.loader.exec_module(quality)


def row(layout, level=None, limit="", limit_bytes=None, family="f", **figures):
    known = quality.Figures(
        **(
            {
                "bytes": 100.0,
                "peak": 100.0,
                "flops": 10.0,
                "communication_s": 0.0,
                "compute_s": 1.0,
                "even_s": 1.0,
                "memory_bytes": 1e9,
            }
            | figures
        )
    )
    return quality.Row(family, "cpu", 8, layout, known, known, 0.0, level, limit, limit_bytes)


def failed(rows):
    return [(what, text) for what, passed, text in quality.checks(rows) if passed is False]


def test_limits_are_ample_and_one_that_data_parallel_misses():
    by_hand = {"data parallel": row("data parallel"), "FSDP": row("FSDP", peak=40.0)}
    assert dict(quality.limits(by_hand)) == {"ample": 200.0, "tight": 60.0}
    by_hand["FSDP"] = row("FSDP", peak=80.0)
    assert dict(quality.limits(by_hand)) == {"ample": 200.0, "tight": 84.0}
    by_hand["FSDP"] = row("FSDP", peak=99.0)
    assert dict(quality.limits(by_hand)) == {"ample": 200.0}


def test_a_plan_worse_than_a_hand_written_layout_fails():
    by_hand = [row("data parallel"), row("FSDP", bytes=150.0, peak=40.0, compute_s=1.2)]
    good = [row("plan", 0, "ample", 200.0), row("plan", 1, "ample", 200.0, peak=40.0, bytes=150.0),
            row("plan", 2, "ample", 200.0)]  # fmt: skip
    assert failed([*by_hand, *good]) == []
    ((what, text),) = failed([*by_hand, row("plan", 2, "ample", 200.0, compute_s=1.1)])
    assert "level 2" in what and "1.1000 of the best by hand, data parallel" in text
    # data parallel does not fit 60, so it is no bar, and a plan that needs 100 fails
    tight = [row("plan", 2, "tight", 60.0, compute_s=1.2, peak=50.0)]
    assert failed([*by_hand, *tight]) == []
    ((_, text),) = failed([*by_hand, row("plan", 2, "tight", 60.0)])
    assert "does not fit: 100 B of 60" in text


def test_each_level_has_to_be_best_at_its_objective():
    by_hand = [row("data parallel", bytes=1e3, peak=1e3, compute_s=9.0)]
    plans = [row("plan", level, "ample", 2e3, peak=100.0 - level) for level in (0, 1, 2)]
    ((what, text),) = failed([*by_hand, *plans])
    assert "level 1 best of the three" in what and "level 2 is better" in text


def test_one_matmul_is_above_its_lower_bound():
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    blocks = shardfn.mindspore.Layout((4, 4), ("rows", "columns"))("rows", "columns")
    plan = shardfn.plan(jnp.matmul, shape, shape, in_strategy=(blocks, blocks), out_strategy=(blocks,), device="cpu:16")
    # rows of x and columns of w are gathered: twice 3 of 4 blocks of a side
    assert plan.cost.bytes_sent == 2 * 3 * 4 * 256 * 256
    assert 0.5 * plan.cost.bytes_sent < quality.least_bytes(1024, 16, plan) < plan.cost.bytes_sent
    whole = shardfn.plan(jnp.matmul, shape, shape, in_strategy=((16, 1), (1, 1)), device="cpu:16")
    assert plan.cost.bytes_sent > whole.cost.bytes_sent == quality.least_bytes(1024, 16, whole) == 0

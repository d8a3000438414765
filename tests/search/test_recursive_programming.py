"""The recursive search: any number of devices, the user's mesh, no collapse to data parallel."""

import math
import time

import jax
import jax.numpy as jnp
import pytest

import shardfn
from examples.models import abstract, attention, mlp
from shardfn.search.generators.recursive_programming import divisions
from shardfn.search.problem import objective
from tests.marks import some_slow
from tests.search.problems import S, problem_of, two_layers

RECURSIVE = {"search_mode": "recursive_programming"}
WIDE = (S((64, 8192), jnp.float32), S((8192, 32768), jnp.float32), S((32768, 8192), jnp.float32))
"""Large weights and a small batch: cutting the weights is right."""


def step(x, w1, w2):
    return jax.grad(lambda w: (two_layers(x, *w) ** 2).mean())((w1, w2))


@pytest.mark.parametrize("devices", [6, 7, 12, 64])
def test_recursive_plan_on_any_number_of_devices_spreads_the_work(devices):
    args = (S((5376, 192), jnp.float32), S((192, 5376), jnp.float32), S((5376, 192), jnp.float32))
    made = shardfn.plan(two_layers, *args, device=f"h100:{devices}", level=2, **RECURSIVE)
    unsharded = shardfn.plan(two_layers, *args, device="h100:1")
    assert math.prod(made.mesh.axis_sizes) == devices
    assert made.cost.flops == pytest.approx(unsharded.cost.flops / devices, rel=0.01)


def test_recursive_plan_keeps_a_mesh():
    layout = shardfn.mindspore.Layout((4, 2), ("rows", "columns"))
    made = shardfn.plan(two_layers, *WIDE, in_strategy=(layout("rows", "None"), shardfn.AUTO, shardfn.AUTO),
                        device="h100:8", level=2, **RECURSIVE)  # fmt: skip
    assert made.axes == (("rows", 4), ("columns", 2))
    assert (made.inputs[0].strategy, made.inputs[0].source) == ((4, 1), "you")


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("devices", some_slow([8, 64], [64]))
@pytest.mark.parametrize("make", [mlp.make, attention.make], ids=["mlp", "attention"])
def test_recursive_plan_is_no_worse_than_data_parallel(make, devices, level):
    sizes = {"batch": 64, "train": True} if make is mlp.make else {"batch": 64}
    function, args = abstract(make, **sizes)
    options = {"device": f"h100:{devices}", "level": level}
    batch = args[-1].shape
    strategies = [(devices, *(1,) * (len(a.shape) - 1)) if a.shape == batch else (1,) * len(a.shape)
            for a in jax.tree.leaves(args)]  # fmt: skip
    entries = tuple(jax.tree.unflatten(jax.tree.structure(args), strategies))
    parallel = shardfn.plan(function, *args, in_strategy=entries, **options)
    made = shardfn.plan(function, *args, **RECURSIVE, **options)
    problem = problem_of(function, args, device=f"h100:{devices}", level=level)
    assert objective(made.cost, problem) <= objective(parallel.cost, problem)


@pytest.mark.parametrize("program", [two_layers, step], ids=["forward", "gradients"])
def test_recursive_plan_of_wide_weights_is_tensor_parallel(program):
    made = shardfn.plan(program, *WIDE, device="h100:8", level=2, **RECURSIVE)
    parallel = shardfn.plan(program, *WIDE, in_strategy=((8, 1), (1, 1), (1, 1)), device="h100:8", level=2)
    assert made.decision("w1").strategy == (1, 8)
    assert made.decision("w2").strategy == (8, 1)
    assert made.cost.time_s < parallel.cost.time_s / 2


@pytest.mark.slow
def test_recursive_plan_at_level_0_sends_no_gradients_of_wide_weights():
    """One division after the other sends least where all but the batch is replicated: the divisions for level 2 do better."""

    def step(params, x):
        def loss(params):
            h = x
            for up, down in params:
                h = h + jax.nn.gelu(h @ up) @ down
            return jnp.mean(h**2)

        return jax.tree.map(lambda a, g: a - 0.1 * g, params, jax.grad(loss)(params))

    params = [(jax.ShapeDtypeStruct((1024, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 1024), jnp.float32))]
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    least, fast = (
        shardfn.plan(
            step, params, x, level=level, device="h100:256", donate_argnums=0, search_mode="recursive_programming"
        )
        for level in (0, 2)
    )
    assert max(least.cost.bytes_sent, fast.cost.bytes_sent) < 2 * 4 * 1024 * 4096
    assert least.cost.flops <= 1.1 * fast.cost.flops


@pytest.mark.slow
def test_recursive_search_on_64_devices_is_faster_than_the_exact_one():
    function, args = abstract(mlp.make, batch=64, train=True)
    seconds = {}
    for mode in ("recursive_programming", "dynamic_programming"):
        begun = time.process_time()
        made = shardfn.plan(function, *args, device="h100:64", search_mode=mode)
        seconds[mode] = time.process_time() - begun
        assert math.prod(made.mesh.axis_sizes) == 64
    assert seconds["recursive_programming"] < seconds["dynamic_programming"] / 3  # a fourteenth, measured


@pytest.mark.parametrize(
    ("devices", "sizes"), [(8, [4, 2]), (64, [8, 4, 2]), (4096, [64, 8, 4, 2]), (12, [4, 3]), (7, [7])]
)
def test_divisions_multiply_to_the_devices(devices, sizes):
    assert divisions(devices) == sizes
    assert math.prod(sizes) == devices

"""What the search pays for rows at borders is what flows send for them; convolutions that XLA gets wrong are not chosen."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.cost.estimate import collective_s, collectives
from shardfn.ir.model import OpConstraint
from shardfn.planning.workarounds import wrong_ops
from shardfn.search.halo_costs import halo_cost
from shardfn.search.resharding_costs import MeshModel, shard_count, spec_of_label
from tests.search.problems import S

IMAGES, KERNEL = S((8, 64, 32, 4), jnp.float32), S((3, 3, 4, 8), jnp.float32)


def convolved(x, k, strides=(1, 1)):
    return jax.lax.conv_general_dilated(x, k, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(x, k):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 5, 1, 1), (1, 1, 1, 1), "SAME") + k.sum()


@pytest.mark.parametrize("row", [[0, 1], [1, 0], [2, 0], [0, -1], [-1, -1], [1, 1]], ids=str)
@pytest.mark.parametrize("function", [convolved, pooled])
def test_halo_cost_is_what_the_program_sends(function, row):
    problem = shardfn.plan(function, IMAGES, KERNEL, device="h100:16")._answered.problem
    axes, whole = (("a", 8), ("b", 2)), np.full((1, 2), -1)
    index, op = next((i, op) for i, op in enumerate(problem.graph.ops) if op.window_dims)
    images = np.array([row])
    full = [float(math.prod(problem.graph.values[v].shape)) * 4 for v in op.inputs]
    local = [full[0] / shard_count(images, (8, 2)), *(np.array([size]) for size in full[1:])]
    wanted = [images, *[whole] * (len(op.inputs) - 1)]
    sent, seconds = halo_cost(op, problem.graph, wanted, [images], local, MeshModel.on(problem.hardware, axes))
    spec = spec_of_label(row, 4, "ab")
    constraints = {index: OpConstraint((spec, *[None] * (len(op.inputs) - 1)), (spec,))}
    partitioned = problem.partition(axes, (spec, ((),) * 4), constraints)
    permuted = [c for c in collectives(partitioned) if c.kind == "collective-permute"]
    assert sent.item() == sum(c.total_bytes for c in permuted)
    assert seconds.item() == pytest.approx(sum(collective_s(c, problem.hardware, axes) for c in permuted), rel=1e-3)


def step(params, x):
    def loss(params):
        y = x
        for k in params:
            y = jax.nn.relu(convolved(y, k))
        return jnp.mean(y**2)

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize(("level", "batch"), [(0, 2), (1, 4), (2, 2)])
def test_plan_of_convolutions_avoids_those_that_xla_gets_wrong(level, batch):
    """Few and large images: their height has to be cut for all devices to work, and kernels lie in pieces."""
    params = [S((3, 3, 4, 64), jnp.float32), S((3, 3, 64, 64), jnp.float32)]
    args = params, S((batch, 512, 512, 4), jnp.float32)
    made = shardfn.plan(step, *args, level=level, device="h100:16")
    assert not wrong_ops(made.partitioned) and not any("shardfn gathers" in text for text in made.diagnostics)
    assert made.cost.flops < 1.1 / 16 * shardfn.plan(step, *args, device="h100:1").cost.flops


@pytest.mark.parametrize("level", [0, 1, 2])
def test_plan_of_convolutions_computes_the_values_of_the_function(level):
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(3, 3, c, 16)).astype("f") / 6 for c in (4, 16)]
    x = rng.normal(size=(2, 64, 16, 4)).astype("f")
    made = shardfn.shard(step, level=level)
    for mine, theirs in zip(jax.tree.leaves(made(params, x)), jax.tree.leaves(step(params, x)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)

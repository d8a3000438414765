"""Plans of convolutions whose images are too few for all devices: XLA computes them correctly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.planning.workarounds import wrong_ops
from tests.marks import some_slow
from tests.search.problems import S


def convolved(x, k, strides=(1, 1)):
    return jax.lax.conv_general_dilated(x, k, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def step(params, x):
    def loss(params):
        y = x
        for k in params:
            y = jax.nn.relu(convolved(y, k))
        return jnp.mean(y**2)

    return jax.value_and_grad(loss)(params)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "batch"), [(0, 2), (1, 4), (2, 2)])
def test_plan_of_convolutions_avoids_those_that_xla_gets_wrong(level, batch):
    """Few and large images: their height has to be sharded for all devices to work, and kernels are sharded too."""
    params = [S((3, 3, 4, 64), jnp.float32), S((3, 3, 64, 64), jnp.float32)]
    args = params, S((batch, 512, 512, 4), jnp.float32)
    made = shardfn.plan(step, *args, level=level, device="h100:16")
    assert not wrong_ops(made.partitioned) and not any("shardfn gathers" in text for text in made.diagnostics)
    assert made.cost.flops < 1.1 / 16 * shardfn.plan(step, *args, device="h100:1").cost.flops


@pytest.mark.parametrize("level", some_slow([0, 1, 2], [0, 1]))
def test_plan_of_convolutions_computes_the_values_of_the_function(level):
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(3, 3, c, 16)).astype("f") / 6 for c in (4, 16)]
    x = rng.normal(size=(2, 64, 16, 4)).astype("f")
    made = shardfn.shard(step, level=level)
    for mine, theirs in zip(jax.tree.leaves(made(params, x)), jax.tree.leaves(step(params, x)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)

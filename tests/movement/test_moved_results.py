"""Results whose rows moved are sharded over the axes of the arguments that they come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn

N = 64
ROW = 4 * N


MOVING = {
    "a roll": lambda u: 2 * jnp.roll(u, 1, 0),
    "inner points updated": lambda u: u.at[1:-1].add(u[2:] - u[1:-1]),
    "rows set": lambda u: u.at[3:].set(1.0),
    "zero rows concatenated": lambda u: jnp.concatenate([0 * u[:1], u[:-1]]),
    "edges padded": lambda u: jnp.pad(u, ((2, 0), (0, 0)), mode="edge")[:-2],
}


@pytest.mark.parametrize("function", MOVING.values(), ids=MOVING)
@pytest.mark.parametrize("strategy", [(4, 1), (2, 1), (2, 2)], ids=str)
def test_a_result_whose_rows_moved_is_sharded_over_the_axes_of_the_argument(function, strategy):
    """Fewer shards than devices: the result would have axes of its own, were it another array's."""
    u = jnp.asarray(np.random.default_rng(0).normal(size=(N, N)), jnp.float32)
    sharded = shardfn.shard(function, (strategy,), (strategy,))
    plan = sharded.plan(u)
    assert plan.inputs[0].spec == plan.outputs[0].spec
    assert plan.cost.bytes_sent <= 3 * ROW
    np.testing.assert_allclose(sharded(u), jax.jit(function)(u), 1e-6)


def test_every_second_row_stays_on_its_device():
    u = jnp.arange(2.0 * N * N).reshape(2 * N, N)
    sharded = shardfn.shard(lambda u: u[::2] - 1, ((4, 1),), ((4, 1),))
    assert sharded.plan(u).cost.bytes_sent == 0
    np.testing.assert_array_equal(sharded(u), u[::2] - 1)


def test_a_cache_that_is_updated_keeps_its_axes_beside_another_array():
    """The rows of the other array get axes of their own."""

    def step(cache, x):
        return jax.lax.dynamic_update_slice(cache, x.sum(0, keepdims=True), (3, 0)), jnp.cumsum(x, 0)

    plan = shardfn.shard(step, ((4, 1), (2, 1)), ((4, 1), (2, 1))).plan(jnp.ones((N, 8)), jnp.ones((16, 8)))
    (cache, x), (updated, summed) = ([d.spec for d in side] for side in (plan.inputs, plan.outputs))
    assert cache == updated != x == summed

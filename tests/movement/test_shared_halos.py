"""One halo for arrays that come from one array: the values stay, and a device receives its rows, columns and corners once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn
from shardfn.movement import shares_halos, with_shared_halos, with_shifts
from shardfn.runtime.verify import compile_plan
from tests.marks import some_slow

N = 32
WEIGHTS = np.arange(1.0, 26.0, dtype="float32").reshape(5, 5) / 325


def padded(u, mode="constant", size=3):
    p = jnp.pad(u, size // 2, mode=mode)
    return [[p[i : i + u.shape[0], j : j + u.shape[1]] for j in range(size)] for i in range(size)]


def weighted(near):
    return sum(w * x for ws, xs in zip(WEIGHTS, near, strict=False) for w, x in zip(ws, xs, strict=False))


def life(cells):
    near = sum(map(sum, padded(cells))) - cells
    return jnp.where((near == 3) | ((cells == 1) & (near == 2)), 1.0, 0.0)


def rolled(u):
    return weighted([[jnp.roll(u, (i, j), (0, 1)) for j in (1, 0, -1)] for i in (1, 0, -1)])


def inner(u):
    near = weighted([[u[i : i + N - 2, j : j + N - 2] for j in range(3)] for i in range(3)])
    return u.at[1:-1, 1:-1].set(near)


def loop(step):
    return lambda u: lax.fori_loop(0, 3, lambda _, v: step(v), u)


PROGRAMS = {
    "life": (loop(life), 1, 3),
    "zero padded": (lambda u: weighted(padded(u)), 1, 1),
    "edges padded": (lambda u: weighted(padded(u, "edge")), 1, 1),
    "mirrored, nonlinear": (lambda u: jnp.median(jnp.concatenate([*map(jnp.stack, padded(u, "reflect"))]), 0), 1, 1),
    "rolled": (rolled, 1, 1),
    "inner points": (inner, 1, 1),
    "5 x 5": (lambda u: weighted(padded(u, "edge", 5)), 2, 1),
    "one after the other": (lambda u: weighted(padded(jnp.sin(weighted(padded(u))))), 1, 2),
    "in a scan": (lambda u: lax.scan(lambda v, _: (weighted(padded(v)), None), u, None, length=3)[0], 1, 3),
}
"""Function, elements that a result reads on each side, steps."""
SLOW = ("zero padded", "rolled", "inner points", "5 x 5", "one after the other", "in a scan")


def halo(strategy, reach, steps):
    """Bytes that a device between others receives."""
    local = [N // shards for shards in strategy]
    wide = [n + 2 * reach * (shards > 1) for n, shards in zip(local, strategy, strict=True)]
    return 4 * steps * (math.prod(wide) - math.prod(local))


def start():
    return jnp.asarray(np.random.default_rng(0).random((N, N)) > 0.5, jnp.float32)


@pytest.mark.parametrize("strategy", some_slow([(1, 8), (2, 4)], [(1, 8)]))
@pytest.mark.parametrize("name", some_slow(PROGRAMS.keys(), SLOW))
def test_stencil_with_corners_sends_its_halo_as_predicted_and_compiled(name, strategy):
    function, reach, steps = PROGRAMS[name]
    sharded = shardfn.shard(function, (strategy,))
    plan = sharded.plan(start())
    assert plan.cost.bytes_sent == halo(strategy, reach, steps)
    assert sum(c.total_bytes for c in compile_plan(plan).collectives) == plan.cost.bytes_sent
    np.testing.assert_allclose(sharded(start()), jax.jit(function)(start()), rtol=1e-5, atol=1e-5)


SHARDS = {((N, N), 0): 4, ((N, N), 1): 8}


@pytest.mark.parametrize("name", some_slow(PROGRAMS.keys(), [*SLOW, "mirrored, nonlinear"]))
def test_shared_halo_has_the_values_and_gradients_of_the_program(name):
    function, *_ = PROGRAMS[name]

    def total(f):
        return lambda u: (jnp.sin(f(u)) * jnp.arange(N)).sum()

    def shared(f):
        return with_shared_halos(with_shifts(f), SHARDS)

    u = jax.random.normal(jax.random.key(0), (N, N))
    assert shares_halos(jax.make_jaxpr(with_shifts(function))(u).jaxpr, SHARDS)
    np.testing.assert_allclose(jax.jit(shared(function))(u), jax.jit(function)(u), rtol=1e-5, atol=1e-5)
    expected = jax.jit(jax.grad(total(function)))(u)
    outside, inside = jax.grad(total(shared(function))), shared(jax.grad(total(function)))
    np.testing.assert_allclose(jax.jit(outside)(u), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.jit(inside)(u), expected, rtol=1e-4, atol=1e-4)
    pair = jnp.stack([u, 2 * u])
    np.testing.assert_allclose(
        jax.jit(jax.vmap(shared(function)))(pair), jax.jit(jax.vmap(function))(pair), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", some_slow(["int8", "bool", "complex64", "bfloat16"], ["complex64", "bfloat16"]))
def test_shared_halo_of_any_dtype_has_the_values_of_the_program(dtype):
    def moved(u):
        near = padded(u)
        return [jnp.where(u == near[0][0], near[2][1], near[i][j]) for i in range(3) for j in range(3)]

    u = start().astype(dtype)
    for found, expected in zip(shardfn.shard(moved, ((2, 4),))(u), jax.jit(moved)(u), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_gradient_from_outside_of_a_sharded_stencil_with_corners_is_right():
    def total(f):
        return lambda u: jnp.sin(f(u)).sum()

    function, *_ = PROGRAMS["edges padded"]
    found = jax.grad(total(shardfn.shard(function, ((2, 4),))))(start())
    np.testing.assert_allclose(found, jax.jit(jax.grad(total(function)))(start()), rtol=1e-4, atol=1e-5)


def test_periodic_gradient_inside_a_sharded_function_shares_halos():
    gradient = jax.grad(lambda u: jnp.sin(rolled(u)).sum())
    plan = shardfn.plan(gradient, start(), in_strategy=((1, 8),))
    assert plan.cost.bytes_sent == 2 * halo((1, 8), 1, 1)  # its own and that of the cotangents


def test_arrays_of_fewer_bytes_than_their_source_are_sent_themselves():
    def masks(u):  # of bools, which are smaller than what they are computed from
        near = padded(u > 0.5)
        return near[0][1] & near[0][2] & near[1][2] & near[2][2]

    u = jax.random.normal(jax.random.key(0), (N, N))
    plan = shardfn.plan(masks, u, in_strategy=((1, 8),))
    assert all(c.dtype == "i1" for c in plan.collectives)


UNSHARED = {
    "rows and columns": lambda u: jnp.roll(u, 1, 0) + jnp.roll(u, 1, 1),
    "a diagonal": lambda u: jnp.roll(u, (1, 1), (0, 1)),
    "a diagonal of each of two": lambda u: jnp.roll(u, (1, 1), (0, 1)) + jnp.roll(u.T @ u, (1, 1), (0, 1)),
}


@pytest.mark.parametrize("function", UNSHARED.values(), ids=UNSHARED)
def test_program_without_a_halo_to_share_stays_as_it_is(function):
    assert not shares_halos(jax.make_jaxpr(with_shifts(function))(start()).jaxpr, SHARDS)

"""Scatters that combine, with updates of uneven shards: the values and gradients of the unsharded function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import shardfn
from shardfn import train

RNG = np.random.default_rng(0)
INDEX = jnp.asarray(RNG.permutation(15)[:13] + 1)


def _same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), a, b)


@pytest.mark.parametrize("strategy", [(4, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("add", "float32"), ("multiply", "complex64"), ("min", "int32"), ("max", "float32"), ("max", "bool"), ("set", "int32")],
)  # fmt: skip
def test_scatter_with_uneven_updates_equals_unsharded(kind, dtype, strategy):
    def scattered(u, i):
        return getattr(jnp.ones((17, 4), u.dtype).at[i], kind)((u & True if dtype == "bool" else u * u)[:13])

    u = jnp.asarray(RNG.normal(size=(16, 4)) * 9).astype(dtype)
    _same(jax.jit(scattered)(u, INDEX), shardfn.shard(scattered, (strategy, (1,)))(u, INDEX))


@pytest.mark.parametrize("strategy", [((1, 1), (2, 2)), ((2, 1), (1, 4)), ((1, 2), (2, 2))])
def test_lookup_with_uneven_rows_has_the_gradient_of_unsharded(strategy):
    table = jnp.asarray(RNG.normal(size=(48, 16)), jnp.float32)
    ids = jnp.asarray(RNG.integers(1, 48, (8, 48)), jnp.int32)

    def rows(table, ids):
        return jnp.tanh(table[ids[:, :-1]])

    def loss(of):
        return lambda table, ids: jnp.sin(of(table, ids)).sum()

    want = jax.jit(jax.grad(loss(rows)))(table, ids)
    _same(want, shardfn.shard(jax.grad(loss(rows)), strategy)(table, ids))
    _same(want, jax.grad(loss(shardfn.shard(rows, strategy)))(table, ids))


def test_train_step_with_uneven_tokens_leaves_rows_that_are_not_looked_up():
    tokens = RNG.integers(1, 50, (8, 64)).astype("int32")
    embedding = jax.random.normal(jax.random.key(0), (50, 16))

    def loss(p, t):
        return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(p[t[:, :-1]]) @ embedding.T, t[:, 1:]).mean()

    step = train.step(loss, optax.sgd(1.0), mode="semi_auto_parallel", in_strategy=((2, 2),))
    state = step.init(lambda: embedding, tokens)
    for _ in range(2):
        state, _ = step(state, tokens)
    np.testing.assert_array_equal(state.params[0], embedding[0])
    assert any("even shards" in note for note in step.plan(state, tokens).diagnostics)


def test_open_search_of_a_segment_sum_equals_unsharded():
    def sums(x):
        return jax.ops.segment_sum(jnp.tanh(x[:513]), jnp.arange(513) * 7 % 63 + 1, num_segments=64)

    x = jnp.asarray(RNG.normal(size=(1024, 4)), jnp.float32)
    _same(jax.jit(sums)(x), shardfn.shard(sums)(x))
    _same(jax.jit(sums)(x), shardfn.shard(sums, ((2, 4),))(x))


def _scattered(x, i, u, mode="drop"):
    numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    return lax.scatter_add(x[:7], i[:7, :, None], u[:7] * 2, numbers, mode=mode)


@pytest.mark.parametrize("mode", ["drop", "clip"])
@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_scatter_at_unsigned_places_equals_unsharded(dtype, mode):
    scattered = functools.partial(_scattered, mode=mode)
    i = RNG.integers(0, 5, (8, 5)).astype(dtype)
    i[1, 2] = np.iinfo(dtype).max - 2
    args = jnp.zeros((8, 5)), jnp.asarray(i), jnp.asarray(RNG.normal(size=(8, 5)), jnp.float32)
    _same(jax.jit(scattered)(*args), shardfn.shard(scattered, ((4, 1),) * 3)(*args))


def test_scatter_at_unsigned_places_into_more_rows_than_int32_counts_needs_int64():
    def plan(rows):
        args = (jax.ShapeDtypeStruct((8, n), dtype) for n, dtype in ((rows, "int8"), (5, "uint32"), (5, "int8")))
        return shardfn.plan(_scattered, *args, in_strategy=((4, 1),) * 3, device="h100:4")

    assert plan(2**31 - 1).diagnostics
    with pytest.raises(shardfn.ShardError, match=r"(?s)2,147,483,648 rows .*jax_enable_x64"):
        plan(2**31)
    with jax.enable_x64(True):
        assert plan(2**31).diagnostics


@pytest.mark.parametrize("strategy", [(2, 2), (1, 2), (1, 4)])
@pytest.mark.parametrize("coordinates", [1, 2])
@pytest.mark.parametrize("kind", ["add", "max", "set", "get"])
def test_places_that_are_columns_of_a_sharded_array_equal_unsharded(kind, coordinates, strategy):
    def placed(x, i, u):
        at = x.at[tuple(i[:, c] for c in range(coordinates))]
        return at.get() * u if kind == "get" else getattr(at, kind)(u)

    x = jnp.asarray(RNG.normal(size=(4,) * coordinates), jnp.float32)
    i = jnp.asarray(np.stack([RNG.permutation(4) for _ in range(12)], 1), jnp.int32)
    u = jnp.asarray(RNG.normal(size=4), jnp.float32)
    entries, four = ((2, *(1,) * (coordinates - 1)), strategy, (1,)), jax.devices()[:4]
    sharded = shardfn.shard(placed, entries, device=four)
    _same(jax.jit(placed)(x, i, u), sharded(x, i, u))
    gradient = lambda f: jax.grad(lambda x, u: jnp.sum(jnp.sin(f(x, i, u))), (0, 1))  # noqa: E731
    _same(gradient(placed)(x, u), jax.jit(gradient(sharded))(x, u))
    inside = shardfn.shard(gradient(placed), (entries[0], (1,)), device=four)
    _same(gradient(placed)(x, u), inside(x, u))


@pytest.mark.parametrize("kind", ["scatter_add", "scatter_max", "scatter", "gather"])
def test_places_that_are_rows_of_a_sharded_array_equal_unsharded(kind):
    def placed(x, i, u):
        i = i[:, :2]
        if kind == "gather":
            return lax.gather(x, i, lax.GatherDimensionNumbers((), (0, 1), (0, 1)), (1, 1), mode="clip") * u
        return getattr(lax, kind)(x, i, u, lax.ScatterDimensionNumbers((), (0, 1), (0, 1)))

    x, u = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((4, 4), (4,)))
    i = jnp.asarray(np.stack([RNG.permutation(4) for _ in range(12)], 1), jnp.int32)
    sharded = shardfn.shard(placed, ((2, 1), (1, 2), (1,)), device=jax.devices()[:4])
    _same(jax.jit(placed)(x, i, u), sharded(x, i, u))
    assert any("coordinates" in note for note in sharded.plan(x, i, u).diagnostics)

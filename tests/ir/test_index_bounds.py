"""Below which number the integers of an argument have to be, as far as the program shows."""

import jax
import jax.numpy as jnp
import pytest

from shardfn.ir.index_bounds import index_bounds


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


def scanned(table, index):
    return jax.lax.scan(lambda carry, _: (carry, table[carry].sum()), index, None, length=3)


def scanned_over(table, index):
    return jax.lax.scan(lambda carry, row: (carry + table[row].sum(), None), 0.0, index)[0]


def carried_from_the_last_round(table, index):
    """The index of a round is the other number of the round before."""

    def body(carry):
        at, other, total = carry
        return other, at, total + table[at].sum()

    return jax.lax.while_loop(lambda carry: carry[2] < 3, body, (index, index, 0.0))[2]


def through_calls(table, index):
    return jax.checkpoint(jax.jit(lambda t, i: jnp.take(t, i, axis=0)))(table, index.reshape(2, -1).T)


CASES = {
    "rows": (lambda table, i: table[i], (f32(50, 3), i32(4)), (None, 50)),
    "negative ones count from the end": (lambda table, i: table[i - 50], (f32(50, 3), i32(4)), (None, 50)),
    "elements": (lambda x, i, j: x[i, j], (f32(7, 9), i32(4), i32(4)), (None, 7, 9)),
    "along an axis": (lambda x, i: jnp.take_along_axis(x, i, 1), (f32(64, 30), i32(64, 4)), (None, 30)),
    "batched": (jax.vmap(lambda x, i: x[i]), (f32(64, 30), i32(64)), (None, 30)),
    "two tables": (lambda a, b, i: a[i] + b[i], (f32(50, 3), f32(20, 3), i32(4)), (None, None, 20)),
    "two indices of one shape": (lambda a, b, i, j: a[i] + b[j], (f32(50, 3), f32(2, 3), i32(4), i32(4)), (None, None, 50, 2)),
    "sorted with others": (lambda t, i, x: t[jax.lax.sort((x, i), num_keys=1)[1]], (f32(50, 3), i32(4), i32(4)), (None, 50, None)),
    "an index of an index": (lambda t, u, i: t[u[i]], (f32(50, 3), i32(20), i32(4)), (None, 50, 20)),
    "a cache": (lambda c, x, at: jax.lax.dynamic_update_slice(c, x, (0, at)), (f32(2, 64), f32(2, 4), i32()), (None, None, 61)),
    "a slice": (lambda x, at: jax.lax.dynamic_slice(x, (at,), (8,)), (f32(64), i32()), (None, 57)),
    "a branch": (lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x), (i32(), f32(2)), (3, None)),
    "updates": (lambda t, i, v: t.at[i].add(v), (f32(50, 3), i32(4), f32(4, 3)), (None, 50, None)),
    "segments": (lambda v, i: jax.ops.segment_sum(v, i, num_segments=10), (f32(50, 3), i32(50)), (None, 10)),
    "groups": (jax.lax.ragged_dot, (f32(64, 3), f32(4, 3, 5), i32(4)), (None, None, 17)),
    "a gradient": (jax.grad(lambda table, i: (table[i] ** 2).sum()), (f32(50, 3), i32(4)), (None, 50)),
    "a scan's carry": (scanned, (f32(50, 3), i32(4)), (None, 50)),
    "what is scanned over": (scanned_over, (f32(50, 3), i32(8, 4)), (None, 50)),
    "a later round": (carried_from_the_last_round, (f32(50, 3), i32(4)), (None, 50)),
    "calls": (through_calls, (f32(50, 3), i32(4)), (None, 50)),
    "no index": (lambda x, n: x * n, (f32(3), i32(3)), (None, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_index_bounds_of(name):
    function, args, wanted = CASES[name]
    assert index_bounds(jax.make_jaxpr(function)(*args)) == wanted

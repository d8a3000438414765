"""Slices along a sharded dimension with fewer elements than shards: what is sent for them, compared with what XLA sends."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn import compiled


def sent(fn, x, entry):
    """(predicted, compiled): the bytes that a device sends."""
    function: Any = shardfn.shard(fn, (entry,), device=jax.devices()[:8])
    real = compiled.read(function.lower(x).compile())
    return tuple(sum(c.total_bytes for c in side.collectives) for side in (function.plan(x), real))


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (16, slice(0, 1)),
        (16, slice(8, 9)),  # the shards between are left out
        (16, slice(0, 9, 3)),
        (64, slice(9, 10)),
        (64, slice(0, 5)),  # all in one shard
        (64, slice(1, 5, 2)),  # ends behind the last element that is read
        (64, slice(7, 17)),
        (64, slice(40, 48)),
    ],
    ids=str,
)
def test_slice_along_sharded_dimension_sends_the_bytes_that_xla_sends(rows, part):
    predicted, actual = sent(lambda x: jnp.tanh(x[part]), jax.ShapeDtypeStruct((rows, 4), "float32"), (8, 1))
    assert predicted == actual > 0


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 8), (3, 3), (8, 8)], ids=str)
def test_gather_of_few_elements_is_an_all_reduce(shape):
    """XLA writes a shard into zeros and all-reduces where a dimension has at most half as many elements as shards."""
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    predicted, actual = sent(lambda x: jnp.tanh(x[: shape[0], : shape[1]]) @ jnp.ones(shape[1]), x, (4, 2))
    assert predicted == actual > 0


def test_what_a_loop_carries_and_nothing_reads_sends_nothing():
    def last(x):
        def body(i, carried):
            x, sums = carried
            return jnp.tanh(x), sums.at[i].set(x.sum())

        return jax.lax.fori_loop(0, 5, body, (x, jnp.zeros(5)))[0]

    assert sent(last, jax.ShapeDtypeStruct((64, 4), "float32"), (8, 1)) == (0, 0)

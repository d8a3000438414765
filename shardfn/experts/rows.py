"""Which row of a buffer belongs to which choice of an expert: pure index arithmetic, the same on every device.

A choice is found by its expert, its source (the shard of tokens that it comes from) and its rank among the choices of
that expert at that source. Two orders of rows exist. With a capacity, each expert has `slots` rows for each source;
dropless rows are packed, expert by expert, and source by source within an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """The choice that each row of a buffer holds: arrays of one shape, int32 and bool."""

    expert: jax.Array
    source: jax.Array
    rank: jax.Array
    filled: jax.Array


def slotted(counts: jax.Array, slots: int) -> Rows:
    """Rows [experts, sources, slots].

    Args:
      counts: int32 [sources, experts], the choices.
      slots: rows for each expert and source.

    >>> slotted(jnp.array([[1, 2]]), 2).filled.tolist()
    [[[True, False]], [[True, True]]]
    """
    sources, experts = counts.shape
    expert, source, rank = jnp.indices((experts, sources, slots), jnp.int32)
    return Rows(expert, source, rank, rank < counts.T[..., None])


def packed(counts: jax.Array, length: int) -> Rows:
    """The `length` rows of a packed buffer.

    Args:
      counts: int32 [sources, experts], the choices.
      length: rows of the buffer, at least all choices.

    >>> packed(jnp.array([[1, 0], [1, 2]]), 5).source.tolist()[:4]
    [0, 1, 1, 1]
    """
    sources, experts = counts.shape
    each = counts.T.ravel()
    ends, row = jnp.cumsum(each), jnp.arange(length, dtype=jnp.int32)
    part = jnp.minimum(jnp.searchsorted(ends, row, side="right"), experts * sources - 1).astype(jnp.int32)
    return Rows(part // sources, part % sources, row - (ends - each)[part], row < ends[-1])


def packed_starts(counts: jax.Array) -> jax.Array:
    """The first packed row of each source and expert: int32 [sources, experts] of the same counts.

    >>> packed_starts(jnp.array([[1, 0], [1, 2]])).tolist()
    [[0, 2], [1, 2]]
    """
    each = counts.T.ravel()
    return (jnp.cumsum(each) - each).reshape(counts.shape[::-1]).T


def taken(values: jax.Array, index: jax.Array, filled: jax.Array) -> jax.Array:
    """`values[index]` where filled, zeros elsewhere; [..., width] for an index [...]."""
    found = values[jnp.where(filled, index, 0)]
    return jnp.where(filled[..., None], found, jnp.zeros((), values.dtype))

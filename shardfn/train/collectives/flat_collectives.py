"""Fused collectives: several arrays of one dtype in one flat array, inside `jax.shard_map`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

Job = tuple[Sequence[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]
"""The operands of a collective, and the collective."""


def all_reduced(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sum of each array over the axes."""
    if len(arrays) == 1:
        return [lax.psum(arrays[0], axes)]
    flat = lax.psum(jnp.concatenate([x.reshape(-1) for x in arrays]), axes)
    return [part.reshape(x.shape) for part, x in zip(_split(flat, arrays, 1), arrays, strict=True)]


def all_reduced_shards(
    arrays: Sequence[jax.Array], axes: tuple[str, ...], specs: Sequence[PartitionSpec], others: frozenset[str]
) -> list[jax.Array]:
    """The sum of each array over the axes, where XLA shards the arrays over other mesh axes.

    A flat array of full arrays would gather them; here each device concatenates the shards that it holds.

    Args:
      arrays: of one dtype.
      axes: those of the enclosing `shard_map`, to sum over.
      specs: the sharding of each array over the other axes.
      others: the other axes.
    """
    summed = jax.shard_map(
        lambda *shards: tuple(all_reduced(shards, axes)),
        in_specs=tuple(specs), out_specs=tuple(specs), axis_names=set(others), check_vma=False,
    )  # fmt: skip
    return list(summed(*arrays))


def reduce_scattered(arrays: Sequence[jax.Array], dims: Sequence[int], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sum of each array over the axes; each device keeps a shard along the array's dimension."""
    if len(arrays) == 1:
        return [lax.psum_scatter(arrays[0], axes, scatter_dimension=dims[0], tiled=True)]
    count = lax.axis_size(axes)
    turned = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    flat = jnp.concatenate([x.reshape(count, -1) for x in turned], axis=1)
    flat = lax.psum_scatter(flat, axes, scatter_dimension=0, tiled=True).reshape(-1)
    return [
        jnp.moveaxis(part.reshape(x.shape[0] // count, *x.shape[1:]), 0, dim)
        for part, x, dim in zip(_split(flat, turned, count), turned, dims, strict=True)
    ]


def all_gathered(arrays: Sequence[jax.Array], dims: Sequence[int], axes: tuple[str, ...]) -> list[jax.Array]:
    """Each array, gathered from its shards along its dimension."""
    if len(arrays) == 1:
        return [lax.all_gather(arrays[0], axes, axis=dims[0], tiled=True)]
    turned = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    flat = lax.all_gather(jnp.concatenate([x.reshape(-1) for x in turned]), axes)
    ends = list(itertools.accumulate(x.size for x in turned))
    return [
        jnp.moveaxis(part.reshape(-1, *x.shape[1:]), 0, dim)
        for part, x, dim in zip(jnp.split(flat, ends[:-1], axis=1), turned, dims, strict=True)
    ]


def in_turn(jobs: Sequence[Job], backwards: bool) -> list[list[jax.Array]]:
    """Run collectives in sequence, so that XLA's combiners cannot join them; `backwards` begins with the last."""
    done: list[list[jax.Array]] = []
    for arrays, collective in reversed(jobs) if backwards else jobs:
        if done:
            *arrays, _ = lax.optimization_barrier((*arrays, done[-1][0]))
        done.append(collective(arrays))
    return done[::-1] if backwards else done


def _split(flat: jax.Array, arrays: Sequence[jax.Array], parts: int) -> list[jax.Array]:
    ends = list(itertools.accumulate(math.prod(x.shape) // parts for x in arrays))
    return jnp.split(flat, ends[:-1])

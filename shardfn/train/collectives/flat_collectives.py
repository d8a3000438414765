"""Collectives of several arrays at once, through one flat array; for use inside `jax.shard_map`.

Each takes arrays of one dtype and gives back arrays in their order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec


def all_reduced(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sum of each array over the axes."""
    if len(arrays) == 1:
        return [lax.psum(arrays[0], axes)]
    flat = lax.psum(jnp.concatenate([x.reshape(-1) for x in arrays]), axes)
    return [piece.reshape(x.shape) for piece, x in zip(_split(flat, arrays, 1), arrays, strict=True)]


def all_reduced_in_pieces(
    arrays: Sequence[jax.Array], axes: tuple[str, ...], cuts: Sequence[PartitionSpec], others: frozenset[str]
) -> list[jax.Array]:
    """The sum of each array over the axes, where other axes of the mesh are XLA's, which cuts the arrays along them.

    One flat array of whole ones would undo those cuts: each device puts together the pieces that it holds.

    Args:
      arrays: of one dtype.
      axes: those of the `shard_map` around, over which is summed.
      cuts: how each array lies along the other axes.
      others: the other axes.
    """
    if len(arrays) == 1:
        return [lax.psum(arrays[0], axes)]
    summed = jax.shard_map(
        lambda *pieces: tuple(all_reduced(pieces, axes)),
        in_specs=tuple(cuts), out_specs=tuple(cuts), axis_names=set(others), check_vma=False,
    )  # fmt: skip
    return list(summed(*arrays))


def reduce_scattered(arrays: Sequence[jax.Array], dims: Sequence[int], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sum of each array over the axes, of which each device keeps its piece along the array's dim."""
    if len(arrays) == 1:
        return [lax.psum_scatter(arrays[0], axes, scatter_dimension=dims[0], tiled=True)]
    count = lax.axis_size(axes)
    turned = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    flat = jnp.concatenate([x.reshape(count, -1) for x in turned], axis=1)
    flat = lax.psum_scatter(flat, axes, scatter_dimension=0, tiled=True).reshape(-1)
    return [
        jnp.moveaxis(piece.reshape(x.shape[0] // count, *x.shape[1:]), 0, dim)
        for piece, x, dim in zip(_split(flat, turned, count), turned, dims, strict=True)
    ]


def all_gathered(arrays: Sequence[jax.Array], dims: Sequence[int], axes: tuple[str, ...]) -> list[jax.Array]:
    """Each array put together from its pieces along its dim."""
    if len(arrays) == 1:
        return [lax.all_gather(arrays[0], axes, axis=dims[0], tiled=True)]
    turned = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    flat = lax.all_gather(jnp.concatenate([x.reshape(-1) for x in turned]), axes)
    ends = list(itertools.accumulate(x.size for x in turned))
    return [
        jnp.moveaxis(piece.reshape(-1, *x.shape[1:]), 0, dim)
        for piece, x, dim in zip(jnp.split(flat, ends[:-1], axis=1), turned, dims, strict=True)
    ]


def in_turn(
    jobs: Sequence[tuple[Sequence[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]], backwards: bool
) -> list[list[jax.Array]]:
    """Run collectives one after the other: XLA's combiners cannot join what waits for each other.

    Args:
      jobs: the arrays of each, and what is done with them.
      backwards: begin with the last, as for gradients: that of what a model reads last is there first.
    """
    done: list[list[jax.Array]] = []
    for arrays, collective in reversed(jobs) if backwards else jobs:
        if done:
            *arrays, _ = lax.optimization_barrier((*arrays, done[-1][0]))
        done.append(collective(arrays))
    return done[::-1] if backwards else done


def _split(flat: jax.Array, arrays: Sequence[jax.Array], parts: int) -> list[jax.Array]:
    ends = list(itertools.accumulate(math.prod(x.shape) // parts for x in arrays))
    return jnp.split(flat, ends[:-1])

"""Rotations: shifts of an array around its end, each one op for XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from shardfn.ir.source_lines import OURS

ROTATED = f"{OURS}rotation"
"""The name of the `jit` of a shift in a jaxpr."""


def rotated(x: Any, shift: int, dim: int) -> Any:
    """An array whose row i is moved to row i + shift, around the end: one rotation for XLA.

    >>> rotated(jax.numpy.arange(4), 1, 0)
    Array([3, 0, 1, 2], dtype=int32)
    """
    return _rotation(x.shape[dim], shift, dim)(x)


@functools.lru_cache(maxsize=1 << 10)
def _rotation(size: int, shift: int, dim: int) -> Callable[..., Any]:
    start = -shift % size

    def rotation(x: Any) -> Any:
        ends = (start, size), (0, start)
        return lax.concatenate([lax.slice_in_dim(x, *end, axis=dim) for end in ends], dim)

    return rotation_jit(rotation)


def rotation_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The `jit` of a rotation or of a part of one, which derivative rules leave as it is."""
    function.__name__ = function.__qualname__ = ROTATED
    return jax.jit(function)


def is_rotation(eqn: Any) -> bool:
    """Whether an equation of a jaxpr is such a rotation, or a part of one. XLA computes it correctly as it stands."""
    return eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == ROTATED


def farther(x: Any, shift: int, wanted: int, dim: int) -> Any:
    """An array that is rotated by `shift`, rotated to `wanted`."""
    if shift:  # XLA would make one gather of two rotations
        x = lax.optimization_barrier(x)
    return rotated(x, wanted - shift, dim)

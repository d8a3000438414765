"""Rotations: shifts of an array around its end, each one op for XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from shardfn.ir.linear_call import linear_call
from shardfn.ir.rewrite import bind_one, rebind
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
    """The `jit` of a rotation or of a part of one."""
    function.__name__ = function.__qualname__ = ROTATED
    return jax.jit(function)


def is_rotation(eqn: Any) -> bool:
    """Whether an equation of a jaxpr is such a rotation, or a part of one. XLA computes it correctly as it stands."""
    return eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == ROTATED


class Turn(NamedTuple):
    """One rotation: the first rows along `dim` are those that were at `first`."""

    dim: int
    first: int


def turns(eqn: Any) -> list[Turn]:
    """The rotations that the `jit` of an equation makes of one array, one after the other; none if it does anything else.

    >>> closed = jax.make_jaxpr(lambda x: jnp.roll(x, (1, 2), (0, 1)))(jnp.ones((4, 6)))
    >>> turns(closed.jaxpr.eqns[0])
    [Turn(dim=0, first=3), Turn(dim=1, first=4)]
    """
    closed = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
    if closed is None or closed.effects or not len(closed.jaxpr.invars) == len(closed.jaxpr.outvars) == 1:
        return []
    makers = {v: one for one in closed.jaxpr.eqns for v in one.outvars}
    value, found = closed.jaxpr.outvars[0], list[Turn]()
    while not isinstance(value, core.Literal) and value in makers:
        whole = makers[value]
        parts = [makers[v] for v in whole.invars if not isinstance(v, core.Literal) and v in makers]
        are_slices = len(parts) == len(whole.invars) == 2 and all(part.primitive.name == "slice" for part in parts)
        if whole.primitive.name != "concatenate" or not are_slices:
            return []
        dim, (end, start), shape = int(whole.params["dimension"]), parts, value.aval.shape
        value, first = end.invars[0], end.params["start_indices"][dim]
        rows = [p.params["limit_indices"][dim] - p.params["start_indices"][dim] for p in parts]
        is_whole = start.params["start_indices"][dim] == 0 and rows == [shape[dim] - first, first]
        if start.invars[0] is not value or value.aval.shape != shape or not is_whole:
            return []
        found.append(Turn(dim, first))
    return found[::-1] if value is closed.jaxpr.invars[0] else []


def with_rotations_back(function: Callable[..., Any], static_argnums: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`function`, whose rotations are transposed to rotations back. JAX's own transpose is a sum of pads.

    >>> gradient = jax.make_jaxpr(jax.grad(lambda x: with_rotations_back(lambda x: rotated(x, 1, 0))(x)[0]))(jnp.ones(4))
    >>> [eqn.primitive.name for eqn in gradient.jaxpr.eqns][-1]
    'jit'
    """

    def is_chosen(eqn: Any, number: int) -> bool:
        return bool(turns(eqn)) and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        def back(*arrays: Any, which: tuple[int, ...]) -> list[Any]:
            return [functools.reduce(lambda x, turn: rotated(x, turn.first, turn.dim), reversed(turns(eqn)), arrays[0])]

        return linear_call(lambda x: bind_one(eqn, [x]), back, [], inputs, [eqn.outvars[0].aval])

    return rebind(function, is_chosen, bind, static_argnums)


def farther(x: Any, shift: int, wanted: int, dim: int) -> Any:
    """An array that is rotated by `shift`, rotated to `wanted`."""
    if shift:  # XLA would make one gather of two rotations
        x = lax.optimization_barrier(x)
    return rotated(x, wanted - shift, dim)

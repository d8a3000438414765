"""Strips: the rows of an array that its shards receive from their neighbours, one shard after the other.

An array of strips has a dimension of shards and one of rows in the place of a dimension of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from shardfn.ir.rewrite import bind_one
from shardfn.movement.rotation import is_rotation, rotated, rotation_jit, turns
from shardfn.movement.rules.elements import ELEMENTWISE


class Node(NamedTuple):
    """A variable of a jaxpr, and the dimension along which its strips are taken."""

    var: Any
    dim: int


class Rotation(NamedTuple):
    """Row i of `operand` is moved to row i + shift along `dim`, around the end."""

    operand: Any
    dim: int
    shift: int

    @property
    def is_next(self) -> bool:
        """Whether rows move to the next shard, not to the one before."""
        return self.shift > 0

    @property
    def node(self) -> Node:
        """What is rotated."""
        return Node(self.operand, self.dim)


class Halo(NamedTuple):
    """What shards exchange: each sends its last `rows` rows of `source` to the next shard, or its first to the one before."""

    source: Node
    shards: int
    rows: int
    is_next: bool


def rotation_of(eqn: Any) -> Rotation | None:
    """The rotation that an equation is (`rotated`), or None."""
    found = turns(eqn) if is_rotation(eqn) else []
    if len(found) != 1:  # a part of a rotation
        return None
    ((dim, start),) = found
    size = eqn.outvars[0].aval.shape[dim]
    return Rotation(eqn.invars[0], dim, size - start if 2 * start >= size else -start)


def operands_of(eqn: Any, node: Node) -> list[Node] | None:
    """What the strips of a result are computed from; None if they are not."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        operands = [v for v in eqn.invars if v.aval.shape]
        is_repeated = any(v.aval.shape != node.var.aval.shape for v in operands)
        return None if is_repeated else [Node(v, node.dim) for v in operands]
    if name == "optimization_barrier":
        return [Node(eqn.invars[eqn.outvars.index(node.var)], node.dim)]
    if name == "iota":
        return []
    if name == "broadcast_in_dim":
        own = _dim_in_operand(eqn, node.dim)
        return [] if own is None else [Node(eqn.invars[0], own)]
    if name == "squeeze":
        return [Node(eqn.invars[0], _kept(eqn.params["dimensions"], eqn.invars[0])[node.dim])]
    if name == "slice":
        (operand,) = eqn.invars
        return [Node(operand, node.dim)] if operand.aval.shape[node.dim] == node.var.aval.shape[node.dim] else None
    if name == "concatenate":
        return None if eqn.params["dimension"] == node.dim else [Node(v, node.dim) for v in eqn.invars]
    rotation = rotation_of(eqn)
    return None if rotation is None or rotation.dim == node.dim else [Node(rotation.operand, node.dim)]


def _kept(dims: Sequence[int], operand: Any) -> list[int]:
    """The dimensions of an operand but for some."""
    return [d for d in range(len(operand.aval.shape)) if d not in dims]


def _dim_in_operand(eqn: Any, dim: int) -> int | None:
    """The dimension of a broadcast's operand that becomes `dim`; None if it has one row there."""
    dims, shape = eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
    return next((k for k, d in enumerate(dims) if d == dim and shape[k] > 1), None)


def on_strips(
    eqn: Any, node: Node, halo: Halo, read: Callable[[Any], Any], strips: Mapping[tuple[Node, Halo], Any]
) -> Any:
    """The strips of a result."""
    name, params, dim = eqn.primitive.name, eqn.params, node.dim
    own = [strips[one, halo] for one in operands_of(eqn, node) or ()]
    shape = _divided(node.var.aval.shape, dim, halo.shards, halo.rows)
    if name in ELEMENTWISE:
        return bind_one(eqn, [own.pop(0) if v.aval.shape else read(v) for v in eqn.invars])[0]
    if name == "optimization_barrier":
        return lax.optimization_barrier(own[0])
    if name == "iota":
        if params["dimension"] != dim:
            return lax.broadcasted_iota(params["dtype"], shape, _moved(params["dimension"], dim))
        places = _places(node.var.aval.shape[dim], halo).astype(params["dtype"])
        return lax.broadcast_in_dim(places, shape, (dim, dim + 1))
    if name == "broadcast_in_dim":
        dims = [_moved(d, dim) for d in params["broadcast_dimensions"]]
        if own:
            dims.insert(dims.index(dim) + 1, dim + 1)
        return lax.broadcast_in_dim(own[0] if own else read(eqn.invars[0]), shape, dims)
    if name == "squeeze":
        above = _kept(params["dimensions"], eqn.invars[0])[dim]
        return lax.squeeze(own[0], [_moved(d, above) for d in params["dimensions"]])
    if name == "slice":
        bounds = (params["start_indices"], params["limit_indices"], params["strides"] or (1,) * len(shape))
        starts, limits, strides = ((*one[:dim], *both, *one[dim + 1 :]) for one, both in
                                   zip(bounds, ((0, 0), (halo.shards, halo.rows), (1, 1)), strict=True))  # fmt: skip
        return lax.slice(own[0], starts, limits, strides)
    if name == "concatenate":
        return lax.concatenate(own, _moved(params["dimension"], dim))
    rotation = rotation_of(eqn)
    assert rotation is not None
    return rotated(own[0], rotation.shift, _moved(rotation.dim, dim))


def _divided(shape: Sequence[int], dim: int, shards: int, rows: int) -> tuple[int, ...]:
    """The shape of an array whose dimension `dim` is divided into shards of some rows."""
    return (*shape[:dim], shards, rows, *shape[dim + 1 :])


def _moved(other: int, dim: int) -> int:
    """The place of another dimension in that array."""
    return other + (other > dim)


def _places(size: int, halo: Halo) -> np.ndarray:
    """The rows that each shard receives.

    >>> _places(8, Halo(Node(None, 0), 2, 1, True)).tolist()
    [[7], [3]]
    """
    blocks = np.arange(size).reshape(halo.shards, -1)
    return np.roll(blocks[:, -halo.rows :], 1, 0) if halo.is_next else np.roll(blocks[:, : halo.rows], -1, 0)


def received(x: Any, halo: Halo) -> Any:
    """The strips of an array that are exchanged."""
    dim, rows = halo.source.dim, x.shape[halo.source.dim] // halo.shards
    first = rows - halo.rows if halo.is_next else 0

    def edges(x: Any) -> Any:
        blocks = x.reshape(_divided(x.shape, dim, halo.shards, rows))
        return lax.slice_in_dim(blocks, first, first + halo.rows, axis=dim + 1)

    own = lax.optimization_barrier(rotation_jit(edges)(x))  # XLA would merge their slices with those of the rotation
    return rotated(own, 1 if halo.is_next else -1, dim)


def joined(x: Any, strips: Any, rotation: Rotation, halo: Halo) -> Any:
    """A rotation of an array, of the strips that its shards have received."""
    dim, shift = rotation.dim, abs(rotation.shift)

    def parts(x: Any, strips: Any) -> Any:
        rows = x.shape[dim] // halo.shards
        blocks = x.reshape(_divided(x.shape, dim, halo.shards, rows))
        if halo.is_next:
            ends = (strips, halo.rows - shift, halo.rows), (blocks, 0, rows - shift)
        else:
            ends = (blocks, shift, rows), (strips, 0, shift)
        return lax.concatenate([lax.slice_in_dim(*end, axis=dim + 1) for end in ends], dim + 1).reshape(x.shape)

    return rotation_jit(parts)(x, strips)

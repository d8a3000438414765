"""Rules of what gives a value other dimensions: transposes, broadcasts, and dimensions of one row added or removed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import lax

from shardfn.movement.emit import Emitter
from shardfn.movement.frames import frame_of
from shardfn.movement.rules.call import MOST_ROWS, Call
from shardfn.movement.rules.elements import elementwise
from shardfn.movement.values import (
    Elementwise,
    Iota,
    Known,
    Lazy,
    Moved,
    Spread,
    Squeezed,
    Value,
    has_no_frame,
    joined,
    transposed,
    with_rows,
)


def iota_rule(call: Call) -> Value | None:
    """Positions along a dimension."""
    if not call.shape or 0 in call.shape or call.operands:
        return None
    return Iota(call.shape, call.dtype, call.params["dimension"])


def transpose_rule(call: Call) -> Value | None:
    """A value with its dimensions in another order."""
    value = call.emitter.settled(call.operands[0])
    if not isinstance(value, Moved | Spread):
        return None
    return transposed(value, call.params["permutation"], call.emitter.transposed)


def broadcast_rule(call: Call) -> Value | None:
    """A broadcast; of a value without a dimension, the value with it."""
    operand, *dynamic = call.operands
    if dynamic or 0 in call.shape or not call.shape:
        return None
    if not np.shape(operand):
        operand = call.emitter.array(operand)
    if isinstance(operand, Squeezed):
        free = [
            d for d in range(len(call.shape)) if d not in call.params["broadcast_dimensions"] and call.shape[d] == 1
        ]
        kept = tuple(call.shape[d] for d in call.params["broadcast_dimensions"]) == operand.shape
        if len(free) == 1 and kept and len(call.shape) == len(operand.shape) + 1:
            return moved_dim(call.emitter, operand.value, operand.dim, free[0])
        return None
    return Spread(call.shape, call.dtype, operand, tuple(call.params["broadcast_dimensions"]))


def squeeze_rule(call: Call) -> Value | None:
    """A value without dimensions of one row."""
    value = call.emitter.settled(call.operands[0])
    for dim in sorted((d % len(value.shape) for d in call.params["dimensions"]), reverse=True):
        value = squeezed(call.emitter, value, dim)
    return value if isinstance(value, Lazy) else None


def reshape_rule(call: Call) -> Value | None:
    """A reshape that adds or removes dimensions of one row."""
    value = call.operands[0]
    if not isinstance(value, Lazy) or call.params["dimensions"] is not None or isinstance(value, Squeezed):
        return None
    if isinstance(value, Spread):
        value = _merged(value, call.shape)
    if value.shape == call.shape:
        return value
    if [n for n in value.shape if n != 1] != [n for n in call.shape if n != 1]:
        return None
    if 1 in value.shape or frame_of(value) is not None:  # else readers of a few of its rows compute only these
        value = call.emitter.settled(value)
    for dim in reversed([d for d, n in enumerate(value.shape) if n == 1]):
        value = squeezed(call.emitter, value, dim)
        if isinstance(value, Squeezed):
            return None
    return expanded(call.emitter, value, [d for d, n in enumerate(call.shape) if n == 1])


def _merged(value: Spread, shape: Sequence[int]) -> Value:
    """A broadcast reshaped to `shape`, if new dimensions vanish in it: those of one row, or behind an operand's row that they
    repeat. Else as it is."""
    given = value
    for dim in reversed(range(len(value.shape))):
        rows, before = value.shape[dim], value.dims.index(dim - 1) if dim - 1 in value.dims else None
        if dim in value.dims or len(value.shape) == len(shape):
            continue
        repeats = before is not None and value.operand.shape[before] == 1 == value.shape[dim - 1] and dim <= len(shape)
        if rows != 1 and not (repeats and shape[dim - 1] == rows):
            continue
        merged = (*value.shape[:dim], *value.shape[dim + 1 :])
        merged = with_rows(merged, dim - 1, rows) if rows != 1 else merged
        value = Spread(merged, value.dtype, value.operand, tuple(d - (d > dim) for d in value.dims))
    if value.dims != tuple(range(len(value.shape))) or value.shape != tuple(shape):
        return value if value.shape == tuple(shape) else given
    found = value.operand
    for dim, rows in enumerate(value.shape):
        if found.shape[dim] != rows:
            if rows > MOST_ROWS or isinstance(found, Elementwise | Iota | Known | Squeezed):
                return value
            found = joined([found] * rows, dim)
    return found


def squeezed(emitter: Emitter, value: Value, dim: int) -> Value:
    """A value without a dimension of one row."""
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    if not shape:
        return lax.squeeze(emitter.array(value), (dim,))
    if isinstance(value, Moved) and value.dim != dim:
        parts = tuple(part._replace(source=squeezed(emitter, part.source, dim)) for part in value.parts)
        return Moved(shape, value.dtype, value.dim - (value.dim > dim), parts)
    if isinstance(value, Moved):
        return Squeezed(shape, value.dtype, value, dim)
    if isinstance(value, Squeezed):
        inner = dim + (dim >= value.dim)
        found, last = squeezed(emitter, value.value, inner), value.dim - (inner < value.dim)
        return Squeezed(shape, value.dtype, found, last) if isinstance(found, Lazy) else lax.squeeze(found, (last,))
    if has_no_frame(value):
        own = [squeezed(emitter, o, dim) if np.shape(o) else o for o in value.operands]
        return elementwise(value.bind, own, shape, value.dtype, emitter, value.safe)
    if isinstance(value, Spread):
        dims = tuple(d - (d > dim) for d in value.dims if d != dim)
        operand = squeezed(emitter, value.operand, value.dims.index(dim)) if dim in value.dims else value.operand
        return operand if np.shape(operand) == shape else Spread(shape, value.dtype, operand, dims)
    return lax.squeeze(emitter.array(value), (dim,))


def expanded(emitter: Emitter, value: Value, dims: Sequence[int]) -> Value:
    """A value with further dimensions of one row."""
    for i, dim in enumerate(sorted(dims)):
        value = _with_dim(emitter, value, dim, is_last=i == len(dims) - 1)
    return value


def _with_dim(emitter: Emitter, value: Value, dim: int, is_last: bool) -> Value:
    """A value with one more dimension of one row. What was squeezed gets its row back, as the last dimension that is added."""
    shape = (*np.shape(value)[:dim], 1, *np.shape(value)[dim:])
    if isinstance(value, Squeezed):
        if is_last:
            return moved_dim(emitter, value.value, value.dim, dim)
        inner = dim + (dim > value.dim)
        own = _with_dim(emitter, value.value, inner, is_last)
        return Squeezed(shape, value.dtype, own, value.dim + (inner <= value.dim))
    kept = tuple(d for d in range(len(shape)) if d != dim)
    if isinstance(value, Moved) and _has_squeezed(value):
        parts = (part._replace(source=_with_dim(emitter, part.source, dim, is_last)) for part in value.parts)
        return Moved(shape, value.dtype, value.dim + (dim <= value.dim), tuple(parts))
    if isinstance(value, Spread) and _has_squeezed(value):
        own = _with_dim(emitter, value.operand, sum(d < dim for d in value.dims), is_last)
        return Spread(shape, value.dtype, own, tuple(sorted((*(kept[d] for d in value.dims), dim))))
    if isinstance(value, Spread):
        return Spread(shape, value.dtype, value.operand, tuple(kept[d] for d in value.dims))
    return Spread(shape, value.dtype, value, kept) if isinstance(value, Lazy) else lax.expand_dims(value, (dim,))


def _has_squeezed(value: Value) -> bool:
    """Whether rows of a value were squeezed."""
    below = value.below() if isinstance(value, Moved | Spread) else ()
    return isinstance(value, Squeezed) or any(map(_has_squeezed, below))


def moved_dim(emitter: Emitter, value: Value, source: int, target: int) -> Value:
    """A value whose dimension `source` becomes dimension `target`."""
    if source == target:
        return value
    order = [d for d in range(len(value.shape)) if d != source]
    order.insert(target, source)
    return transposed(value, order, emitter.transposed)

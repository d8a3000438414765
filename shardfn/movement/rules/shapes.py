"""Rules of what gives a value other dimensions: transposes, broadcasts, and dimensions of one row added or removed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfn.movement.emit import Emitter
from shardfn.movement.mapped import transposed
from shardfn.movement.rules.call import MOST_ROWS, Call
from shardfn.movement.rules.composed import expanded, has_squeezed, rows_of, squeezed
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
    is_stack_of_many,
    joined,
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
    if has_squeezed(operand):
        dims = call.params["broadcast_dimensions"]
        free = [d for d in range(len(call.shape)) if d not in dims and call.shape[d] == 1]
        if len(free) + len(dims) == len(call.shape) and tuple(call.shape[d] for d in dims) == operand.shape:
            return expanded(call.emitter, operand, free)
        if isinstance(operand, Squeezed):
            return None
    return Spread(call.shape, call.dtype, operand, tuple(call.params["broadcast_dimensions"]))


def squeeze_rule(call: Call) -> Value | None:
    """A squeeze."""
    return without(call.emitter, call.operands[0], call.params["dimensions"])


def without(emitter: Emitter, value: Value, dims: Sequence[int]) -> Value | None:
    """A value without dimensions of one row; None if it is an array."""
    value = _settled(emitter, value)
    for dim in sorted((d % len(value.shape) for d in dims), reverse=True):
        value = squeezed(emitter, value, dim)
    return value if isinstance(value, Lazy) else None


def _settled(emitter: Emitter, value: Value) -> Value:
    """A value that is computed once; what has no frame as it is, so that readers of a few of its rows compute only these."""
    return value if any(has_no_frame(value, d) for d in range(len(value.shape))) else emitter.settled(value)


def stack_rule(call: Call) -> Value | None:
    """Values one behind the other along a new dimension."""
    if not any(isinstance(o, Lazy) for o in call.operands) or 0 in call.shape:
        return None
    dim = call.params["axis"]
    found = joined([expanded(call.emitter, o, (dim,)) for o in call.operands], dim)
    return None if is_stack_of_many(found, len(call.operands)) else found


def unstack(call: Call) -> list[Value] | None:
    """Each row of a value along a dimension, without it; None for an array."""
    (value,), dim = call.operands, call.params["axis"]
    if not isinstance(value, Lazy):
        return None
    rows = (rows_of(call.emitter, value, dim, i, 1) for i in range(value.shape[dim]))
    return [squeezed(call.emitter, row, dim) for row in rows]


def reshape_rule(call: Call) -> Value | None:
    """A reshape that adds or removes dimensions of one row."""
    value = call.operands[0]
    if not isinstance(value, Lazy) or call.params["dimensions"] is not None:
        return None
    if isinstance(value, Spread):
        value = _merged(value, call.shape)
    if value.shape == call.shape:
        return value
    if [n for n in value.shape if n != 1] != [n for n in call.shape if n != 1]:
        return None
    value = _settled(call.emitter, value)
    for dim in reversed([d for d, n in enumerate(value.shape) if n == 1]):
        value = squeezed(call.emitter, value, dim)
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

"""Rules of what moves rows: slices, pads, concatenations, reversals, and slices and updates at places that are known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.movement.emit import Emitter
from shardfn.movement.rules.call import MOST_ROWS, Call
from shardfn.movement.rules.composed import rows_of
from shardfn.movement.values import (
    Elementwise,
    Known,
    Lazy,
    Moved,
    Part,
    Spread,
    Value,
    is_one_constant,
    is_stack_of_many,
    joined,
    sliced,
    with_rows,
)


def slice_rule(call: Call) -> Value | None:
    """A slice, of strides that divide where they are not 1."""
    start, limit = call.params["start_indices"], call.params["limit_indices"]
    strides = call.params["strides"] or (1,) * len(start)
    value = call.operands[0]
    for dim, (first, last, stride) in enumerate(zip(start, limit, strides, strict=True)):
        if stride == 1:
            value = rows_of(call.emitter, value, dim, first, last - first)
        elif (
            last <= first
            or (value := strided_rows_of(call.emitter, value, dim, first, -(-(last - first) // stride), stride)) is None
        ):
            return None
    return value


def split(call: Call) -> list[Value]:
    """The results of `lax.split`."""
    (value,), dim, sizes = call.operands, call.params["axis"], call.params["sizes"]
    starts = itertools.accumulate(sizes, initial=0)
    return [
        rows_of(call.emitter, value, dim, first, rows) if rows else _empty(with_rows(value.shape, dim, 0), value.dtype)
        for first, rows in zip(starts, sizes, strict=False)
    ]


def _empty(shape: tuple[int, ...], dtype: Any) -> Spread:
    return Spread(shape, dtype, np.zeros((), dtype), ())


def strided_rows_of(emitter: Emitter, value: Value, dim: int, first: int, rows: int, stride: int) -> Value | None:
    """Each `stride`-th row: of an array whose size the stride divides, one of each group, which needs no neighbours."""
    value, shape = emitter.settled(value), with_rows(value.shape, dim, rows)
    if isinstance(value, Spread) and dim not in value.dims:
        return Spread(shape, value.dtype, value.operand, value.dims)
    if isinstance(value, Moved) and value.dim != dim:
        sources = [strided_rows_of(emitter, part.source, dim, first, rows, stride) for part in value.parts]
        if not any(source is None for source in sources):
            parts = (part._replace(source=own) for part, own in zip(value.parts, sources, strict=True))
            return Moved(shape, value.dtype, value.dim, tuple(parts))
    value = sliced(value, dim, first, (rows - 1) * stride + 1)
    if rows == 1 or stride == 1:
        return value
    if isinstance(value, Moved) and value.dim == dim and len(value.parts) == 1:
        (part,) = value.parts
    else:
        part = Part(value.shape[dim], value, 0)
    if isinstance(part.source, Elementwise) or part.source.shape[dim] % stride:
        return None
    group, lane = divmod(part.first, stride)
    emitter.shifted += part.source is not value  # the rows in between are not moved
    return sliced(emitter.lane(emitter.array(part.source), dim, stride, lane), dim, group, rows)


def pad_rule(call: Call) -> Value | None:
    """A pad, also by negative numbers and between elements."""
    value, fill = call.operands
    if 0 in value.shape or 0 in call.shape:
        return None
    fill = call.emitter.array(fill)
    for dim, (low, high, interior) in enumerate(call.params["padding_config"]):
        if interior:
            value = _interior(call.emitter, value, fill, dim, interior + 1)
            high -= interior
        value = padded(value, fill, dim, low, high)
    return value


def padded(value: Value, fill: Any, dim: int, low: int, high: int) -> Value:
    """A value with rows of a scalar before and behind it; of a negative number, without as many of its own."""
    rows = value.shape[dim]
    first, last = max(-low, 0), rows - max(-high, 0)
    before, after = max(low, 0), max(high, 0)
    if first >= last:  # nothing is left of it
        return Spread(with_rows(value.shape, dim, rows + low + high), value.dtype, fill, ())
    value = sliced(value, dim, first, last - first)
    if not before and not after:
        return value
    fills = [Spread(with_rows(value.shape, dim, n), value.dtype, fill, ()) for n in (before, after)]
    return joined([fills[0], value, fills[1]], dim)


def _interior(emitter: Emitter, value: Value, fill: Any, dim: int, stride: int) -> Value:
    """A value with `stride - 1` rows of `fill` behind each of its rows: of the rows of an array, as rows of that array with them,
    which has groups of `stride` rows."""
    value, longer = emitter.settled(value), with_rows(value.shape, dim, value.shape[dim] * stride)
    filled = Spread(longer, value.dtype, fill, ())
    if is_one_constant(value, filled):
        return filled
    if isinstance(value, Moved) and value.dim != dim:
        parts = [part._replace(source=_interior(emitter, part.source, fill, dim, stride)) for part in value.parts]
        return Moved(longer, value.dtype, value.dim, tuple(parts))
    if isinstance(value, Moved) and len(value.parts) == 1 and 2 * value.shape[dim] > value.parts[0].source.shape[dim]:
        (part,) = value.parts
        whole = _interior(emitter, part.source, fill, dim, stride)
        return sliced(whole, dim, part.first * stride, part.rows * stride)
    x = emitter.array(value)
    shape = (*x.shape[: dim + 1], stride, *x.shape[dim + 1 :])
    lane = lax.broadcasted_iota(np.int32, shape, dim + 1)
    spread = emitter.repeated(x, dim, stride).reshape(shape)
    found = lax.select(lane == 0, spread, jnp.full(shape, fill, x.dtype))
    return found.reshape(longer)


def concatenate_rule(call: Call) -> Value | None:
    """A concatenation; of the two ends of an array it is a rotation."""
    dim = call.params["dimension"]
    values = [o for o in call.operands if o.shape[dim]]
    if not values or 0 in call.shape:
        return None
    if len(values) == 1:
        return values[0]
    found = joined(values, dim)
    if is_stack_of_many(found, len(values)):
        return None
    if isinstance(found, Moved) and len(found.parts) == 2:
        (end, start) = found.parts
        is_whole = end.first == start.rows and end.first + end.rows == found.shape[dim] == end.source.shape[dim]
        found.is_rotation = end.source is start.source and start.first == 0 and is_whole
        if found.is_rotation and isinstance(end.source, Moved):  # one rotation after the other
            whole = call.emitter.array(end.source)
            parts = tuple(part._replace(source=whole) for part in found.parts)
            found = Moved(found.shape, found.dtype, dim, parts, is_rotation=True)
    return found


def reverse_rule(call: Call) -> Value | None:
    """A few rows of a moved value in reverse."""
    (value,) = call.operands
    for dim in call.params["dimensions"]:
        rows = value.shape[dim]
        if rows == 1:
            continue
        if rows > MOST_ROWS or not isinstance(value, Lazy):
            return None
        value = joined([sliced(value, dim, i, 1) for i in reversed(range(rows))], dim)
    return value


def dynamic_slice_rule(call: Call) -> Value | None:
    """A slice at places that are known."""
    value, *starts = call.operands
    sizes = call.params["slice_sizes"]
    places = [_place(start) for start in starts]
    for dim, (place, size) in enumerate(zip(places, sizes, strict=True)):
        if place is None:
            return None
        value = rows_of(call.emitter, value, dim, min(max(place, 0), value.shape[dim] - size), size)
    return value


def dynamic_update_slice_rule(call: Call) -> Value | None:
    """An update at places that are known."""
    value, update, *starts = call.operands
    places = [place for start in starts if (place := _place(start)) is not None]
    if len(places) < len(starts) or 0 in update.shape:
        return None
    every = zip(places, value.shape, update.shape, strict=True)
    return put(call.emitter, value, update, [min(max(place, 0), n - k) for place, n, k in every])


def _place(start: Value) -> int | None:
    """The number of a row, if it is known."""
    if isinstance(start, Known):
        return int(start.array)
    return int(start) if isinstance(start, np.ndarray | np.generic) else None


def put(emitter: Emitter, value: Value, update: Value, starts: Sequence[int]) -> Value:
    """A value with `update` in the place of what begins at `starts`."""
    return emitter.in_place(_put(value, update, starts))


def _put(value: Value, update: Value, starts: Sequence[int]) -> Value:
    for dim, (start, rows, size) in enumerate(zip(starts, update.shape, value.shape, strict=True)):
        if rows == size:
            continue
        inside = _put(sliced(value, dim, start, rows), update, [0 if d == dim else s for d, s in enumerate(starts)])
        parts = [sliced(value, dim, 0, start), inside, sliced(value, dim, start + rows, size - start - rows)]
        return joined([part for part in parts if part.shape[dim]], dim)
    return update

"""Rules of ops along dimensions: reductions, and what is computed along one dimension of a value that is moved along another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardfn.movement.frames import Frame, frame_of
from shardfn.movement.rules.call import MOST_ROWS, Call, has_infinity
from shardfn.movement.rules.composed import combined, rows_of, squeezed
from shardfn.movement.rules.shapes import without
from shardfn.movement.values import Elementwise, Moved, Value, alignments, ends_and_rows, joined, sliced, with_rows


def reduce_rule(
    identity: Callable[[Any], Any], call: Call, combine: Callable[[Any, Any], Any] | None = None
) -> Value | None:
    """A reduction. Along dimensions with a frame it is one of the frame, where what does not count is the identity. Without a
    frame, that of a few rows is made row by row, if `combine` makes one result of two."""
    (value,) = call.operands
    axes = tuple(call.params["axes"])
    if all(value.shape[d] == 1 for d in axes):
        return without(call.emitter, value, axes)
    frame = frame_of(value) if has_infinity(value.dtype) and isinstance(value, Moved | Elementwise) else None
    if frame is None and combine is not None:
        found = _row_by_row(call, axes, combine)
        return _with_ends(identity, call, axes, combine) if found is None else found
    if frame is None:
        return None
    if frame.shape == value.shape:
        return None
    call.emitter.shifted += any(frame.shape[d] != value.shape[d] for d in axes)
    found = call.bound(_masked(call, value, frame, identity(value.dtype)))
    kept = [d for d in range(len(value.shape)) if d not in axes]
    for own, dim in enumerate(kept):
        found = sliced(found, own, frame.offset[dim], value.shape[dim])
    return found


def _masked(call: Call, value: Value, frame: Frame, neutral: Any) -> Any:
    """A value in a frame whose other rows hold a neutral element, also those along which nothing is combined: a gradient of zero
    times what they hold would be no zero if that were infinite."""
    found, mask = call.emitter.place(value, frame), call.emitter.inside(value, frame)
    return found if mask is None else lax.select(mask, found, jnp.full(frame.shape, neutral, value.dtype))


def _row_by_row(call: Call, axes: Sequence[int], combine: Callable[[Any, Any], Any]) -> Value | None:
    """A reduction of a few rows of an array, such as those that an edge was repeated to, or components. Where nothing else is
    reduced, the rows are what is combined."""
    (value,) = call.operands
    few = [d for d in axes if 1 < value.shape[d] <= MOST_ROWS and alignments(value, d)]
    if len(few) != 1:
        return None
    call.emitter.shifted += 1
    rows = [rows_of(call.emitter, value, few[0], i, 1) for i in range(value.shape[few[0]])]
    if axes == tuple(few):
        found = [squeezed(call.emitter, row, few[0]) for row in rows]
    else:
        found = [call.bound(call.emitter.array(row)) for row in rows]
    return combined(combine, found, call.dtype, call.emitter)


def _with_ends(
    identity: Callable[[Any], Any], call: Call, axes: Sequence[int], combine: Callable[[Any, Any], Any]
) -> Value | None:
    """A reduction of more rows than an array has, as of one with ghost cells: of those of the array, and of the ends. Along a
    dimension that is reduced they are combined, along another one they stand one after the other."""
    (value,) = call.operands
    for dim in (*axes, *(d for d in range(len(value.shape)) if d not in axes)):
        found: list[Value] = []
        for start, stop in ends_and_rows(value, dim):
            own = dataclasses.replace(call, operands=(sliced(value, dim, start, stop - start),))
            one = reduce_rule(identity, own, combine)
            found.append(call.bound(call.emitter.array(own.operands[0])) if one is None else one)
        if found:
            call.emitter.shifted += 1
            kept = dim - sum(axis < dim for axis in axes)
            return combined(combine, found, call.dtype, call.emitter) if dim in axes else joined(found, kept)
    return None


def least(dtype: Any) -> Any:
    """The identity of maxima."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else -jnp.inf


def most(dtype: Any) -> Any:
    """The identity of minima."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.inf


def along_rule(axes: Callable[[Mapping[str, Any]], Sequence[int]], keeps: bool, call: Call) -> Value | None:
    """An op along some dimensions, of a value that is moved along others.

    `axes` reads these dimensions from the equation's parameters; with `keeps` the result has them too.
    """
    value = call.emitter.settled(call.operands[0])
    if len(call.operands) > 1 or not isinstance(value, Moved):
        return None
    worked = set(axes(call.params))

    def of(one: Value) -> Value:
        if not isinstance(one, Moved) or one.dim in worked:
            return call.bound(call.emitter.array(one))
        parts = tuple(part._replace(source=of(part.source)) for part in one.parts)
        dim = one.dim if keeps else one.dim - sum(axis < one.dim for axis in worked)
        shape = with_rows(parts[0].source.shape, dim, one.shape[one.dim])
        return Moved(shape, parts[0].source.dtype, dim, parts)

    return of(value) if value.dim not in worked else None


def dot_rule(call: Call) -> Value | None:
    """A product of values that are moved along dimensions that are neither contracted nor of a batch."""
    contracted, batch = call.params["dimension_numbers"]
    frames, kept = [], []
    for value, *fixed in zip(call.operands, contracted, batch, strict=True):
        frame = frame_of(value) if isinstance(value, Moved | Elementwise) else None
        frame = frame or Frame(value.shape, (0,) * len(value.shape))
        if any(frame.shape[d] != value.shape[d] for dims in fixed for d in dims):
            return None
        frames.append(frame)
        free = (d for d in range(len(value.shape)) if d not in (*fixed[0], *fixed[1]))
        kept += [(frame.offset[d], value.shape[d]) for d in free]
    if all(frame.shape == value.shape for frame, value in zip(frames, call.operands, strict=True)):
        return None
    found = call.bound(*(_masked(call, value, frame, 0) for value, frame in zip(call.operands, frames, strict=True)))
    for dim, (first, rows) in enumerate(kept, len(batch[0])):
        found = sliced(found, dim, first, rows)
    return found

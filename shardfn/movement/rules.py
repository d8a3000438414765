"""What each primitive makes of values that are moved: one row for each primitive, in `RULES` at the end.

A rule takes a `Call` and returns the value of its result, or None: then the primitive is bound to arrays as it stands.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.ir.rewrite import bind_one
from shardfn.movement.emit import Emitter, Frame, frame_of, inside
from shardfn.movement.values import (
    Elementwise,
    Iota,
    Known,
    Lazy,
    Moved,
    Part,
    Spread,
    Squeezed,
    Value,
    alignments,
    joined,
    scalar_of,
    sliced,
    transposed,
    with_rows,
)

MOST_ROWS = 8
"""Rows at constant places that are moved one by one."""


@dataclasses.dataclass(frozen=True)
class Call:
    """An equation with the values of its operands."""

    eqn: Any
    operands: tuple[Value, ...]
    emitter: Emitter

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the equation."""
        return self.eqn.params

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.eqn.outvars[0].aval.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the result."""
        return self.eqn.outvars[0].aval.dtype

    def bound(self, *arrays: Any) -> Any:
        """The result of the primitive for arrays."""
        return bind_one(self.eqn, arrays)[0]


Rule = Callable[[Call], Value | None]


# ---- elements


def _elementwise(call: Call) -> Value | None:
    shapes = {tuple(np.shape(o)) for o in call.operands} - {()}
    if shapes != {call.shape}:
        return None
    is_moved = any(
        isinstance(o, Squeezed) or any(alignments(o, d) for d in range(len(np.shape(o)))) for o in call.operands
    )
    if not is_moved and any(not isinstance(o, Lazy) and np.shape(o) for o in call.operands):
        return None
    squeezed = {o.dim if isinstance(o, Squeezed) else -1 for o in call.operands if np.shape(o)}
    if len(squeezed) > 1:
        return None
    name = call.eqn.primitive.name
    is_scaled = name == "mul" and any(not np.shape(o) for o in call.operands)
    safe = None if name in _FINITE or is_scaled else 2.0 if name == "acosh" else 0.5

    def bind(arrays: Sequence[Any]) -> Any:
        return call.bound(*arrays)

    (dim,) = squeezed
    if dim >= 0:  # the same op, and then without the dimension
        rows = [o.value if isinstance(o, Squeezed) else o for o in call.operands]
        shape = (*call.shape[:dim], 1, *call.shape[dim:])
        return Squeezed(call.shape, call.dtype, elementwise(bind, rows, shape, call.dtype, call.emitter, safe), dim)
    return elementwise(bind, call.operands, call.shape, call.dtype, call.emitter, safe)


def elementwise(
    bind: Callable[[Sequence[Any]], Any], operands: Sequence[Value], shape: tuple[int, ...], dtype: Any, emitter: Emitter,
    safe: float | None = None,
) -> Value:  # fmt: skip
    """An op on the elements of values. Of values that fit into no frame it is the same op on their parts."""
    found = Elementwise(shape, dtype, bind, tuple(operands), safe)
    if frame_of(found) is None and (apart := _on_parts(bind, operands, dtype, emitter, safe)) is not None:
        return apart
    return found


def _on_parts(
    bind: Callable[[Sequence[Any]], Any], operands: Sequence[Value], dtype: Any, emitter: Emitter, safe: float | None
) -> Value | None:
    """The op on each part of its operands, which have parts of the same rows, or no dimensions."""
    moved = [o for o in operands if np.shape(o)]
    if not moved or not all(isinstance(o, Moved) and o.dim == moved[0].dim and len(o.parts) > 1 for o in moved):
        return None
    forms = {tuple((p.rows, p.first, p.source.shape, scalar_of(p.source) is None) for p in o.parts) for o in moved}
    if len(forms) > 1:
        return None
    parts: list[Part] = []
    for i, part in enumerate(moved[0].parts):
        sources = [o.parts[i].source if np.shape(o) else o for o in operands]
        if scalar_of(part.source) is not None:
            scalars = [scalar_of(s) if np.shape(s) else s for s in sources]
            arrays = [
                jnp.asarray(emitter.array(x), getattr(o, "dtype", None)) for x, o in zip(scalars, operands, strict=True)
            ]
            parts.append(part._replace(source=Spread(part.source.shape, dtype, bind(arrays), ())))
        else:
            same = next((p for p, q in zip(parts, moved[0].parts, strict=False) if q.source is part.source), None)
            made = same.source if same else elementwise(bind, sources, part.source.shape, dtype, emitter, safe)
            parts.append(part._replace(source=made))
    return Moved(moved[0].shape, dtype, moved[0].dim, tuple(parts))


# ---- movement


def _slice(call: Call) -> Value | None:
    start, limit = call.params["start_indices"], call.params["limit_indices"]
    strides = call.params["strides"] or (1,) * len(start)
    value = call.operands[0]
    for dim, (first, last, stride) in enumerate(zip(start, limit, strides, strict=True)):
        if stride == 1:
            value = _sliced(call.emitter, value, dim, first, last - first)
        elif (
            last <= first
            or (value := _strided(call.emitter, value, dim, first, -(-(last - first) // stride), stride)) is None
        ):
            return None
    return value


def split(call: Call) -> list[Value]:
    """The results of `lax.split`."""
    (value,), dim = call.operands, call.params["axis"]
    starts = [0, *itertools.accumulate(call.params["sizes"])]
    return [
        _sliced(call.emitter, value, dim, first, rows)
        for first, rows in zip(starts, call.params["sizes"], strict=False)
    ]


def _sliced(emitter: Emitter, value: Value, dim: int, first: int, rows: int) -> Value:
    if rows == value.shape[dim]:
        return value
    return sliced(emitter.movable(value), dim, first, rows)


def _strided(emitter: Emitter, value: Value, dim: int, first: int, rows: int, stride: int) -> Value | None:
    """Each `stride`-th row: of an array whose size the stride divides, one of each group, which needs no neighbours."""
    value = _sliced(emitter, value, dim, first, (rows - 1) * stride + 1)
    if rows == 1:
        return value
    if not isinstance(value, Moved) or value.dim != dim or len(value.parts) != 1:
        if isinstance(value, Moved):
            value = emitter.array(value)
        part = Part(value.shape[dim], value, 0)
    else:
        part = value.parts[0]
    source, size = part.source, part.source.shape[dim]
    if isinstance(source, Spread | Iota | Known):
        source = emitter.array(source)
    if size % stride:
        return None
    group, lane = divmod(part.first, stride)
    if not isinstance(source, Lazy):
        taken = emitter.lane(source, dim, stride, lane)
    else:
        return None
    return sliced(taken, dim, group, rows)


def _pad(call: Call) -> Value | None:
    value, fill = call.operands
    if 0 in value.shape or 0 in call.shape:
        return None
    fill = call.emitter.array(fill)
    value = call.emitter.movable(value)
    for dim, (low, high, interior) in enumerate(call.params["padding_config"]):
        if interior:
            value = _interior(call.emitter.array(value), fill, dim, interior + 1)
            high -= interior
        value = _padded(call.emitter, value, fill, dim, low, high)
    return value


def _padded(emitter: Emitter, value: Value, fill: Any, dim: int, low: int, high: int) -> Value:
    rows = value.shape[dim]
    first, last = max(-low, 0), rows - max(-high, 0)
    before, after = max(low, 0), max(high, 0)
    if first >= last:  # nothing is left of it
        return Spread(with_rows(value.shape, dim, rows + low + high), value.dtype, fill, ())
    value = _sliced(emitter, value, dim, first, last - first)
    if not before and not after:
        return value
    fills = [Spread(with_rows(value.shape, dim, n), value.dtype, fill, ()) for n in (before, after)]
    return joined([fills[0], emitter.movable(value), fills[1]], dim)


def _interior(x: Any, fill: Any, dim: int, stride: int) -> Any:
    """An array with `stride - 1` rows of `fill` behind each of its rows, as groups of `stride` rows."""
    shape = (*x.shape[: dim + 1], stride, *x.shape[dim + 1 :])
    lane = lax.broadcasted_iota(np.int32, shape, dim + 1)
    spread = jnp.broadcast_to(jnp.expand_dims(x, dim + 1), shape)
    return lax.select(lane == 0, spread, jnp.full(shape, fill, x.dtype)).reshape(
        with_rows(x.shape, dim, x.shape[dim] * stride)
    )


def _concatenate(call: Call) -> Value | None:
    dim = call.params["dimension"]
    values = [o for o in call.operands if o.shape[dim]]
    if not values or 0 in call.shape:
        return None
    if len(values) == 1:
        return call.emitter.movable(values[0])
    found = joined([*map(call.emitter.movable, values)], dim)
    if isinstance(found, Moved) and len(found.parts) == 2:
        (end, start) = found.parts
        is_whole = end.first == start.rows and end.first + end.rows == found.shape[dim] == end.source.shape[dim]
        found.is_rotation = end.source is start.source and start.first == 0 and is_whole
        if found.is_rotation and isinstance(end.source, Moved):  # one rotation after the other
            whole = call.emitter.array(end.source)
            parts = tuple(part._replace(source=whole) for part in found.parts)
            found = Moved(found.shape, found.dtype, dim, parts, is_rotation=True)
    return found


def _reverse(call: Call) -> Value | None:
    (value,) = call.operands
    for dim in call.params["dimensions"]:
        rows = value.shape[dim]
        if rows > 1 and (rows > MOST_ROWS or not isinstance(value, Moved)):
            return None
        value = joined([sliced(value, dim, i, 1) for i in reversed(range(rows))], dim) if rows > 1 else value
    return value


def _dynamic_slice(call: Call) -> Value | None:
    value, *starts = call.operands
    sizes = call.params["slice_sizes"]
    places = [_place(start) for start in starts]
    for dim, (place, size) in enumerate(zip(places, sizes, strict=True)):
        if place is None:
            return None
        value = _sliced(call.emitter, value, dim, min(max(place, 0), value.shape[dim] - size), size)
    return value


def _place(start: Value) -> int | None:
    """The number of a row, if it is known."""
    if isinstance(start, Known):
        return int(start.array)
    return int(start) if isinstance(start, np.ndarray | np.generic) else None


def _dynamic_update_slice(call: Call) -> Value | None:
    value, update, *starts = call.operands
    places = [place for start in starts if (place := _place(start)) is not None]
    if len(places) < len(starts) or 0 in update.shape:
        return None
    every = zip(places, value.shape, update.shape, strict=True)
    return _put(call.emitter, value, update, [min(max(place, 0), n - k) for place, n, k in every])


def _put(emitter: Emitter, value: Value, update: Value, starts: Sequence[int]) -> Value:
    """A value with `update` in the place of what begins at `starts`."""
    value, update = emitter.movable(value), emitter.movable(update)
    for dim, (start, rows, size) in enumerate(zip(starts, update.shape, value.shape, strict=True)):
        if rows == size:
            continue
        inside = _put(
            emitter, sliced(value, dim, start, rows), update, [0 if d == dim else s for d, s in enumerate(starts)]
        )
        parts = [sliced(value, dim, 0, start), inside, sliced(value, dim, start + rows, size - start - rows)]
        return joined([part for part in parts if part.shape[dim]], dim)
    return update


# ---- gathers and scatters at constant places


def _scatter(combine: Callable[[Any, Any], Any] | None, call: Call) -> Value | None:
    value, index, updates = call.operands
    numbers = call.params["dimension_numbers"]
    is_plain = not numbers.operand_batching_dims and (combine is not None or call.params["update_jaxpr"] is None)
    if not isinstance(index, Known) or not is_plain or 0 in updates.shape or 0 in value.shape:
        return None
    in_updates = iter(updates.shape[d] for d in numbers.update_window_dims)
    window = [1 if d in numbers.inserted_window_dims else next(in_updates) for d in range(len(value.shape))]
    batch = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    places = index.array.reshape(math.prod(index.array.shape[:-1]), index.array.shape[-1])
    starts = [[0] * len(window) for _ in places]
    for start, place in zip(starts, places.tolist(), strict=True):
        for d, at in zip(numbers.scatter_dims_to_operand_dims, place, strict=True):
            start[d] = at
    kept = _in_bounds(starts, window, value.shape, call.params["mode"])
    if kept is None:
        return None
    settle = call.emitter.settled
    if len(starts) == 1:
        if not kept:
            return value
        for d in sorted(batch, reverse=True):
            updates = _squeezed(call.emitter, settle(updates), d)
        return _combined(
            call, value, _expanded(call.emitter, updates, numbers.inserted_window_dims), kept[0][1], combine
        )
    if len(batch) != 1 or len(numbers.inserted_window_dims) != 1:
        return None
    (along,) = numbers.inserted_window_dims
    updates = _moved_dim(call.emitter, settle(updates), batch[0], along)
    stride = _stride([start[along] for _, start in kept])
    if len({(*start[:along], *start[along + 1 :]) for _, start in kept}) > 1:
        stride = 0
    if len(kept) == len(starts) and stride and len(kept) > 1:
        if stride == 1:
            return _combined(call, value, updates, kept[0][1], combine)
        return _put_strided(call, value, updates, kept[0][1], along, stride, combine)
    if len(kept) > MOST_ROWS:
        return None
    for i, start in kept:
        value = _combined(call, value, sliced(updates, along, i, 1), start, combine)
    return value


def _in_bounds(
    starts: Sequence[list[int]], window: Sequence[int], shape: Sequence[int], mode: Any
) -> list[tuple[int, list[int]]] | None:
    """The windows that count, with their numbers, by JAX's mode for those out of bounds; None if that is not known."""
    mode = lax.GatherScatterMode.from_any(mode)
    last = [n - k for n, k in zip(shape, window, strict=True)]
    found = []
    for i, start in enumerate(starts):
        is_inside = all(0 <= s <= most for s, most in zip(start, last, strict=True))
        if mode == lax.GatherScatterMode.CLIP:
            start = [min(max(s, 0), most) for s, most in zip(start, last, strict=True)]
        elif not is_inside and mode != lax.GatherScatterMode.FILL_OR_DROP:
            return None
        if is_inside or mode == lax.GatherScatterMode.CLIP:
            found.append((i, start))
    return found


def _combined(
    call: Call, value: Value, update: Value, starts: Sequence[int], combine: Callable[[Any, Any], Any] | None
) -> Value:
    """A value with `update` put in, or combined with what is there."""
    emitter = call.emitter
    value, update = emitter.movable(value), emitter.movable(update)
    if combine is not None:
        there = value
        for dim, (start, rows) in enumerate(zip(starts, update.shape, strict=True)):
            there = sliced(there, dim, start, rows)
        safe = 0.5 if combine is operator.mul else None
        update = elementwise(
            lambda arrays: combine(*arrays), (there, update), tuple(update.shape), value.dtype, emitter, safe
        )
        if isinstance(update, Elementwise) and not isinstance(value, Lazy):
            emitter.place(update, Frame(tuple(value.shape), tuple(starts)))  # it is computed where it is put
    return _put(emitter, value, update, starts)


def _put_strided(
    call: Call, value: Value, updates: Value, starts: Sequence[int], dim: int, stride: int,
    combine: Callable[[Any, Any], Any] | None,
) -> Value | None:  # fmt: skip
    """Updates put into, or combined with, each `stride`-th row: each stands in the group of rows that it is put into."""
    emitter, rows, size, start = call.emitter, updates.shape[dim], value.shape[dim], starts[dim]
    if size % stride or any(
        n != k for d, (n, k) in enumerate(zip(value.shape, updates.shape, strict=True)) if d != dim
    ):
        return None
    first, last = start // stride, start + (rows - 1) * stride
    place = Frame(with_rows(updates.shape, dim, size // stride), with_rows((0,) * len(starts), dim, first))
    own = emitter.place(updates, place)
    shape = (*own.shape[: dim + 1], stride, *own.shape[dim + 1 :])
    spread = jnp.broadcast_to(jnp.expand_dims(own, dim + 1), shape).reshape(value.shape)

    def put(arrays: Sequence[Any]) -> Any:
        old, new, row = arrays
        is_written = (row % stride == start % stride) & (row >= start) & (row <= last)
        return lax.select(is_written, combine(old, new) if combine else new, old)

    emitter.shifted += 1
    lanes = Iota(tuple(value.shape), np.dtype(np.int32), dim)
    return elementwise(put, (emitter.movable(value), spread, lanes), tuple(value.shape), value.dtype, emitter, 0.5)


def _gather(call: Call) -> Value | None:
    value, index = call.operands
    numbers, sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    if (
        not isinstance(index, Known)
        or numbers.operand_batching_dims
        or index.array.shape[-1] != 1
        or index.array.ndim != 2
    ):
        return None
    (dim,) = numbers.start_index_map
    is_rows = numbers.collapsed_slice_dims == (dim,) and all(
        k == n for d, (k, n) in enumerate(zip(sizes, value.shape, strict=True)) if d != dim
    )
    rows = index.array[:, 0].tolist()
    if not is_rows or not rows or min(rows) < 0 or max(rows) >= value.shape[dim]:
        return None
    batch = [d for d in range(len(call.shape)) if d not in numbers.offset_dims]
    stride, movable = _stride(rows), call.emitter.movable(value)
    if stride == 1:
        found = _sliced(call.emitter, movable, dim, rows[0], len(rows))
    elif stride:
        found = _strided(call.emitter, movable, dim, rows[0], len(rows), stride)
    elif len(rows) <= MOST_ROWS:
        found = joined([_sliced(call.emitter, movable, dim, row, 1) for row in rows], dim)
    else:
        return None
    return None if found is None else _moved_dim(call.emitter, found, dim, batch[0])


def _stride(rows: Sequence[int]) -> int:
    """The positive difference of neighbours if all are alike, else 0."""
    steps = {b - a for a, b in itertools.pairwise(rows)}
    return max(steps.pop(), 0) if len(steps) == 1 else 0


def _moved_dim(emitter: Emitter, value: Value, source: int, target: int) -> Value:
    if source == target:
        return value
    order = [d for d in range(len(value.shape)) if d != source]
    order.insert(target, source)
    return transposed(value, order, emitter.transposed)


# ---- other dimensions


def _transpose(call: Call) -> Value | None:
    value = call.emitter.settled(call.operands[0])
    if not isinstance(value, Moved | Spread):
        return None
    return transposed(value, call.params["permutation"], call.emitter.transposed)


def _broadcast(call: Call) -> Value | None:
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
            return _moved_dim(call.emitter, operand.value, operand.dim, free[0])
        return None
    return Spread(call.shape, call.dtype, operand, tuple(call.params["broadcast_dimensions"]))


def _squeeze(call: Call) -> Value | None:
    value = call.emitter.settled(call.operands[0])
    for dim in sorted((d % len(value.shape) for d in call.params["dimensions"]), reverse=True):
        value = _squeezed(call.emitter, value, dim)
    return value if isinstance(value, Lazy) else None


def _squeezed(emitter: Emitter, value: Value, dim: int) -> Value:
    """A value without a dimension of one row."""
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    if not shape:
        return lax.squeeze(emitter.array(value), (dim,))
    if isinstance(value, Moved) and value.dim != dim:
        parts = tuple(part._replace(source=_squeezed(emitter, part.source, dim)) for part in value.parts)
        return Moved(shape, value.dtype, value.dim - (value.dim > dim), parts)
    if isinstance(value, Moved):
        return Squeezed(shape, value.dtype, value, dim)
    if isinstance(value, Spread) and dim not in value.dims:
        return Spread(shape, value.dtype, value.operand, tuple(d - (d > dim) for d in value.dims))
    return lax.squeeze(emitter.array(value), (dim,))


def _expanded(emitter: Emitter, value: Value, dims: Sequence[int]) -> Value:
    """A value with further dimensions of one row."""
    for i, dim in enumerate(sorted(dims)):
        if isinstance(value, Squeezed) and i == len(dims) - 1:
            value = _moved_dim(emitter, value.value, value.dim, dim)
            continue
        if isinstance(value, Squeezed):
            value = emitter.array(value)
        shape = (*np.shape(value)[:dim], 1, *np.shape(value)[dim:])
        kept = tuple(d for d in range(len(shape)) if d != dim)
        value = Spread(shape, value.dtype, value, kept) if isinstance(value, Lazy) else lax.expand_dims(value, (dim,))
    return value


def _reshape(call: Call) -> Value | None:
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
    value = call.emitter.settled(value)
    for dim in reversed([d for d, n in enumerate(value.shape) if n == 1]):
        value = _squeezed(call.emitter, value, dim)
        if isinstance(value, Squeezed):
            return None
    return _expanded(call.emitter, value, [d for d, n in enumerate(call.shape) if n == 1])


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


def _along(axes: Callable[[Call], Sequence[int]], keeps: bool, call: Call) -> Value | None:
    """An op along some dimensions, of a value that is moved along others."""
    value = call.emitter.settled(call.operands[0])
    if len(call.operands) > 1 or not isinstance(value, Moved):
        return None
    worked = set(axes(call))

    def of(one: Value) -> Value:
        if not isinstance(one, Moved) or one.dim in worked:
            return call.bound(call.emitter.array(one))
        parts = tuple(part._replace(source=of(part.source)) for part in one.parts)
        dim = one.dim if keeps else one.dim - sum(axis < one.dim for axis in worked)
        shape = with_rows(parts[0].source.shape, dim, one.shape[one.dim])
        return Moved(shape, parts[0].source.dtype, dim, parts)

    return of(value) if value.dim not in worked else None


def _reduce(identity: Callable[[Any], Any], call: Call) -> Value | None:
    """A reduction. Along dimensions with a frame it is one of the frame, where what does not count is the identity."""
    (value,) = call.operands
    axes = tuple(call.params["axes"])
    has_infinity = not jnp.issubdtype(value.dtype, jnp.floating) or jnp.finfo(value.dtype).bits > 8
    if (
        not has_infinity
        or not isinstance(value, Moved | Elementwise)
        or not any(alignments(value, d) for d in range(len(value.shape)))
    ):
        return None
    frame = frame_of(value)
    if frame is None or frame.shape == value.shape:
        return None
    found = call.emitter.place(value, frame)
    mask = inside(value, frame, axes)
    if mask is not None:
        neutral = jnp.full(frame.shape, identity(value.dtype), value.dtype)
        found = lax.select(mask, found, neutral)
        call.emitter.shifted += 1
    found = call.bound(found)
    kept = [d for d in range(len(value.shape)) if d not in axes]
    for own, dim in enumerate(kept):
        found = sliced(found, own, frame.offset[dim], value.shape[dim])
    return found


def _iota(call: Call) -> Value | None:
    if not call.shape or 0 in call.shape or call.operands:
        return None
    return Iota(call.shape, call.dtype, call.params["dimension"])


def _least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else -jnp.inf


def _most(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.inf


def _axes(call: Call) -> Sequence[int]:
    return call.params["axes"]


def _axis(call: Call) -> Sequence[int]:
    return (call.params["axis"],)


def _sort_dim(call: Call) -> Sequence[int]:
    return (call.params["dimension"],)


_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow",
    "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
    "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "sub", "tan", "tanh", "xor",
)  # fmt: skip

_FINITE = frozenset(
    {"add", "add_any", "sub", "neg", "abs", "max", "min", "sign", "clamp", "select_n", "convert_element_type", "copy", "real",
     "imag", "conj", "complex", "floor", "ceil", "round", "reduce_precision"}
)  # fmt: skip
"""Their derivatives are finite for all operands, and so are those of `mul` with a number."""

ELEMENTWISE: Rule = _elementwise

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, ELEMENTWISE),
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "rev": _reverse,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": functools.partial(_scatter, None),
    "scatter-add": functools.partial(_scatter, operator.add),
    "scatter-sub": functools.partial(_scatter, operator.sub),
    "scatter-mul": functools.partial(_scatter, operator.mul),
    "scatter-min": functools.partial(_scatter, lax.min),
    "scatter-max": functools.partial(_scatter, lax.max),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "iota": _iota,
    "reduce_sum": functools.partial(_reduce, lambda dtype: 0),
    "reduce_prod": functools.partial(_reduce, lambda dtype: 1),
    "reduce_max": functools.partial(_reduce, _least),
    "reduce_min": functools.partial(_reduce, _most),
    "reduce_and": functools.partial(_reduce, lambda dtype: True),
    "reduce_or": functools.partial(_reduce, lambda dtype: False),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), functools.partial(_along, _axis, True)),
    "sort": functools.partial(_along, _sort_dim, True),
    **dict.fromkeys(("argmax", "argmin"), functools.partial(_along, _axes, False)),
}
"""By primitive."""

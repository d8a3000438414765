"""Rules of gathers and scatters at places that are known."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.movement.frames import Frame
from shardfn.movement.mapped import transposed
from shardfn.movement.rules.call import MOST_ROWS, Call
from shardfn.movement.rules.composed import combined, expanded, moved_dim, on_elements, rows_of, squeezed
from shardfn.movement.rules.rows import put, strided_rows_of
from shardfn.movement.values import Elementwise, Iota, Known, Lazy, Moved, Op, Spread, Value, joined, sliced


def gather_rule(call: Call) -> Value | None:
    """Rows at places that are known: a slice, a strided slice, few rows, one window, or the elements of a grid."""
    value, index = call.operands
    numbers, sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    if isinstance(index, Known) and index.array.ndim == 1:
        return _window(call, value, index.array.tolist())
    if not isinstance(index, Known) or index.array.shape[-1] != 1 or index.array.ndim != 2:
        return _of_grid(call, value, index)
    if numbers.operand_batching_dims:
        return None
    (dim,) = numbers.start_index_map
    is_rows = numbers.collapsed_slice_dims == (dim,) and all(
        k == n for d, (k, n) in enumerate(zip(sizes, value.shape, strict=True)) if d != dim
    )
    rows = index.array[:, 0].tolist()
    if not is_rows or not rows or min(rows) < 0 or max(rows) >= value.shape[dim]:
        return None
    batch = [d for d in range(len(call.shape)) if d not in numbers.offset_dims]
    stride, found = _stride(rows), None
    if stride == 1:
        found = sliced(value, dim, rows[0], len(rows))
    elif stride:
        found = strided_rows_of(call.emitter, value, dim, rows[0], len(rows), stride)
    if found is None and len(rows) <= MOST_ROWS:
        found = joined([rows_of(call.emitter, value, dim, row, 1) for row in rows], dim)
    return None if found is None else moved_dim(call.emitter, found, dim, batch[0])


def _window(call: Call, value: Value, place: Sequence[int]) -> Value | None:
    """One window at a place that is known."""
    numbers, sizes, start = call.params["dimension_numbers"], call.params["slice_sizes"], [0] * len(value.shape)
    for d, at in zip(numbers.start_index_map, place, strict=True):
        start[d] = at
    if not (kept := _in_bounds([start], sizes, value.shape, call.params["mode"])):
        return None
    found = value
    for d, (first, rows) in enumerate(zip(kept[0][1], sizes, strict=True)):
        found = rows_of(call.emitter, found, d, first, rows)
    for d in sorted(numbers.collapsed_slice_dims, reverse=True):
        found = squeezed(call.emitter, found, d)
    return found


def _stride(rows: Sequence[int]) -> int:
    """The positive difference of neighbours if all are alike, else 0."""
    steps = {b - a for a, b in itertools.pairwise(rows)}
    return max(steps.pop(), 0) if len(steps) == 1 else 0


def scatter_rule(combine: Callable[[Any, Any], Any] | None, call: Call) -> Value | None:
    """An update at places that are known; `combine` makes a new element of the one that is there and an update."""
    value, index, updates = call.operands
    numbers = call.params["dimension_numbers"]
    is_plain = not numbers.operand_batching_dims and (combine is not None or call.params["update_jaxpr"] is None)
    if not is_plain or 0 in updates.shape or 0 in value.shape:
        return None
    batch = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    if not isinstance(index, Known):
        return _put_grid(call, value, updates, index, batch, combine)
    in_updates = iter(updates.shape[d] for d in numbers.update_window_dims)
    window = [1 if d in numbers.inserted_window_dims else next(in_updates) for d in range(len(value.shape))]
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
            updates = squeezed(call.emitter, settle(updates), d)
        return _updated(call, value, expanded(call.emitter, updates, numbers.inserted_window_dims), kept[0][1], combine)
    if len(batch) != 1 or len(numbers.inserted_window_dims) != 1:
        return _put_grid(call, value, updates, index, batch, combine)
    (along,) = numbers.inserted_window_dims
    updates = moved_dim(call.emitter, settle(updates), batch[0], along)
    stride = _stride([start[along] for _, start in kept])
    if len({(*start[:along], *start[along + 1 :]) for _, start in kept}) > 1:
        stride = 0
    if len(kept) == len(starts) and stride and len(kept) > 1:
        if stride == 1:
            return _updated(call, value, updates, kept[0][1], combine)
        rows = {along: range(kept[0][1][along], kept[-1][1][along] + 1, stride)}
        if (found := _put_strided(call, value, updates, rows, combine)) is not None:
            return found
    if len(kept) > MOST_ROWS:
        return None
    for i, start in kept:
        value = _updated(call, value, rows_of(call.emitter, updates, along, i, 1), start, combine)
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


def _updated(
    call: Call, value: Value, update: Value, starts: Sequence[int], combine: Callable[[Any, Any], Any] | None
) -> Value:
    """A value with `update` put in, or combined with what is there."""
    emitter = call.emitter
    if combine is not None:
        there = value
        for dim, (start, rows) in enumerate(zip(starts, update.shape, strict=True)):
            there = sliced(there, dim, start, rows)
        update = combined(combine, (there, update), value.dtype, emitter)
        if isinstance(update, Elementwise) and not isinstance(value, Lazy):
            emitter.place(update, Frame(tuple(value.shape), tuple(starts)))  # it is computed where it is put
    return put(emitter, value, update, starts)


class _Grid(NamedTuple):
    """The elements where strided rows of several dimensions meet: by dimension, the rows, and the axis of the index that counts
    them."""

    rows: Mapping[int, range]
    axes: Mapping[int, int]


def _grid(index: Value, along: Sequence[int], shape: Sequence[int]) -> _Grid | None:
    """The grid that an index into an array of a shape lists; None if it is none."""
    rows, axes = dict[int, range](), dict[int, int]()
    columns = _columns(index)
    if columns is None or len(along) != len(index.shape) - 1:
        return None
    for dim, own in zip(along, columns, strict=True):
        own = own[tuple(slice(None) if step else slice(1) for step in own.strides)]  # of what is repeated, once
        varies = [t for t in range(own.ndim) if (own != own.take([0], t)).any()]
        axis = varies[0] if varies else next((t for t in range(own.ndim) if index.shape[t] == 1), -1)
        places = own[tuple(slice(None) if t == axis else 0 for t in range(own.ndim))].tolist()
        stride = _stride(places) if len(places) > 1 else 1
        if len(varies) > 1 or axis < 0 or not stride or places[0] < 0 or places[-1] >= shape[dim]:
            return None
        rows[dim], axes[dim] = range(places[0], places[-1] + 1, stride), axis
    return _Grid(rows, axes) if len({*axes.values()}) == len(axes) else None


def _columns(index: Value) -> list[np.ndarray] | None:
    """The numbers of rows that an index lists, an array for each dimension that it is an index into; None if they are not known.
    What is repeated is so without memory."""
    if isinstance(index, Moved) and index.dim == len(index.shape) - 1:
        parts = [(_columns(part.source), part) for part in index.parts]
        known = [own[part.first : part.first + part.rows] for own, part in parts if own is not None]
        return [column for own in known for column in own] if len(known) == len(parts) else None
    if isinstance(index, Spread) and isinstance(index.operand, Known):
        sizes = [index.operand.shape[index.dims.index(d)] if d in index.dims else 1 for d in range(len(index.shape))]
        array = np.broadcast_to(index.operand.array.reshape(sizes), index.shape)
    elif isinstance(index, Known):
        array = index.array
    else:
        return None
    return [array[..., j] for j in range(array.shape[-1])]


def _of_grid(call: Call, value: Value, index: Value) -> Value | None:
    """The elements of a grid."""
    numbers, sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    along, count = numbers.start_index_map, len(value.shape)
    is_whole = all(sizes[d] == (1 if d in along else value.shape[d]) for d in range(count))
    grid = None if numbers.operand_batching_dims else _grid(index, along, value.shape)
    if grid is None or not is_whole or {*numbers.collapsed_slice_dims} != {*along}:
        return None
    found: Value | None = value
    for dim, rows in grid.rows.items():
        found = strided_rows_of(call.emitter, found, dim, rows.start, len(rows), rows.step)
        if found is None:
            return None
    batch = [d for d in range(count) if d not in numbers.offset_dims]
    order = _places(grid, batch, numbers.offset_dims, count)
    return found if order == [*range(count)] else transposed(found, np.argsort(order).tolist(), call.emitter.transposed)


def _places(grid: _Grid, batch: Sequence[int], window: Sequence[int], count: int) -> list[int]:
    """Which dimension of what an index lists each dimension of the array is."""
    windows = iter(window)
    return [batch[grid.axes[d]] if d in grid.axes else next(windows) for d in range(count)]


def _put_grid(
    call: Call, value: Value, updates: Value, index: Value, batch: Sequence[int],
    combine: Callable[[Any, Any], Any] | None,
) -> Value | None:  # fmt: skip
    """Updates put into, or combined with, the elements of a grid."""
    numbers, count = call.params["dimension_numbers"], len(value.shape)
    along = numbers.scatter_dims_to_operand_dims
    grid = _grid(index, along, value.shape) if {*along} == {*numbers.inserted_window_dims} else None
    if grid is None or _places(grid, batch, numbers.update_window_dims, count) != [*range(count)]:
        return None
    return _put_strided(call, value, call.emitter.settled(updates), grid.rows, combine)


def _put_strided(
    call: Call, value: Value, updates: Value, rows: Mapping[int, range], combine: Callable[[Any, Any], Any] | None
) -> Value | None:
    """Updates put into, or combined with, strided rows of some dimensions: each stands in the group of rows that it is put
    into."""
    emitter, shape = call.emitter, tuple(value.shape)
    sizes = [len(rows[d]) if d in rows else n for d, n in enumerate(shape)]
    if list(updates.shape) != sizes or any(shape[d] % own.step for d, own in rows.items()):
        return None
    steps = [rows[d].step if d in rows else 1 for d in range(len(shape))]
    first = tuple(rows[d].start // rows[d].step if d in rows else 0 for d in range(len(shape)))
    own = emitter.place(updates, Frame(tuple(n // step for n, step in zip(shape, steps, strict=True)), first))
    for dim in (d for d in rows if steps[d] > 1):
        own = emitter.repeated(own, dim, steps[dim])

    def put(arrays: Sequence[Any]) -> Any:
        old, new, *positions = arrays
        masks = [
            (at % r.step == r.start % r.step) & (at >= r.start) & (at < r.stop)
            for at, r in zip(positions, rows.values(), strict=True)
        ]
        mask = functools.reduce(operator.and_, masks)
        # A gradient of zero times what is not read would be no zero if that were infinite.
        if combine is not None and combine is operator.mul:
            near = [lax.select(mask, x, jnp.ones_like(x)) for x in (old, new)]
            return lax.select(mask, combine(*near), old)
        return lax.select(mask, combine(old, new) if combine else new, old)

    emitter.shifted += 1
    lanes = [Iota(shape, np.dtype(np.int32), dim) for dim in rows]
    return on_elements(Op(put, 0.5), (value, own, *lanes), shape, value.dtype, emitter)

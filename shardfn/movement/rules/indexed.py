"""Rules of gathers and scatters at places that are known."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.movement.frames import Frame
from shardfn.movement.rules.call import MOST_ROWS, Call
from shardfn.movement.rules.composed import elementwise, expanded, moved_dim, squeezed
from shardfn.movement.rules.rows import put, rows_of, strided_rows_of
from shardfn.movement.values import Elementwise, Iota, Known, Lazy, Value, joined, sliced, with_rows


def gather_rule(call: Call) -> Value | None:
    """Rows at places that are known: a slice, a strided slice, few rows, or one window."""
    value, index = call.operands
    numbers, sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    if isinstance(index, Known) and index.array.ndim == 1:
        return _window(call, value, index.array.tolist())
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
    stride, movable, found = _stride(rows), value, None
    if stride == 1:
        found = rows_of(call.emitter, movable, dim, rows[0], len(rows))
    elif stride:
        found = strided_rows_of(call.emitter, movable, dim, rows[0], len(rows), stride)
    if found is None and len(rows) <= MOST_ROWS:
        found = joined([rows_of(call.emitter, movable, dim, row, 1) for row in rows], dim)
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
            updates = squeezed(call.emitter, settle(updates), d)
        return _combined(
            call, value, expanded(call.emitter, updates, numbers.inserted_window_dims), kept[0][1], combine
        )
    if len(batch) != 1 or len(numbers.inserted_window_dims) != 1:
        return _put_grid(call, value, updates, index.array, batch, combine)
    (along,) = numbers.inserted_window_dims
    updates = moved_dim(call.emitter, settle(updates), batch[0], along)
    stride = _stride([start[along] for _, start in kept])
    if len({(*start[:along], *start[along + 1 :]) for _, start in kept}) > 1:
        stride = 0
    if len(kept) == len(starts) and stride and len(kept) > 1:
        if stride == 1:
            return _combined(call, value, updates, kept[0][1], combine)
        rows = {along: range(kept[0][1][along], kept[-1][1][along] + 1, stride)}
        if (found := _put_strided(call, value, updates, rows, combine)) is not None:
            return found
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
    return put(emitter, value, update, starts)


def _put_grid(
    call: Call, value: Value, updates: Value, index: np.ndarray, batch: Sequence[int],
    combine: Callable[[Any, Any], Any] | None,
) -> Value | None:  # fmt: skip
    """Updates put into, or combined with, the elements where strided rows of several dimensions meet."""
    numbers = call.params["dimension_numbers"]
    along, rows, order = numbers.scatter_dims_to_operand_dims, dict[int, range](), dict[int, int]()
    if set(along) != set(numbers.inserted_window_dims) or len(along) != len(batch) or len(batch) != index.ndim - 1:
        return None
    for j, dim in enumerate(along):
        own = index[..., j]
        varies = [t for t in range(own.ndim) if (own != own.take([0], t)).any()]
        turn = varies[0] if varies else next((t for t in range(own.ndim) if own.shape[t] == 1), -1)
        places = own[tuple(slice(None) if t == turn else 0 for t in range(own.ndim))].tolist()
        stride = _stride(places) if len(places) > 1 else 1
        if len(varies) > 1 or turn < 0 or not stride or places[0] < 0 or places[-1] >= value.shape[dim]:
            return None
        rows[dim], order[dim] = range(places[0], places[-1] + 1, stride), batch[turn]
    windows = iter(numbers.update_window_dims)
    ordered = [order[d] if d in order else next(windows) for d in range(len(value.shape))]
    if ordered != [*range(len(value.shape))]:
        return None
    return _put_strided(call, value, call.emitter.settled(updates), rows, combine)


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
        groups = (*own.shape[: dim + 1], steps[dim], *own.shape[dim + 1 :])
        spread = jnp.broadcast_to(jnp.expand_dims(own, dim + 1), groups)
        own = spread.reshape(with_rows(own.shape, dim, own.shape[dim] * steps[dim]))

    def put(arrays: Sequence[Any]) -> Any:
        old, new, *positions = arrays
        masks = [
            (at % r.step == r.start % r.step) & (at >= r.start) & (at < r.stop)
            for at, r in zip(positions, rows.values(), strict=True)
        ]
        return lax.select(functools.reduce(operator.and_, masks), combine(old, new) if combine else new, old)

    emitter.shifted += 1
    lanes = [Iota(shape, np.dtype(np.int32), dim) for dim in rows]
    return elementwise(put, (value, own, *lanes), shape, value.dtype, emitter, 0.5)

"""Frames: where values are computed.

A frame is the shape of the array in which a value is computed. Row i of the value is row i + offset of the frame; the other rows
of the frame hold anything. Where the frame is the shape of an argument, all its shards are even.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.movement.values import Alignment, Known, Part, Value, alignments, has_few, scalar_of, with_rows


class Frame(NamedTuple):
    """Where a value is computed: the shape, and the place of its first element."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def frame_of(value: Value, with_few: bool = False) -> Frame | None:
    """Where a value can be computed by shifts of arrays of one size along each dimension, most of which it fills; None if
    nowhere. `with_few`: along dimensions where it has few rows of an array these rows are taken first."""
    shape, offsets, is_shifted = [], [], False
    for dim, rows in enumerate(value.shape):
        found = alignments(value, dim)
        if not found or (with_few and has_few(value, dim)):
            shape.append(rows)
            offsets.append(0)
            continue
        is_shifted = True
        weights = collections.Counter[int]()
        for one in found:
            weights[one.size] += one.weight
        is_in_place = any(one.size == rows and one.offset == 0 for one in found)
        size = rows if is_in_place else max(weights, key=lambda n: (weights[n], n))
        if size < rows or 2 * rows <= size or (not is_in_place and 2 * weights[size] <= weights.total()):
            return None
        offset = 0 if is_in_place else min(max(_middle([one for one in found if one.size == size]), 0), size - rows)
        near = sum(
            one.weight for one in found if one.size == size and _distance(one.offset - offset, size) < one.weight
        )
        if 2 * near <= weights.total() and not is_in_place:
            return None
        shape.append(size)
        offsets.append(offset)
    return Frame(tuple(shape), tuple(offsets)) if is_shifted else None


def _distance(rows: int, size: int) -> int:
    """How far a shift around the end moves."""
    return min(rows % size, -rows % size)


def _middle(found: Sequence[Alignment]) -> int:
    """The offset that needs the fewest shifts: the median by weight."""
    ordered = sorted(found, key=lambda one: one.offset)
    left = sum(one.weight for one in ordered)
    for one in ordered:
        left -= 2 * one.weight
        if left <= 0:
            return one.offset
    return 0


def frame_of_source(frame: Frame, part: Part, dim: int, start: int) -> Frame | None:
    """The frame of a part's source in which its rows stand where a frame needs them, or as near as they can; None if the
    source has no frame of this size along the dimension."""
    source, size = part.source, frame.shape[dim]
    if isinstance(source, Known) or scalar_of(source) is not None:
        return None
    rows = source.shape[dim]
    if rows == size:
        return Frame(frame.shape, with_rows(frame.offset, dim, 0))
    if rows > size or not any(one.size == size for one in alignments(source, dim)):
        return None
    wanted = frame.offset[dim] + start - part.first
    return Frame(frame.shape, with_rows(frame.offset, dim, min(max(wanted, 0), size - rows)))


def is_near(part: Part, source: Frame, dim: int, shift: int) -> bool:
    """Whether a part is moved by few rows, as many as twice its own."""
    size, home = source.shape[dim], source.offset[dim]
    moved = [home - one.offset for one in alignments(part.source, dim) if one.size == size]
    return all(_distance(far, size) <= 2 * part.rows for far in (*moved, shift))


def frame_of_whole(frame: Frame, part: Part, dim: int) -> Frame:
    """The frame of a part's source in its own size along the dimension."""
    return Frame(with_rows(frame.shape, dim, part.source.shape[dim]), with_rows(frame.offset, dim, 0))


def inside(value: Value, frame: Frame) -> Any:
    """Where a frame holds a value; None if everywhere."""
    mask = None
    for dim in range(len(frame.shape)):
        first, rows, size = frame.offset[dim], value.shape[dim], frame.shape[dim]
        if rows != size:
            position = lax.broadcasted_iota(np.int32, with_rows((1,) * len(frame.shape), dim, size), dim)
            own = (position >= first) & (position < first + rows)
            mask = own if mask is None else mask & own
    return None if mask is None else jnp.broadcast_to(mask, frame.shape)

"""Halo exchange: what shards send each other for an op with a window or an offset along a sharded dimension."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from shardfn.ir.model import WindowDim


class HaloPermute(NamedTuple):
    """One collective-permute: each shard sends its rows `start` to `end`; a receiver uses what it needs."""

    start: int
    end: int


@functools.lru_cache(1 << 12)
def halo_permutes(size: int, out_size: int, shards: int, window: WindowDim) -> tuple[HaloPermute, ...] | None:
    """The permutes that bring every shard of the result the rows it reads; None where XLA gathers the operand instead.

    Neighbours at each distance send as many rows as any of them needs. Where rows come from far away, this would send
    more than twice what is read. Each shard then sends to its readers one after the other.

    Args:
      size: size of the operand's dimension.
      out_size: size of the result's dimension, or the kernel's.
      shards: number of shards of both.
      window: what is read of the operand.

    >>> halo_permutes(64, 64, 8, WindowDim(0, 0, 0, low=-1, extent=3))
    (HaloPermute(start=7, end=8), HaloPermute(start=0, end=1))
    >>> halo_permutes(192, 64, 8, WindowDim(0, 0, 0, low=128))  # the last third
    (HaloPermute(start=0, end=16), HaloPermute(start=8, end=24), HaloPermute(start=16, end=24))
    >>> halo_permutes(1, 2, 4, WindowDim(0, 0, 0, low=-2))  # padding alone
    ()
    """
    own, out = -(-size // shards), -(-out_size // shards)
    if window.low + (out_size - 1) * window.stride + window.extent <= 0:
        return ()
    if not own or not out:
        return ()  # of nothing, nothing is sent: a pad of an empty slice, as in the gradient of an associative scan
    first, used = window.low, shards  # first element that is read; shards that take part
    if out_size < shards and window.spacing == 1:
        own, first, used = _used_shards(own, size, out_size, shards, window)
        if used == 1:
            return ()
    width = (out - 1) * window.stride + window.extent
    starts = [i * out * window.stride + first for i in range(used)]
    reads = [(-(-start // window.spacing), -(-(start + width) // window.spacing)) for start in starts]
    before = [i * own - start for i, (start, _) in enumerate(reads)]
    after = [end - (i + 1) * own for i, (_, end) in enumerate(reads)]
    most = max(end - start for start, end in reads)
    if max(*before, *after) > 2 * most and window.spacing == 1:
        if 2 * most >= used * own:
            return None
        return _in_turn(own, size if used == shards else used * own, reads)
    return _from_neighbours(own, before, after)


def rows_read(window: WindowDim, out_size: int, shards: int) -> int:
    """How many rows of the operand a shard of the result reads along a dimension.

    >>> rows_read(WindowDim(0, 0, 0, low=-1, extent=3), 64, 8)
    10
    """
    return (positions_read(window, out_size, shards) - 1) // window.spacing + 1


def positions_read(window: WindowDim, out_size: int, shards: int) -> int:
    """The same with the holes between the rows."""
    return (-(-out_size // shards) - 1) * window.stride + window.extent


def _used_shards(own: int, size: int, out_size: int, shards: int, window: WindowDim) -> tuple[int, int, int]:
    """The shards that hold elements which are read or results, where not every shard has a result.

    Shards after both are left out, and so are those between the results and the first element that is read. If only one
    shard is read, its other elements are left out too.

    Returns:
      The size of a shard, the first element that is read, and the number of shards, of what remains.
    """
    first = window.low
    read = (out_size - 1) * window.stride + window.extent + window.unread
    used = shards
    if -(-(first + read) // own) < shards:
        used = max(-(-(first + read) // own), out_size)
        if used > 1 and first + read < min(own, size):
            own = first + read
    between = first // own - out_size
    if between > 0:
        used, first = used - between, first - between * own
        skipped = first - own * (used - 1)
        if skipped > 0:
            own, first = own - skipped, first - skipped * used
            if read < own:
                first -= (own - read) * (used - 1)
                own = read
    return own, first, used


def rotation_permutes(shift: int, own: int) -> tuple[HaloPermute, ...]:
    """The permutes of a rotation: the rows of each shard of `own` rows that other shards receive, from one or two shards.

    >>> rotation_permutes(5, 4)
    (HaloPermute(start=0, end=3), HaloPermute(start=3, end=4))
    >>> rotation_permutes(-1, 4)
    (HaloPermute(start=0, end=1),)
    """
    shards, rows = divmod(abs(shift), own)
    at = own - rows if shift > 0 else rows
    ends = HaloPermute(0, at), HaloPermute(at, own)
    near, far = ends if shift > 0 else ends[::-1]
    return tuple(part for part in ((near,) if shards else ()) + (far,) if part.start < part.end)


def _from_neighbours(own: int, before: Sequence[int], after: Sequence[int]) -> tuple[HaloPermute, ...] | None:
    left, right = max(before[1:], default=0), max(after[:-1], default=0)
    if left + right + own >= own * len(before) and max(left, right) > own:
        return None
    low, high = -max(before), own + max(after)  # of what any device reads, from the start of its own shard
    if low >= high:
        return None
    found, farthest = [], own * (len(before) - 1)  # behind the last shard is padding
    for distance in range(0, min(left, farthest), own):
        skipped = max(-distance - high, 0)
        if -distance - own < high:
            found.append(HaloPermute(own - min(left - distance, own), own - skipped))
    for distance in range(0, min(right, farthest), own):
        skipped = max(low - own - distance, 0)
        if distance + own > low - own and skipped < own:
            found.append(HaloPermute(skipped, min(right - distance, own)))
    return tuple(fetch for fetch in found if fetch.end > fetch.start)


def _in_turn(own: int, size: int, reads: Sequence[tuple[int, int]]) -> tuple[HaloPermute, ...]:
    """Each shard sends to its readers one after the other, in the order in which they need it. No reader receives
    twice in a turn, and rows at one end of a shard do not travel with rows at the other.
    """
    wanted: list[list[tuple[int, int, HaloPermute]]] = [
        [] for _ in reads
    ]  # of each part: position at the reader, reader, rows
    for reader, (start, end) in enumerate(reads):
        at = max(start, 0)
        while at < min(end, size):
            source, row = divmod(at, own)
            rows = min(own - row, end - at)
            if source != reader:
                wanted[source].append((at - start, reader, HaloPermute(row, row + rows)))
            at += rows
    queues = [sorted(queue, key=lambda wish: wish[0]) for queue in wanted]
    found = []
    while any(queues):
        low, high = own, 0
        receivers: set[int] = set()
        for queue in queues:
            if not queue:
                continue
            _, reader, (start, end) = queue[0]
            if receivers:
                ends = (low > end and high == own and start == 0) or (high < start and low == 0 and end == own)
                if reader in receivers or ends:
                    continue
            receivers.add(reader)
            low, high = min(low, start), max(high, end)
            del queue[0]
        found.append(HaloPermute(low, high))
    return tuple(found)

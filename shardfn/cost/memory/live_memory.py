"""Memory of one device: arguments and results exactly, temporaries from live ranges.

Donated arguments are the buffers of results. Temporaries may use a result's buffer before the result is made.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from shardfn.cost.backends.tpu_memory import (
    gathers_over_arguments,
    outside_fast_memory,
    table_copies,
    tiled_local_bytes,
)
from shardfn.cost.devices.chips import Chip
from shardfn.cost.memory.live_ranges import LiveBuffer, live_buffers
from shardfn.cost.schedule import Schedule, lower_for_backend, schedule_ops
from shardfn.ir.model import PartitionedProgram


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    arguments: int
    results: int
    temporaries: int
    """The most bytes that are live at once in addition to arguments and results."""
    donated: int = 0
    """Bytes of the results that are in the buffers of donated arguments."""
    constants: int = 0
    """The arrays that the function closes over."""

    @property
    def peak(self) -> int:
        """Bytes of arguments, results, closed-over arrays and temporaries at their peak; donated buffers count once."""
        return self.arguments + self.results + self.constants + self.temporaries - self.donated


class ReusableBuffer(NamedTuple):
    """A result's buffer that temporaries may use: bytes, and the closed intervals in which it is taken."""

    bytes: int
    busy: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class LiveMemory:
    """The buffers of a program on one device, and those that are live at its memory peak."""

    partitioned: PartitionedProgram
    """The program as XLA runs it."""
    arguments: list[tuple[int, int]]
    """Arguments and their bytes, held throughout."""
    results: list[tuple[int, int]]
    """The same of results, without those in the buffers of donated arguments."""
    temporaries: list[LiveBuffer]
    """Buffers that do not reuse those of results."""
    peak_tick: int
    """When the most temporaries are live."""
    estimate: MemoryEstimate

    @property
    def at_peak(self) -> list[int]:
        """The temporaries, by position, that are live at the peak."""
        return [i for i, buffer in enumerate(self.temporaries) if buffer.start <= self.peak_tick <= buffer.end]

    @property
    def last_tick(self) -> int:
        """The tick after the last op: there are two for each op."""
        return 2 * len(self.partitioned.graph.ops)

    @property
    def held_at_peak(self) -> list[tuple[tuple[int, ...], int]]:
        """The buffers that make up `MemoryEstimate.peak`, without constants: their values (none for a copy that XLA makes) and
        bytes."""
        temporaries = [(self.temporaries[i].values, self.temporaries[i].bytes) for i in self.at_peak]
        return [*(((v,), size) for v, size in (*self.arguments, *self.results)), *temporaries]


def live_memory(partitioned: PartitionedProgram, donated: Collection[int] = (), chip: Chip | None = None) -> LiveMemory:
    """The memory of one call on one device.

    Args:
      partitioned: the program with its shardings.
      donated: positions of arguments whose buffers results of equal size take over.
      chip: what it runs on; what stays in its fast memory (`Chip.fast_bytes`) takes no other memory.
    """
    return memory_of_schedule(schedule_ops(lower_for_backend(partitioned, chip)), donated, chip)


def memory_of_schedule(schedule: Schedule, donated: Collection[int] = (), chip: Chip | None = None) -> LiveMemory:
    """`live_memory` of a scheduled program."""
    partitioned, graph = schedule.partitioned, schedule.partitioned.graph
    buffers, result_buffers = live_buffers(schedule)
    size = (
        functools.partial(tiled_local_bytes, partitioned) if partitioned.platform == "tpu" else partitioned.local_bytes
    )
    arguments = [size(v) for v in graph.inputs]
    buffer_of = {v: buffer for buffer in result_buffers for v in buffer.values}
    free = {id(buffer): buffer for buffer in result_buffers}
    pairs: list[tuple[int, LiveBuffer]] = []
    taken: list[tuple[int, int]] = []
    given: dict[int, collections.deque[int]] = {}
    for i in sorted(donated):
        given.setdefault(arguments[i], collections.deque()).append(graph.inputs[i])
    for v in graph.outputs:  # each takes the first of its size, as XLA pairs them
        buffer = buffer_of.get(v)
        if buffer is not None and id(buffer) in free and given.get(full := max(size(v), buffer.bytes)):
            taken.append((v, full))
            pairs.append((given[full].popleft(), free.pop(id(buffer))))
    reusable = [ReusableBuffer(buffer.bytes, [(buffer.start, buffer.end)]) for buffer in free.values()]
    if partitioned.platform == "cpu" and pairs:
        copies, vacated = _saved(schedule, pairs)
        buffers, reusable = [*buffers, *copies], [*reusable, *vacated]
    if partitioned.platform == "tpu":
        copies, vacated = _gathered(schedule, pairs)
        buffers, reusable = [*buffers, *table_copies(schedule), *copies], [*reusable, *vacated]
    left = outside_fast_memory(schedule, buffers, donated, chip) if chip and chip.fast_bytes else buffers
    temporaries = _outside(left, reusable)
    most, tick = _most(temporaries)
    results = [size(v) for v in graph.outputs]
    saved = sum(size for _, size in taken)
    estimate = MemoryEstimate(sum(arguments), sum(results), most, saved, partitioned.constant_bytes)
    size_of = dict(zip(graph.outputs, results, strict=True))
    apart = collections.Counter(graph.outputs) - collections.Counter(v for v, _ in taken)
    own = [(v, size_of[v]) for v in apart.elements()]
    return LiveMemory(partitioned, list(zip(graph.inputs, arguments, strict=True)), own, temporaries, tick, estimate)


def _gathered(
    schedule: Schedule, pairs: Sequence[tuple[int, LiveBuffer]]
) -> tuple[list[LiveBuffer], list[ReusableBuffer]]:
    """Copies of the arguments of `gathers_over_arguments`, and the buffers of the gathered arrays. Also the arguments' own
    buffers, which are free from the first tick to the last."""
    copies, vacated = [], []
    for v, buffer in gathers_over_arguments(schedule, pairs):
        last = max((i for i, reads in enumerate(schedule.fusion.reads) if v in reads), default=0)
        copies += [LiveBuffer((), 0, 2 * last, buffer.bytes), buffer]
        vacated.append(ReusableBuffer(buffer.bytes, [(0, 0), (buffer.end, buffer.end)]))
    return copies, vacated


def _saved(
    schedule: Schedule, pairs: Sequence[tuple[int, LiveBuffer]]
) -> tuple[list[LiveBuffer], list[ReusableBuffer]]:
    """Copies of donated arguments, and the arguments' own buffers, which are free until the results in them are computed.

    XLA copies an argument at the start if an op reads it that need not run before the result in its buffer is computed. It
    decides so before it orders the ops.
    """
    graph, fusion = schedule.partitioned.graph, schedule.fusion
    inside = {i: last for last, first in schedule.loops.items() for i in range(first, last)}
    first_of = {i: first for i, (first, _) in schedule.together.items()}
    readers: dict[int, list[int]] = {v: [] for v, _ in pairs}
    maker: dict[int, int] = {}
    needs: dict[int, int] = {}  # of each op, what runs before it in any order, a bit for each
    for i, (op, reads) in enumerate(zip(graph.ops, fusion.reads, strict=True)):
        if fusion.inside[i] is None:
            continue
        node = inside.get(i, first_of.get(i, i))
        before = needs.get(node, 1 << node)
        for v in reads:
            if v in maker:
                before |= needs[maker[v]]
            if v in readers:
                readers[v].append(i)
        needs[node] = before
        maker.update(dict.fromkeys(op.outputs, node))
    copies, vacated = [], []
    for v, buffer in pairs:
        made = next((maker[w] for w in buffer.values if w in maker), None)
        if made is None or not readers[v]:
            continue
        if not all(needs[made] >> inside.get(i, first_of.get(i, i)) & 1 for i in readers[v]):
            copies.append(LiveBuffer((), 0, 2 * max(readers[v]), buffer.bytes))
            vacated.append(ReusableBuffer(buffer.bytes, [(0, 0), (buffer.start, buffer.end)]))
    return copies, vacated


_TRIED = 128
"""Buffers of results that are tried for one temporary."""


def _outside(buffers: Iterable[LiveBuffer], reusable: Iterable[ReusableBuffer]) -> list[LiveBuffer]:
    """The buffers that do not fit into those of results while these are not in use. The largest are assigned first, as in XLA."""
    reusable = sorted(reusable, key=lambda other: other.bytes)
    sizes = [other.bytes for other in reusable]
    left = []
    for buffer in sorted(buffers, key=lambda p: -p.bytes):
        first = bisect.bisect_left(sizes, buffer.bytes)
        end = buffer.end if buffer.sooner is None else buffer.sooner
        for other in reusable[first : first + _TRIED]:
            if all(end < a or b < buffer.start for a, b in other.busy):
                other.busy.append((buffer.start, end))
                break
        else:
            left.append(buffer)
    return left


def _most(buffers: Iterable[LiveBuffer]) -> tuple[int, int]:
    """The most bytes that are alive at once, and a tick at which they are."""
    change: dict[int, int] = {}
    for buffer in buffers:
        change[buffer.start] = change.get(buffer.start, 0) + buffer.bytes
        change[buffer.end + 1] = change.get(buffer.end + 1, 0) - buffer.bytes
    alive = most = at = 0
    for tick in sorted(change):
        alive += change[tick]
        if alive > most:
            most, at = alive, tick
    return most, at

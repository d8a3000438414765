"""Memory of one device: arguments and results exactly, temporaries from live ranges.

Donated arguments are the buffers of results. Temporaries may use a result's buffer before the result is made.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Collection, Iterable

from shardfn.cost.backends.tpu_memory import outside_fast_memory
from shardfn.cost.devices.chips import Chip
from shardfn.cost.memory.live_ranges import LiveBuffer, ReusableBuffer
from shardfn.cost.memory.platforms import live_buffers, memory_rules
from shardfn.cost.schedule import Schedule, lower_for_backend, schedule_ops
from shardfn.ir.partitioned import PartitionedProgram


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
    rules = memory_rules(partitioned.platform)
    buffers, result_buffers = live_buffers(schedule)

    def size(v: int) -> int:
        return rules.local_bytes(partitioned, v)

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
    copies, vacated = rules.argument_copies(schedule, pairs)
    buffers = [*buffers, *copies]
    left = outside_fast_memory(schedule, buffers, donated, chip) if chip and chip.fast_bytes else buffers
    temporaries = _outside(left, [*reusable, *vacated])
    most, tick = _most(temporaries)
    results = [size(v) for v in graph.outputs]
    saved = sum(size for _, size in taken)
    estimate = MemoryEstimate(sum(arguments), sum(results), most, saved, partitioned.constant_bytes)
    size_of = dict(zip(graph.outputs, results, strict=True))
    apart = collections.Counter(graph.outputs) - collections.Counter(v for v, _ in taken)
    own = [(v, size_of[v]) for v in apart.elements()]
    return LiveMemory(partitioned, list(zip(graph.inputs, arguments, strict=True)), own, temporaries, tick, estimate)


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

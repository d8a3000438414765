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
    """The most that is live at once beside arguments and results."""
    donated: int = 0
    """Of the results, those in the buffers of donated arguments."""
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
    """The same of results, but those in the place of donated arguments."""
    temporaries: list[LiveBuffer]
    """Buffers that have no place in those of results."""
    peak_tick: int
    """When the most temporaries are live."""
    estimate: MemoryEstimate

    @property
    def at_peak(self) -> list[int]:
        """The temporaries, by position, that are live at the peak."""
        return [i for i, place in enumerate(self.temporaries) if place.start <= self.peak_tick <= place.end]

    @property
    def last_tick(self) -> int:
        """The tick after the last op: there are two for each op."""
        return 2 * len(self.partitioned.graph.ops)

    @property
    def held_at_peak(self) -> list[tuple[tuple[int, ...], int]]:
        """What `MemoryEstimate.peak` is made of, without constants: values in one place (none of a copy that XLA makes), with
        bytes."""
        temporaries = [(self.temporaries[i].values, self.temporaries[i].bytes) for i in self.at_peak]
        return [*(((v,), size) for v, size in (*self.arguments, *self.results)), *temporaries]


def live_memory(partitioned: PartitionedProgram, donated: Collection[int] = (), chip: Chip | None = None) -> LiveMemory:
    """The memory of one call on one device.

    Args:
      partitioned: the program with its shardings.
      donated: positions of arguments whose buffers results of equal size take over.
      chip: what it runs on; what stays in its fast memory (`Chip.fast_bytes`) takes no other.
    """
    return memory_of_schedule(schedule_ops(lower_for_backend(partitioned, chip)), donated, chip)


def memory_of_schedule(schedule: Schedule, donated: Collection[int] = (), chip: Chip | None = None) -> LiveMemory:
    """`live_memory` of a scheduled program."""
    partitioned, graph = schedule.partitioned, schedule.partitioned.graph
    places, result_places = live_buffers(schedule)
    size = (
        functools.partial(tiled_local_bytes, partitioned) if partitioned.platform == "tpu" else partitioned.local_bytes
    )
    arguments = [size(v) for v in graph.inputs]
    place_of = {v: place for place in result_places for v in place.values}
    free = {id(place): place for place in result_places}
    pairs: list[tuple[int, LiveBuffer]] = []
    taken: list[tuple[int, int]] = []
    given: dict[int, collections.deque[int]] = {}
    for i in sorted(donated):
        given.setdefault(arguments[i], collections.deque()).append(graph.inputs[i])
    for v in graph.outputs:  # each takes the first of its size, as XLA pairs them
        place = place_of.get(v)
        if place is not None and id(place) in free and given.get(full := max(size(v), place.bytes)):
            taken.append((v, full))
            pairs.append((given[full].popleft(), free.pop(id(place))))
    rooms = [ReusableBuffer(place.bytes, [(place.start, place.end)]) for place in free.values()]
    if partitioned.platform == "cpu" and pairs:
        copies, vacated = _saved(schedule, pairs)
        places, rooms = [*places, *copies], [*rooms, *vacated]
    if partitioned.platform == "tpu":
        copies, vacated = _gathered(schedule, pairs)
        places, rooms = [*places, *table_copies(schedule), *copies], [*rooms, *vacated]
    left = outside_fast_memory(schedule, places, donated, chip) if chip and chip.fast_bytes else places
    temporaries = _outside(left, rooms)
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
    """Copies of the arguments of `gathers_over_arguments`, and what is gathered, which is made apart. Also the arguments' own
    buffers, which are free from the start to the end."""
    copies, vacated = [], []
    for v, place in gathers_over_arguments(schedule, pairs):
        last = max((i for i, reads in enumerate(schedule.fusion.reads) if v in reads), default=0)
        copies += [LiveBuffer((), 0, 2 * last, place.bytes), place]
        vacated.append(ReusableBuffer(place.bytes, [(0, 0), (place.end, place.end)]))
    return copies, vacated


def _saved(
    schedule: Schedule, pairs: Sequence[tuple[int, LiveBuffer]]
) -> tuple[list[LiveBuffer], list[ReusableBuffer]]:
    """Copies of donated arguments that an op reads of which the result in their place does not depend: XLA makes them at the
    start, as it does so before it orders the ops. Also gives those places, which are free from then until the result is made."""
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
    for v, place in pairs:
        made = next((maker[w] for w in place.values if w in maker), None)
        if made is None or not readers[v]:
            continue
        if not all(needs[made] >> inside.get(i, first_of.get(i, i)) & 1 for i in readers[v]):
            copies.append(LiveBuffer((), 0, 2 * max(readers[v]), place.bytes))
            vacated.append(ReusableBuffer(place.bytes, [(0, 0), (place.start, place.end)]))
    return copies, vacated


_TRIED = 128
"""Places of results that are looked at for a temporary."""


def _outside(places: Iterable[LiveBuffer], rooms: Iterable[ReusableBuffer]) -> list[LiveBuffer]:
    """The places that do not fit into those of results while these are not in use: largest first, as XLA assigns."""
    rooms = sorted(rooms, key=lambda room: room.bytes)
    sizes = [room.bytes for room in rooms]
    left = []
    for place in sorted(places, key=lambda p: -p.bytes):
        first = bisect.bisect_left(sizes, place.bytes)
        end = place.end if place.sooner is None else place.sooner
        for room in rooms[first : first + _TRIED]:
            if all(end < a or b < place.start for a, b in room.busy):
                room.busy.append((place.start, end))
                break
        else:
            left.append(place)
    return left


def _most(places: Iterable[LiveBuffer]) -> tuple[int, int]:
    """The most bytes that are alive at once, and a tick at which they are."""
    change: dict[int, int] = {}
    for place in places:
        change[place.start] = change.get(place.start, 0) + place.bytes
        change[place.end + 1] = change.get(place.end + 1, 0) - place.bytes
    alive = most = at = 0
    for tick in sorted(change):
        alive += change[tick]
        if alive > most:
            most, at = alive, tick
    return most, at

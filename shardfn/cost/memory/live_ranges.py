"""Memory of one device: arguments and results exactly, temporaries from live ranges.

Ops run in the order of `cost.schedule`. A value has a buffer unless it is fused, from the op that makes it to its last
reader. An elementwise op writes over an operand that dies there, a loop carries a value in one buffer, and donated
arguments are the buffers of results. Temporaries may use a result's buffer before the result is made. `backends.tpu`
has what a TPU does differently.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardfn.cost.backends.tpu import (
    MAX_STAY_RATIO,
    PREFETCH_RATIO,
    FastMemoryRequest,
    assign_fast_memory,
    gathered_arguments,
    residency_intervals,
    row_major_bytes,
)
from shardfn.cost.collectives import bytes_sent
from shardfn.cost.compute import once
from shardfn.cost.devices.chips import Chip
from shardfn.cost.fusion_walk import FusionPlan
from shardfn.cost.memory.loops import LoopBuffers, keeps_places, loop_buffers, loop_copies, stay_through
from shardfn.cost.schedule import ExecutionOrder, lower_for_backend, schedule_ops
from shardfn.ir.model import Graph, Op, PartitionedProgram, dtype_bits
from shardfn.ir.op_traits import ELEMENTWISE, UPDATES
from shardfn.partition.tpu_padding import tiled_bytes


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    arguments: int
    results: int
    temporaries: int
    """The most that is live at once beside arguments and results."""
    donated: int = 0
    """Of the results, those in the buffers of donated arguments."""

    @property
    def peak(self) -> int:
        """Bytes of arguments, results and temporaries at their peak; donated buffers count once."""
        return self.arguments + self.results + self.temporaries - self.donated


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A buffer that is live in the closed interval `[start, end]`, two ticks for each op, with its values and bytes."""

    values: tuple[int, ...]
    start: int
    end: int
    bytes: int
    sooner: int | None = None
    """The end in the place of a result, where that is earlier: what is made there may be written over what dies."""


class ReusableBuffer(NamedTuple):
    """A result's buffer that temporaries may use: bytes, and the closed intervals in which it is taken."""

    bytes: int
    busy: list[tuple[int, int]]


def memory(partitioned: PartitionedProgram, donated: Collection[int] = (), chip: Chip | None = None) -> MemoryEstimate:
    """Memory of one call on one device.

    Args:
      partitioned: the program with its shardings.
      donated: positions of arguments whose buffers results of equal size take over.
      chip: what it runs on; what stays in its fast memory (`Chip.fast_bytes`) takes no other.
    """
    order, fusion = schedule_ops(lower_for_backend(partitioned, chip))
    return memory_of(order, fusion, donated, chip)


def memory_of(
    order: ExecutionOrder, fusion: FusionPlan, donated: Collection[int] = (), chip: Chip | None = None
) -> MemoryEstimate:
    """`memory` of a schedule and its fusion."""
    buffers = device_buffers(order, fusion, donated, chip)
    taken = sum(size for _, size in buffers.donated)
    return MemoryEstimate(sum(buffers.arguments), sum(buffers.results), most_alive(buffers.places)[0], taken)


class DeviceBuffers(NamedTuple):
    """Bytes of arguments and of results; results in the place of donated arguments, with bytes; what temporaries take else."""

    arguments: list[int]
    results: list[int]
    donated: list[tuple[int, int]]
    places: list[LiveBuffer]


def device_buffers(
    order: ExecutionOrder, fusion: FusionPlan, donated: Collection[int], chip: Chip | None
) -> DeviceBuffers:
    """The buffers of a schedule and its fusion."""
    partitioned, graph = order.partitioned, order.partitioned.graph
    places, results = live_buffers(order, fusion)
    size = functools.partial(_tiled, partitioned) if partitioned.platform == "tpu" else partitioned.local_bytes
    arguments = [size(v) for v in graph.inputs]
    place_of = {v: place for place in results for v in place.values}
    free = {id(place): place for place in results}
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
        copies, vacated = _saved(order, fusion, pairs)
        places, rooms = [*places, *copies], [*rooms, *vacated]
    places = [*places, *_turned_tables(partitioned, fusion)]
    left = _outside_fast(order, fusion, places, donated, chip) if chip and chip.fast_bytes else places
    return DeviceBuffers(arguments, [size(v) for v in graph.outputs], taken, _outside(left, rooms))


def _saved(
    order: ExecutionOrder, fusion: FusionPlan, pairs: Sequence[tuple[int, LiveBuffer]]
) -> tuple[list[LiveBuffer], list[ReusableBuffer]]:
    """Copies of donated arguments that an op reads of which the result in their place does not depend: XLA makes them at the
    start, as it does so before it orders the ops. Also gives those places, which are free from then until the result is made."""
    spans = loop_buffers(order.partitioned.graph, fusion, order.bodies).spans
    inside = {i: last for last, first in sorted(spans.items()) for i in range(first, last)}
    first_of = {i: first for i, (first, _) in order.together().items()}
    readers: dict[int, list[int]] = {v: [] for v, _ in pairs}
    maker: dict[int, int] = {}
    needs: dict[int, int] = {}  # of each op, what runs before it in any order, a bit for each
    for i, (op, reads) in enumerate(zip(order.partitioned.graph.ops, fusion.reads, strict=True)):
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


def _tiled(partitioned: PartitionedProgram, value: int) -> int:
    return tiled_bytes(partitioned.local_shape(value), dtype_bits(partitioned.graph.values[value].dtype))


def _turned_tables(partitioned: PartitionedProgram, fusion: FusionPlan) -> list[LiveBuffer]:
    """On a TPU, copies of arguments that are looked up in, where a row is no multiple of the lanes: kept to their last reader."""
    if partitioned.platform != "tpu":
        return []
    found = []
    for v in gathered_arguments(partitioned.graph):
        at = [i for i, reads in enumerate(fusion.reads) if v in reads]
        size = row_major_bytes(partitioned.local_shape(v), dtype_bits(partitioned.graph.values[v].dtype))
        if at and size > _tiled(partitioned, v):
            found.append(LiveBuffer((), 2 * at[0], 2 * at[-1], size))
    return found


def _outside_fast(
    order: ExecutionOrder, fusion: FusionPlan, places: Sequence[LiveBuffer], donated: Collection[int], chip: Chip
) -> list[LiveBuffer]:
    """The places that the memory inside the chip has no room for, or not for all of their life.

    An array stays there from one access to the next, unless this takes too long (`backends.tpu.MAX_STAY_RATIO`).
    Arguments are fetched there for their readers too; of those that are not given away, the one that is read most has its
    place before all others, until its last reader.
    """
    partitioned, graph = order.partitioned, order.partitioned.graph
    accesses = _accesses(order, fusion)
    clock, gains = _clock(order, fusion, chip)
    longest = MAX_STAY_RATIO * chip.fast_bytes / chip.memory_bytes_s
    claims, whole = [], []
    for place in places:
        met = sorted({i for v in place.values for i in accesses.get(v, ())})
        least = min((graph.ops[i].trips for i in met), default=1)
        parts = residency_intervals([gap / least for gap in _gaps(clock, met)], longest)
        whole.append(len(parts) <= 1)
        gain = sum(graph.ops[i].trips for i in met if gains[i])
        claims.append(FastMemoryRequest(max(0, place.start - 1), place.end, place.bytes if whole[-1] else 0, gain))
    inputs = {v: accesses[v] for v in graph.inputs if v in accesses}
    given = {graph.inputs[i] for i in donated}
    kept = [v for v in inputs if v not in given and partitioned.local_bytes(v) <= chip.fast_bytes]
    ahead = max(kept, key=lambda v: (len(inputs[v]), partitioned.local_bytes(v)), default=None)
    for v, met in inputs.items():
        size = partitioned.local_bytes(v)
        if v == ahead:
            claims.append(FastMemoryRequest(0, 2 * met[-1], size, math.inf))
            continue
        gain = sum(gains[i] for i in met)
        for first, last in residency_intervals(_gaps(clock, met), longest):
            fetched = bisect.bisect_right(
                clock, clock[max(0, met[first] - 1)] - PREFETCH_RATIO * size / chip.memory_bytes_s
            )
            claims.append(FastMemoryRequest(2 * min(fetched, met[first]), 2 * met[last], size, gain))
    has = assign_fast_memory(claims, chip.fast_bytes)
    return [place for place, inside, got in zip(places, whole, has, strict=False) if not (inside and got)]


def _gaps(clock: Sequence[float], met: Sequence[int]) -> list[float]:
    """From the end of each op to the beginning of the next of `met`."""
    return [max(0.0, clock[b - 1] - clock[a]) for a, b in itertools.pairwise(met)]


def _accesses(order: ExecutionOrder, fusion: FusionPlan) -> dict[int, list[int]]:
    """For each stored value the ops that make it or read it, in their order."""
    found: dict[int, list[int]] = {}
    for i, op in enumerate(order.partitioned.graph.ops):
        for v in dict.fromkeys((*fusion.reads[i], *(v for v in op.outputs if v in fusion.stored))):
            found.setdefault(v, []).append(i)
    return found


def _clock(order: ExecutionOrder, fusion: FusionPlan, chip: Chip) -> tuple[list[float], list[bool]]:
    """When each op is done, in seconds from the start, and whether its time is that of memory; a collective takes its bytes
    over one link."""
    partitioned = order.partitioned
    sent = {
        c.result: bytes_sent(c.kind, c.group_size, partitioned.local_bytes(c.operand))
        for c in partitioned.communications
    }
    now, clock, gains = 0.0, [], []
    for i, op in enumerate(partitioned.graph.ops):
        over = sum(sent.get(v, 0) for v in op.outputs) / chip.link_bytes_s
        _, moved, time = once(partitioned, i, chip, fusion)
        now += (time + over) * op.trips
        clock.append(now)
        gains.append(bool(over) or moved / chip.memory_bytes_s >= time > 0)
    return clock, gains


def live_buffers(order: ExecutionOrder, fusion: FusionPlan) -> tuple[list[LiveBuffer], list[LiveBuffer]]:
    """Live ranges of temporaries, and of results."""
    partitioned, graph = order.partitioned, order.partitioned.graph
    together = order.together()
    loops = loop_buffers(graph, fusion, order.bodies)
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    copies: list[LiveBuffer] = []
    for i, op in enumerate(graph.ops):
        if i in fusion.dead:
            continue
        for v in op.outputs:
            if v in fusion.stored:
                start[v] = 2 * together.get(i, (i, i))[0]
        if i in loops.spans:
            first = 2 * loops.spans[i]
            for v in fusion.reads[i]:
                end[v] = max(end.get(v, 0), first - 1 if start.get(v, -1) < first else 2 * i - 1)
        else:
            until = 2 * together.get(i, (i, i))[1]
            chosen = op.inputs[0] if op.name == "select_and_scatter" and partitioned.platform == "cpu" else -1
            for v in fusion.reads[i]:
                end[v] = max(end.get(v, 0), start.get(v, -1) + 1 if v == chosen else until)
            if chosen >= 0:
                copies += _chosen(partitioned, i, op, start.get(chosen, 2 * i - 2) + 1)
                start[op.outputs[0]] = 0
    for result, source in loops.unchanged.items():
        start.pop(result, None)
        if result in end:
            end[source] = max(end.get(source, 0), end[result])
    for v, first in loops.entered.items():
        start[v] = 2 * first
    apart = loop_copies(partitioned, fusion, loops, start, end) if partitioned.platform == "cpu" else {}
    copies += [
        LiveBuffer((), 2 * loops.entered[v], until, partitioned.local_bytes(v)) for v, (until, _) in apart.items()
    ]
    stay_through(start, end, [(2 * first, 2 * last) for last, first in loops.spans.items()], loops.entered)
    last_read = {i: 2 * last for i, (_, last) in together.items()}
    bound = _bound(partitioned, fusion, loops, end) if partitioned.platform == "cpu" else frozenset()
    spread = () if partitioned.platform == "tpu" else {i for i, (first, last) in together.items() if first < last}
    updated = _updated(graph, fusion, start, end, last_read) if partitioned.platform == "cpu" else []
    sooner = _in_place(partitioned, fusion, start, end, last_read, bound, spread)
    chained = {v for pair in updated for v in pair}
    groups = _colocated(graph, loops, [*_shown(partitioned, fusion), *updated], start, end)
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    last = 2 * len(graph.ops)
    temporaries, results = copies, []
    for members in groups:
        members = tuple(v for v in members if v in start and v not in inputs)
        if not members:
            continue
        is_result = not outputs.isdisjoint(members)
        until = last if is_result else max(end.get(v, start[v]) for v in members)
        place = LiveBuffer(members, min(start[v] for v in members), until, max(map(partitioned.local_bytes, members)))
        if (
            not is_result
            and (len(members) == 1 or chained.issuperset(members))
            and not sooner.keys().isdisjoint(members)
        ):
            place = dataclasses.replace(place, sooner=max(sooner.get(v, end.get(v, start[v])) for v in members))
        gaps = [(2 * loops.entered[v], apart[v][1]) for v in members if v in apart and not is_result]
        for copied, again in sorted(gaps):
            temporaries.append(dataclasses.replace(place, end=copied))
            place = dataclasses.replace(place, start=max(again, copied + 1))
        (results if is_result else temporaries).append(place)
    return temporaries, results


def _chosen(partitioned: PartitionedProgram, i: int, op: Op, at: int) -> list[LiveBuffer]:
    """What the gradient of a max pool needs on CPU beside operands and results.

    As soon as the image is there, at tick `at`, indices of every element, made at the start, give those of the largest, to
    which the gradient is added at the end.
    """
    image, pooled = (math.prod(partitioned.local_shape(v)) for v in op.inputs[:2])
    rank = len(partitioned.local_shape(op.inputs[0]))
    every, largest = LiveBuffer((), 0, at, 4 * rank * image), LiveBuffer((), at, at + 1, 4 * (rank + 1) * pooled)
    return [every, largest, LiveBuffer((), at + 1, 2 * i, 4 * rank * pooled)]


def _in_place(
    partitioned: PartitionedProgram,
    fusion: FusionPlan,
    start: dict[int, int],
    end: dict[int, int],
    last_read: Mapping[int, int],
    bound: frozenset[int],
    merged_sums: Collection[int] = (),
) -> dict[int, int]:
    """Elementwise ops and updates write over an operand of their own size that dies there, on CPU where each element is read only
    for the one in its place; on accelerators all-reduces too, on GPUs those that are not merged.

    Not where one of them is of `bound`, values that an update or a loop has in one place with others already: when these would
    end, which counts in the places of results, comes back.
    """
    sooner: dict[int, int] = {}
    graph = partitioned.graph
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    writes_over = _WRITES_OVER if partitioned.platform == "cpu" else _WRITES_OVER | {"all_reduce"}
    for i, op in enumerate(graph.ops):
        if len(op.outputs) != 1 or op.outputs[0] not in start or op.name not in writes_over:
            continue
        if partitioned.platform == "cpu" and any(graph.ops[j].name == "reduce" for j in fusion.inside[i] or ()):
            continue  # a call of the library
        if i in merged_sums:
            continue
        shape, size = partitioned.local_shape(op.outputs[0]), partitioned.local_bytes(op.outputs[0])
        for v in fusion.reads[i]:
            dies = end.get(v) == last_read.get(i, 2 * i) and v in start and v not in inputs and v not in outputs
            if not dies or partitioned.local_shape(v) != shape or partitioned.local_bytes(v) != size:
                continue
            if partitioned.platform != "cpu" or keeps_places(partitioned, fusion, i, v):
                apart = op.name not in UPDATES and not bound.isdisjoint((v, op.outputs[0]))
                (sooner if apart else end)[v] = min(2 * i, start[op.outputs[0]]) - 1
                break
    return sooner


def _updated(
    graph: Graph, fusion: FusionPlan, start: Mapping[int, int], end: Mapping[int, int], last_read: Mapping[int, int]
) -> list[tuple[int, int]]:
    """What updates make, each with what that is written into: temporaries that nothing reads any more."""
    apart, found = {*graph.inputs, *graph.outputs}, []
    for i, op in enumerate(graph.ops):
        if op.name not in UPDATES or len(op.outputs) != 1:
            continue
        (made,), v = op.outputs, op.inputs[0]
        is_last = v in fusion.reads[i] and end.get(v) == last_read.get(i, 2 * i)
        if made in start and v in start and v not in apart and is_last:
            found.append((made, v))
    return found


_WRITES_OVER = (ELEMENTWISE - {"copy"}).union(UPDATES)


def _bound(
    partitioned: PartitionedProgram, fusion: FusionPlan, loops: LoopBuffers, end: Mapping[int, int]
) -> frozenset[int]:
    """Values that XLA's CPU backend puts in one place with others before it looks what may be written over: what an update is
    made in with what it makes, and what goes into a loop, goes round in it and comes out."""
    found: set[int] = set()
    for i, op in enumerate(partitioned.graph.ops):
        if op.name in UPDATES and fusion.inside[i] is not None and op.inputs[0] in fusion.reads[i]:
            found.update((op.inputs[0], op.outputs[0]))
    for operand, seen, back, result in loops.carried:
        found.update((seen, back, result))
        if end.get(operand, 0) < 2 * loops.entered[seen]:
            found.add(operand)
    return frozenset(found)


def _shown(partitioned: PartitionedProgram, fusion: FusionPlan) -> list[tuple[int, int]]:
    """Results that are views of what was computed, each with that."""
    held, inputs = set(partitioned.graph.outputs), set(partitioned.graph.inputs)
    found: dict[int, int] = {}
    for i, op in enumerate(partitioned.graph.ops):
        if fusion.inside[i] is not None and len(op.outputs) == len(fusion.reads[i]) == 1 and partitioned.is_view(op):
            (source,) = fusion.reads[i]
            if op.outputs[0] in held and source not in held and source not in inputs:
                found.setdefault(source, op.outputs[0])
    return [(result, source) for source, result in found.items()]


def _colocated(
    graph: Graph, loops: LoopBuffers, shown: Iterable[tuple[int, int]], start: dict[int, int], end: dict[int, int]
) -> Iterable[tuple[int, ...]]:
    """Values that lie in one place: what goes into a loop, goes round in it and comes out; a result and what it shows."""
    parent: dict[int, int] = {}

    def find(v: int) -> int:
        while parent.setdefault(v, v) != v:
            v = parent[v]
        return v

    for result, source in shown:
        if source in start and result in start:
            parent[find(result)] = find(source)
    inputs = set(graph.inputs)
    given: set[int] = set()
    for operand, seen, back, result in loops.carried:
        parent[find(result)] = find(seen)
        free = operand in start and operand not in inputs and operand not in given
        if free and end.get(operand, 0) < start[seen]:
            given.add(operand)
            parent[find(operand)] = find(seen)
        if back in start and start[back] >= end.get(seen, 0) - 1 and back not in given:
            given.add(back)
            parent[find(back)] = find(seen)
    groups: dict[int, list[int]] = {}
    for v in start:
        groups.setdefault(find(v), []).append(v)
    return map(tuple, groups.values())


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


def most_alive(places: Iterable[LiveBuffer]) -> tuple[int, int]:
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

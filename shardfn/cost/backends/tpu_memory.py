"""What libtpu keeps in vector memory (VMEM), which takes no other memory, and the tables that it copies row by row."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np

from shardfn.cost.backends.tpu import gathered_arguments, row_major_bytes
from shardfn.cost.collectives import communication_bytes
from shardfn.cost.compute import has_own_time, once
from shardfn.cost.devices.chips import Chip
from shardfn.cost.memory.live_ranges import LiveBuffer, LiveRanges, ReusableBuffer
from shardfn.cost.schedule import Schedule
from shardfn.ir.model import dtype_bits
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.collective_matmul import shards_held
from shardfn.partition.tpu_padding import LANES, SUBLANES, tiled_bytes, tiled_dims

MAX_STAY_RATIO = 8
"""An array stays in VMEM between accesses for as long as copying all of VMEM takes, times this: libtpu's
`xla_vf_vmem_max_overlap_to_mem_size_async_copy_ratio`.
"""


PREFETCH_RATIO = 2
"""An argument is prefetched this many copy times before its reader: libtpu's
`xla_vf_vmem_preferred_overlap_to_async_copy_ratio`.
"""


@dataclasses.dataclass(frozen=True)
class FastMemoryRequest:
    """A request for VMEM from `start` to `end`, both included."""

    start: int
    end: int
    bytes: int
    accesses: float
    """Reads and writes by ops that are bound by memory; for others VMEM gains nothing."""


def assign_fast_memory(requests: Sequence[FastMemoryRequest], capacity: float) -> list[bool]:
    """Which requests XLA's memory space assignment grants.

    Requests with the largest gain come first: accesses times the root of the size. A request is granted for all of its
    life or not at all. Fragmentation is ignored.

    >>> assign_fast_memory([FastMemoryRequest(0, 2, 60, 1), FastMemoryRequest(1, 3, 60, 2), FastMemoryRequest(3, 4, 40, 0)], 100)
    [False, True, True]
    """
    used = np.zeros(max((request.end for request in requests), default=0) + 1)
    found = [False] * len(requests)
    for i in sorted(
        range(len(requests)), key=lambda i: (-requests[i].accesses * requests[i].bytes ** 0.5, -requests[i].bytes)
    ):
        request = requests[i]
        taken = used[request.start : request.end + 1]
        if request.bytes <= capacity and (not taken.size or taken.max() + request.bytes <= capacity):
            taken += request.bytes
            found[i] = True
    return found


def residency_intervals(gaps: Sequence[float], longest: float) -> list[tuple[int, int]]:
    """Merge accesses of an array that are close enough for it to stay in VMEM.

    Args:
      gaps: seconds from the end of each access to the start of the next.
      longest: the longest gap within one interval, in seconds.

    Returns:
      The first and the last access of each interval, by index.

    >>> residency_intervals([1.0, 8.0, 1.0, 10.0], 2.0)
    [(0, 1), (2, 3), (4, 4)]
    """
    found = [(0, 0)]
    for i, gap in enumerate(gaps, 1):
        found.append((i, i))
        if gap <= longest:
            found[-2:] = [(found[-2][0], i)]
    return found


def tiled_local_bytes(partitioned: PartitionedProgram, value: int) -> int:
    """Bytes of a value on one device in whole tiles."""
    return tiled_bytes(partitioned.local_shape(value), dtype_bits(partitioned.graph.values[value].dtype))


class TpuLiveRanges(LiveRanges):
    """Combined all-reduces write over their operands too. A collective matmul holds some shards instead of the whole array."""

    @functools.cached_property
    def in_matmuls(self) -> dict[int, int]:
        """The bytes of arrays that collective matmuls gather or scatter."""
        return {
            c.whole: shards_held(c.kind, c.matmul_permutes) * self.partitioned.local_bytes(c.shard)
            for c in self.partitioned.communications
            if c.matmul_permutes
        }

    def held_bytes(self, v: int) -> int:
        """Those of the shards that a collective matmul holds at once, or of the value."""
        return self.in_matmuls[v] if v in self.in_matmuls else super().held_bytes(v)

    def may_write_over(self, i: int, v: int) -> bool:
        """Always."""
        return True


def argument_copies(
    schedule: Schedule, pairs: Sequence[tuple[int, LiveBuffer]]
) -> tuple[list[LiveBuffer], list[ReusableBuffer]]:
    """Copies of tables, and of the arguments of `gathers_over_arguments`, with the buffers of the gathered arrays. Also these
    arguments' own buffers, which are free from the first tick to the last.

    Args:
      schedule: the scheduled program.
      pairs: donated arguments with the buffers of the results that take their place.
    """
    copies, vacated = table_copies(schedule), []
    for v, buffer in gathers_over_arguments(schedule, pairs):
        last = max((i for i, reads in enumerate(schedule.fusion.reads) if v in reads), default=0)
        copies += [LiveBuffer((), 0, 2 * last, buffer.bytes), buffer]
        vacated.append(ReusableBuffer(buffer.bytes, [(0, 0), (buffer.end, buffer.end)]))
    return copies, vacated


def table_copies(schedule: Schedule) -> list[LiveBuffer]:
    """Copies of arguments that are gathered from, where a row is no multiple of the lanes: kept to their last reader."""
    partitioned, found = schedule.partitioned, []
    for v in gathered_arguments(partitioned.graph):
        at = [i for i, reads in enumerate(schedule.fusion.reads) if v in reads]
        size = row_major_bytes(partitioned.local_shape(v), dtype_bits(partitioned.graph.values[v].dtype))
        if at and size > tiled_local_bytes(partitioned, v):
            found.append(LiveBuffer((), 2 * at[0], 2 * at[-1], size))
    return found


def gathers_over_arguments(schedule: Schedule, pairs: Sequence[tuple[int, LiveBuffer]]) -> list[tuple[int, LiveBuffer]]:
    """The donated arguments that libtpu copies at the start, because an all-gather makes the result in their place.

    The all-gather does not write over an argument: its result is copied there at the end. Where the shards are not whole
    tiles, libtpu rearranges what was gathered, and the rearranged array is written there (libtpu 0.0.42).

    Args:
      schedule: the scheduled program.
      pairs: donated arguments with the buffers of the results that take their place.
    """
    partitioned = schedule.partitioned
    gathers = {op.outputs[0]: op for op in partitioned.graph.ops if op.name == "all_gather"}

    def is_direct(value: int) -> bool:
        op = gathers.get(value)
        return op is not None and in_whole_tiles(partitioned, op.inputs[0], value)

    return [(v, buffer) for v, buffer in pairs if any(map(is_direct, buffer.values))]


def in_whole_tiles(partitioned: PartitionedProgram, shard: int, gathered: int) -> bool:
    """Whether the shards of a gathered array are whole tiles of it along the gathered dimensions."""
    shape, full = partitioned.local_shape(shard), partitioned.local_shape(gathered)
    if len(full) < 2:
        return True
    row, column = tiled_dims(full, dtype_bits(partitioned.graph.values[gathered].dtype))
    tile = {row: SUBLANES, column: LANES}
    return all(n == m or n % tile.get(d, 1) == 0 for d, (n, m) in enumerate(zip(shape, full, strict=True)))


def outside_fast_memory(
    schedule: Schedule, buffers: Sequence[LiveBuffer], donated: Collection[int], chip: Chip
) -> list[LiveBuffer]:
    """The buffers that do not fit into the memory inside the chip, or not for all of their life.

    An array stays there from one access to the next, unless this takes too long (`MAX_STAY_RATIO`).
    Arguments are prefetched for their readers too. Of those that are not donated, the one with the most readers is assigned
    before all other buffers, until its last reader.
    """
    partitioned, graph = schedule.partitioned, schedule.partitioned.graph
    accesses = _accesses(schedule)
    clock, gains = _clock(schedule, chip)
    longest = MAX_STAY_RATIO * chip.fast_bytes / chip.memory_bytes_s
    requests, whole = [], []
    for buffer in buffers:
        met = sorted({i for v in buffer.values for i in accesses.get(v, ())})
        least = min((graph.ops[i].trips for i in met), default=1)
        parts = residency_intervals([gap / least for gap in _gaps(clock, met)], longest)
        whole.append(len(parts) <= 1)
        gain = sum(graph.ops[i].trips for i in met if gains[i])
        requests.append(FastMemoryRequest(max(0, buffer.start - 1), buffer.end, buffer.bytes if whole[-1] else 0, gain))
    inputs = {v: accesses[v] for v in graph.inputs if v in accesses}
    given = {graph.inputs[i] for i in donated}
    kept = [v for v in inputs if v not in given and partitioned.local_bytes(v) <= chip.fast_bytes]
    ahead = max(kept, key=lambda v: (len(inputs[v]), partitioned.local_bytes(v)), default=None)
    for v, met in inputs.items():
        size = partitioned.local_bytes(v)
        if v == ahead:
            requests.append(FastMemoryRequest(0, 2 * met[-1], size, math.inf))
            continue
        gain = sum(gains[i] for i in met)
        for first, last in residency_intervals(_gaps(clock, met), longest):
            fetched = bisect.bisect_right(
                clock, clock[max(0, met[first] - 1)] - PREFETCH_RATIO * size / chip.memory_bytes_s
            )
            requests.append(FastMemoryRequest(2 * min(fetched, met[first]), 2 * met[last], size, gain))
    has = assign_fast_memory(requests, chip.fast_bytes)
    return [buffer for buffer, inside, got in zip(buffers, whole, has, strict=False) if not (inside and got)]


def _gaps(clock: Sequence[float], met: Sequence[int]) -> list[float]:
    """From the end of each op to the beginning of the next of `met`."""
    return [max(0.0, clock[b - 1] - clock[a]) for a, b in itertools.pairwise(met)]


def _accesses(schedule: Schedule) -> dict[int, list[int]]:
    """For each stored value the ops that make it or read it, in program order."""
    fusion, found = schedule.fusion, dict[int, list[int]]()
    for i, op in enumerate(schedule.partitioned.graph.ops):
        for v in dict.fromkeys((*fusion.reads[i], *(v for v in op.outputs if v in fusion.stored))):
            found.setdefault(v, []).append(i)
    return found


def _clock(schedule: Schedule, chip: Chip) -> tuple[list[float], list[bool]]:
    """When each op is done, in seconds from the start, and whether its time is that of memory; a collective takes its bytes
    over one link."""
    partitioned = schedule.partitioned
    sent = {c.result: communication_bytes(partitioned, c) for c in partitioned.communications}
    now, clock, gains = 0.0, [], []
    for i, op in enumerate(partitioned.graph.ops):
        over = sum(sent.get(v, 0) for v in op.outputs) / chip.link_bytes_s
        is_kernel = schedule.fusion.inside[i] is not None and has_own_time(op)
        _, moved, time = once(partitioned, (i,) if is_kernel else (), chip, schedule.fusion)
        now += (time + over) * op.trips
        clock.append(now)
        gains.append(bool(over) or moved / chip.memory_bytes_s >= time > 0)
    return clock, gains

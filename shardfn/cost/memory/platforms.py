"""How each XLA backend assigns buffers: one row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from shardfn.cost.backends import cpu_memory, gpu_memory, tpu_memory
from shardfn.cost.memory.live_ranges import LiveBuffer, LiveRanges, ReusableBuffer
from shardfn.cost.schedule import Schedule
from shardfn.ir.partitioned import PartitionedProgram

ArgumentCopies = Callable[[Schedule, Sequence[tuple[int, LiveBuffer]]], tuple[list[LiveBuffer], list[ReusableBuffer]]]
"""From a scheduled program and its donated arguments, each with the buffer of the result in its place: copies of arguments, and
the buffers that temporaries may use because of them."""


@dataclasses.dataclass(frozen=True)
class MemoryRules:
    """The rules of one backend."""

    live_ranges: type[LiveRanges] = LiveRanges
    """When values have buffers; `LiveRanges` itself has the common rules."""
    local_bytes: Callable[[PartitionedProgram, int], int] = PartitionedProgram.local_bytes
    """Bytes of an argument or a result on one device."""
    argument_copies: ArgumentCopies = lambda schedule, pairs: ([], [])
    """What it copies of arguments."""


_GPU = MemoryRules(gpu_memory.GpuLiveRanges)
_RULES = {
    "cpu": MemoryRules(cpu_memory.CpuLiveRanges, argument_copies=cpu_memory.donated_copies),
    "tpu": MemoryRules(tpu_memory.TpuLiveRanges, tpu_memory.tiled_local_bytes, tpu_memory.argument_copies),
}


def memory_rules(platform: str) -> MemoryRules:
    """The rules of a platform's backend; of a platform that is none of them, those of GPUs.

    >>> memory_rules("cuda").live_ranges.__name__, memory_rules("cpu").live_ranges.__name__
    ('GpuLiveRanges', 'CpuLiveRanges')
    """
    return _RULES.get(platform, _GPU)


def live_buffers(schedule: Schedule) -> tuple[list[LiveBuffer], list[LiveBuffer]]:
    """The buffers of temporaries, and of results."""
    return memory_rules(schedule.partitioned.platform).live_ranges(schedule).buffers()

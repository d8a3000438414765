"""The buffers of one device over a program, and those that are alive at its memory peak."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection

from shardfn.cost.devices.chips import Chip
from shardfn.cost.memory.live_ranges import LiveBuffer, device_buffers, most_alive
from shardfn.cost.schedule import lower_for_backend, schedule_ops
from shardfn.ir.model import PartitionedProgram


@dataclasses.dataclass(frozen=True)
class LiveMemory:
    """What `MemoryEstimate.peak` is made of: the program as XLA runs it, and its buffers with bytes on one device."""

    partitioned: PartitionedProgram
    arguments: list[tuple[int, int]]
    """Arguments and their bytes, held throughout."""
    results: list[tuple[int, int]]
    """The same of results, but those in the place of donated arguments."""
    temporaries: list[LiveBuffer]
    peak_tick: int
    """When the most temporaries are alive."""

    @property
    def at_peak(self) -> list[int]:
        """The temporaries, by position, that are alive at the peak."""
        return [i for i, place in enumerate(self.temporaries) if place.start <= self.peak_tick <= place.end]

    @property
    def last_tick(self) -> int:
        """The tick after the last op: there are two for each op."""
        return 2 * len(self.partitioned.graph.ops)

    @property
    def peak(self) -> int:
        """`MemoryEstimate.peak`."""
        held = sum(size for _, size in (*self.arguments, *self.results))
        return held + sum(self.temporaries[i].bytes for i in self.at_peak)


def live_memory(partitioned: PartitionedProgram, donated: Collection[int] = (), chip: Chip | None = None) -> LiveMemory:
    """The buffers of one call on one device; the arguments are those of `memory`."""
    order, fusion = schedule_ops(lower_for_backend(partitioned, chip))
    buffers, graph = device_buffers(order, fusion, donated, chip), order.partitioned.graph
    apart = collections.Counter(graph.outputs) - collections.Counter(v for v, _ in buffers.donated)
    size_of = dict(zip(graph.outputs, buffers.results, strict=True))
    return LiveMemory(
        order.partitioned,
        list(zip(graph.inputs, buffers.arguments, strict=True)),
        [(v, size_of[v]) for v in apart.elements()],
        buffers.places,
        most_alive(buffers.places)[1],
    )


def at_peak(
    partitioned: PartitionedProgram, donated: Collection[int] = (), chip: Chip | None = None
) -> tuple[PartitionedProgram, list[tuple[tuple[int, ...], int]]]:
    """What is alive at the peak: the program as XLA runs it, and its live buffers: values in one place (none of a copy that
    XLA makes) with bytes."""
    live = live_memory(partitioned, donated, chip)
    held = [((v,), size) for v, size in (*live.arguments, *live.results)]
    temporaries = [(live.temporaries[i].values, live.temporaries[i].bytes) for i in live.at_peak]
    return live.partitioned, [*held, *temporaries]

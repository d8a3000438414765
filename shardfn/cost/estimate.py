"""The cost of a partitioned program on hardware: FLOPs, bytes, memory and modelled time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from shardfn.cost.collectives import bytes_sent
from shardfn.cost.compute import matrix_flops, work
from shardfn.cost.devices.hardware import Hardware, link_over
from shardfn.cost.memory.live_ranges import MemoryEstimate, memory_of
from shardfn.cost.schedule import ExecutionOrder, lower_for_backend, schedule_ops
from shardfn.ir.model import Collective, Communication, PartitionedProgram


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one call for one device. Times are modelled."""

    flops: float
    bytes_sent: int
    memory: MemoryEstimate
    compute_s: float
    communication_s: float
    matrix_flops: float = 0.0
    """Of `flops`, those of matmuls and convolutions."""
    unmodelled_ops: tuple[str, ...] = ()
    """Ops without a cost rule, by name and line; they cost the bytes they move."""

    @property
    def time_s(self) -> float:
        """Seconds of compute and communication, one after the other."""
        return self.compute_s + self.communication_s


@dataclasses.dataclass(frozen=True)
class PredictedCollective(Collective):
    """A predicted collective; `merged` of them run as one and share its latency."""

    merged: int = 1


def collectives(
    partitioned: PartitionedProgram, order: ExecutionOrder | None = None
) -> tuple[PredictedCollective, ...]:
    """The program's collectives with their bytes; those that send nothing are left out.

    Args:
      partitioned: the program.
      order: `lower_for_backend` of it, if known.
    """
    groups = (order or lower_for_backend(partitioned)).groups
    sizes = collections.Counter(groups.values())
    found = []
    for c, sent in communications_with_bytes(partitioned):
        shape, dtype = partitioned.local_shape(c.operand), partitioned.graph.values[c.operand].dtype
        together = sizes[groups[c.result]] if c.result in groups else 1
        found.append(
            PredictedCollective(c.kind, c.axes, c.group_size, shape, dtype, sent, c.trips, c.where, c.cause, together)
        )
    return tuple(found)


def communications_with_bytes(partitioned: PartitionedProgram) -> list[tuple[Communication, int]]:
    """The communications that send something, with the bytes that one device sends each time."""
    every = [
        (c, bytes_sent(c.kind, c.group_size, partitioned.local_bytes(c.operand))) for c in partitioned.communications
    ]
    return [(c, sent) for c, sent in every if sent]


def collective_s(c: Collective, hardware: Hardware, axes: Sequence[tuple[str, int]]) -> float:
    """Modelled seconds of all runs of a collective in one call.

    Args:
      c: the collective; combined ones share the latency.
      hardware: what it runs on.
      axes: the mesh, as (name, size) in row-major order.
    """
    link = link_over(hardware, axes, c.axes, c.group_size)
    share = link.latency_s / c.merged if isinstance(c, PredictedCollective) else link.latency_s
    return (link.seconds(c.kind, c.bytes_sent) - link.latency_s + share) * c.trips


def estimate_cost(partitioned: PartitionedProgram, hardware: Hardware, donated: Collection[int] = ()) -> Cost:
    """The cost of one call of a function.

    Args:
      partitioned: the program with its shardings and collectives.
      hardware: what it runs on.
      donated: positions of arguments whose buffers results take over.
    """
    axes = tuple(partitioned.axes.items())
    order = lower_for_backend(partitioned, hardware.chip)
    sent = collectives(partitioned, order)
    order, fusion = schedule_ops(order)
    done = work(order.partitioned, hardware.chip, fusion)
    communication_s = sum(collective_s(c, hardware, axes) for c in sent)
    return Cost(
        done.flops,
        sum(c.total_bytes for c in sent),
        memory_of(order, fusion, donated, hardware.chip),
        done.seconds,
        communication_s,
        matrix_flops(order.partitioned),
        done.unmodelled_ops,
    )

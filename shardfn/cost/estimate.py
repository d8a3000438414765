"""The price of a flow on hardware: work, bytes, memory, and a modelled time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from shardfn.cost.collectives import bytes_sent
from shardfn.cost.compute import matrix_flops, work
from shardfn.cost.devices.hardware import Hardware, link_over
from shardfn.cost.memory.live_ranges import MemoryEstimate, memory_of
from shardfn.cost.schedule import Schedule, lower_for_backend, schedule_ops
from shardfn.ir.model import Collective, Communication, PartitionedProgram


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call costs one device. Times are a model."""

    flops: float
    bytes_sent: int
    memory: MemoryEstimate
    compute_s: float
    communication_s: float
    matrix_flops: float = 0.0
    """Of `flops`, those of products and convolutions."""
    unmodelled_ops: tuple[str, ...] = ()
    """Ops without a rule for their work, as `name (file:line)`: charged for the bytes they move."""

    @property
    def time_s(self) -> float:
        """Compute and communication one after the other."""
        return self.compute_s + self.communication_s


@dataclasses.dataclass(frozen=True)
class PredictedCollective(Collective):
    """A collective of a flow; `merged` of them run as one and share its latency."""

    merged: int = 1


def collectives(partitioned: PartitionedProgram, order: Schedule | None = None) -> tuple[PredictedCollective, ...]:
    """The flow's communications with their bytes; groups of one send nothing and are left out.

    Args:
      flow: layouts and communications.
      order: `cost.schedule.lower_for_backend` of it on the chip, where that is known: which of them run as one.
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
    """The flow's communications that send something, with the bytes that one device sends each time."""
    every = [
        (c, bytes_sent(c.kind, c.group_size, partitioned.local_bytes(c.operand))) for c in partitioned.communications
    ]
    return [(c, sent) for c, sent in every if sent]


def collective_s(c: Collective, hardware: Hardware, axes: Sequence[tuple[str, int]]) -> float:
    """Modelled seconds of all runs of a collective in one call: `Link.seconds` of the link over its axes.

    Args:
      c: the collective; its share of the latency, where several run as one.
      hardware: what it runs on.
      axes: the grid, as (name, size) in row-major order.
    """
    link = link_over(hardware, axes, c.axes, c.group_size)
    share = link.latency_s / c.merged if isinstance(c, PredictedCollective) else link.latency_s
    return (link.seconds(c.kind, c.bytes_sent) - link.latency_s + share) * c.trips


def estimate_cost(partitioned: PartitionedProgram, hardware: Hardware, donated: Collection[int] = ()) -> Cost:
    """Price one call of a function.

    Args:
      flow: layouts of all values, and the collectives.
      hardware: what it runs on.
      donated: positions of arguments whose memory results take over.
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

"""The cost of a partitioned program on hardware: FLOPs, bytes, memory and modelled time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Sequence

from shardfn.cost.collectives import communication_bytes
from shardfn.cost.compute import matrix_flops, work
from shardfn.cost.devices.chips import Hardware
from shardfn.cost.devices.links import link_over
from shardfn.cost.memory.live_memory import MemoryEstimate, memory_of_schedule
from shardfn.cost.schedule import ExecutionOrder, lower_for_backend, schedule_ops
from shardfn.ir.partitioned import Collective, PartitionedProgram
from shardfn.partition.collective_matmul import sends_both_ways


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
    """Ops without a rule for their time that was checked on such a device, by name and line; `time_s` counts the bytes that they
    move, or the FLOPs, and is then the least that the call takes."""

    @property
    def time_s(self) -> float:
        """Seconds of compute and communication, one after the other."""
        return self.compute_s + self.communication_s

    @property
    def is_lower_bound(self) -> bool:
        """Whether the modelled time is the least that the call takes, as some op has no checked rule."""
        return bool(self.unmodelled_ops)


def collectives(partitioned: PartitionedProgram, order: ExecutionOrder | None = None) -> tuple[Collective, ...]:
    """The program's collectives with their bytes; those that send nothing are left out.

    Args:
      partitioned: the program.
      order: `lower_for_backend` of it, if known.
    """
    return tuple(c for _, c in collectives_by_result(partitioned, order))


def collectives_by_result(
    partitioned: PartitionedProgram, order: ExecutionOrder | None = None
) -> Iterator[tuple[int, Collective]]:
    """`collectives`, each with the value that it makes."""
    groups = (order or lower_for_backend(partitioned)).groups
    sizes = collections.Counter(groups.values())
    for c in partitioned.communications:
        sent, together = communication_bytes(partitioned, c), sizes[groups[c.result]] if c.result in groups else 1
        kind, runs, operand = (
            ("collective-permute", c.matmul_permutes, c.shard) if c.matmul_permutes else (c.kind, 1, c.operand)
        )
        shape, dtype = partitioned.local_shape(operand), partitioned.graph.values[operand].dtype
        if sent:
            yield c.result, Collective(
                kind, c.axes, c.group_size, shape, dtype, sent // runs, c.trips * runs, c.where, c.cause, together,
                in_matmul=bool(c.matmul_permutes), purpose=c.purpose,
            )  # fmt: skip


def collective_s(c: Collective, hardware: Hardware, axes: Sequence[tuple[str, int]]) -> float:
    """Modelled seconds of all runs of a collective in one call.

    Args:
      c: the collective; combined ones share the latency. Those of a collective matmul go around a ring and all together have
        the latency of one gather or scatter.
      hardware: what it runs on.
      axes: the mesh, as (name, size) in row-major order.
    """
    link = link_over(hardware, axes, c.axes, c.group_size)
    if c.in_matmul:
        rate = link.bytes_s if sends_both_ways(c.group_size) else link.bytes_s / 2
        return (c.bytes_sent / rate + link.latency_s / c.group_size) * c.trips
    return (link.seconds(c.kind, c.bytes_sent) - link.latency_s + link.latency_s / c.merged) * c.trips


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
    schedule = schedule_ops(order)
    done = work(schedule.partitioned, hardware.chip, schedule.fusion)
    communication_s = sum(collective_s(c, hardware, axes) for c in sent)
    return Cost(
        done.flops,
        sum(c.total_bytes for c in sent),
        memory_of_schedule(schedule, donated, hardware.chip).estimate,
        done.seconds,
        communication_s,
        matrix_flops(schedule.partitioned),
        done.unmodelled_ops,
    )

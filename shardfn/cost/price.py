"""The price of a flow on hardware: work, bytes, memory, and a modelled time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from shardfn.cost.collectives import bytes_sent
from shardfn.cost.compute import work
from shardfn.cost.fusion import fuse
from shardfn.cost.hardware import Hardware, link_over
from shardfn.cost.memory import Memory, memory_of
from shardfn.cost.schedule import Order, early, merged
from shardfn.graph.model import Collective, Flow


@dataclasses.dataclass(frozen=True)
class Price:
    """What one call costs one device. Times are a model."""

    flops: float
    bytes_sent: int
    memory: Memory
    compute_s: float
    communication_s: float
    unpriced: tuple[str, ...] = ()
    """Ops without a rule for their work, as `name (file:line)`: charged for the bytes they move."""

    @property
    def time_s(self) -> float:
        """Compute and communication one after the other."""
        return self.compute_s + self.communication_s


def collectives(flow: Flow) -> tuple[Collective, ...]:
    """The flow's communications with their bytes; groups of one send nothing and are left out."""
    found = []
    for c in flow.communications:
        sent = bytes_sent(c.kind, c.group_size, flow.local_bytes(c.operand))
        if sent:
            shape, dtype = flow.local_shape(c.operand), flow.graph.values[c.operand].dtype
            found.append(Collective(c.kind, c.axes, c.group_size, shape, dtype, sent, c.trips, c.where, c.cause))
    return tuple(found)


def collective_s(c: Collective, hardware: Hardware, axes: Sequence[tuple[str, int]]) -> float:
    """Modelled seconds of all runs of a collective in one call: `Link.seconds` of the link over its axes.

    Args:
      c: the collective.
      hardware: what it runs on.
      axes: the grid, as (name, size) in row-major order.
    """
    return link_over(hardware, axes, c.axes, c.group_size).seconds(c.kind, c.bytes_sent) * c.trips


def price(flow: Flow, hardware: Hardware, donated: Collection[int] = ()) -> Price:
    """Price one call of a function.

    Args:
      flow: layouts of all values, and the collectives.
      hardware: what it runs on.
      donated: positions of arguments whose memory results take over.
    """
    sent = collectives(flow)
    axes = tuple(flow.axes.items())
    order = early(merged(flow))
    fusion = fuse(order.flow)
    done = work(order.flow, hardware.chip, fusion)
    communication_s = sum(collective_s(c, hardware, axes) for c in sent) - _merged_s(order, hardware)
    return Price(
        done.flops,
        sum(c.total_bytes for c in sent),
        memory_of(order, fusion, donated),
        done.seconds,
        communication_s,
        done.unpriced,
    )


def _merged_s(order: Order, hardware: Hardware) -> float:
    """Latency that is saved where several all-reduces run as one."""
    flow = order.flow
    axes = tuple(flow.axes.items())
    seen: set[int] = set()
    saved = 0.0
    for c in flow.communications:
        group = order.groups.get(c.result) if c.kind == "all-reduce" else None
        if group in seen:
            saved += link_over(hardware, axes, c.axes, c.group_size).latency_s * c.trips
        elif group is not None:
            seen.add(group)
    return saved

"""The price of a flow on a chip: work, bytes, memory, and a modelled time."""

from __future__ import annotations

import dataclasses

from shardfn.cost.collectives import bytes_sent
from shardfn.cost.compute import flops
from shardfn.cost.hardware import Chip
from shardfn.cost.memory import Memory, memory
from shardfn.graph.model import Collective, Flow


@dataclasses.dataclass(frozen=True)
class Price:
    """What one call costs one device. Times are a model: FLOPs over the chip's peak, bytes over its links."""

    flops: float
    bytes_sent: int
    memory: Memory
    compute_s: float
    communication_s: float

    @property
    def time_s(self) -> float:
        """Compute and communication one after the other."""
        return self.compute_s + self.communication_s


def collectives(flow: Flow) -> tuple[Collective, ...]:
    """The flow's communications with their bytes; groups of one send nothing and are left out."""
    found = []
    for c in flow.communications:
        local = flow.local_bytes(c.operand)
        sent = bytes_sent(c.kind, c.group_size, local)
        if sent:
            value = flow.graph.values[c.operand]
            found.append(
                Collective(
                    c.kind,
                    c.axes,
                    c.group_size,
                    flow.local_shape(c.operand),
                    value.dtype,
                    sent,
                    c.trips,
                    c.where,
                    c.cause,
                )
            )
    return tuple(found)


def collective_s(c: Collective, chip: Chip) -> float:
    """Modelled seconds of all runs of a collective in one call: its bytes over the link, and the latency of each run."""
    return c.total_bytes / chip.link_bytes_s + chip.latency_s * c.trips


def price(flow: Flow, chip: Chip) -> Price:
    """Price one call of a function."""
    sent = collectives(flow)
    work = flops(flow)
    total = sum(c.total_bytes for c in sent)
    return Price(work, total, memory(flow), work / chip.flops, sum(collective_s(c, chip) for c in sent))

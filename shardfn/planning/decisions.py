"""What a plan says of single arrays and ops: its decisions, what is held inside, and what else was weighed."""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec

from shardfn.cost.estimate import Cost
from shardfn.frontend.meshes import partition_spec
from shardfn.ir.model import Spec


@dataclasses.dataclass(frozen=True)
class Decision:
    """The layout of one array and where it comes from.

    `strategy` has the number of shards of each dimension, `spec` the mesh axes; `source` is `you`, `file`,
    `propagated` or `searched`. `runner_up` is the next best cut, and what it would cost more: by
    the search's estimate, op by op; in a report by the flow, as `Plan.why` has it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    strategy: tuple[int, ...]
    spec: Spec
    source: str
    reason: str = ""
    runner_up: str = ""
    local_bytes: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece that one device holds."""
        return tuple(n // c for n, c in zip(self.shape, self.strategy, strict=True))

    @property
    def partition_spec(self) -> PartitionSpec:
        """The layout as JAX writes it."""
        return partition_spec(self.spec)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """An op inside the function that is held to layouts: propagation alone would lay it out otherwise.

    `kind` is the op as the report names it, `number` which of that kind it is in program order; `operands` and
    `results` hold a layout, or None where it is left open.
    """

    kind: str
    number: int
    where: str
    operands: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]


@dataclasses.dataclass(frozen=True)
class DimensionGroup:
    """Dims of arguments and results that the function treats as one: `members` as `path.dim`."""

    name: str
    size: int
    members: tuple[str, ...]
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one call costs one device: modelled seconds, bytes sent, bytes at the peak, FLOPs."""

    time_s: float
    bytes_sent: int
    memory: int
    flops: float

    @classmethod
    def of(cls, cost: Cost) -> Figures:
        """The figures of a price."""
        return cls(cost.time_s, cost.bytes_sent, cost.memory.peak, cost.flops)

    def __sub__(self, other: Figures) -> Figures:
        return Figures(
            self.time_s - other.time_s,
            self.bytes_sent - other.bytes_sent,
            self.memory - other.memory,
            self.flops - other.flops,
        )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A whole plan that the search priced: its name, its grid, what it costs."""

    name: str
    axes: tuple[tuple[str, int], ...]
    figures: Figures


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another cut of one array, all else as planned: what the call would cost, and how much more than the plan."""

    strategy: tuple[int, ...]
    spec: Spec
    figures: Figures
    more: Figures


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """What other cuts of one array would cost, best first at the plan's level. Print it, or show it in a notebook.

    `planned` is the array's decision and `figures` the plan's; `left_out` are cuts that were not priced; `paths` are the
    arrays that are cut alike, where there are several.
    """

    planned: Decision
    figures: Figures
    rows: tuple[Alternative, ...]
    left_out: tuple[tuple[int, ...], ...] = ()
    paths: tuple[str, ...] = ()

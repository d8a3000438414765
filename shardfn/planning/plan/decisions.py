"""The parts of a plan: decisions on arrays, sharding constraints on ops, candidates and alternatives."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardfn.cost.estimate import Cost
from shardfn.frontend.meshes import partition_spec
from shardfn.frontend.paths import alike, few, layer, mirrored
from shardfn.ir.model import Spec, mesh_sizes_text
from shardfn.render.parts import Table
from shardfn.render.printed import PrintedTable
from shardfn.units import bytes_text, flops_text, signed, time_text

BY_DATA_PARALLEL = ": data parallel"
"""How the reason ends of an array whose entry is None."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The sharding of one array and where it comes from.

    Attributes:
      path: the array's path in the call.
      shape: its global shape.
      dtype: its dtype.
      strategy: the number of shards of each dimension.
      spec: the mesh axes of each dimension, major to minor.
      source: `you`, `file`, `mode` (a parallel mode), `propagated` or `searched`.
      reason: why it was chosen.
      runner_up: the next best strategy and its additional cost: by the search's estimate, or in a report by the partitioned
        program, as `Plan.why` evaluates it.
      local_bytes: bytes on one device.
      memory_kind: the memory that it stays in, such as "pinned_host"; None is the one that the devices compute from.
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
    memory_kind: str | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one shard."""
        return tuple(n // c for n, c in zip(self.shape, self.strategy, strict=True))

    @property
    def partition_spec(self) -> PartitionSpec:
        """The sharding as a `PartitionSpec`."""
        return partition_spec(self.spec)


def in_rows(decisions: Sequence[Decision], with_reasons: bool) -> list[list[Decision]]:
    """The decisions that are one row of a table each: layers differ in numbers, and an optimizer's moments follow a parameter.

    Args:
      decisions: on the arguments, or on the results.
      with_reasons: whether the rows say why.

    >>> shared = dict(shape=(4,), dtype="float32", strategy=(1,), spec=((),), source="you")
    >>> rows = in_rows([Decision("blocks/0/w", **shared), Decision("blocks/1/w", **shared)], with_reasons=True)
    >>> [[d.path for d in row] for row in rows]
    [['blocks/0/w', 'blocks/1/w']]
    """
    copies, every = mirrored([(d.path, d.shape) for d in decisions]), {d.path: d for d in decisions}

    def shared(d: Decision) -> Decision:
        followed = every.get(copies.get(d.path, d.path), d)
        source, reason = (
            followed.source if d.source == "mode" else d.source,
            layer(followed.reason) if with_reasons else "",
        )
        return dataclasses.replace(d, path=layer(followed.path), reason=reason, runner_up="", source=source)

    return alike(decisions, shared, least=2)


@dataclasses.dataclass(frozen=True)
class DimensionGroup:
    """Tied dimensions of arguments and results, which the function shards alike; `members` are `path.dim`."""

    name: str
    size: int
    members: tuple[str, ...]
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Figures:
    """The cost of one call on one device: modelled seconds, bytes sent, peak bytes, FLOPs."""

    time_s: float
    bytes_sent: int
    memory: int
    flops: float

    @classmethod
    def of(cls, cost: Cost) -> Figures:
        """The figures of a cost."""
        return cls(cost.time_s, cost.bytes_sent, cost.memory.peak, cost.flops)

    def __sub__(self, other: Figures) -> Figures:
        return Figures(*map(operator.sub, dataclasses.astuple(self), dataclasses.astuple(other)))

    def texts(self) -> tuple[str, str, str]:
        """Time, bytes sent and memory."""
        return time_text(self.time_s), bytes_text(self.bytes_sent), bytes_text(self.memory)

    def signed_texts(self) -> tuple[str, str, str]:
        """The texts of a difference.

        >>> Figures(1.5e-6, 2048, 0, 0.0).signed_texts()
        ('+1.5 µs', '+2 KiB', '0 B')
        """
        time, sent, memory = map(signed, self.texts())
        return time, sent, memory


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that the search evaluated: its name, its mesh axes, its cost."""

    name: str
    axes: tuple[tuple[str, int], ...]
    figures: Figures


class Candidates(PrintedTable, tuple[Candidate, ...]):
    """Candidates, the plan itself first. Print them for a table, or show them in a notebook.

    >>> figures = Figures(1e-3, 2048, 4096, 1e9)
    >>> print(Candidates([Candidate("this plan", (("a", 8),), figures)]))
    Candidates evaluated
    plan       mesh  time   sent  memory   compute
    ---------  ----  ----  -----  ------  --------
    this plan     8  1 ms  2 KiB   4 KiB  1 GFLOPs
    """

    __slots__ = ()

    def table(self) -> Table:
        """One row for each candidate."""
        rows = [(c.name, mesh_sizes_text(c.axes), *c.figures.texts(), flops_text(c.figures.flops)) for c in self]
        columns = ("plan", "mesh", "time", "sent", "memory", "compute")
        return Table("Candidates evaluated", columns, tuple(rows))

    def _html_title(self) -> str:
        return "Candidates evaluated"


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another sharding of one array, everything else as planned: the cost of the call, and how much `more` than the plan."""

    strategy: tuple[int, ...]
    spec: Spec
    figures: Figures
    more: Figures


@dataclasses.dataclass(frozen=True, repr=False)
class Alternatives(PrintedTable):
    """The costs of other shardings of one array, best first at the plan's level. Print it, or show it in a notebook.

    Attributes:
      planned: the array's decision.
      figures: the cost of the plan.
      rows: the evaluated shardings.
      left_out: strategies that were not evaluated.
      paths: the arrays that change together, if there are several.
    """

    planned: Decision
    figures: Figures
    rows: tuple[Alternative, ...]
    left_out: tuple[tuple[int, ...], ...] = ()
    paths: tuple[str, ...] = ()

    def table(self) -> Table:
        """One row for each sharding, the plan's own first."""
        d = self.planned
        name = f"{few(self.paths, 3)} ({len(self.paths)} arrays)" if self.paths else d.path
        rows = [(f"{d.strategy} as planned", str(d.partition_spec), *self.figures.texts(), "", "", "")]
        rows += [
            (str(row.strategy), str(partition_spec(row.spec)), *row.figures.texts(), *row.more.signed_texts())
            for row in self.rows
        ]
        notes = [] if self.rows else ["the mesh allows no other sharding of it"]
        if self.left_out:
            shown = ", ".join(map(str, self.left_out[:4])) + (" …" if len(self.left_out) > 4 else "")
            notes.append(
                f"{len(self.left_out)} more strategies were not evaluated: {shown}; raise `most` to evaluate more"
            )
        title = f"Other shardings of {name}, {d.dtype}{list(d.shape)} ({d.source}), everything else as planned"
        columns = ("strategy", "spec", "time", "sent", "memory", "more time", "more sent", "more memory")
        return Table(title, columns, tuple(rows), "; ".join(notes))

    __repr__ = PrintedTable.__str__

    def _html_title(self) -> str:
        return f"Other shardings of {few(self.paths, 3) or self.planned.path}"


@dataclasses.dataclass(frozen=True)
class Change:
    """One line of a diff: the property that differs, its text in both plans, and the paths of the arrays concerned."""

    what: str
    first: str
    second: str
    paths: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What differs, and of how many arrays."""
        return self.what + (f" ({len(self.paths)} arrays)" if len(self.paths) > 1 else "")

    def __str__(self) -> str:
        return f"{self.title}: {self.first} -> {self.second}"


class Changes(PrintedTable, tuple[Change, ...]):
    """What differs between two plans. Print it for a table, or show it in a notebook.

    >>> print(Changes([Change("peak memory per device", "4 KiB", "2 KiB")]))
    What differs
    what                    first plan  second plan
    ----------------------  ----------  -----------
    peak memory per device       4 KiB        2 KiB
    """

    __slots__ = ()

    def table(self) -> Table:
        """One row for each change."""
        rows = [(change.title, change.first, change.second) for change in self]
        return Table("What differs", ("what", "first plan", "second plan"), tuple(rows))

    def __str__(self) -> str:
        return super().__str__() if self else "the plans are equal"

    def __rich__(self) -> Any:
        return super().__rich__() if self else str(self)

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self else str(self)

    def _html_title(self) -> str:
        return "What differs between two plans"

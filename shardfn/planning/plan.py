"""A plan: the grid, the layout of every argument and result, why, and what it costs. Plain data, whoever made it."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.cost.devices.hardware import Hardware
from shardfn.cost.estimate import Cost
from shardfn.errors import DeviceError, StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.meshes import abstract_mesh, mesh_on, wired
from shardfn.frontend.options import LEVELS
from shardfn.frontend.paths import alike, few, listed
from shardfn.ir.model import Collective, Op, PartitionedProgram
from shardfn.layoutfile import plan_file
from shardfn.planning.decisions import Alternatives, Candidate, Constraint, Decision, DimensionGroup
from shardfn.planning.layout_rules import LayoutFile, LayoutRule

__all__ = [
    "Alternatives", "Candidate", "Change", "Constraint", "Decision", "DimensionGroup", "OpStrategy", "Plan", "Study", "diff",
    "op_strategies",
]  # fmt: skip


class Study(Protocol):
    """What a plan was made from: it prices other layouts, and plans again."""

    def why(self, plan: Plan, path: str, most: int | None) -> Alternatives: ...

    def what_if(self, entries: Mapping[str, Any]) -> Plan: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a function runs on a grid of devices. Printed it is a summary; `shardfn.explain` of it is the whole report.

    `axes` is the grid, row-major, last axis fastest; `order` says which device stands where if not 0, 1, 2, …
    """

    function: str
    hardware: Hardware
    level: int
    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] | None
    inputs: tuple[Decision, ...]
    outputs: tuple[Decision, ...]
    dimension_groups: tuple[DimensionGroup, ...]
    collectives: tuple[Collective, ...]
    cost: Cost
    policy: str
    diagnostics: tuple[str, ...]
    partitioned: PartitionedProgram = dataclasses.field(repr=False, compare=False)
    constraints: tuple[Constraint, ...] = ()
    """Ops inside that are held to a layout, because propagation alone would choose another."""
    gap: float | None = None
    """How far the plan may be from the optimum of the cost model, op by op, on the grids that were tried, at level 0 on its own
    grid: 0 is proved, None where the search does not know."""
    runner_up: str = ""
    """The next best of the whole plans that were priced, with what both cost; empty where there is none."""
    candidates: tuple[Candidate, ...] = ()
    """The whole plans that the search priced by their flows, this one first, the others best first."""
    activations: tuple[LayoutRule, ...] = ()
    """Rules of a layout file for what is tagged inside."""
    memory_limit: float | None = dataclasses.field(default=None, compare=False)
    """Bytes that one device may hold, as they were given; None is all that it has."""
    _study: Study | None = dataclasses.field(default=None, repr=False, compare=False)
    _verifier: Callable[[Plan], Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join(_summary(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # in a notebook, where the whole of it would be pages long

    def __getstate__(self) -> dict[str, Any]:
        """Without the devices, which are of this process, and without what it takes to plan again."""
        hardware = dataclasses.replace(self.hardware, devices=None, mesh=None)
        return {**self.__dict__, "_study": None, "_verifier": None, "hardware": hardware}

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def why(self, path: str, most: int | None = None) -> Alternatives:
        """What each other cut of one array, an argument or under `result` a result, would cost, all else as planned.

        Args:
          path: of the array, as the report has it; or a glob of arrays of one shape and one layout, which are then cut alike.
          most: how many cuts to price; as many as take a few seconds, 12 at most, if None.

        Raises:
          StrategyError: no array has that path, those of a glob have several shapes or layouts, or the plan comes from a
            file or another process.

        >>> import jax, shardfn
        >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
        >>> made = shardfn.shard(lambda x, w: x @ w, ((4, 1), (1, 1)), device="tpu-v5e:2x2").plan(x, w)
        >>> [row.strategy for row in made.why("x").rows]
        [(1, 4), (1, 1)]
        """
        return self._studied().why(self, path, most)

    def what_if(self, entries: Mapping[str, Any]) -> Plan:
        """The plan with other entries, by path glob as in `parameter_plan`; what was searched is searched again.

        Raises:
          ShardError: an entry that fits no array, or not its array.

        >>> import jax, shardfn
        >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
        >>> made = shardfn.shard(lambda x, w: x @ w, ((4, 1), (1, 1)), device="tpu-v5e:2x2").plan(x, w)
        >>> print(made.diff(made.what_if({"x": (2, 1), "w": (1, 2)}))[0])
        grid: a=4 -> a=2 x b=2
        """
        return dataclasses.replace(self._studied().what_if(entries), _verifier=self._verifier)

    def diff(self, other: Plan) -> tuple[Change, ...]:
        """What differs in another plan of the same function (`shardfn.diff`)."""
        return diff(self, other)

    def decided(self) -> LayoutFile:
        """What the plan decides, as a layout file has it: grid, layouts, what is held inside, level, device, and why."""
        return plan_file.layout_of_plan(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a layout file (TOML): `load_layout` reads it, `shard(f, layout=path)` uses it.

        A name that ends in `.json` gets MindSpore's strategy JSON: the layouts of the arguments, and each op's strategy.

        Raises:
          StrategyError: it cannot be written there.

        >>> import jax, shardfn, tempfile
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made.save(f"{folder}/layout.toml")
        ...     shardfn.load_layout(f"{folder}/layout.toml") == made
        True
        """
        plan_file.save_plan(self, path, op_strategies(self))

    def _studied(self) -> Study:
        if self._study is None:
            fail(StrategyError, f"the plan of `{self.function}` cannot be studied",
                 why="what it was made from is not here: it was pickled, or made by hand",
                 fix="plan the call again in this process")  # fmt: skip
        return self._study

    def verify(self) -> Any:
        """The `Report` with what XLA compiles beside what is predicted; for a TPU that is not here through libtpu.

        Raises:
          StrategyError: it does not fit as compiled, or the plan comes from a file or another process.
          DeviceError: there is no compiler for the target.
        """
        if self._verifier is None:
            fail(StrategyError, f"this plan of `{self.function}` has no function to compile",
                 why="it comes from a file or another process", fix="plan again: plan(f, *args)")  # fmt: skip
        return self._verifier(self)

    def decision(self, path: str) -> Decision:
        """The decision on an argument or, under `result`, on a result.

        Raises:
          StrategyError: no array has that path.
        """
        for d in (*self.inputs, *self.outputs):
            if d.path == path:
                return d
        fail(StrategyError, f"the plan of `{self.function}` has no array `{path}`",
             fix=f"use one of {', '.join(d.path for d in (*self.inputs, *self.outputs)[:20])}")  # fmt: skip

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The device mesh; an `AbstractMesh` where the devices are not here."""
        axes = self.axes or (("a", 1),)
        devices = self.hardware.devices
        if devices is None:
            return abstract_mesh(axes)
        given = self.hardware.mesh
        if given is not None and tuple(given.shape.items()) == axes:
            return mesh_on(given.devices, axes)
        if self.hardware.platform == "tpu" and self.order is None:
            return wired(devices, axes)
        order = self.order or range(len(devices))
        return mesh_on([devices[i] for i in order], axes)

    def sharding(self, path: str) -> NamedSharding:
        """The `NamedSharding` of one array."""
        return NamedSharding(self.mesh, self.decision(path).partition_spec)

    def with_devices(self, devices: Sequence[Any]) -> Plan:
        """The same plan on other devices, for instance one made for a target that is now here.

        Raises:
          DeviceError: another number of devices.
        """
        if len(devices) != self.hardware.count:
            fail(DeviceError, f"the plan is for {self.hardware.count} devices, not {len(devices)}",
                 fix="plan again for that number")  # fmt: skip
        return dataclasses.replace(self, hardware=dataclasses.replace(self.hardware, devices=tuple(devices), mesh=None))


@dataclasses.dataclass(frozen=True)
class OpStrategy:
    """How one op is cut: for each input and output the cuts of its dims (MindSpore's get_strategy)."""

    op: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    trips: int
    where: str


def op_strategies(plan: Plan) -> tuple[OpStrategy, ...]:
    """Every op of the function with its cuts, in program order."""
    partitioned = plan.partitioned

    def operands(op: Op) -> tuple[int, ...]:  # without what the body of a `shard_map` gives back
        return op.inputs[: -len(op.outputs)] if op.name == "shard_map" else op.inputs

    return tuple(
        OpStrategy(
            op.name,
            tuple(map(partitioned.shards, operands(op))),
            tuple(map(partitioned.shards, op.outputs)),
            op.trips,
            op.where,
        )
        for op in partitioned.graph.ops
    )


@dataclasses.dataclass(frozen=True)
class Change:
    """One line of a diff: what differs, in the first plan and in the second; `paths` are the arrays it speaks of."""

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


def diff(first: Plan, second: Plan) -> tuple[Change, ...]:
    """What differs between two plans of one function: grid, level, layouts, costs, proof, what is held inside.

    Arrays of one shape that differ alike are one change, and so are those whose cuts stay and only lie over the axes of
    another grid.

    Raises:
      StrategyError: the plans are of functions with other arguments.
    """
    for plan in (first, second):
        if not isinstance(plan, Plan):
            fail(StrategyTypeError, f"`diff` takes two plans, not {a(plan)}", where=f"diff(..., {plan!r:.60})",
                 why="it says what differs between two plans of one function",
                 fix="pass what shardfn.plan(...) or plan.what_if(...) gives")  # fmt: skip
    if [d.path for d in first.inputs] != [d.path for d in second.inputs]:
        fail(StrategyError, f"`{first.function}` and `{second.function}` have other arguments",
             fix="compare two plans of one function")  # fmt: skip
    changes = []

    def row(what: str, a: Any, b: Any) -> None:
        if a != b:
            changes.append(Change(what, str(a), str(b)))

    row("grid", _grid(first), _grid(second))
    row("level", first.level, second.level)
    changes += _laid_otherwise(first, second)
    if first.constraints != second.constraints:
        changes.append(Change("ops held to a layout inside", _held(first, second), _held(second, first)))
    row("modelled time, µs", _us(first), _us(second))
    row("bytes sent per device", f"{first.cost.bytes_sent:,}", f"{second.cost.bytes_sent:,}")
    row("peak memory per device", f"{first.cost.memory.peak:,}", f"{second.cost.memory.peak:,}")
    row("FLOPs per device", f"{first.cost.flops:,.0f}", f"{second.cost.flops:,.0f}")
    row("collectives", len(first.collectives), len(second.collectives))
    row("proof", proof(first.gap, first.level), proof(second.gap, second.level))
    return tuple(changes)


def _laid_otherwise(first: Plan, second: Plan) -> Iterator[Change]:
    """The arrays whose layouts differ."""
    sides = zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=False)
    differ = [(one, two) for one, two in sides if (one.strategy, one.spec) != (two.strategy, two.spec)]
    moved = [one.path for one, two in differ if one.strategy == two.strategy and first.axes != second.axes]
    rows = [
        (one.path, one.shape, f"{one.strategy} {one.partition_spec}", f"{two.strategy} {two.partition_spec}")
        for one, two in differ
        if one.strategy != two.strategy or first.axes == second.axes
    ]
    for same in alike(rows, lambda row: row[1:], least=2):
        paths = tuple(path for path, *_ in same)
        yield Change(few(paths, 2, 2), *same[0][2:], paths)
    if moved:
        yield Change(few(moved, 2, 2), "cut over the first grid", "cut as much over the second", tuple(moved))


def _grid(plan: Plan) -> str:
    return " x ".join(f"{n}={s}" for n, s in plan.axes) or "1 device"


def proof(gap: float | None, level: int) -> str:
    """How far a plan may be from the best under the cost model, in words: of what adds up over the ops, on the grids that were
    tried, at level 0 on the plan's own. The flow, by which a whole plan is priced, may find something better.

    >>> proof(0.032, 2), proof(None, 2)
    ('op by op, within 3.2% of the optimum on the grids tried', 'not known')
    """
    if gap is None:
        return "not known"
    where = "this grid" if level == 0 else "the grids tried"
    if gap > 5e-5:
        return f"op by op, within {max(gap, 0.001):.1%} of the optimum on {where}"
    return f"op by op, nothing costs less on {where}; by its flow something may"


def _us(plan: Plan) -> str:
    """Microseconds with four digits."""
    return f"{float(f'{plan.cost.time_s * 1e6:.4g}'):,.10g}"


MOST_KINDS, MOST_PLACES = 3, 2
"""Of ops that only one of two plans holds: kinds that are told, and lines of each."""


def _held(plan: Plan, other: Plan) -> str:
    """How many ops are held; those that the other plan leaves alone, by kind and line, and how many it holds otherwise."""
    theirs = {(c.kind, c.number): c for c in other.constraints}
    alone: dict[str, list[str]] = {}
    for c in plan.constraints:
        if (c.kind, c.number) not in theirs:
            alone.setdefault(c.kind, []).append(pathlib.PurePath(c.where).name)
    parts = []
    kinds = sorted(alone.items(), key=lambda item: -len(item[1]))
    for kind, lines in kinds[:MOST_KINDS]:
        known = list(dict.fromkeys(filter(None, lines)))
        parts.append(f"{len(lines)} {kind} ({listed(known, MOST_PLACES) if known else 'no line known'})")
    rest = sum(len(lines) for _, lines in kinds[MOST_KINDS:])
    parts += [f"{rest} of other kinds"] if rest else []
    changed = sum(c != theirs.get((c.kind, c.number), c) for c in plan.constraints)
    return (
        str(len(plan.constraints))
        + (f"; here only: {', '.join(parts)}" if parts else "")
        + (f"; {changed} in another layout than there" if changed else "")
    )


MOST_LINES = 10
"""Of arrays, in the text of a plan."""


MOST_SAID = 200
"""Characters of the first finding, in the text of a plan."""


def _summary(plan: Plan) -> list[str]:
    """A plan in less than 25 lines: the largest arrays stand for the rest."""
    cost = plan.cost
    lines = [
        f"{plan.function} on {plan.hardware.name or plan.hardware.chip.name}, "
        f"{plan.hardware.count} device{'s'[: plan.hardware.count != 1]}: grid {_grid(plan)}",
        f"level {plan.level}, {LEVELS[plan.level]}: {plan.policy}",
        f"per device and call: {_us(plan)} µs modelled, {cost.bytes_sent:,} B sent, "
        f"{cost.memory.peak:,} B at the peak, {cost.flops:,.0f} FLOPs",
    ]
    if any(d.source == "searched" for d in plan.inputs):
        lines.append(f"proof under the cost model: {proof(plan.gap, plan.level)}")
    for title, decisions in (("arguments", plan.inputs), ("results", plan.outputs)):
        most = MOST_LINES if title == "arguments" else 4
        groups: dict[tuple[Any, ...], list[Decision]] = {}
        for d in sorted(decisions, key=lambda d: -math.prod(d.shape)):
            groups.setdefault((d.shape, d.dtype, d.strategy, d.spec, d.source), []).append(d)
        rows = [
            (same[0].path + (f" and {len(same) - 1} more" if len(same) > 1 else ""), f"{d.dtype}{list(d.shape)}",
             str(d.strategy), d.source)
            for same in groups.values() for d in same[:1]
        ]  # fmt: skip
        widths = [max((len(row[i]) for row in rows[:most]), default=0) for i in range(4)]
        lines += [
            f"  {'  '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()}" for row in rows[:most]
        ]
        lines += [f"  … {len(rows) - most} more kinds of {title}"] if len(rows) > most else []
    if plan.constraints:
        lines.append(f"{len(plan.constraints)} ops are held to layouts inside")
    if plan.diagnostics:
        first, count = plan.diagnostics[0], len(plan.diagnostics)
        short = first if len(first) <= MOST_SAID else first[: MOST_SAID - 1].rstrip() + "…"
        lines.append(f"{count} findings, the first: {short}" if count > 1 else f"1 finding: {short}")
    lines.append("the whole report: shardfn.explain(plan)")
    return lines

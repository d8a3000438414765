"""A plan: the mesh, the sharding of every argument and result, the reasons, and the estimated cost. Plain data."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from jax import tree_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.cost.devices.hardware import Hardware
from shardfn.cost.estimate import Cost
from shardfn.errors import DeviceError, StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.meshes import abstract_mesh, mesh_on, wired
from shardfn.frontend.paths import alike, few, listed
from shardfn.ir.model import Collective, Op, PartitionedProgram
from shardfn.planning.decisions import Alternatives, Candidate, Constraint, Decision, DimensionGroup
from shardfn.planning.layout_rules import LayoutRule
from shardfn.planning.summary import mesh_text, plan_kind, proof, summary
from shardfn.units import bytes_text, flops_text, time_text

__all__ = [
    "Alternatives", "Candidate", "Change", "Constraint", "Decision", "DimensionGroup", "OpStrategy", "Plan", "Study", "diff",
    "op_strategies",
]  # fmt: skip


_P = ParamSpec("_P")
_R = TypeVar("_R")


class Study(Protocol):
    """The call of a plan, for what-if analysis: it evaluates other shardings and plans again."""

    def why(self, plan: Plan, path: str, most: int | None) -> Alternatives:
        """The costs of other shardings of one array (`Plan.why`)."""
        ...

    def what_if(self, entries: Mapping[str, Any]) -> Plan:
        """The plan with other entries (`Plan.what_if`)."""
        ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a function runs on a mesh of devices. `print` it for a summary; `shardfn.explain(plan)` is the full report.

    Attributes:
      function: the function's name.
      hardware: the devices.
      level: the objective's number: 0 communication, 1 memory, 2 time.
      axes: name and size of each mesh axis, row-major.
      order: the device at each position of the mesh; None is 0, 1, 2, …
      inputs: the sharding of each argument array.
      outputs: the sharding of each result array.
      dimension_groups: the tied dimensions of arguments and results.
      collectives: the collectives that XLA is predicted to insert.
      cost: the estimated cost of one call on one device: seconds, bytes, FLOPs.
      policy: how the plan was chosen.
      diagnostics: what costs more than necessary or may fail, with a fix.
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
    """The sharding constraints on ops for which propagation alone would choose another sharding."""
    gap: float | None = None
    """The relative gap to the optimum of the cost model summed over ops, on the meshes tried, at level 0 on the plan's own mesh.
    0 is proved optimal, None is unknown."""
    runner_up: str = ""
    """The second best candidate and the cost of both; empty if there is none."""
    candidates: tuple[Candidate, ...] = ()
    """The candidates whose partitioned programs the search evaluated, this plan first, the others best first."""
    activations: tuple[LayoutRule, ...] = ()
    """The rules of a layout file for tagged values."""
    memory_limit: float | None = dataclasses.field(default=None, compare=False)
    """Bytes per device, as the user gave them; None is the device's memory."""
    _study: Study | None = dataclasses.field(default=None, repr=False, compare=False)
    _verifier: Callable[[Plan], Any] | None = dataclasses.field(default=None, repr=False, compare=False)
    _call: Any = dataclasses.field(default=None, repr=False, compare=False)
    """The traced call (`posed_call.TracedCall`): the structure of arguments and results, and the workarounds."""

    def __str__(self) -> str:
        return summary(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # in a notebook, where the dataclass's repr would be pages long

    def __getstate__(self) -> dict[str, Any]:
        """The fields without what belongs to this process: the devices and the traced call."""
        hardware = dataclasses.replace(self.hardware, devices=None, mesh=None)
        return {**self.__dict__, "_study": None, "_verifier": None, "_call": None, "hardware": hardware}

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def why(self, path: str, most: int | None = None) -> Alternatives:
        """The costs of the other shardings of one array, everything else as planned.

        Args:
          path: the array's path, as the report has it; a result's path begins with `result`. Or a glob of arrays with one
            shape and one sharding, which are then changed together.
          most: the number of shardings to evaluate. None is as many as take a few seconds, at most 12.

        Returns:
          One row for each sharding, best first. Print it for a table.

        Raises:
          StrategyError: no array has that path, the arrays of a glob differ in shape or sharding, or the plan comes from a
            file or another process.

        >>> import jax, shardfn
        >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
        >>> made = shardfn.shard(lambda x, w: x @ w, ((4, 1), (1, 1)), device="tpu-v5e:2x2").plan(x, w)
        >>> [row.strategy for row in made.why("x").rows]
        [(1, 4), (1, 1)]
        """
        return self._studied().why(self, path, most)

    def what_if(self, entries: Mapping[str, Any]) -> Plan:
        """The plan of the same call with other entries; the other open shardings are searched again.

        Args:
          entries: entries by path or glob, as in `parameter_plan`; a path that begins with `result` names a result.

        Returns:
          The new plan. `plan.diff(new)` compares both.

        Raises:
          ShardError: an entry that fits no array, or not its array.

        >>> import jax, shardfn
        >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
        >>> made = shardfn.shard(lambda x, w: x @ w, ((4, 1), (1, 1)), device="tpu-v5e:2x2").plan(x, w)
        >>> print(made.diff(made.what_if({"x": (2, 1), "w": (1, 2)}))[0])
        mesh: a=4 -> a=2 x b=2
        """
        return dataclasses.replace(self._studied().what_if(entries), _verifier=self._verifier)

    def diff(self, other: Plan) -> tuple[Change, ...]:
        """What differs in another plan of the same function.

        Args:
          other: the other plan.

        Returns:
          One `Change` for each difference; print it for a line of text.

        Raises:
          StrategyError: the plans are of functions with other arguments.
          StrategyTypeError: `other` is no plan.
        """
        return diff(self, other)

    def _as_layout_file(self) -> Any:
        # Lazily, as in `save`: this package is below its serialisers.
        return importlib.import_module("shardfn.layoutfile.plan_file").layout_of_plan(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a layout file (TOML): `load_layout` reads it, `shard(f, layout=path)` uses it.

        Args:
          path: the file. A name that ends in `.json` gets MindSpore's strategy JSON, with the layouts of the arguments and
            the strategy of each op.

        Raises:
          StrategyError: the file cannot be written.

        >>> import jax, shardfn, tempfile
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made.save(f"{folder}/layout.toml")
        ...     shardfn.load_layout(f"{folder}/layout.toml") == made
        True
        """
        importlib.import_module("shardfn.layoutfile.files").save_plan(self, path)

    def draw(self, kind: str, path: str | None = None, width: float = 760) -> Any:
        """A picture of the plan (SVG): a notebook shows it, `str` is its text, `.save("plan.svg")` writes it.

        Args:
          kind: "mesh", "arrays", "memory", "time" or "search"; `shardfn.draw.draw_plan` describes them.
          path: the array that "mesh" shows; the largest argument by default.
          width: pixels.

        Raises:
          StrategyError: there is no such kind, array or width.

        >>> import jax, shardfn
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> print(made.draw("memory").title)
        Memory of abs on one device
        """
        return importlib.import_module("shardfn.draw").draw_plan(self, kind, path, width)

    def _studied(self) -> Study:
        if self._study is None:
            fail(StrategyError, f"the plan of `{self.function}` allows no what-if analysis",
                 why="its call is not here: the plan was pickled, or made by hand",
                 fix="plan the call again in this process")  # fmt: skip
        return self._study

    def verify(self) -> Any:
        """Compile the plan and compare it with the prediction. A TPU that is not here is compiled for by libtpu.

        Returns:
          The `Report`, with XLA's collectives, memory and FLOPs beside the predicted ones.

        Raises:
          StrategyError: the compiled program does not fit, or the plan comes from a file or another process.
          DeviceError: there is no compiler for the target.
        """
        if self._verifier is None:
            fail(StrategyError, f"this plan of `{self.function}` has no function to compile",
                 why="it comes from a file or another process", fix="plan again: plan(f, *args)")  # fmt: skip
        return self._verifier(self)

    def decision(self, path: str) -> Decision:
        """The sharding of one array, and why it was chosen.

        Args:
          path: the array's path, as the report has it; a result's path begins with `result`.

        Returns:
          The decision: strategy, spec, bytes per device, who chose it and why.

        Raises:
          StrategyError: no array has that path.
        """
        for d in (*self.inputs, *self.outputs):
            if d.path == path:
                return d
        fail(StrategyError, f"the plan of `{self.function}` has no array `{path}`",
             fix=f"use one of {', '.join(d.path for d in (*self.inputs, *self.outputs)[:20])}")  # fmt: skip

    @property
    def kind(self) -> str:
        """The textbook name of the plan, such as `FSDP over 8 devices`, or `mixed` and its parts where none fits."""
        return plan_kind(self)

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
        """The `NamedSharding` of one array.

        Args:
          path: the array's path, as the report has it; a result's path begins with `result`.

        Returns:
          The sharding, on `mesh`.

        Raises:
          StrategyError: no array has that path.
        """
        return NamedSharding(self.mesh, self.decision(path).partition_spec)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """The shardings of the arguments, for `jax.jit`, `jax.device_put` and Orbax.

        Returns:
          One pytree of `NamedSharding` for each argument that is not static. A module's arrays come first, by path.

        Raises:
          StrategyError: the plan comes from a file or another process.

        >>> import jax, shardfn
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> made.in_shardings[0].spec
        P...('a',)
        """
        function = self._traced_call().function
        dynamic = tuple(v for i, v in enumerate(function.shapes) if i not in function.static_argnums)
        return self._shardings(dynamic, self.inputs)

    @property
    def out_shardings(self) -> Any:
        """The shardings of the results, for `jax.jit`.

        Returns:
          A pytree of `NamedSharding` with the structure of the result; a module's changed arrays follow, by path.

        Raises:
          StrategyError: the plan comes from a file or another process.
        """
        return self._shardings(self._traced_call().traced.results, self.outputs)

    def apply(self, fn: Callable[_P, _R]) -> Callable[_P, _R]:
        """The function with the plan's sharding constraints and its workarounds for XLA bugs, and nothing else.

        Args:
          fn: the planned function, which traces to the program that was planned.

        Returns:
          A function to jit: `jax.jit(plan.apply(f), in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)`.

        Raises:
          StrategyError: the plan comes from a file or another process; when called, `fn` traces to another program.
        """
        return self._traced_call().constrained(self, fn)

    def _shardings(self, tree: Any, decisions: Sequence[Decision]) -> Any:
        mesh = self.mesh
        leaves = [NamedSharding(mesh, d.partition_spec) for d in decisions]
        return tree_util.tree_unflatten(tree_util.tree_structure(tree), leaves)

    def _traced_call(self) -> Any:
        if self._call is None:
            fail(StrategyError, f"the plan of `{self.function}` has no function",
                 why="it comes from a file or another process", fix="plan again: plan(f, *args)")  # fmt: skip
        return self._call

    def with_devices(self, devices: Sequence[Any]) -> Plan:
        """The same plan on other devices, such as a plan for a target that is now here.

        Args:
          devices: the devices, as many as the plan has, in the order of the mesh.

        Returns:
          The plan on these devices.

        Raises:
          DeviceError: another number of devices.
        """
        if len(devices) != self.hardware.count:
            fail(DeviceError, f"the plan is for {self.hardware.count} devices, not {len(devices)}",
                 fix="plan again for that number")  # fmt: skip
        return dataclasses.replace(self, hardware=dataclasses.replace(self.hardware, devices=tuple(devices), mesh=None))


@dataclasses.dataclass(frozen=True)
class OpStrategy:
    """The strategy of one op: the number of shards of each dimension of its operands and results."""

    op: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    trips: int
    where: str


def op_strategies(plan: Plan) -> tuple[OpStrategy, ...]:
    """The strategy of every op of the partitioned program, in program order."""
    partitioned = plan.partitioned

    def operands(op: Op) -> tuple[int, ...]:  # without the results of a `shard_map`'s body
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


def diff(first: Plan, second: Plan) -> tuple[Change, ...]:
    """What differs between two plans of one function: mesh, kind, level, shardings, constraints, costs, optimality.

    Arrays of one shape with the same difference are one change. So are arrays that keep their strategy on another mesh.

    Args:
      first: a plan.
      second: the plan to compare it with.

    Returns:
      The changes.

    Raises:
      StrategyError: the plans are of functions with other arguments.
      StrategyTypeError: one of them is no plan.
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

    row("mesh", mesh_text(first.axes), mesh_text(second.axes))
    row("kind", first.kind, second.kind)
    row("level", first.level, second.level)
    changes += _sharded_differently(first, second)
    if first.constraints != second.constraints:
        changes.append(
            Change("ops with sharding constraints", _constrained(first, second), _constrained(second, first))
        )
    row("modelled time", time_text(first.cost.time_s), time_text(second.cost.time_s))
    row("sent per device", bytes_text(first.cost.bytes_sent), bytes_text(second.cost.bytes_sent))
    row("peak memory per device", bytes_text(first.cost.memory.peak), bytes_text(second.cost.memory.peak))
    row("FLOPs per device", flops_text(first.cost.flops), flops_text(second.cost.flops))
    row("collectives", len(first.collectives), len(second.collectives))
    row("optimality", proof(first.gap, first.level), proof(second.gap, second.level))
    return tuple(changes)


def _sharded_differently(first: Plan, second: Plan) -> Iterator[Change]:
    """The arrays that are sharded differently."""
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
        yield Change(
            few(moved, 2, 2), "sharded over the first mesh", "sharded equally over the second mesh", tuple(moved)
        )


MOST_KINDS, MOST_PLACES = 3, 2
"""Of ops that only one of two plans constrains: how many kinds are named, and lines of each."""


def _constrained(plan: Plan, other: Plan) -> str:
    """How many ops have constraints, which of them have none in the other plan, and how many have others there."""
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
        + (f"; only here: {', '.join(parts)}" if parts else "")
        + (f"; {changed} sharded differently" if changed else "")
    )

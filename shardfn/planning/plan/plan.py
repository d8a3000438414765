"""A plan: the mesh, the sharding of every argument and result, the reasons, and the estimated cost. Plain data."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jax import tree_util
from jax.sharding import AbstractMesh, Mesh

from shardfn.cost.devices.hardware import Hardware
from shardfn.cost.estimate import Cost
from shardfn.cost.overlap import Overlap, overlap
from shardfn.cost.rehearsal import Rehearsal
from shardfn.errors import DeviceError, StrategyError, did_you_mean, fail
from shardfn.frontend.closed_over import ClosedOverArray
from shardfn.frontend.paths import listed, met, met_by_end, near, normal, unmirrored
from shardfn.frontend.static_leaves import without_static
from shardfn.ir.partitioned import Collective, PartitionedProgram
from shardfn.planning.call import AnsweredCall
from shardfn.planning.inside import PlacedDetour
from shardfn.planning.layout_rules import Constraint, LayoutFile, LayoutRule, WrittenAsLayout, fingerprint
from shardfn.planning.meshes import PlanMesh, device_mesh
from shardfn.planning.plan.decisions import Alternatives, Candidate, Changes, Decision, DimensionGroup
from shardfn.planning.plan.late import late
from shardfn.planning.plan.plan_kind import Layouts, kind_of, layouts_of


def _later(name: str) -> Any:
    """The function `name`, such as "planning.plan.summary.summary", of a module that imports this one."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"shardfn.{module}"), function)


@dataclasses.dataclass(frozen=True)
class Plan(WrittenAsLayout):
    """How a function runs on a mesh of devices. `print` it for a summary; `shardfn.explain(plan)` is the report.

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
    policy: str
    partitioned: PartitionedProgram = dataclasses.field(repr=False, compare=False)
    dimension_groups: tuple[DimensionGroup, ...] = late()
    collectives: tuple[Collective, ...] = late()
    cost: Cost = late()
    diagnostics: tuple[str, ...] = late()
    constraints: tuple[Constraint, ...] = ()
    """The sharding constraints on ops for which propagation alone would choose another sharding."""
    detours: tuple[PlacedDetour, ...] = ()
    """The arrays that are gathered and sliced, where all-to-alls are not allowed."""
    gap: float | None = late(None)
    """The part of the plan's cost that may lie above the least of the cost model summed over ops; None is unknown. It
    holds on the meshes tried."""
    runner_up: str = ""
    """The second best candidate and the cost of both; empty if there is none."""
    candidates: tuple[Candidate, ...] = late(())
    """The candidates whose partitioned programs the search evaluated, this plan first, the others best first."""
    style: str = ""
    """The style that the user asked for (`shardfn.search.generators.styles.STYLES`); empty for any."""
    entries: str = late("")
    """What is done inside the function otherwise than the user's entries say, or what a search inside would save."""
    activations: tuple[LayoutRule, ...] = ()
    """The rules of a layout file for tagged values."""
    memory_limit: float | None = dataclasses.field(default=None, compare=False)
    """Bytes per device, as the user gave them; None is the device's memory."""
    closed_over: tuple[ClosedOverArray, ...] = ()
    """The arrays that the function closes over, which every device holds in full."""
    rehearsal: Rehearsal | None = dataclasses.field(default=None, compare=False)
    """What one device measured of its part (`rehearse`); None before that."""
    _answered: AnsweredCall | None = dataclasses.field(default=None, repr=False, compare=False)
    """The call that the plan is for, with its search problem; None for a pickled plan."""

    def __str__(self) -> str:
        return _later("planning.plan.summary.summary")(self)

    @functools.cached_property
    def overlap(self) -> Overlap:
        """The modelled seconds of one call if no collective overlaps with compute, if those do that XLA is expected to overlap,
        and if all do. The search compares plans by the first.

        >>> import jax, shardfn
        >>> x, w = jax.ShapeDtypeStruct((1024, 512), "float32"), jax.ShapeDtypeStruct((512, 256), "float32")
        >>> rows = ((4, 1), (4, 1))  # the rows of w are gathered
        >>> made = shardfn.plan(lambda x, w: (x @ x.T, x @ w), x, w, in_strategy=rows, device="tpu-v5e:2x2")
        >>> times = made.overlap
        >>> times.none_s == made.cost.time_s, times.full_s <= times.expected_s < times.none_s
        (True, True)
        """
        return overlap(self.partitioned, self.hardware)

    def __repr__(self) -> str:
        return f"<Plan of {self.function}: {self.kind}, on {self.hardware.name or self.hardware.chip.name}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # in a notebook, where the dataclass's repr would be pages long

    refuses_calls: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a plan is no function. The error says what to write."""
        return _later("planning.plan.as_function.refuse_call")(self)

    def __getstate__(self) -> dict[str, Any]:
        """The fields without what belongs to this process: the devices and the traced call."""
        hardware = dataclasses.replace(self.hardware, devices=None, mesh=None)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "_answered": None, "hardware": hardware}

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
          StrategyError: no array has that path, the arrays of a glob differ in shape or sharding, or the plan was
            pickled.

        >>> import jax, shardfn
        >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
        >>> made = shardfn.shard(lambda x, w: x @ w, ((4, 1), (1, 1)), device="tpu-v5e:2x2").plan(x, w)
        >>> [row.strategy for row in made.why("x").rows]
        [(1, 1), (1, 4)]
        """
        return _later("planning.questions.what_if.why")(self, path, most)

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
        return _later("planning.questions.what_if.what_if")(self, entries)

    def at(self, level: str | int) -> Plan:
        """The plan of the same call for another objective: "communication", "memory" or "time", or 0, 1 or 2.

        What the first search evaluated is not evaluated again, and the best of both searches is taken.

        >>> import jax, shardfn
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), device="tpu-v5e:4")
        >>> made.at("memory").cost.memory.peak <= made.cost.memory.peak
        True
        """
        return _later("planning.questions.other_objective.at")(self, level)

    def diff(self, other: Plan) -> Changes:
        """What differs in another plan of the same function.

        Args:
          other: the other plan.

        Returns:
          One `Change` for each difference. Print them all for a table, or one for a line of text.

        Raises:
          StrategyError: the plans are of functions with other arguments.
          StrategyTypeError: `other` is no plan.
        """
        return _later("planning.plan.plan_diff.diff")(self, other)

    def _as_layout_file(self) -> LayoutFile:
        return _later("layoutfile.plan_file.layout_of_plan")(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a layout file (TOML): `load_layout` reads it, `shard(f, layout=path)` uses it.

        Args:
          path: the file. A name that ends in `.toml`, or has no ending, gets TOML. One that ends in `.json` or `.ckpt` gets
            MindSpore's strategy file (JSON, ProtoBuf), with the layouts of the arguments and the strategy of each op.
            `explain(plan).save("report.html")` writes a web page.

        Raises:
          LayoutFileError: the file cannot be written, or its name ends in something else.

        >>> import jax, shardfn, tempfile
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made.save(f"{folder}/layout.toml")
        ...     shardfn.load_layout(f"{folder}/layout.toml") == made
        True
        """
        _later("layoutfile.files.save_plan")(self, path)

    def draw(self, kind: str, path: str | None = None, width: float = 760) -> Any:
        """A picture of the plan (SVG): a notebook shows it, `str` is its text, `.save("plan.svg")` writes it.

        Args:
          kind: "mesh", "arrays", "memory", "time" or "search"; `shardfn.draw.draw_plan` describes them.
          path: the array that "mesh" shows; the largest argument by default.
          width: pixels.

        Raises:
          StrategyError: there is no such kind, array or width.
          StrategyTypeError: the kind is not a string, or the width not a number.

        >>> import jax, shardfn
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> print(made.draw("memory").title)
        Memory of abs on one device
        """
        return _later("draw.draw_plan")(self, kind, path, width)

    def verify(self) -> Any:
        """Compile the plan and compare it with the prediction. The target's own compiler is used for TPUs and GPUs not here.

        Returns:
          The `Report`, with XLA's collectives, memory and FLOPs beside the predicted ones.

        Raises:
          StrategyError: the compiled program does not fit, or the plan was pickled.
          DeviceError: there is no compiler for the target.
        """
        return _later("runtime.verify.verify")(self)

    def rehearse(self, steps: int = 10, time_limit: float = 600.0) -> Plan:
        """Measure compute and memory of the plan on one device, whatever number of them it is for. GPUs only.

        Another process compiles the program for all devices and runs the part of one, with random arguments. Collectives send
        nothing there: communication stays modelled. The process ends within the time limit. Where one shard does not fit, two
        programs with fewer layers are measured, and the figures scaled to all (`Rehearsal.layers`).

        Args:
          steps: the number of calls in a row in each of three rounds.
          time_limit: seconds, compilation included.

        Returns:
          The plan with its `rehearsal`: print that for tables. `explain` shows it, and `save` keeps it.

        Raises:
          NotAvailableError: the plan is for CPUs or TPUs, or JAX lacks the option.
          DeviceError: no such device is here, or it took too long.
          StrategyError: one shard does not fit, and has no layers that repeat; it does not compile; or the plan was pickled.

        >>> import jax, shardfn
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> made.rehearse()
        Traceback (most recent call last):
        shardfn.errors.NotAvailableError: one shard of a plan for tpu-v5e:4 cannot be rehearsed
        ...
        """
        return _later("runtime.rehearsal.rehearse.rehearse")(self, steps, time_limit)

    def check(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the planned function sharded and unsharded, and compare results and gradients leaf by leaf.

        Args:
          args: the positional arguments of the planned call. None is donated.
          kwargs: its keyword arguments.

        Returns:
          The `CheckResult`: print it for a table. A difference is no error; ask `agrees`.

        Raises:
          DeviceError: the devices of the plan are not here.
          NotAvailableError: they belong to several processes.
          StrategyError: other arguments than planned; a plan that was pickled, or that is of a module, whose arrays it lacks.

        >>> import jax.numpy as jnp, shardfn
        >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 2))
        >>> made = shardfn.plan(lambda x, w: x @ w, x, w, in_strategy=((4, 1), (1, 2)))
        >>> result = made.check(x, w)
        >>> result.agrees, [f"{row.what} {row.path}" for row in result.rows][:3]
        (True, ['result result', 'gradient x', 'gradient w'])
        """
        return _later("runtime.check.check_plan")(self, args, kwargs)

    def decision(self, path: str) -> Decision:
        """The sharding of one array, and why it was chosen.

        Args:
          path: the array's path, as the report has it, or an end of it that no other array has, but for a parameter's moments.
            A result's begins with `result`.

        Returns:
          The decision: strategy, spec, bytes per device, who chose it and why. For a replicated array that the search chose,
          `reason` says what sharding it would cost.

        Raises:
          StrategyError: no array has that path, or several have.
        """
        return _later("planning.questions.reasons.with_reason")(self, decision_of(self, path))

    @property
    def kind(self) -> str:
        """The textbook name of the plan, such as `FSDP over 8 devices`, or `mixed` and its parts where none fits."""
        return kind_of(self.layouts)

    @property
    def layouts(self) -> Layouts:
        """The facts about the plan that give it its `kind`."""
        return layouts_of(self.axes, self.inputs, self.outputs, self.dimension_groups, self.partitioned)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The device mesh; an `AbstractMesh` where the devices are not here."""
        return device_mesh(self.hardware, self.axes, self.order)

    @property
    def fingerprint(self) -> str:
        """What tells whether the function is still the one that was planned, whatever the sizes and devices; "" after pickling.

        Layout files hold it. A file that was made for the function before it changed gives a warning.
        """
        if self._answered is None:
            return ""
        arrays = [(d.path, d.shape) for d in self.inputs]
        return fingerprint(arrays, self._answered.posed.call.function.jaxpr)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """The shardings of the arguments, for `jax.jit`, `jax.device_put` and Orbax.

        Returns:
          One pytree of `NamedSharding` for each argument that is not static, in the order in which `apply` takes them. The
          arrays of a module come first, as a dict by path. Leaves that are no arrays are None, as `eqx.filter` leaves them.

        Raises:
          StrategyError: the plan was pickled.

        >>> import jax, shardfn
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> made.in_shardings[0].spec
        P...('a',)
        """
        return without_static(shardings_on(self, PlanMesh.of(self.mesh))[0])

    @property
    def out_shardings(self) -> Any:
        """The shardings of the results, for `jax.jit`.

        Returns:
          A pytree of `NamedSharding` with the structure of the result. For a module it is a pair: the result, and a dict of
          the arrays that the call changes, by path.

        Raises:
          StrategyError: the plan was pickled.
        """
        return without_static(shardings_on(self, PlanMesh.of(self.mesh))[1])

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the plan's sharding constraints and its workarounds for XLA bugs, and nothing else.

        Args:
          fn: the planned function, or another one that traces to the same program.

        Returns:
          A function to jit: `jax.jit(plan.apply(f), in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)`. It takes
          all arguments of the planned call by position, those that were given by keyword last. The function of a module
          takes a dict of the module's arrays first, which is its attribute `arrays`; in the place of a Flax NNX object it
          takes its arrays as nested dicts. Both return a pair: the result, and a dict of the arrays that the call changes.
          Its attribute `arguments` makes all these of the arguments of a call: `jitted(*applied.arguments(model, x))`.

        Raises:
          StrategyError: the plan was pickled; `fn` traces to another program, or (a StrategyTypeError) takes other arguments.
        """
        return _later("runtime.apply.apply_plan")(self, fn)

    def code(self) -> str:
        """The plan as plain JAX: a mesh, a `PartitionSpec` for each array, sharding constraints by source line, a `jax.jit`.

        The code needs nothing of shardfn. It names the planned function by its name, or `f`. An argument of a class that cannot
        be written as code is named, too. Of Flax NNX objects it is an `nnx.jit`. Comments at the top say what `apply` does and
        this code does not.

        Returns:
          Python, from the imports to `sharded = jax.jit(...)`. Constraints inside are named shardings: write
          `y = jax.lax.with_sharding_constraint(y, name)` at the line that the comment above each gives.

        Raises:
          StrategyError: the plan was pickled.

        >>> import jax, shardfn
        >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
        >>> print(*made.code().splitlines()[3:8], sep="\\n")
        <BLANKLINE>
        mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,) * 1)
        <BLANKLINE>
        in_specs = (P("a"),)
        out_specs = P("a")
        """
        return _later("planning.plan.plain_jax.code")(self)

    def with_devices(self, devices: Sequence[Any]) -> Plan:
        """The same plan on other devices, such as a plan for a target that is now here.

        Args:
          devices: the devices, as many as the plan has, in the order of the mesh.

        Raises:
          DeviceError: another number of devices.
        """
        if len(devices) != self.hardware.count:
            fail(DeviceError, f"the plan is for {self.hardware.count} devices, not {len(devices)}",
                 fix="plan again for that number")  # fmt: skip
        return dataclasses.replace(self, hardware=dataclasses.replace(self.hardware, devices=tuple(devices), mesh=None))


def decision_of(plan: Plan, path: str, asked: str = "decision") -> Decision:
    """The decision on the array of a path; `asked` is the method that the user called.

    Raises:
      StrategyError: no array has that path, or several have.
    """
    every = (*plan.inputs, *plan.outputs)
    found = [d for d in every if d.path == path]
    for side in (plan.inputs, plan.outputs):
        paths = [normal(d.path) for d in side]
        hits = (met(path, paths)[0] or met_by_end(path, paths)) if isinstance(path, str) and path and not found else ()
        found = found or [side[i] for i in unmirrored([*hits], [(d.path, d.shape) for d in side])]
    if len(found) == 1:
        return found[0]
    names = [d.path for d in every]
    what = f"`{path}` names {len(found)} arrays" if found else f"the plan of `{plan.function}` has no array `{path}`"
    close = [d.path for d in found][:3] or near(str(path), names[: len(plan.inputs)]) or near(str(path), names)
    fail(StrategyError, what, where=f"{asked}({path!r})", why=f"the arrays are {listed([d.path for d in found] or names)}",
         fix=did_you_mean(close) or "use one of these paths")  # fmt: skip


def argument_names(plan: Plan) -> tuple[str, ...]:
    """The names of the arguments; of a pickled plan the first parts of its paths."""
    if plan._answered is None:
        return tuple(dict.fromkeys(d.path.partition("/")[0] for d in plan.inputs))
    return plan._answered.posed.call.function.call.names


def answered_call(plan: Plan) -> AnsweredCall:
    """The call that a plan is for.

    Raises:
      StrategyError: the plan was pickled.
    """
    if plan._answered is None:
        fail(StrategyError, f"the plan of `{plan.function}` has no function",
             why="it was pickled", fix="plan again, without a search: plan(f, *args, layout=plan, device=...)")  # fmt: skip
    return plan._answered


def shardings_on(plan: Plan, mesh: PlanMesh) -> tuple[tuple[Any, ...], Any]:
    """`in_shardings` and `out_shardings` of a plan on a mesh of its devices."""
    call = answered_call(plan).posed.call

    def like(tree: Any, decisions: Sequence[Decision]) -> Any:
        found = [mesh.sharding(d.spec, d.memory_kind) for d in decisions]
        return tree_util.tree_unflatten(tree_util.tree_structure(tree), found)

    return like(call.function.call.dynamic, plan.inputs), like(call.traced.results, plan.outputs)

"""The callable that `shard` returns: it plans on the first call of a kind, and hands later ones to `jax.jit`.

A call is of another kind if its shapes, dtypes, structure, keywords or static values differ, or what is no array of the
object it is a method of, or the parallel context, or JAX's x64 switch. As long as there was one kind, of positional
arguments only, of a function (not of a module) whose arrays lay where they belong, a call costs what `jit` costs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
import math
import pathlib
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardfn import compiled as compiled_module
from shardfn import context, finalists, planfile, search
from shardfn.algo import algorithm_of, idle
from shardfn.amounts import bytes_of
from shardfn.apply import Grid, apply, finest, has_other_grids, lies_elsewhere, moved, on_paper, shardings, whole
from shardfn.callee import Callee, Slot, bind, describe, split
from shardfn.cost import hardware as hardware_
from shardfn.cost.hardware import Hardware
from shardfn.cuts import check_all
from shardfn.errors import ContextError, DeviceError, Problem, StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.given import mesh_of
from shardfn.guard import convolution_finding, whole_convolutions, wrong_convolutions
from shardfn.layoutfile import LayoutFile, read, with_layout
from shardfn.layoutrules import axes_on
from shardfn.make import Wishes, make_plan
from shardfn.plan import Plan, op_strategies
from shardfn.progress import progress
from shardfn.report import Report, make_report, save_graphs
from shardfn.search.problem import Answer, Candidate, Search, objective
from shardfn.search.problem import Problem as Question
from shardfn.strategy import (
    AUTO,
    UNKNOWN,
    Argument,
    Leaf,
    apply_parameter_plan,
    leaves_of,
    match,
    shape_of,
    short,
)
from shardfn.tags import held_tags, tags_of
from shardfn.trace import Traced, shaped, trace
from shardfn.verify import Verifier


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for, as given to `shard`."""

    in_strategy: Any = None
    out_strategy: Any = None
    device: Any = None
    level: int = 0
    parameter_plan: Any = None
    search_mode: str | None = None
    memory_limit: int | float | str | None = None
    finalists: int = 0
    time_limit: float = 60.0
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    layout: Any = None
    compiler_options: Any = None


class OtherCall(Exception):
    """Raised while tracing: the jitted function at hand was planned for other shapes or static values."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One plan, compiled for the calls it fits."""

    plan: Plan
    slots: tuple[Slot, ...]
    jitted: Callable[..., Any]
    nested: Callable[..., Any]
    """The same for a call inside a transformation: on the finest grid, which all plans on these devices share, because
    `jit` cannot name a layout of its results that its first grid has no axes for."""
    targets: tuple[NamedSharding, ...]
    stateful: bool


@dataclasses.dataclass(frozen=True)
class _Laid:
    """A plan, the function to apply it to on a grid, and that function traced."""

    plan: Plan
    on: Callable[[Grid], Callable[..., Any]]
    traced: Traced


class ShardedFunction:
    """What `shard` returns: call it like the function. `plan`, `explain` and `lower` say what a call would do."""

    layout_alone = False
    """Whether an array of which the layout file does not speak is a problem."""

    def __init__(self, fn: Callable[..., Any], options: Options):
        self.fn = fn
        self.options = options
        self.callee: Callee = describe(fn)
        functools.update_wrapper(self, fn, updated=())
        self._entries: dict[Any, Entry] = {}
        self._fast: Callable[..., Any] = _never
        self._fast_context: Any = None
        self._checked = False
        self._moves = False

    def __repr__(self) -> str:
        given = ", ".join(
            f"{f.name}={getattr(self.options, f.name)!r}"
            for f in dataclasses.fields(Options)
            if getattr(self.options, f.name) != f.default
        )
        return f"shard({self.callee.name}{', ' if given else ''}{given})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a decorated method: bound to the instance, whose arrays become arguments where its kind is known."""
        if instance is None:
            return self
        kept = getattr(instance, "__dict__", {}).get(METHODS, {})
        found = kept.get(self)
        if found is not None and found.fn.__self__ is instance:  # and not that of what the instance is a copy of
            return found
        found = ShardedFunction(types.MethodType(self.fn, instance), self.options)
        if found.callee.adapter is not None:
            found._entries = self._entries  # `nnx.grad` makes a new instance for every call
        elif hasattr(instance, "__dict__"):  # its arrays are constants of what is compiled: that goes when it goes
            own = {method: bound for method, bound in kept.items() if bound.fn.__self__ is instance}
            instance.__dict__[METHODS] = Methods({**own, self: found})
        return found

    def __reduce__(self) -> Any:
        return ShardedFunction, (self.fn, self.options)

    def for_owner(self, owner: Any) -> ShardedFunction:
        """The same method of another instance, such as a copy made by `nnx.grad`; the plans are shared."""
        other = ShardedFunction(types.MethodType(self.fn.__func__, owner), self.options)  # type: ignore[attr-defined]
        other._entries = self._entries
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The shapes need no check here: `jit` looks them up, and traces for new ones, which raises OtherCall.
        if (
            not kwargs
            and context.current() is self._fast_context
            and (not self._checked or _CONCRETE.issuperset(map(type, tree_util.tree_leaves(args))))
        ):
            try:
                return self._fast(*args)
            except (OtherCall, ValueError):
                pass
        return self._call(args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan of a call; arguments may be shapes.

        Raises:
          ShardError: all that is wrong with the call.
        """
        return self._entry(args, kwargs)[0].plan

    def explain(self, *args: Any, compiled: bool = False, **kwargs: Any) -> Report:
        """The report of a call; with `compiled`, beside what XLA made of it."""
        entry, values = self._entry(args, kwargs)
        if compiled and not entry.plan.hardware.is_here:
            fail(DeviceError, f"nothing can be compiled for {entry.plan.hardware.name}, which is not here",
                 where="compiled = True", why="XLA compiles for the devices of this machine",
                 fix="leave `compiled` out, or give a device of this machine")  # fmt: skip
        executable = self._lower(entry, values).compile() if compiled else None
        return make_report(entry.plan, executable, self._arrivals(entry, values))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the sharded function; its `.compile()` is JAX's own."""
        return self._lower(*self._entry(args, kwargs))

    # ---- inside

    def _lower(self, entry: Entry, values: list[Any]) -> Any:
        jitted: Any = entry.jitted
        if entry.plan.hardware.is_here:
            return jitted.lower(*_shapes(values, entry.slots, entry.stateful))
        traced = jitted.trace(*_shapes(values, entry.slots, entry.stateful))
        return traced.lower(lowering_platforms=(entry.plan.hardware.platform,))

    def _arrivals(self, entry: Entry, values: list[Any]) -> tuple[str, ...]:
        leaves = tree_util.tree_leaves(_dynamic(values, entry.slots, entry.stateful))
        return tuple(
            f"{d.path} lies elsewhere ({leaf.sharding}) and is moved on arrival: {d.local_bytes:,} bytes per device"
            for d, leaf, target in zip(entry.plan.inputs, leaves, entry.targets, strict=True)
            if lies_elsewhere(leaf, target) and leaf.committed
        )

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if manual := jax.sharding.get_abstract_mesh().manual_axes:
            fail(StrategyError, f"`{self.callee.name}` is called inside a shard_map",
                 where=f"the axes {', '.join(map(str, manual))} of the shard_map",
                 why="there every device already works on its own piece",
                 fix="call it outside, and the unsharded function inside: it is the `.fn` of what `shard` returns")  # fmt: skip
        known = len(self._entries)
        entry, values = self._entry(args, kwargs)
        if not entry.plan.hardware.is_here:
            fail(StrategyError, f"`{self.callee.name}` is planned for {entry.plan.hardware.name}, which is not here",
                 where=f"device = {self.options.device!r}", why="a target can be planned for, and not run on",
                 fix="use .plan(...) or .explain(...), or give a device of this machine to run on")  # fmt: skip
        leaves, treedef = tree_util.tree_flatten(_dynamic(values, entry.slots, entry.stateful))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            fail(StrategyTypeError, f"`{self.callee.name}` is called with a shape in the place of an array",
                 where=", ".join(d.path for d, leaf in zip(entry.plan.inputs, leaves, strict=True)
                                 if isinstance(leaf, jax.ShapeDtypeStruct)),
                 why="a jax.ShapeDtypeStruct holds no data: it can be planned for",
                 fix="pass an array, or use .plan(...), .explain(...) or .lower(...)")  # fmt: skip
        with progress(f"compiling {self.callee.name}", len(self._entries) > known):
            if any(isinstance(leaf, Tracer) for leaf in leaves):
                return self._finish(entry, self._run_nested(entry, values, leaves, treedef))
            _CONCRETE.update(map(type, leaves))
            self._moves = any(map(lies_elsewhere, leaves, entry.targets))  # of a first state, not of the next
            result = entry.jitted(*_replaced(values, entry, treedef, moved(leaves, entry.targets)))
        simple = not entry.stateful and not any(s.keyword for s in entry.slots)
        if simple and len(self._entries) == 1 and not self._moves:
            self._checked = entry.plan.hardware.count > 1
            self._fast, self._fast_context = entry.jitted, context.current()
        else:
            self._fast, self._fast_context = _never, None
        return self._finish(entry, result)

    def _run_nested(self, entry: Entry, values: list[Any], leaves: list[Any], treedef: Any) -> Any:
        try:
            return entry.nested(*values)
        except ValueError as error:
            # An eager derivative carries concrete arrays, which may be committed to another layout.
            if "does not match the sharding" not in str(error) and "incompatible" not in str(error):
                raise
        try:
            put = [jax.device_put(leaf, target) for leaf, target in zip(leaves, entry.targets, strict=True)]
        except ValueError as error:  # a batched one has another shape than its tracer tells
            fail(StrategyError, f"an array in a transformation of `{self.callee.name}` is committed to another layout",
                 why=str(error).split("\n")[0],
                 fix="leave it uncommitted, or move it with jax.device_put before the transformation")  # fmt: skip
        return entry.nested(*_replaced(values, entry, treedef, put))

    def _finish(self, entry: Entry, result: Any) -> Any:
        if not entry.stateful:
            return result
        result, changed = result
        self.callee.write(changed)
        return result

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, list[Any]]:
        """The entry of a call, made if it is the first of its kind; and the values as its jitted function takes them."""
        slots, values = bind(
            self.callee.signature, args, kwargs,
            frozenset(self.options.static_argnums), frozenset(self.options.static_argnames),
        )  # fmt: skip
        state = self.callee.read()
        if self.callee.adapter is not None:
            values = [state, *values]
        stateful = self.callee.adapter is not None
        dynamic = _dynamic(values, slots, stateful)
        leaves, treedef = tree_util.tree_flatten(dynamic)
        statics = tuple(v for v, s in zip(values[stateful:], slots, strict=True) if s.is_static)
        current = context.current()
        key = (slots, treedef, tuple(map(_signature, leaves)), statics, self.callee.fixed(), current,
               jax.dtypes.canonicalize_dtype(float))  # fmt: skip
        try:
            entry = self._entries.get(key)
        except TypeError:
            raise StrategyTypeError([_unhashable(s.name, v) for s, v in zip(slots, values[stateful:], strict=True)
                                     if s.is_static and not _hashable(v)]) from None  # fmt: skip
        if entry is None:
            with progress(f"planning {self.callee.name}"):
                entry = self._entries[key] = self._make(slots, values, stateful, current)
        return entry, values

    def _make(self, slots: tuple[Slot, ...], values: list[Any], stateful: bool, current: Any) -> Entry:
        options = self.options
        problems: list[Problem] = []
        inputs = self._input_leaves(slots, values, stateful, current, problems)
        hardware = self._hardware(inputs, current, problems)
        layout = self._layout(current)
        strict = options.layout is not None  # the context's is for every function of the program
        if layout is not None:
            names = [s.name for s in slots if not s.is_static]
            inputs = with_layout(
                layout, inputs, hardware.count, problems, given=names, complete=self.layout_alone, strict=strict
            )
        if any(leaf.dtype == UNKNOWN for leaf in inputs):  # it cannot be traced
            check_all(inputs, hardware.count, problems)
            raise_problems(problems)
        statics = tuple(i + stateful for i, s in enumerate(slots) if s.is_static)
        shapes = _shapes(values, slots, stateful)
        callee = self.callee.frozen(shapes[0]) if stateful else self.callee
        expected = _call_signature(shapes, statics)

        def pure(*flat: Any) -> Any:
            if _call_signature(flat, statics) != expected:
                raise OtherCall
            state, rest = (flat[0], flat[1:]) if stateful else ({}, flat)
            args, kwargs = split(slots, rest)
            result, changed = callee.call(state, args, kwargs)
            return (result, changed) if stateful else result

        _dress(pure, self.callee, ["self"] * stateful + [s.name for s in slots])
        traced = trace(pure, shapes, statics, hardware.platform)
        on: Callable[[Grid], Callable[..., Any]] = lambda grid: pure  # noqa: E731
        if layout is not None and layout.activations:
            axes = axes_on(layout, hardware.count, [])
            tags = tags_of(layout, traced.jaxpr, axes, hardware.count, problems, strict)
            if tags and hardware.count > 1 and not problems:
                on = lambda grid: held_tags(pure, tags, axes, grid.mesh, grid.parts, statics)  # noqa: E731
                traced = trace(on(on_paper(axes)), shapes, statics, hardware.platform)
        result, changed = traced.results if stateful else (traced.results, {})
        outputs = self._output_leaves(result, current, hardware, problems)
        ends = [*outputs, *_changed_leaves(changed)]
        if layout is not None:
            ends = with_layout(layout, ends, hardware.count, problems, section="results", strict=strict)
        donated = tuple(
            i + stateful
            for i, s in enumerate(slots)
            if not s.is_static and (s.declared in options.donate_argnums or s.name in options.donate_argnames)
        )
        state_paths = {leaf.path: i for i, leaf in enumerate(inputs)}
        plan_of = functools.partial(
            make_plan, self.callee.name, inputs, ends, hardware=hardware, layout=layout,
            level=options.level or (layout and layout.level) or 0, problems=problems,
            donated=_leaf_positions(shapes, statics, donated),
            wishes=_wishes(options, current), again=search.select(options.search_mode or current.search_mode),
            same_as={
                **_replacements(_outer(result), _dynamic(shapes, slots, stateful)),
                **{len(outputs) + i: state_paths[p] for i, p in enumerate(sorted(changed))},
            },
        )  # fmt: skip

        def laid(find: Search, is_chosen: bool = False) -> _Laid:
            asked: list[tuple[Question, Answer]] = []
            made = plan_of(traced, search=lambda problem: asked.append((problem, find(problem))) or asked[-1][1])
            if not (wrong := wrong_convolutions(made.flow)):
                return _Laid(made, on, traced)
            mended = lambda grid: whole_convolutions(on(grid), grid.mesh, statics)  # noqa: E731
            again = trace(mended(whole(made)), shapes, statics, hardware.platform)
            problem, first = asked[0]
            kept = dataclasses.replace(first, pins={})  # its ops have other numbers there
            made = plan_of(again, search=lambda problem: better(problem, kept, find(problem), first))
            sound = None if is_chosen else unmended(problem, first)
            if sound and objective(sound.price, problem) < objective(made.price, problem):
                why = "convolutions as XLA computes them rightly"
                return laid(lambda _: finalists.chosen(first, sound, why), is_chosen=True)
            made = dataclasses.replace(made, findings=(*made.findings, convolution_finding(wrong)))
            return _Laid(made, mended, again)

        def jit(found: _Laid, grid: Grid, nested: bool = False) -> Callable[..., Any]:
            return apply(found.plan, found.on(grid), shapes, found.traced.results, statics, donated, grid, nested,
                         options.compiler_options)  # fmt: skip

        def here(found: _Laid) -> Callable[..., Any]:
            return jit(
                found, finest(found.plan) if has_other_grids(found.plan, found.traced.grids) else whole(found.plan)
            )

        find = search.select(options.search_mode or current.search_mode)
        asked: list[tuple[Question, Answer]] = []
        found = laid(lambda problem: asked.append((problem, find(problem))) or asked[-1][1])
        if options.finalists > 1 and asked[0][0].is_open:
            found = self._best_compiled(*asked[0], find, str(traced.module), laid, lambda one: Verifier(
                lambda plan: here(dataclasses.replace(one, plan=plan)), tuple(shapes)).compiled(one.plan, True))  # fmt: skip
        made = found.plan
        if told := idle(made, algorithm_of(current)):
            warnings.warn(told, stacklevel=_outside())
            made = dataclasses.replace(made, findings=(*made.findings, told))
        again = Verifier(lambda plan: here(dataclasses.replace(found, plan=plan)), tuple(shapes))
        made = dataclasses.replace(made, verifier=again)
        nested, jitted = jit(found, finest(made), nested=True), here(found)
        if (file := current.strategy_ckpt_config.save_file) and jax.process_index() == 0:
            planfile.save(made, file, op_strategies(made), current.strategy_ckpt_config.only_trainable_params)
        if current.save_graphs:
            save_graphs(made, current.save_graphs_path)
        return Entry(made, slots, jitted, nested, tuple(shardings(made.inputs, whole(made))), stateful)

    def _best_compiled(
        self, problem: Question, answer: Answer, find: Search, program: str, laid: Callable[[Search, bool], _Laid],
        compiled: Callable[[_Laid], Any],
    ) -> _Laid:  # fmt: skip
        levels = [find(dataclasses.replace(problem, level=other)) for other in (0, 1, 2) if other != problem.level]
        if self.options.memory_limit is not None:  # what sends least without it may fit in pieces
            levels.append(find(dataclasses.replace(problem, level=0, memory_limit=math.inf)))
        entered = finalists.answers(problem, answer, levels, self.options.finalists)
        found = []
        for name, one in entered:
            with progress(f"compiling {self.callee.name}: {name}"):
                made = finalists.compiled_once(
                    program, problem, one, lambda one=one: compiled_module.read(compiled(laid(lambda _: one, True)))
                )
            found.append(finalists.judged(name, problem, one, made))
        at, told = finalists.best(found, problem.memory_limit)
        if self.options.memory_limit is not None:
            finalists.check(found[at], len(found), problem.memory_limit)
        winner = laid(lambda _: entered[at][1], True)
        plan = dataclasses.replace(winner.plan, findings=(*winner.plan.findings, told))
        return dataclasses.replace(winner, plan=plan)

    def _input_leaves(
        self, slots: tuple[Slot, ...], values: list[Any], stateful: bool, current: Any, problems: list[Problem]
    ) -> list[Leaf]:
        strategy = self.options.in_strategy
        positional: list[Argument] = []
        declared: list[int] = []
        late: list[Argument] = []
        for slot, value in zip(slots, values[stateful:], strict=True):
            if slot.is_static:
                continue
            if slot.declared is None:
                late.append(Argument(slot.name, f"argument `{slot.name}`", value))
            else:
                positional.append(Argument(slot.name, f"argument {len(positional)} `{slot.name}`", value))
                declared.append(slot.declared)
        name = "in_strategy"
        if strategy is None and isinstance(current.dataset_strategy, tuple) and current.is_set("dataset_strategy"):
            name = "dataset_strategy"
            strategy = (*current.dataset_strategy, *[AUTO] * (len(positional) - len(current.dataset_strategy)))
        if type(strategy) is tuple and len(strategy) != len(positional):
            strategy = _with_defaults(strategy, self.callee, self.options, declared)
        leaves = []
        if stateful:
            for path, value in sorted(values[0].items()):
                leaves.append(Leaf(path, f"`{path}` of {self.callee.name}", *(shape_of(value) or ((), UNKNOWN))))
        leaves += match(positional, strategy, name, problems)
        for argument in late:
            leaves += leaves_of(argument, problems)
        return apply_parameter_plan(leaves, self.options.parameter_plan, problems)

    def _layout(self, current: Any) -> LayoutFile | None:
        if self.options.layout is not None:
            return read(self.options.layout)
        file = current.strategy_ckpt_config.load_file
        return read(pathlib.Path(file)) if file else None

    def _hardware(self, inputs: Sequence[Leaf], current: Any, problems: list[Problem]) -> Hardware:
        if current.is_set("parallel_mode") and current.parallel_mode in ("data_parallel", "hybrid_parallel"):
            fail(ContextError, f"`shard` has no meaning under parallel_mode={current.parallel_mode!r}",
                 where=f"parallel_mode = {current.parallel_mode!r}", why="that mode cuts no operator",
                 fix='set_auto_parallel_context(parallel_mode="semi_auto_parallel"), or leave parallel_mode unset')  # fmt: skip
        if current.read("pipeline_stages") > 1 and current.search_mode == "dynamic_programming":
            fail(ContextError, "a pipeline does not go with the search dynamic_programming",
                 where="pipeline_stages > 1, search_mode = 'dynamic_programming'", why="as in MindSpore",
                 fix="use another search_mode, or reset_auto_parallel_context()")  # fmt: skip
        device = self.options.device
        mesh = mesh_of([*(leaf.entry for leaf in inputs), *tree_util.tree_leaves(self.options.out_strategy)])
        if device is None and mesh is not None:
            device = mesh
        count = 1 if current.is_set("parallel_mode") and current.parallel_mode == "stand_alone" else current.device_num
        try:
            found = hardware_.resolve(device, count=count, default=current.device_target)
        except DeviceError as error:  # beside it, what is wrong whatever the device is
            check_all(inputs, 1, problems)
            raise_problems([*error.problems, *problems] if problems else ())
            raise
        if found.count % (stages := current.read("pipeline_stages")):
            fail(ContextError, f"{found.count} devices cannot be cut into {stages} pipeline stages",
                 where=f"pipeline_stages = {stages}", why=f"{found.count} is not divisible by {stages}",
                 fix="set pipeline_stages to a divisor, or reset_auto_parallel_context()")  # fmt: skip
        current.rank_among(found.count)
        return found

    def _output_leaves(self, result: Any, current: Any, hardware: Hardware, problems: list[Problem]) -> list[Leaf]:
        said = _output_leaves(result, self.options.out_strategy, problems)
        if not self._overridden(current):
            return said
        check_all(said, hardware.count, problems)
        if problems:
            return _output_leaves(result, None, [])
        return _output_leaves(result, self._instead(result, current), [])

    def _overridden(self, current: Any) -> bool:
        return (
            self.options.out_strategy is not None
            and current.is_set("parallel_mode")
            and current.parallel_mode in ("semi_auto_parallel", "auto_parallel")
            and current.out_strategy_mode != "honour"
        )

    def _instead(self, result: Any, current: Any) -> Any:
        """What MindSpore's context puts in the place of an out_strategy: data parallel, or whole under full_batch."""
        entries = _outer(result)
        whole = current.full_batch
        warnings.warn(
            f"out_strategy of `{self.callee.name}` is overridden with {'whole results' if whole else 'data parallel'}, "
            f"as MindSpore does under parallel_mode={current.parallel_mode!r}; to honour it: "
            'set_auto_parallel_context(out_strategy_mode="honour")',
            stacklevel=_outside(),
        )
        return tuple(tree_util.tree_map(lambda s: (1,) * len(s.shape), e) if whole else None for e in entries)


def better(problem: Question, kept: Answer, found: Answer, at_first: Answer) -> Answer:
    """Of a mended program the arguments' layouts as they were found before it was mended, or what was found anew."""
    if found is at_first:
        return kept
    costs = [objective(problem.price(a.axes, a.specs, a.pins), problem) for a in (kept, found)]
    return kept if costs[0] <= costs[1] else found


def unmended(problem: Question, answer: Answer) -> Candidate | None:
    """The best of what else was priced in which XLA computes all convolutions rightly."""
    return next((c for c in answer.others if not wrong_convolutions(problem.flow(c.axes, c.specs, c.pins))), None)


def _wishes(options: Options, current: Any) -> Wishes:
    limit = None if options.memory_limit is None else bytes_of(options.memory_limit, "memory_limit")
    assert not isinstance(limit, Problem)  # checked by `shard`
    mode = options.search_mode or (current.search_mode if current.is_set("search_mode") else None)
    inside = mode not in (None, "auto")  # which follows the cuts where nothing is left open
    return Wishes(limit, options.time_limit, options.finalists <= 1, algorithm_of(current), inside)


def _leaf_positions(args: Sequence[Any], statics: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Of all leaves of the dynamic arguments, the positions of those that belong to the arguments `wanted`."""
    found: list[int] = []
    position = 0
    for i, argument in enumerate(args):
        if i not in statics:
            count = len(tree_util.tree_leaves(argument))
            found += range(position, position + count) if i in wanted else ()
            position += count
    return tuple(found)


def _dress(pure: Any, callee: Callee, names: list[str]) -> None:
    """Give `pure` the user's names: JAX's errors, profiles and the HLO show them."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    found = [n if n.isidentifier() and not keyword.iskeyword(n) else f"argument_{i}" for i, n in enumerate(names)]
    pure.__name__ = pure.__qualname__ = callee.name
    pure.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in found])
    pure.__wrapped__ = callee.function


def _outside() -> int:
    """The stack level of the caller's code, for a warning that is raised by the caller of this."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "shardfn":
        frame, level = frame.f_back, level + 1
    return level


def _unhashable(name: str, value: Any) -> Problem:
    return Problem(
        f"static argument `{name}` is {a(value)}, which cannot be hashed",
        where=f"{name} = {short(value)}",
        why="a compiled function is found by the values of its static arguments",
        fix="pass a tuple, a string or a frozen dataclass there, or make the argument a dynamic one",
        is_type=True,
    )


METHODS = "_shardfn_methods"


class Methods(dict[ShardedFunction, ShardedFunction]):
    """The sharded methods of one plain object, kept in its attributes; pickles and deep copies of it go without."""

    def __reduce__(self) -> Any:
        return Methods, ()


def _never(*args: Any) -> Any:
    raise OtherCall


_CONCRETE: set[type] = set()
"""Types of array leaves that have been seen and are no tracers."""


def _replaced(values: list[Any], entry: Entry, treedef: Any, leaves: Sequence[Any]) -> list[Any]:
    """The arguments of a call with other arrays."""
    dynamic = iter(tree_util.tree_unflatten(treedef, leaves))
    fixed = int(entry.stateful)
    return [v if i >= fixed and entry.slots[i - fixed].is_static else next(dynamic) for i, v in enumerate(values)]


def _dynamic(values: Sequence[Any], slots: Sequence[Slot], stateful: bool) -> tuple[Any, ...]:
    return (*values[:stateful], *(v for v, s in zip(values[stateful:], slots, strict=True) if not s.is_static))


def _shapes(values: Sequence[Any], slots: Sequence[Slot], stateful: bool) -> list[Any]:
    return [
        v if i >= stateful and slots[i - stateful].is_static else tree_util.tree_map(shaped, v)
        for i, v in enumerate(values)
    ]


def _signature(leaf: Any) -> Any:
    try:
        return leaf.shape, leaf.dtype
    except AttributeError:
        return type(leaf)


def _call_signature(flat: Sequence[Any], statics: tuple[int, ...]) -> Any:
    dynamic = [v for i, v in enumerate(flat) if i not in statics]
    leaves, treedef = tree_util.tree_flatten(dynamic)
    return treedef, [shape_of(leaf) for leaf in leaves], [flat[i] for i in statics]


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _with_defaults(strategy: tuple[Any, ...], callee: Callee, options: Options, declared: list[int]) -> Any:
    """Entries of the arguments that were passed. Arguments with defaults may be left out of the call or the strategy."""
    if callee.signature is None:
        return strategy
    every = {
        i: p.default is not p.empty
        for i, p in enumerate(callee.signature.parameters.values())
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and i not in options.static_argnums
        and p.name not in options.static_argnames
    }
    required = [i for i, has_default in every.items() if not has_default]
    if not len(required) <= len(strategy) <= len(every) or any(i not in every for i in declared):
        return strategy
    entries = dict(zip(every, strategy, strict=False))
    return tuple(entries.get(i, AUTO) for i in declared)


def _outer(result: Any) -> tuple[Any, ...]:
    """The results that an out_strategy has entries for: a tuple's elements, or the one result."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _replacements(results: Sequence[Any], arguments: Sequence[Any]) -> dict[int, int]:
    """Leaf by leaf, the results that can take an argument's place in the next call: parameters, optimizer state.

    That is a result of several arrays with the structure, shapes and dtypes of an argument.
    """

    def form(tree: Any) -> Any:
        leaves, treedef = tree_util.tree_flatten(tree)
        return treedef, [shape_of(leaf) for leaf in leaves]

    starts, position = [], 0
    for argument in arguments:
        starts.append((form(argument), position))
        position += len(tree_util.tree_leaves(argument))
    found: dict[int, int] = {}
    position = 0
    for result in results:
        mine = form(result)
        size = len(mine[1])
        match_ = next((s for s in starts if size > 1 and s[0] == mine), None)
        if match_ is not None:
            starts.remove(match_)
            found |= {position + i: match_[1] + i for i in range(size)}
        position += size
    return found


def _output_leaves(result: Any, strategy: Any, problems: list[Problem]) -> list[Leaf]:
    outer = _outer(result)
    single = not isinstance(result, tuple | list)
    arguments = [
        Argument("result" if single else f"result/{i}", "the output" if single else f"output {i}", value)
        for i, value in enumerate(outer)
    ]
    return match(arguments, strategy, "out_strategy", problems)


def _changed_leaves(changed: dict[str, Any]) -> list[Leaf]:
    return [
        Leaf(f"state/{path}", f"`{path}`", tuple(value.shape), str(value.dtype))
        for path, value in sorted(changed.items())
    ]

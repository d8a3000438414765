"""From a call to one plan and its executable: the search's own plan, or the best of a few compiled candidates."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import NamedSharding

from shardfn.compiled import candidates
from shardfn.compiled.executable import Compiled
from shardfn.compiled.log_capture import compile_logged
from shardfn.compiled.targets import target
from shardfn.errors import StrategyError, warn
from shardfn.frontend.arguments import Call
from shardfn.frontend.callee import Callee
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.options import Options
from shardfn.frontend.recorder import recording
from shardfn.frontend.static_leaves import holds_static
from shardfn.frontend.watch import NOTHING_READ, Watch
from shardfn.ir.model import Spec, mesh_sizes_text
from shardfn.layoutfile import files
from shardfn.layoutfile.files import LayoutFile
from shardfn.planning.answers import (
    alternatives,
    correct_answer,
    plan_fixed_answer,
    plan_search_answer,
    search,
    with_completed_entries,
    with_notes,
)
from shardfn.planning.call import PosedCall, pose
from shardfn.planning.diagnostics import not_fully_used
from shardfn.planning.layout_rules import unmatched_note
from shardfn.planning.plan import Plan, answered_call
from shardfn.report.saved_graphs import save_graphs
from shardfn.runtime.apply import jitted_for_calls, outermost
from shardfn.runtime.entries import Entries
from shardfn.runtime.processes import check_same_plan, is_of_several_processes, is_traced
from shardfn.runtime.progress import progress
from shardfn.runtime.rehearsal.candidates import best_rehearsed
from shardfn.runtime.verify import compile_plan
from shardfn.runtime.without_effect import without_effect
from shardfn.search.engine import Archive
from shardfn.search.problem import Answer, figures


@dataclasses.dataclass(frozen=True)
class Results:
    """The shapes of what a call returns."""

    shapes: Any
    watch: Watch
    """What the function read when it was traced."""

    @classmethod
    def of(cls, jaxpr: Any, like: Any, watch: Watch) -> Results:
        """The shapes of a jaxpr's results in the structure of `like`."""
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak_type) for v in jaxpr.out_avals]
        return cls(tree_util.tree_unflatten(tree_util.tree_structure(like), shapes), watch)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One plan, compiled for the calls it fits."""

    plan: Plan
    jitted: Any
    """From `jax.jit`."""
    nested: Any
    """The same for a call inside a transformation."""
    targets: tuple[NamedSharding, ...]
    """The shardings of the arguments."""
    replaced: frozenset[int]
    """The inputs, by position, that are donated or that a result can replace: the next call passes results there."""
    holds_static: bool = False
    """Whether arguments or results have leaves that are no arrays (`frontend.static_leaves`)."""
    captures: bool = False
    """Whether the function closes over traced arrays: the call is inside a transformation."""
    is_compiled: bool = False
    """Whether XLA is known to compile the plan."""
    is_agreed: bool = False
    """Whether all processes are known to have this plan."""
    is_checked: bool = False
    """Whether a check found no difference (`runtime.check`)."""
    logged: tuple[str, ...] = ()
    """Diagnostics that XLA logged when it compiled the plan."""
    in_types: tuple[Spec | None, ...] = ()
    """`Call.types` of arguments as planned."""
    watch: Watch = NOTHING_READ
    """What the function read when it was traced: the entry fits calls that would read the same."""

    @property
    def results(self) -> Results:
        """The shapes of the results."""
        traced = answered_call(self.plan).posed.call.traced
        return Results.of(traced.jaxpr, traced.results, self.watch)

    def shapes(self, call: Call) -> Sequence[Any]:
        """The shapes of a call's arrays in the memories of the plan, with the Explicit axes of their types."""
        kinds = tuple(d.memory_kind for d in self.plan.inputs)
        return dataclasses.replace(call, memories=kinds if any(kinds) else ()).of_typed_shapes().values

    @classmethod
    def of(cls, plan: Plan) -> Entry:
        """The entry of a plan, which nothing is compiled for yet."""
        planned = answered_call(plan).posed.call
        targets = tuple(tree_util.tree_leaves(plan.in_shardings))
        replaced = frozenset((*planned.same_as.values(), *planned.donated))
        static = holds_static((planned.function.call.dynamic, planned.traced.results))
        ambient = planned.ambient_mesh
        types = tuple(ambient.explicit_spec(d.spec) for d in plan.inputs) if ambient is not None else ()
        run, nested = jitted_for_calls(plan), jitted_for_calls(plan, nested=True)
        captures = bool(planned.traced.captured)
        return cls(plan, run, nested, targets, replaced, static, captures, in_types=types)


def typed_as_planned(entries: Entries[Entry], key: Any, types: Sequence[Any], root: Any) -> Entry | None:
    """An entry that differs from a call in Explicit types only, where each of them is as planned: results come back as
    arguments, with the types that the plan gave them. It becomes the entry of that key as well.

    Args:
      entries: the entries of a function, by `PlannedCalls.key`.
      key: that of the call.
      types: `Call.types`, which the key has last in its first part.
      root: what the call belongs to (`Callee.root`).
    """
    if not types:
        return None
    ((*kind, _), *rest) = key
    for ((*other, known), *others), entry in entries:
        if (kind, rest) == (other, others) and entry.watch.holds(root):
            rows = zip(types, known, entry.in_types, strict=True)
            if all(mine in (given, planned) for mine, given, planned in rows):
                return entries.keep(key, entry, root)
    return None


def watched(posed: PosedCall, say: Callable[[str], None]) -> PosedCall:
    """The call whose search tells `say` the generator at work, the candidates so far and the figures of the best."""

    def watch(generator: str, archive: Archive) -> None:
        best = archive.best(posed.problem.level)
        say(f"{generator}, {len(archive)} candidates, best: {figures(best.cost)}")

    return dataclasses.replace(posed, problem=dataclasses.replace(posed.problem, watch=watch))


def _layout_file(options: Options, defaults: Defaults) -> LayoutFile | None:
    """The layout file of the options, or the default one, which is for every function."""
    if options.layout is not None:
        return files.read_layout(options.layout)
    if not defaults.layout_file:
        return None
    found = files.read_layout(pathlib.Path(defaults.layout_file), "strategy_ckpt_load_file")
    return dataclasses.replace(found, fingerprint="", every_rule_matches=False)


def make_entry(
    callee: Callee, options: Options, call: Call, defaults: Defaults, say: Callable[[str], None] = lambda text: None
) -> Entry:
    """Plan a call, and write the plan file and graphs that the defaults ask for. `say` is told how the search goes.

    Raises:
      ShardError: all problems of the call.
    """
    layout = _layout_file(options, defaults)
    with recording(callee.root, callee.name, callee.objects_of(call)) as read:
        posed = watched(with_completed_entries(pose(callee, options, call, defaults, layout)), say)
    for note in without_effect(options, posed):
        warn(note)
    answer = search(posed)
    count = candidates.count_of(posed.problem, posed.call.search.compile_candidates) if posed.problem.is_open else 0
    rehearsed = posed.call.search.rehearse_candidates if posed.problem.is_open else 0
    if rehearsed:
        entry = Entry.of(best_rehearsed(posed, answer, rehearsed))
    else:
        entry = best_compiled(posed, answer, count) if count > 1 else Entry.of(plan_search_answer(posed, answer))
    plan = entry.plan
    if note := not_fully_used(plan, defaults.algorithm):
        warn(note)
        plan = with_notes(plan, note)
    layout = posed.call.layout
    if layout is not None and not layout.every_rule_matches:
        note = unmatched_note(layout, [d.path for d in plan.inputs], [d.path for d in plan.outputs])
        plan = with_notes(plan, note) if note else plan
        if note and options.layout is not None and not any(d.source == "file" for d in plan.inputs):
            warn(f"{layout.name} shards no argument of `{plan.function}`: {note}")
    if defaults.plan_file and jax.process_index() == 0:
        files.save_plan(plan, defaults.plan_file, defaults.saves_parameters_only, "strategy_ckpt_save_file")
    if defaults.graphs:
        save_graphs(plan, defaults.graphs_path)
    return dataclasses.replace(entry, plan=plan, watch=call.closed_over.watch if call.closed_over else read())


def compile_entry(entry: Entry, values: Callable[[Entry], Sequence[Any]]) -> Entry:
    """The entry, compiled. If XLA does not compile its plan, the entry of the next candidate of the search that XLA compiles.

    Args:
      entry: the entry.
      values: the arrays of the call for an entry, with its shardings, or their shapes.

    Raises:
      StrategyError: XLA compiles no candidate, or the function traces to another program than the planned one.
    """
    answered, left_out = answered_call(entry.plan), list[candidates.Refused]()
    own = "the plan", answered.posed, answered.answer
    for name, posed, answer in itertools.chain([own], alternatives(answered)):
        try:
            found = dataclasses.replace(_fixed_entry(posed, answer), watch=entry.watch) if left_out else entry
            lowered = found.jitted.lower(*values(found))
            expected = any(c.is_last_resort for c in found.plan.partitioned.communications)
            logged = tuple(compile_logged(lowered, wanted=expected)[1])
        except (jax.errors.JaxRuntimeError, StrategyError) as error:
            if isinstance(error, StrategyError) and not left_out:  # the function does not trace as it was planned
                raise
            left_out.append(candidates.refused(name, answer, error))
            continue
        if left_out:
            first, mesh = left_out[0], mesh_sizes_text(answer.axes)
            warn(
                f"XLA does not compile the plan of `{entry.plan.function}` that the search chose: {first.why}"
                f"{f' ({first.where})' * bool(first.where)}; its next candidate takes the place: {name}, mesh {mesh}"
            )
            found = dataclasses.replace(found, plan=with_notes(found.plan, *map(str, left_out)))
        if logged and not any("full rematerialisation" in note for note in found.plan.diagnostics):
            found = dataclasses.replace(found, plan=with_notes(found.plan, *logged))
        return dataclasses.replace(found, is_compiled=True, logged=logged)
    candidates.none_compiles(entry.plan.function, left_out, is_asked=False)


def jitted_as_called(entry: Entry, call: Call, given: int) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """The jitted function of an entry, and the shapes of a call's arguments to stage it with.

    The first `given` arguments are given by position, the others by keyword. `jax.jit` takes no keywords beside `in_shardings`:
    where there are any, the shapes have the shardings.
    """
    if len(call.slots) <= given:
        return entry.jitted, entry.shapes(call), {}
    names = [None] * (call.stateful + given) + [slot.name for slot in call.slots[given:]]

    def function(*_shardfn_args: Any, **_shardfn_keywords: Any) -> Any:  # names that no parameter of the user's has
        return entry.jitted(*_shardfn_args, *(_shardfn_keywords[name] for name in names if name))

    def are(positions: Sequence[int]) -> tuple[list[int], list[str]]:
        return [i for i in positions if not names[i]], [name for i in positions if (name := names[i])]

    function.__name__ = entry.plan.function
    options = outermost(answered_call(entry.plan).posed.call)
    for what in ("static", "donate"):
        options[f"{what}_argnums"], options[f"{what}_argnames"] = are(options[f"{what}_argnums"])
    jitted = jax.jit(function, **options)
    leaves, treedef = tree_util.tree_flatten(call.of_shapes().dynamic)
    values = call.replaced(treedef, [_sharded(*pair) for pair in zip(leaves, entry.targets, strict=True)])
    rows = list(zip(names, values, strict=True))
    return jitted, [value for name, value in rows if not name], {name: value for name, value in rows if name}


def _sharded(shape: Any, sharding: NamedSharding) -> Any:
    """The shape with a sharding; a Python number as it is."""
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return shape
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=sharding)


def agreed(entry: Entry) -> Entry:
    """The entry after the processes compared their plans of it, which each does once, before it runs the first time.

    Raises:
      StrategyError: a process has another plan.
    """
    if is_of_several_processes(entry.plan):
        if is_traced():  # a process may trace alone
            return entry
        check_same_plan(entry.plan)
    return dataclasses.replace(entry, is_agreed=True)


def _fixed_entry(posed: PosedCall, answer: Answer) -> Entry:
    return Entry.of(plan_fixed_answer(posed, answer))


def _compiled(entry: Callable[[], Entry]) -> Compiled:
    return compile_plan(entry().plan, entry().jitted)


def best_compiled(posed: PosedCall, answer: Answer, count: int) -> Entry:
    """The best of `count` compiled candidates, within the memory limit first. Its first call compiles nothing again.

    Raises:
      StrategyError: no candidate compiles, or none keeps the memory limit.
      DeviceError: there is no compiler for the devices.
    """
    problem, bounds = posed.problem, posed.call.search
    if not problem.hardware.is_here:
        target(problem.hardware)  # raises before minutes of planning
    entered = candidates.answers(posed, correct_answer(posed, answer), count)
    source = f"{posed.call.traced.module}{posed.propagation.inner}"
    compiled, planned, refused = [], [], []
    for name, one in entered:
        key = candidates.program_key(source, problem, one)
        entry = functools.cache(
            functools.partial(_fixed_entry, posed, one)
        )  # one that was compiled before may not be needed
        try:
            with progress(f"compiling {posed.call.name}: {name}"):
                found = candidates.compiled_once(key, functools.partial(_compiled, entry))
        except (jax.errors.JaxRuntimeError, StrategyError) as error:
            refused.append(candidates.refused(name, one, error))
            continue
        planned.append((one, entry))
        compiled.append(candidates.judged(name, problem, one, found))
    if not compiled:
        candidates.none_compiles(posed.call.name, refused)
    own = entered[0]
    at, note = candidates.best(compiled, problem.memory_limit, "" if planned[0][0] is own[1] else own[0])
    if bounds.memory_limit is not None:
        candidates.check(compiled[at], len(compiled), problem.memory_limit)
    winner = planned[at][1]()
    return dataclasses.replace(winner, plan=with_notes(winner.plan, note, *map(str, refused)))

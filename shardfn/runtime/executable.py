"""From a call to one plan and its executable: the search's own plan, or the best of a few compiled candidates."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardfn.compiled import candidates
from shardfn.compiled.executable import read
from shardfn.compiled.targets import target
from shardfn.errors import StrategyError, warn
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.options import Options
from shardfn.layoutfile import files
from shardfn.layoutfile.files import LayoutFile
from shardfn.planning.diagnostics import not_fully_used
from shardfn.planning.open_dimensions import with_completed_entries
from shardfn.planning.plan import Plan
from shardfn.planning.plan_mesh import lacks_axes_for, own_mesh, prime_mesh
from shardfn.planning.planner import correct_answer, plan_known, plan_searched, search, with_notes
from shardfn.planning.pose import pose
from shardfn.planning.posed_call import CallRequest, PlannedCall, PosedCall, TracedCall
from shardfn.planning.what_if import WhatIf
from shardfn.report.saved_graphs import save_graphs
from shardfn.runtime.apply import apply, shardings
from shardfn.runtime.progress import progress
from shardfn.runtime.verify import Verifier
from shardfn.search.problem import Answer


@dataclasses.dataclass(frozen=True)
class Entry:
    """One plan, compiled for the calls it fits."""

    plan: Plan
    jitted: Callable[..., Any]
    nested: Callable[..., Any]
    """The same for a call inside a transformation."""
    targets: tuple[NamedSharding, ...]
    """The shardings of the arguments."""
    replaced: frozenset[int]
    """The inputs, by position, that are donated or that a result can replace: the next call passes results there."""


def layout_file(options: Options, defaults: Defaults) -> LayoutFile | None:
    """The layout file of the options, or the default one."""
    if options.layout is not None:
        return files.read_layout(options.layout)
    return files.read_layout(pathlib.Path(defaults.layout_file)) if defaults.layout_file else None


def make_entry(request: CallRequest) -> Entry:
    """Plan a call, and write the plan file and graphs that the defaults ask for.

    Raises:
      ShardError: all problems of the call.
    """
    posed = with_completed_entries(pose(request))
    answer = search(posed)
    is_compiled = posed.call.search.compile_candidates > 1 and posed.problem.is_open
    planned = best_compiled(posed, answer) if is_compiled else plan_searched(posed, answer)
    plan, call, defaults = planned.plan, planned.posed.call, request.defaults
    if note := not_fully_used(plan, call.search.algorithm):
        warn(note)
        plan = with_notes(plan, note)
    plan = dataclasses.replace(plan, _study=WhatIf.of(planned), _verifier=verifier(call), _call=call)
    if defaults.plan_file and jax.process_index() == 0:
        files.save_plan(plan, defaults.plan_file, defaults.saves_parameters_only)
    if defaults.graphs:
        save_graphs(plan, defaults.graphs_path)
    targets = tuple(shardings(plan.inputs, own_mesh(plan)))
    replaced = frozenset((*call.same_as.values(), *call.donated))
    return Entry(plan, jitted(call, plan), jitted(call, plan, nested=True), targets, replaced)


def jitted(call: TracedCall, plan: Plan, nested: bool = False) -> Callable[..., Any]:
    """`jax.jit` of the function as planned; a `nested` one is for calls inside a transformation.

    The mesh is the plan's own, or one with prime axes if the function has meshes of its own. A nested function always uses
    prime axes, so that all plans on these devices share a mesh: `jit` cannot express a result sharding for which its mesh
    has no axes.
    """
    mesh = prime_mesh(plan) if nested or lacks_axes_for(plan, call.traced.mesh_shapes) else own_mesh(plan)
    function = call.function
    return apply(plan, function.on(mesh), function.shapes, call.traced.results, function.static_argnums,
                 function.donate_argnums, mesh, nested, call.compiler_options)  # fmt: skip


def verifier(call: TracedCall) -> Verifier:
    """Compiles plans of a call, each with the workarounds of its own call: those of a what-if plan may be others."""
    return Verifier(lambda plan: jitted(plan._call or call, plan), tuple(call.function.shapes))


def best_compiled(posed: PosedCall, answer: Answer) -> PlannedCall:
    """The best of the compiled candidates, within the memory limit first.

    Raises:
      StrategyError: no candidate compiles, or none keeps the memory limit.
      DeviceError: there is no compiler for the devices.
    """
    problem, bounds = posed.problem, posed.call.search
    if not problem.hardware.is_here:
        target(problem.hardware)  # raises before minutes of planning
    answers = {}
    for level in (0, 1, 2):
        at = dataclasses.replace(problem, level=level)
        answers[level] = correct_answer(at, answer if level == problem.level else posed.find(at))
    more = []
    if (
        bounds.memory_limit is not None
    ):  # the plan that sends least without the limit may fit once its arguments are fully sharded
        unlimited = dataclasses.replace(problem, level=0, memory_limit=math.inf)
        more.append(correct_answer(unlimited, posed.find(unlimited)))
    entered = candidates.answers(problem, answers, more, bounds.compile_candidates)
    source = str(posed.call.traced.module)
    compiled, planned, refused = [], [], []
    for name, one in entered:
        key = candidates.program_key(source, problem, one)
        try:
            with progress(f"compiling {posed.call.name}: {name}"):
                made = candidates.known(key) or candidates.remember(key, _compiled(plan_known(posed, one)))
        except (jax.errors.JaxRuntimeError, StrategyError) as error:
            refused.append(candidates.refused(name, one, error))
            continue
        planned.append(one)
        compiled.append(candidates.judged(name, problem, one, made))
    if not compiled:
        candidates.none_compiles(posed.call.name, refused)
    own = entered[0]
    at, note = candidates.best(compiled, problem.memory_limit, "" if planned[0] is own[1] else own[0])
    if bounds.memory_limit is not None:
        candidates.check(compiled[at], len(compiled), problem.memory_limit)
    winner = plan_known(posed, planned[at])
    return dataclasses.replace(winner, plan=with_notes(winner.plan, note, *map(str, refused)))


def _compiled(planned: PlannedCall) -> Any:
    return read(verifier(planned.posed.call).compiled(planned.plan, quick=True))

"""What-if analysis of a plan: the cost of other shardings of one array, and the plan with other entries."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardfn.cost.estimate import estimate_cost
from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, did_you_mean, fail, raise_problems
from shardfn.frontend.meshes import partition_spec
from shardfn.frontend.parameter_plan import apply_parameter_plan
from shardfn.frontend.paths import (
    alike,
    layer,
    listed,
    met,
    met_by_end,
    mirrored,
    near,
    normal,
    starred,
    unmirrored,
)
from shardfn.frontend.strategy import Leaf, short
from shardfn.ir.model import Spec, axes_of
from shardfn.ir.specs import strategy_of
from shardfn.planning.answers import plan_search_answer, search, with_completed_entries, without_workarounds
from shardfn.planning.call import place_call
from shardfn.planning.plan import Alternative, Alternatives, Decision, Figures, Plan, answered_call
from shardfn.search.moves import array_specs
from shardfn.search.problem import objective

MOST = 12
"""Shardings of an array that are evaluated by default, at most."""

OPS = 24_000
"""Ops of all partitioned programs together that are evaluated by default: a few seconds."""


def why(plan: Plan, path: str, most: int | None) -> Alternatives:
    """The costs of the other shardings of an array, all else as planned (`Plan.why`)."""
    answered, every = answered_call(plan), find(plan, path)
    planned, paths = every[0], tuple(d.path for d in every)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        fail(StrategyError, f"{most!r} shardings cannot be evaluated", where=f"why({path!r}, most={most!r})",
             why="`most` counts the shardings to evaluate", fix="give an integer above 0, or leave it out")  # fmt: skip
    others = sorted(
        array_specs(planned.shape, plan.axes, planned.spec), key=lambda spec: _evaluation_order(spec, planned, plan)
    )
    if most is None:
        most = min(MOST, max(1, OPS // max(1, len(plan.partitioned.graph.ops))))
    own, moved = Figures.of(plan.cost), moved_with(plan, paths)
    rated = []
    for spec in others[:most]:
        cost = estimate_cost(answered.partitioned_with(moved, spec), plan.hardware, answered.problem.donated)
        figures = Figures.of(cost)
        row = Alternative(strategy_of(spec, plan.axes), spec, figures, figures - own)
        rated.append((objective(cost, answered.problem), len(rated), row))
    rows = tuple(row for _, _, row in sorted(rated, key=lambda r: r[:2]))
    left_out = tuple(strategy_of(spec, plan.axes) for spec in others[most:])
    return Alternatives(planned, own, rows, left_out, paths if len(paths) > 1 else ())


def moved_with(plan: Plan, paths: Collection[str]) -> set[str]:
    """The paths of some arrays, of the moments that are sharded as they are and follow them, and of the results that replace
    these: what `parameter_plan` shards anew."""
    moved = {*paths, *(moment for moment, parameter in _followers(plan).items() if parameter in paths)}
    if moved == set(paths):
        return moved
    replaced = answered_call(plan).posed.call.same_as
    return moved | {plan.outputs[r].path for r, argument in replaced.items() if plan.inputs[argument].path in moved}


def _followers(plan: Plan) -> dict[str, str]:
    """The parameter of each moment that is sharded as it is, by path."""
    every = {d.path: d for d in plan.inputs}
    copies = mirrored([(d.path, d.shape) for d in plan.inputs])
    return {path: of for path, of in copies.items() if path != of and every[path].spec == every[of].spec}


def what_if(plan: Plan, entries: Mapping[str, Any]) -> Plan:
    """The plan with other entries (`Plan.what_if`); keys that begin with `result` name results."""
    call = without_workarounds(answered_call(plan).posed.call)
    inputs, outputs = _with_entries(call.inputs, call.outputs, entries)
    inputs = _with_moments(plan, call.inputs, inputs)
    posed = place_call(dataclasses.replace(call, inputs=inputs, outputs=outputs, layout=None), [])
    posed = with_completed_entries(posed)
    return plan_search_answer(posed, search(posed))


def _with_entries(
    inputs: Sequence[Leaf], outputs: Sequence[Leaf], entries: Mapping[str, Any]
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Inputs and outputs with other entries, by path glob.

    Raises:
      ShardError: all that is wrong with the entries.
    """
    if not isinstance(entries, Mapping):
        fail(StrategyTypeError, f"`what_if` takes a dict from path to entry, not {a(entries)}",
             where=f"what_if({short(entries)})", why="it gives single arrays entries, by their paths",
             fix='write it as what_if({"params/w1": (1, 4)})')  # fmt: skip
    problems: list[Problem] = []
    is_input = any(leaf.path.split("/")[0] == "result" for leaf in inputs)  # an argument of that name
    sides: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    for key, entry in entries.items():
        is_result = isinstance(key, str) and re.split(r"[/.\[]", key.lstrip("/."))[0] == "result"
        sides[is_result and not is_input][key] = entry
    changed = [tuple(apply_parameter_plan(leaves, mine or None, problems, "what_if"))
               for leaves, mine in zip((inputs, outputs), sides, strict=True)]  # fmt: skip
    raise_problems(problems)
    return changed[0], changed[1]


def _with_moments(plan: Plan, before: Sequence[Leaf], after: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Inputs whose moments have the new entries of the parameters that they follow, if they have none of their own."""
    changed = {new.path: new for old, new in zip(before, after, strict=True) if new != old}
    followed = {moment: changed[of] for moment, of in _followers(plan).items() if of in changed}
    wrong = {of.path for of in changed.values() if isinstance(of.entry, tuple) and len(of.entry) != len(of.shape)}
    return tuple(  # what is wrong with a parameter's entry is said of the parameter alone
        dataclasses.replace(leaf, entry=followed[leaf.path].entry, where=followed[leaf.path].where)
        if leaf.path in followed and leaf.path not in changed and followed[leaf.path].path not in wrong
        else leaf
        for leaf in after
    )


def find(plan: Plan, path: str) -> tuple[Decision, ...]:
    """The decisions on the arrays of a path or a glob; `.` and `/` separate alike, and the one array with an end of a path may
    be named by it.

    Raises:
      StrategyError: no array has that path, or the arrays of a glob differ in shape or sharding.
    """
    decisions = (*plan.inputs, *plan.outputs)
    paths = [d.path for d in decisions]
    text = str(path).replace(".", "/").strip("/")
    forms = [p.replace(".", "/") for p in paths]
    hits = [d for d, form in zip(decisions, forms, strict=True) if text == form]
    hits = hits or [d for d, form in zip(decisions, forms, strict=True) if text and text == form.partition("/")[2]]
    if len(hits) == 1 and isinstance(path, str):
        return tuple(hits)
    globbed = [decisions[i] for i in met(path, list(map(normal, paths)))[0]] if isinstance(path, str) else []
    shapes = {d.shape: d.path for d in globbed}
    if len(shapes) > 1:
        fail(StrategyError, f"`{path}` names arrays of {len(shapes)} shapes", where=f"why({path!r})",
             why=", ".join(f"`{name}` is {list(shape)}" for shape, name in list(shapes.items())[:3]),
             fix="name arrays of one shape, which can have one sharding")  # fmt: skip
    same = alike(globbed, lambda d: d.spec, least=1)
    if len(same) > 1:
        asked = listed([f"why({glob_of(group, paths)!r})" for group in same], 3)
        fail(StrategyError, f"`{path}` names arrays with {len(same)} different shardings", where=f"why({path!r})",
             why=f"{_shardings_text(same)}: they have no common sharding to compare others with",
             fix=f"ask for each sharding separately: {asked}")  # fmt: skip
    if globbed:
        return tuple(globbed)
    ends = met_by_end(str(path), paths)
    if arguments := [i for i in ends if i < len(plan.inputs)]:
        ends = unmirrored(arguments, [(d.path, d.shape) for d in plan.inputs])
    if len(ends) == 1:
        return (decisions[ends[0]],)
    close = [paths[i] for i in ends[:3]] or near(text, paths)
    fail(StrategyError, f"the plan of `{plan.function}` has no array `{path}`", where=f"why({path!r})",
         why=f"the arrays are {listed(paths)}",
         fix=did_you_mean(close) or "use one of these paths")  # fmt: skip


def _shardings_text(groups: Sequence[Sequence[Decision]]) -> str:
    """The sharding of one array of each group."""
    firsts = [group[0] for group in groups]
    is_enough = len({d.strategy for d in firsts}) == len(firsts)
    return listed([f"`{d.path}` is {d.strategy}{'' if is_enough else f' {partition_spec(d.spec)}'}" for d in firsts], 3)


def glob_of(group: Sequence[Decision], every: Sequence[str]) -> str:
    """The glob of the arrays of layers that meets just these; the path of the first of them where there is none."""
    names = [d.path for d in group]
    if len(group) > 1 and len({layer(name) for name in names}) == 1:
        hits, _ = met(starred(names), list(map(normal, every)))
        if {every[i] for i in hits} == set(names):
            return starred(names)
    return names[0]


def _evaluation_order(spec: Spec, planned: Decision, plan: Plan) -> tuple[Any, ...]:
    """Sort key: the runner-up, then replicated, then over the same mesh axes, then the most shards over the fewest dimensions."""
    strategy = strategy_of(spec, plan.axes)
    return (
        not planned.runner_up.startswith(f"{strategy}:"),
        any(spec),
        {*axes_of(spec)} != {*axes_of(planned.spec)},
        -math.prod(strategy),
        sum(n > 1 for n in strategy),
        tuple(-n for n in strategy),
        spec,
    )


RUNNERS_UP = 12_000
"""Ops of all partitioned programs together that are evaluated for the runners-up of a report: a part of a second."""


def with_runners_up(plan: Plan) -> Plan:
    """The plan with the runner-up of each searched argument as `Plan.why` evaluates it, the largest arrays first.

    Arrays that are alike in all layers are evaluated once. Beyond `RUNNERS_UP` ops the search's own estimate stays."""
    if plan._answered is None:
        return plan
    searched = [d for d in plan.inputs if d.source == "searched"]
    groups = sorted(
        alike(searched, lambda d: (layer(d.path), d.strategy, d.runner_up)), key=lambda g: -math.prod(g[0].shape)
    )
    programs = RUNNERS_UP // (1 + len(plan.partitioned.graph.ops))
    found: dict[str, str] = {}
    for same in groups[:programs]:
        rows = plan.why(same[0].path, min(MOST, programs // len(groups[:programs]))).rows
        text = "{}: {}, {} sent, {} memory".format(rows[0].strategy, *rows[0].more.signed_texts()) if rows else ""
        found |= {d.path: text for d in same}
    inputs = (dataclasses.replace(d, runner_up=found.get(d.path, d.runner_up)) for d in plan.inputs)
    return dataclasses.replace(plan, inputs=tuple(inputs))

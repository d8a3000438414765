"""Arguments, strategies and hardware to a plan: place what was given, search what is open, propagate, price."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardfn.cost.devices.hardware import Hardware
from shardfn.cost.estimate import collectives
from shardfn.cost.schedule import lower_for_backend
from shardfn.errors import Problem, raise_problems
from shardfn.frontend.search_options import UNBOUNDED, Wishes
from shardfn.frontend.strategy import AUTO, Leaf
from shardfn.frontend.trace import Traced
from shardfn.frontend.validation import check
from shardfn.ir.dimension_groups import DimensionGroups, dimension_groups
from shardfn.ir.model import Graph, OpConstraint, Spec
from shardfn.planning.answer import constraints_of, dimension_groups_of, of_inputs, of_results
from shardfn.planning.candidates import candidates
from shardfn.planning.diagnostics import advice
from shardfn.planning.layout_rules import LayoutFile, mesh_axes
from shardfn.planning.mesh_inference import Placement, expresses, finest, place
from shardfn.planning.named_shardings import names_axes, place_named
from shardfn.planning.op_constraints import anchors, held_in
from shardfn.planning.plan import Plan
from shardfn.planning.propagation import Propagation, kept, padded
from shardfn.planning.unmodelled import not_predicted, of_program
from shardfn.planning.what_if import Study
from shardfn.planning.workarounds import mended_finding, wrong_ops
from shardfn.search import Search
from shardfn.search.graph_facts import array_bytes
from shardfn.search.memory_limit import near_limit_note, refuse_implausible_limit, refuse_infeasible_limit, within_limit
from shardfn.search.problem import Answer, Memo, OpenResult, SearchProblem
from shardfn.search.resharding_costs import Axes


def place_call(
    inputs: Sequence[Leaf], outputs: Sequence[Leaf], traced: Traced, classes: DimensionGroups, hardware: Hardware,
    problems: list[Problem],
) -> Placement:  # fmt: skip
    """Validate all entries of a call, arguments and results alike, and put them on one grid; `problems` grows."""
    leaves = [*inputs, *outputs]
    before = len(problems)
    cuts = [check(leaf, hardware.count, problems) for leaf in leaves]
    values = (*traced.inputs, *traced.outputs)
    tied = [classes.of[v][: len(leaf.shape)] for v, leaf in zip(values, leaves, strict=True)]
    if any(names_axes(leaf) for leaf in leaves):
        return place_named(leaves, cuts, hardware.count, hardware.mesh, problems, hardware.devices)
    if len(problems) > before:
        return Placement((), (None,) * len(leaves))
    sizes = [math.prod(v.shape) for v in traced.graph.values]
    return place(leaves, cuts, tied, hardware.count, problems, classes.of, sizes)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Planning makes many small objects and no cycles that matter: the collector would only walk them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_collection()
def make_plan(
    name: str, inputs: Sequence[Leaf], outputs: Sequence[Leaf], traced: Traced, *, hardware: Hardware, level: int,
    search: Search, problems: list[Problem], same_as: Mapping[int, int], donated: Collection[int] = (),
    wishes: Wishes = UNBOUNDED, again: Search | None = None, layout: LayoutFile | None = None,
) -> Plan:  # fmt: skip
    """The plan of one call. `same_as[i] = j` lays output i, if it is open, out as input j; `donated` are inputs.

    `again` is the search for `Plan.what_if`, where `search` is not one that can be asked twice. Of `layout` the grid
    and what is held inside are taken; what it says of arrays stands in the leaves.

    Raises:
      ShardError: with everything in `problems`, which other stages may have filled before.
    """
    graph = traced.graph
    classes = dimension_groups(graph)
    placed = place_call(inputs, outputs, traced, classes, hardware, problems)
    raise_problems(problems)
    grid, specs = _grid_of(placed, inputs, outputs, traced, hardware, layout, problems)
    in_specs, out_specs = specs[: len(inputs)], specs[len(inputs) :]
    anchored = anchors(traced.jaxpr, graph)
    propagation = Propagation(traced, hardware, out_specs, same_as)
    question = _question(inputs, outputs, traced, classes, grid, in_specs, propagation, hardware, level, donated,
                         _safe(anchored, graph), wishes)  # fmt: skip

    def inside(axes: Axes) -> tuple[Mapping[int, OpConstraint], Sequence[str]]:
        return ({}, ()) if layout is None or hardware.count == 1 else held_in(layout, anchored, graph, axes)

    def held(answer: Answer) -> Answer:
        constraints, _ = inside(answer.axes)
        return dataclasses.replace(answer, constraints={**answer.constraints, **constraints}) if constraints else answer

    if wishes.memory_limit is not None:
        refuse_implausible_limit(question)
        if wishes.is_strict:
            refuse_infeasible_limit(question, again or search)
    answer = held(search(question))
    if wishes.is_strict:
        answer = within_limit(question, answer, lambda q: held((again or search)(q)), wishes.memory_limit is not None)
    partitioned, paid = question.partitioned_of(answer), question.evaluate_answer(answer)
    decided = of_inputs(inputs, in_specs, answer, traced, "propagated" if hardware.count == 1 else answer.source)

    def asked_again(changed: Sequence[Leaf], ends: Sequence[Leaf]) -> Plan:
        other = make_plan(name, changed, ends, traced, hardware=hardware, level=level, search=again or search,
                          problems=[], same_as=same_as, donated=donated, wishes=wishes)  # fmt: skip
        if wrong := wrong_ops(other.partitioned):
            told = f"{mended_finding(wrong)}; what that costs is not in this plan"
            other = dataclasses.replace(other, diagnostics=(*other.diagnostics, told))
        return other

    # Without the flows that the search has priced: they are large.
    afresh = dataclasses.replace(question, partition=propagation)
    study = Study(
        afresh, answer.specs, answer.constraints, answer.result_specs, tuple(inputs), tuple(outputs), asked_again
    )
    diagnostics = [*inside(answer.axes)[1]]
    results = of_results(inputs, outputs, propagation, answer, partitioned, diagnostics)
    made = Plan(
        function=name,
        hardware=hardware,
        level=level,
        axes=answer.axes,
        order=placed.order,
        inputs=decided,
        outputs=results,
        dimension_groups=dimension_groups_of(classes, inputs, outputs, traced, decided),
        collectives=collectives(partitioned, lower_for_backend(partitioned, hardware.chip)),
        cost=paid,
        policy=answer.policy,
        diagnostics=(),
        partitioned=partitioned,
        constraints=constraints_of(answer.constraints, anchored, graph),
        gap=answer.gap,
        runner_up=answer.runner_up,
        candidates=candidates(question, answer, paid),
        activations=layout.activations if layout is not None else (),
        memory_limit=wishes.memory_limit,
        _study=study,
    )
    diagnostics += (
        near_limit_note(paid.memory, question.memory_limit) if wishes.is_strict else []
    )  # else judged as compiled
    diagnostics += [
        *answer.diagnostics,
        *of_program(traced, hardware, inputs, answer.axes),
        *not_predicted(graph, partitioned),
    ]
    return dataclasses.replace(made, diagnostics=(*advice(made, study), *diagnostics))


def _grid_of(
    placed: Placement, inputs: Sequence[Leaf], outputs: Sequence[Leaf], traced: Traced, hardware: Hardware,
    layout: LayoutFile | None, problems: list[Problem],
) -> tuple[Axes, tuple[Spec | None, ...]]:  # fmt: skip
    """The grid that the call's entries or its layout file ask for, () if none does, and the entries' layouts on it."""
    drawn = any(names_axes(leaf) for leaf in (*inputs, *outputs))
    grid: Axes = placed.axes if drawn or any(dim for spec in placed.specs if spec for dim in spec) else ()
    if layout is not None and hardware.count > 1 and not grid:
        grid = mesh_axes(layout, hardware.count, problems)
    own = grid or (("a", hardware.count),)
    if all(math.prod(other) != hardware.count or expresses(own, other) for other in traced.grids):
        return grid, tuple(placed.specs)
    # An inner `shard` has its own grid: Shardy carries layouts across only if both are one.
    grid, parts = finest(own)
    return grid, tuple(None if spec is None else _in_parts(spec, parts) for spec in placed.specs)


def _question(
    inputs: Sequence[Leaf], outputs: Sequence[Leaf], traced: Traced, classes: DimensionGroups, grid: Axes,
    in_specs: Sequence[Spec | None], propagation: Propagation, hardware: Hardware, level: int, donated: Collection[int],
    can_constrain: frozenset[int], wishes: Wishes,
) -> SearchProblem:  # fmt: skip
    """What the search is asked."""
    graph, given, same_as = traced.graph, propagation.given, propagation.same_as
    results = list(zip(traced.outputs, outputs, given, strict=True))
    return SearchProblem(
        names=tuple(leaf.path for leaf in inputs),
        shapes=tuple(leaf.shape for leaf in inputs),
        groups=tuple(classes.of[v][: len(leaf.shape)] for v, leaf in zip(traced.inputs, inputs, strict=True)),
        group_bytes=_weights(graph, classes),
        axes=grid,
        specs=tuple(in_specs) if hardware.count > 1 else tuple(((),) * len(leaf.shape) for leaf in inputs),
        hardware=hardware,
        level=level,
        partition=kept(propagation),
        graph=graph,
        inputs=traced.inputs,
        results={v: padded(spec, graph, v) or () for v, _, spec in results if spec is not None},
        same_as={traced.outputs[i]: traced.inputs[j] for i, j in same_as.items() if given[i] is None},
        donated=frozenset(traced.inputs[i] for i in donated),
        can_constrain=can_constrain,
        memory_limit=wishes.memory_limit if wishes.memory_limit is not None else hardware.chip.memory_bytes,
        algorithm=wishes.algorithm,
        search_ops=wishes.inside,
        open_results={} if hardware.count == 1 else {
            i: OpenResult(leaf.path, v, leaf.shape, i - len(outputs))
            for i, (v, leaf, spec) in enumerate(results)
            if spec is None and i not in same_as and leaf.shape},
        results_requested=any(leaf.entry is AUTO and leaf.where for leaf in outputs),
        seconds=wishes.seconds,
        memo=Memo(value_groups=classes.of),
    )  # fmt: skip


def _safe(anchored: Collection[int], graph: Graph) -> frozenset[int]:
    """Those of the ops that can be held, by index: a convolution in groups that is held may end the process in XLA."""
    return frozenset(i for i in anchored if (made := graph.ops[i].convolution) is None or not made.grouped)


def _in_parts(spec: Spec, parts: Mapping[str, tuple[str, ...]]) -> Spec:
    return tuple(tuple(p for axis in dim for p in parts[axis]) for dim in spec)


def _weights(graph: Graph, classes: DimensionGroups) -> dict[int, int]:
    found: dict[int, int] = {}
    for value, of in enumerate(classes.of):
        for class_ in set(of):
            found[class_] = found.get(class_, 0) + int(array_bytes(graph.values[value]))
    return found

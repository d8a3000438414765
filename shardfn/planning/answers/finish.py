"""From an answer of the search to a plan: decisions, constraints, collectives, diagnostics."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from shardfn.cost.estimate import Cost, collectives
from shardfn.cost.schedule import lower_for_backend
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import Leaf
from shardfn.ir.model import Axes, Graph, Spec
from shardfn.ir.partitioned import Detour, PartitionedProgram
from shardfn.ir.specs import strategy_of
from shardfn.planning.answers.candidates import BATCH, candidates, of_rows
from shardfn.planning.call import AnsweredCall, PosedCall, file_constraints, knowing
from shardfn.planning.diagnostics import advice, entries_note, not_predicted, of_program, shared_axes_note
from shardfn.planning.inside import (
    RESHARDED,
    PlacedDetour,
    alltoalls_left,
    anchors,
    placed_detours,
)
from shardfn.planning.layout_rules import Constraint, change_since
from shardfn.planning.plan import (
    BY_DATA_PARALLEL,
    Candidates,
    Decision,
    DimensionGroup,
    Layouts,
    Plan,
    later,
    layouts_of,
    read,
)
from shardfn.search.problem import Answer, OpConstraints, array_bytes, gap_of, near_limit_note


def finish(posed: PosedCall, answer: Answer) -> Plan:
    """The plan of an answer, from a search, a file or a user.

    Where nothing was searched, nothing of the plan is judged before somebody asks: the first call needs shardings alone.
    """
    call, problem = posed.call, posed.problem
    inputs = _inputs(posed, answer)
    outputs, changed = _outputs(posed, answer, problem.partitioned_of(answer))
    compiled = _with_results(posed, answer, outputs)
    partitioned = problem.partitioned_of(compiled)
    uncached = posed.without_programs()
    if not problem.is_open:
        posed = dataclasses.replace(
            posed, problem=dataclasses.replace(problem, partition=knowing(posed.partition, compiled, partitioned))
        )
    answered = AnsweredCall(uncached, answer)
    detours, left = _detours(posed, partitioned)

    def cost() -> Cost:
        return posed.problem.evaluate_answer(compiled)

    def notes() -> tuple[str, ...]:
        return (
            *advice(unadvised, answered),
            *_elsewhere(inputs),
            *file_constraints(call, posed.anchored, answer.axes)[1],
            *changed,
            *(near_limit_note(cost().memory, problem.memory_limit) if call.search.is_limit_strict else ()),
            *answer.diagnostics,
            *alltoalls_left(left),
            *of_program(call.traced, call.hardware, call.inputs, answer.axes),
            *not_predicted(call.traced.graph, partitioned),
            *filter(None, [call.layout and change_since(call.layout, call.name, call.inputs, call.function.jaxpr)]),
        )

    make = functools.partial(
        Plan,
        function=call.name,
        hardware=call.hardware,
        level=problem.level,
        axes=answer.axes,
        order=posed.order,
        inputs=inputs,
        outputs=outputs,
        dimension_groups=later(lambda: _dimension_groups(posed, inputs)),
        collectives=later(lambda: collectives(partitioned, lower_for_backend(partitioned, call.hardware.chip))),
        cost=later(cost),
        policy=answer.policy,
        style=call.search.style,
        entries=later(lambda: _entries_note(posed, answer, cost())),
        partitioned=partitioned,
        constraints=_constraints(posed, answer.constraints),
        detours=detours,
        gap=later(lambda: gap_of(cost(), posed.problem, answer.bound_s)),
        runner_up=answer.runner_up,
        candidates=later(lambda: _candidates(posed, answer, cost(), unadvised)),
        activations=call.layout.activations if call.layout is not None else (),
        memory_limit=call.search.memory_limit,
        closed_over=call.traced.closed_over,
        _answered=answered,
    )
    unadvised = make(diagnostics=())
    plan = make(diagnostics=later(notes))
    return read(plan) if problem.is_open else plan


def _candidates(posed: PosedCall, answer: Answer, cost: Cost, plan: Plan) -> Candidates:
    """The evaluated candidates, named after rows where the plan is of no neural network."""
    found = candidates(posed.problem, answer, cost)
    is_of_rows = any(BATCH in c.name for c in found) and plan.layouts.dimensions is not None
    return of_rows(found) if is_of_rows else found


def _elsewhere(inputs: Sequence[Decision]) -> tuple[str, ...]:
    """A note on arguments that stay in another memory, of which the estimate knows nothing."""
    found = [d.path for d in inputs if d.memory_kind is not None]
    kinds = ", ".join(sorted({d.memory_kind for d in inputs if d.memory_kind is not None}))
    if not found:
        return ()
    return (f"{listed(found)}: in {kinds} memory; the estimate of the memory per device counts these arrays too",)


def _detours(posed: PosedCall, partitioned: PartitionedProgram) -> tuple[tuple[PlacedDetour, ...], tuple[Detour, ...]]:
    """The detours of the program around all-to-alls, and those that have no place."""
    if not partitioned.detours:
        return (), ()
    traced = posed.call.traced
    return placed_detours(partitioned, traced.graph, anchors(traced.jaxpr, traced.graph, RESHARDED), traced.captured)


def _entries_note(posed: PosedCall, answer: Answer, cost: Cost) -> str:
    """What the headline says of the user's entries."""

    def layouts(one: Answer) -> Layouts:
        partitioned, inputs = posed.problem.partitioned_of(one), _inputs(posed, one)
        outputs, _ = _outputs(posed, one, partitioned)
        return layouts_of(one.axes, inputs, outputs, _dimension_groups(posed, inputs), partitioned)

    search = posed.call.search
    sources = ("you", "file") if search.style and search.search_ops else ("you",)
    is_of_user = any(
        leaf.by in sources for leaf, own in zip(posed.call.inputs, posed.entries, strict=True) if own is not None
    )
    hardware = posed.call.hardware
    if not is_of_user or hardware.count == 1:
        return ""
    note = entries_note(posed.problem, answer, cost, layouts, search.style)
    own = [leaf.entry for leaf in posed.call.inputs if leaf.by == "you"]
    has_integers = all(isinstance(entry, tuple) and all(isinstance(n, int) for n in entry) for entry in own)
    shared = (
        shared_axes_note(posed.problem, answer.axes, hardware.count) if has_integers and hardware.mesh is None else ""
    )
    return "; ".join(filter(None, (shared, note)))


def _inputs(posed: PosedCall, answer: Answer) -> tuple[Decision, ...]:
    call = posed.call
    source = "propagated" if call.hardware.count == 1 else answer.source
    runners_up = answer.runners_up or ("",) * len(call.inputs)
    rows = zip(
        call.inputs, answer.specs, posed.entries, call.traced.inputs, answer.reasons, runners_up, call.memories[0],
        strict=True,
    )  # fmt: skip
    return tuple(
        _decision(
            leaf,
            spec,
            answer.axes,
            call.traced.graph,
            value,
            source if own is None else leaf.by,
            reason,
            runner_up,
            kind,
        )
        for leaf, spec, own, value, reason, runner_up, kind in rows
    )


def _outputs(
    posed: PosedCall, answer: Answer, partitioned: PartitionedProgram
) -> tuple[tuple[Decision, ...], list[str]]:
    """The decisions on the results, and notes on shardings that JAX cannot express."""
    call, graph, diagnostics = posed.call, partitioned.graph, list[str]()
    decided = []
    values = graph.outputs[len(graph.outputs) - len(call.outputs) :]
    wanted_specs = posed.propagation.results(answer.specs)
    rows = zip(call.outputs, posed.propagation.given, wanted_specs, values, call.memories[1], strict=True)
    for i, (leaf, given, wanted, value, kind) in enumerate(rows):
        spec = answer.result_specs.get(i, wanted)
        if spec is None:
            spec = _expressible(partitioned.specs[value][: len(leaf.shape)], leaf, partitioned, diagnostics)
        source = "searched" if i in answer.result_specs else "propagated" if given is None else leaf.by
        reason = (
            "with the arguments: propagation alone would choose another sharding" if i in answer.result_specs else ""
        )
        if given is None and i in call.same_as:
            reason = f"as the argument which it can replace, `{call.inputs[call.same_as[i]].path}`"
        decided.append(_decision(leaf, spec, answer.axes, graph, value, source, reason, "", kind))
    return tuple(decided), diagnostics


def as_compiled(posed: PosedCall, answer: Answer) -> Answer:
    """The answer as its plan is compiled: `Plan.partitioned` is its program."""
    outputs, _ = _outputs(posed, answer, posed.problem.partitioned_of(answer))
    return _with_results(posed, answer, outputs)


def _with_results(posed: PosedCall, answer: Answer, outputs: Sequence[Decision]) -> Answer:
    """The answer with the open results as `jax.jit` gets them. Fixed, they may spread otherwise than left to propagation."""
    wanted = posed.propagation.results(answer.specs)
    own = {i: d.spec for i, (d, spec) in enumerate(zip(outputs, wanted, strict=True)) if spec is None and d.shape}
    return dataclasses.replace(answer, result_specs={**own, **answer.result_specs})


def _constraints(posed: PosedCall, constraints: OpConstraints) -> tuple[Constraint, ...]:
    ops, shifts = posed.call.traced.graph.ops, posed.call.function.has_shifts
    return tuple(
        Constraint(ops[i].name, posed.anchored[i], ops[i].where, constraint.operands, constraint.results, shifts)
        for i, constraint in sorted(constraints.items())
    )


def _dimension_groups(posed: PosedCall, decided: Sequence[Decision]) -> tuple[DimensionGroup, ...]:
    """The tied dimensions of inputs and outputs."""
    leaves = (*posed.call.inputs, *posed.call.outputs)
    values = (*posed.call.traced.inputs, *posed.call.traced.outputs)
    found = []
    for members in posed.groups.members(values).values():
        pairs = [(i, d) for i, d in members if d < len(leaves[i].shape) and leaves[i].shape[d] > 1]
        if pairs:
            axes: tuple[str, ...] = max((decided[i].spec[d] for i, d in pairs if i < len(decided)), key=len, default=())
            names = tuple(f"{leaves[i].path}.{d}" for i, d in pairs)
            i, d = pairs[0]
            found.append(DimensionGroup(names[0], leaves[i].shape[d], names, axes))
    return tuple(found)


def _decision(
    leaf: Leaf, spec: Spec | None, axes: Axes, graph: Graph, value: int, source: str, reason: str, runner_up: str,
    memory_kind: str | None,
) -> Decision:  # fmt: skip
    spec = spec if spec is not None else ((),) * len(leaf.shape)
    strategy = strategy_of(spec, axes)
    if source in ("you", "file", "mode"):
        reason, runner_up = leaf.where + (BY_DATA_PARALLEL if leaf.entry is None else ""), ""
    elif source == "propagated":
        runner_up = ""
    local = int(array_bytes(graph.values[value])) // max(1, math.prod(strategy))
    return Decision(leaf.path, leaf.shape, leaf.dtype, strategy, spec, source, reason, runner_up, local, memory_kind)


def _expressible(spec: Spec, leaf: Leaf, partitioned: PartitionedProgram, diagnostics: list[str]) -> Spec:
    """A propagated sharding that JAX can express: over unsplit mesh axes whose product divides the dimension."""
    kept = []
    for size, dim in zip(leaf.shape, spec, strict=True):
        good = dim
        while good and (
            any(":" in a for a in good) or size % math.prod(partitioned.axes.get(a, 0) or size + 1 for a in good)
        ):
            good = good[:-1]
        kept.append(good)
        if good != dim:
            diagnostics.append(f"{leaf.path}: XLA would shard dimension {len(kept) - 1} over {dim}, which does not "
                            f"divide {size}; the result is sharded over {good or 'no axis'}")  # fmt: skip
    return tuple(kept)

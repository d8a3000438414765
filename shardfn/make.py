"""Arguments, strategies and hardware to a plan: place what was given, search what is open, propagate, price."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from shardfn.cost.hardware import Hardware
from shardfn.cost.price import collectives
from shardfn.cuts import check
from shardfn.decisions import Constraint, Decision, DimClass
from shardfn.errors import Problem, raise_problems
from shardfn.findings import advice
from shardfn.given import is_drawn, place_drawn
from shardfn.graph import shardy
from shardfn.graph.classes import Classes, dim_classes
from shardfn.graph.model import Flow, Graph, Spec, axis_size, dtype_bits
from shardfn.graph.roads import as_compiled
from shardfn.guard import mended_finding, wrong_ops
from shardfn.layoutrules import LayoutFile, axes_on
from shardfn.limits import near_limit, within_limit
from shardfn.pins import anchors, held_in
from shardfn.place import Placement, expresses, finest, place
from shardfn.plan import Plan
from shardfn.priced import candidates
from shardfn.search import Search
from shardfn.search.grid import Axes
from shardfn.search.problem import NO_ENDS, Algorithm, End, Ends, Pins
from shardfn.search.problem import Problem as Question
from shardfn.strategy import AUTO, Leaf
from shardfn.study import Study
from shardfn.trace import Traced
from shardfn.unpredicted import not_predicted, of_program


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What bounds a search: bytes per device (None: what the device has), the user's time limit, and what may be left out."""

    memory_limit: float | None = None
    seconds: float = math.inf
    is_strict: bool = True
    """Whether a plan that is predicted to hold more than `memory_limit` is an error."""
    algorithm: Algorithm = dataclasses.field(default_factory=Algorithm)
    inside: bool = False
    """Whether the layouts inside are searched though no argument is open."""


def place_call(
    inputs: Sequence[Leaf], outputs: Sequence[Leaf], traced: Traced, classes: Classes, hardware: Hardware,
    problems: list[Problem],
) -> Placement:  # fmt: skip
    """Validate all entries of a call, arguments and results alike, and put them on one grid; `problems` grows."""
    leaves = [*inputs, *outputs]
    before = len(problems)
    cuts = [check(leaf, hardware.count, problems) for leaf in leaves]
    values = (*traced.inputs, *traced.outputs)
    tied = [classes.of[v][: len(leaf.shape)] for v, leaf in zip(values, leaves, strict=True)]
    if any(is_drawn(leaf) for leaf in leaves):
        return place_drawn(leaves, cuts, hardware.count, hardware.mesh, problems, hardware.devices)
    if len(problems) > before:
        return Placement((), (None,) * len(leaves))
    return place(leaves, cuts, tied, hardware.count, problems, classes.of)


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
    wishes: Wishes = Wishes(), again: Search | None = None, layout: LayoutFile | None = None,
) -> Plan:  # fmt: skip
    """The plan of one call. `same_as[i] = j` lays output i, if it is open, out as input j; `donated` are inputs.

    `again` is the search for `Plan.what_if`, where `search` is not one that can be asked twice. Of `layout` the grid
    and what is held inside are taken; what it says of arrays stands in the leaves.

    Raises:
      ShardError: with everything in `problems`, which other stages may have filled before.
    """
    graph = traced.graph
    classes = dim_classes(graph)
    placed = place_call(inputs, outputs, traced, classes, hardware, problems)
    raise_problems(problems)
    in_specs, out_specs = placed.specs[: len(inputs)], placed.specs[len(inputs) :]
    drawn = any(is_drawn(leaf) for leaf in (*inputs, *outputs))
    grid: Axes = placed.axes if drawn or any(dim for spec in placed.specs if spec for dim in spec) else ()

    if layout is not None and hardware.count > 1 and not grid:
        grid = axes_on(layout, hardware.count, problems)

    own = grid or (("a", hardware.count),)
    if any(math.prod(other) == hardware.count and not expresses(own, other) for other in traced.grids):
        # An inner `shard` has its own grid: Shardy carries layouts across only if both are one.
        grid, parts = finest(own)
        in_specs, out_specs = (tuple(None if s is None else _in_parts(s, parts) for s in specs)
                               for specs in (in_specs, out_specs))  # fmt: skip

    def result_specs(specs: Sequence[Spec | None]) -> list[Spec | None]:
        return [specs[same_as[i]] if spec is None and i in same_as else spec for i, spec in enumerate(out_specs)]

    ready: list[shardy.Ready] = []  # the module as all flows begin

    def flow_with(axes: Axes, specs: Sequence[Spec | None], results: Mapping[int, Spec], pins: Pins) -> Flow:
        ends = [results.get(i, spec) for i, spec in enumerate(result_specs(specs))]
        spread = [None] * traced.captured
        spread += [_padded(s, graph, v) for s, v in zip(specs, traced.inputs, strict=True)]
        padded = [_padded(s, graph, v) for s, v in zip(ends, traced.outputs, strict=True)]
        tokens = len(graph.outputs) - len(outputs)
        at = {graph.ops[index].site: pin for index, pin in pins.items()}
        if not ready:
            ready.append(shardy.as_propagated(traced.module, traced.seen))
        laid = shardy.propagate(traced.module, axes, spread, [None] * tokens + padded, at, *ready)
        return as_compiled(laid, hardware.platform)

    known: dict[Any, Flow] = {}

    def flow_of(axes: Axes, specs: Sequence[Spec | None], pins: Pins, ends: Ends = NO_ENDS) -> Flow:
        key = axes, tuple(specs), tuple(pins.items()), tuple(sorted(ends.items()))
        if key not in known:
            known[key] = flow_with(axes, specs, ends, pins)
        return known[key]

    anchored = anchors(traced.jaxpr, graph)
    question = Question(
        names=tuple(leaf.path for leaf in inputs),
        shapes=tuple(leaf.shape for leaf in inputs),
        classes=tuple(classes.of[v][: len(leaf.shape)] for v, leaf in zip(traced.inputs, inputs, strict=True)),
        weights=_weights(graph, classes),
        axes=grid,
        specs=in_specs if hardware.count > 1 else tuple(((),) * len(leaf.shape) for leaf in inputs),
        hardware=hardware,
        level=level,
        flow=flow_of,
        graph=graph,
        inputs=traced.inputs,
        results={v: _padded(s, graph, v) or ()
                 for v, s in zip(traced.outputs, out_specs, strict=True) if s is not None},
        same_as={traced.outputs[i]: traced.inputs[j] for i, j in same_as.items() if out_specs[i] is None},
        donated=frozenset(traced.inputs[i] for i in donated),
        can_hold=frozenset(anchored),
        memory_limit=wishes.memory_limit if wishes.memory_limit is not None else hardware.chip.memory_bytes,
        algorithm=wishes.algorithm,
        inside=wishes.inside,
        ends={} if hardware.count == 1 else {
            i: End(leaf.path, v, leaf.shape, i - len(outputs))
            for i, (v, leaf, s) in enumerate(zip(traced.outputs, outputs, out_specs, strict=True))
            if s is None and i not in same_as and leaf.shape},
        ends_asked=any(leaf.entry is AUTO and leaf.where for leaf in outputs),
        seconds=wishes.seconds,
    )  # fmt: skip
    question.memo["tied"] = classes.of
    answer = search(question)
    if wishes.is_strict:
        answer = within_limit(question, answer, again or search, wishes.memory_limit is not None)
    findings: list[str] = []
    if layout is not None and hardware.count > 1:
        pins = held_in(layout, anchored, graph, answer.axes, findings)
        answer = dataclasses.replace(answer, pins={**answer.pins, **pins})
    flow = question.flow_of(answer)
    constraints = tuple(
        Constraint(graph.ops[index].name, anchored[index], graph.ops[index].where, pin.operands, pin.results)
        for index, pin in sorted(answer.pins.items())
    )
    decided_in = tuple(
        _decision(leaf, spec, answer.axes, graph, value, source if given is None else leaf.by, reason, runner_up)
        for leaf, spec, given, value, reason, runner_up in zip(
            inputs,
            answer.specs,
            in_specs,
            traced.inputs,
            answer.reasons,
            answer.runners_up or (answer.runner_up,) * len(inputs),
            strict=True,
        )
        for source in (answer.source if hardware.count > 1 else "propagated",)
    )
    decided_out = []
    last = flow.graph.outputs[len(flow.graph.outputs) - len(outputs) :]
    for i, (leaf, given, laid, value) in enumerate(
        zip(outputs, out_specs, result_specs(answer.specs), last, strict=True)
    ):
        laid = answer.ends.get(i, laid)
        spec = laid if laid is not None else _whole_axes(flow.specs[value][: len(leaf.shape)], leaf, flow, findings)
        source = "searched" if i in answer.ends else "propagated" if given is None else leaf.by
        reason = "with the arguments: propagation alone would leave it otherwise" if i in answer.ends else ""
        if given is None and i in same_as:
            reason = f"as `{inputs[same_as[i]].path}`, whose place it can take"
        decided_out.append(_decision(leaf, spec, answer.axes, flow.graph, value, source, reason, ""))

    def asked_again(changed: Sequence[Leaf], ends: Sequence[Leaf]) -> Plan:
        other = make_plan(name, changed, ends, traced, hardware=hardware, level=level, search=again or search,
                          problems=[], same_as=same_as, donated=donated, wishes=wishes)  # fmt: skip
        if wrong := wrong_ops(other.flow):
            told = f"{mended_finding(wrong)}; what that costs is not in this plan"
            other = dataclasses.replace(other, findings=(*other.findings, told))
        return other

    paid = question.price_of(answer)
    # Without the flows that the search has priced: they are large.
    afresh = lambda axes, specs, pins, ends=NO_ENDS: flow_with(axes, specs, ends, pins)  # noqa: E731
    study = Study(dataclasses.replace(question, flow=afresh), answer.specs, answer.pins, answer.ends, tuple(inputs),
                  tuple(outputs), flow_with, asked_again)  # fmt: skip
    made = Plan(
        name, hardware, level, answer.axes, placed.order, decided_in, tuple(decided_out),
        _classes(classes, inputs, outputs, traced, decided_in), collectives(flow), paid, answer.policy, (), flow,
        constraints, answer.gap, candidates(question, answer, paid),
        layout.activations if layout is not None else (), wishes.memory_limit, study,
    )  # fmt: skip
    findings += near_limit(paid.memory, question.memory_limit) if wishes.is_strict else []  # else judged as compiled
    findings += [*answer.findings, *of_program(traced, hardware, inputs, answer.axes), *not_predicted(graph, flow)]
    return dataclasses.replace(made, findings=(*findings, *advice(made, study)))


def _in_parts(spec: Spec, parts: Mapping[str, tuple[str, ...]]) -> Spec:
    return tuple(tuple(p for axis in dim for p in parts[axis]) for dim in spec)


def _padded(spec: Spec | None, graph: Graph, value: int) -> Spec | None:
    """A spec for the array as the module has it: a PRNG key has one dim more there."""
    return None if spec is None else (*spec, *((),) * (len(graph.values[value].shape) - len(spec)))


def _bytes(graph: Graph, value: int) -> int:
    return math.prod(graph.values[value].shape) * dtype_bits(graph.values[value].dtype) // 8


def _weights(graph: Graph, classes: Classes) -> dict[int, int]:
    found: dict[int, int] = {}
    for value, of in enumerate(classes.of):
        for class_ in set(of):
            found[class_] = found.get(class_, 0) + _bytes(graph, value)
    return found


def _decision(
    leaf: Leaf, spec: Spec | None, axes: Axes, graph: Graph, value: int, source: str, reason: str, runner_up: str
) -> Decision:
    spec = spec if spec is not None else ((),) * len(leaf.shape)
    sizes = dict(axes)
    cuts = tuple(math.prod(axis_size(a, sizes) for a in dim) for dim in spec)
    if source in ("you", "file"):
        reason, runner_up = leaf.where + (": data parallel" if leaf.entry is None else ""), ""
    elif source == "propagated":
        runner_up = ""
    local = _bytes(graph, value) // max(1, math.prod(cuts))
    return Decision(leaf.path, leaf.shape, leaf.dtype, cuts, spec, source, reason, runner_up, local)


def _whole_axes(spec: Spec, leaf: Leaf, flow: Flow, findings: list[str]) -> Spec:
    """A propagated layout that JAX can hand out: axes must be whole ones and divide the dim."""
    kept = []
    for size, dim in zip(leaf.shape, spec, strict=True):
        good = dim
        while good and (any(":" in a for a in good) or size % math.prod(flow.axes.get(a, 0) or size + 1 for a in good)):
            good = good[:-1]
        kept.append(good)
        if good != dim:
            findings.append(f"{leaf.path}: XLA would cut dimension {len(kept) - 1} over {dim}, which does not divide "
                            f"{size}; it is handed out over {good or 'no axis'}")  # fmt: skip
    return tuple(kept)


def _classes(
    classes: Classes, inputs: Sequence[Leaf], outputs: Sequence[Leaf], traced: Traced, decided: Sequence[Decision]
) -> tuple[DimClass, ...]:
    leaves = [*inputs, *outputs]
    values = (*traced.inputs, *traced.outputs)
    found = []
    for members in classes.members(values).values():
        pairs = [(i, d) for i, d in members if d < len(leaves[i].shape) and leaves[i].shape[d] > 1]
        if not pairs:
            continue
        axes: tuple[str, ...] = max((decided[i].spec[d] for i, d in pairs if i < len(decided)), key=len, default=())
        i, d = pairs[0]
        names = tuple(f"{leaves[i].path}.{d}" for i, d in pairs)
        found.append(DimClass(names[0], leaves[i].shape[d], names, axes))
    return tuple(found)

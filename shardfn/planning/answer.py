"""What a plan says of its arrays, of dims and of held ops, from an answer of the search and the flow of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardfn.frontend.strategy import Leaf
from shardfn.frontend.trace import Traced
from shardfn.ir.dimension_groups import DimensionGroups
from shardfn.ir.model import Graph, PartitionedProgram, Spec, axis_size
from shardfn.planning.decisions import Constraint, Decision, DimensionGroup
from shardfn.planning.propagation import Propagation
from shardfn.search.graph_facts import array_bytes
from shardfn.search.problem import Answer, OpConstraints
from shardfn.search.resharding_costs import Axes


def of_inputs(
    inputs: Sequence[Leaf], given: Sequence[Spec | None], answer: Answer, traced: Traced, source: str
) -> tuple[Decision, ...]:
    """The decisions on the arguments; `source` is that of those which were not given."""
    runners_up = answer.runners_up or ("",) * len(inputs)
    rows = zip(inputs, answer.specs, given, traced.inputs, answer.reasons, runners_up, strict=True)
    return tuple(
        _decision(leaf, spec, answer.axes, traced.graph, value, source if own is None else leaf.by, reason, runner_up)
        for leaf, spec, own, value, reason, runner_up in rows
    )


def of_results(
    inputs: Sequence[Leaf],
    outputs: Sequence[Leaf],
    propagation: Propagation,
    answer: Answer,
    partitioned: PartitionedProgram,
    diagnostics: list[str],
) -> tuple[Decision, ...]:
    """The decisions on the results; `diagnostics` grows by what JAX cannot hand out as it lies."""
    decided = []
    values = partitioned.graph.outputs[len(partitioned.graph.outputs) - len(outputs) :]
    rows = zip(outputs, propagation.given, propagation.results(answer.specs), values, strict=True)
    for i, (leaf, given, laid, value) in enumerate(rows):
        laid = answer.result_specs.get(i, laid)
        spec = (
            laid
            if laid is not None
            else _whole_axes(partitioned.specs[value][: len(leaf.shape)], leaf, partitioned, diagnostics)
        )
        source = "searched" if i in answer.result_specs else "propagated" if given is None else leaf.by
        reason = "with the arguments: propagation alone would leave it otherwise" if i in answer.result_specs else ""
        if given is None and i in propagation.same_as:
            reason = f"as `{inputs[propagation.same_as[i]].path}`, whose place it can take"
        decided.append(_decision(leaf, spec, answer.axes, partitioned.graph, value, source, reason, ""))
    return tuple(decided)


def constraints_of(constraints: OpConstraints, anchored: Mapping[int, int], graph: Graph) -> tuple[Constraint, ...]:
    """What is held inside; `anchored` has the number of each op among its kind."""
    return tuple(
        Constraint(
            graph.ops[index].name, anchored[index], graph.ops[index].where, constraint.operands, constraint.results
        )
        for index, constraint in sorted(constraints.items())
    )


def dimension_groups_of(
    classes: DimensionGroups,
    inputs: Sequence[Leaf],
    outputs: Sequence[Leaf],
    traced: Traced,
    decided: Sequence[Decision],
) -> tuple[DimensionGroup, ...]:
    """Which dims of arguments and results the function treats as one."""
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
        found.append(DimensionGroup(names[0], leaves[i].shape[d], names, axes))
    return tuple(found)


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
    local = int(array_bytes(graph.values[value])) // max(1, math.prod(cuts))
    return Decision(leaf.path, leaf.shape, leaf.dtype, cuts, spec, source, reason, runner_up, local)


def _whole_axes(spec: Spec, leaf: Leaf, partitioned: PartitionedProgram, diagnostics: list[str]) -> Spec:
    """A propagated layout that JAX can hand out: axes must be whole ones and divide the dim."""
    kept = []
    for size, dim in zip(leaf.shape, spec, strict=True):
        good = dim
        while good and (
            any(":" in a for a in good) or size % math.prod(partitioned.axes.get(a, 0) or size + 1 for a in good)
        ):
            good = good[:-1]
        kept.append(good)
        if good != dim:
            diagnostics.append(f"{leaf.path}: XLA would cut dimension {len(kept) - 1} over {dim}, which does not divide "
                            f"{size}; it is handed out over {good or 'no axis'}")  # fmt: skip
    return tuple(kept)

"""A candidate with less held: without the pins that propagation does not need, and with arguments that are sliced before
anything reads them laid out so from the start."""

from __future__ import annotations

import math

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Graph, Op, OpConstraint, PartitionedProgram, ShardingRule, Spec
from shardfn.search.feasibility import is_infeasible
from shardfn.search.problem import OpConstraints, SearchCandidate, SearchProblem, objective

CRUMB = 1e-4
"""Of the memory of a device: arguments that hold less together are not worth a flow of a program that is not small."""


def drop_redundant_constraints(problem: SearchProblem, best: SearchCandidate, is_last: bool = False) -> SearchCandidate:
    """The same without the pins that propagation does not need, if the flow stays as good. Of what `is_last`, the one that
    was taken, at level 2 of programs that are not small, only where a single flow may do it: the plan stays as good."""
    if not best.constraints or problem.seconds_left <= 0:
        return best
    is_quick = is_last and problem.skips_unlikely
    is_lost = is_quick and best.cost.memory.peak > problem.memory_limit and is_infeasible(problem)
    is_held = any(
        spec is not None for constraint in best.constraints.values() for spec in constraint.operands
    )  # which was better than less
    if is_lost or (is_quick and is_held) or ((is_quick or problem.is_large) and gathers(problem, best)):
        return best
    aim = objective(best.cost, problem)
    alone = problem.again(best, constraints={})
    if objective(alone.cost, problem) <= aim and not problem.algorithm.fully_use_devices:
        return alone  # but for that rule, which propagation does not know
    if problem.is_large:
        return best
    results_only = {
        index: OpConstraint((None,) * len(constraint.operands), constraint.results)
        for index, constraint in best.constraints.items()
    }
    loose = problem.again(best, constraints=results_only)
    if objective(loose.cost, problem) < aim:  # as the op reads its operands, they are best changed elsewhere
        best, aim = loose, objective(loose.cost, problem)
    if is_quick:  # a further flow costs more than the pins do
        return best
    agreed = agreeing_ops(
        problem.graph, problem.partition(best.axes, best.specs, {}, best.result_specs), best.constraints
    )
    needed = {index: constraint for index, constraint in best.constraints.items() if index not in agreed}
    fewer = problem.again(best, constraints=needed)
    return fewer if objective(fewer.cost, problem) <= aim else best


def gathers(problem: SearchProblem, best: SearchCandidate) -> bool:
    """Whether an op is held so that it reads an argument in larger pieces than it lies in: propagation by itself would
    hand the cut on to the op's results and from there to all else, and its flow is another one."""
    lies = dict(zip(problem.inputs, best.specs, strict=True))
    return any(
        v in lies and _is_gathered(problem.graph.ops[index].rule, position, lies[v], constraint)
        for index, constraint in best.constraints.items()
        for position, v in enumerate(problem.graph.ops[index].inputs)
    )


def _is_gathered(rule: ShardingRule | None, position: int, lies: Spec, constraint: OpConstraint) -> bool:
    """Whether a cut of an operand is neither read so, nor summed over, nor found in a result."""
    laid = constraint.operands[position]
    if laid is not None:
        return not {a for dim in lies for a in dim} <= {a for dim in laid for a in dim}
    if rule is None or None in constraint.results:
        return False
    cut = {
        (factor, axis)
        for dims, spec in zip(rule.results, constraint.results, strict=True)
        for factors, axes in zip(dims, spec or (), strict=True)
        for factor in factors
        for axis in axes
    }
    return any(
        not any(factor in rule.reduction or (factor, axis) in cut for factor in factors)
        for factors, axes in zip(rule.operands[position], lies, strict=False)
        for axis in axes
    )


def shard_sliced_arguments(problem: SearchProblem, best: SearchCandidate) -> SearchCandidate:
    """The same with each open argument that the flow slices before anything else reads it laid out so from the start, if
    that is better; at level 2 of programs that are not small, if they are worth a flow."""
    partitioned = problem.partitioned_of(best)
    inputs = partitioned.graph.arguments(len(best.specs))
    readers: dict[int, list[Op]] = {value: [] for value in inputs}
    for op in partitioned.graph.ops:
        for value in set(op.inputs) & readers.keys():
            readers[value].append(op)
    sizes, specs = dict(best.axes), list(best.specs)
    for i, value in enumerate(inputs):
        found = {partitioned.specs[op.outputs[0]] for op in readers[value] if op.name == "all_slice"}
        if problem.specs[i] is None and len(found) == 1 and all(op.name == "all_slice" for op in readers[value]):
            (spec,) = found
            laid, shape = spec[: len(problem.shapes[i])], problem.shapes[i]
            if all(a in sizes for dim in laid for a in dim) and all(
                n % math.prod(sizes[a] for a in dim) == 0 for n, dim in zip(shape, laid, strict=True)
            ):
                specs[i] = laid
    changed = [v for v, was, now in zip(inputs, best.specs, specs, strict=True) if was != now]
    worth = CRUMB * best.cost.memory.peak if problem.skips_unlikely else 0
    if not changed or sum(map(partitioned.local_bytes, changed)) < worth:
        return best
    laid = problem.again(best, specs=tuple(specs))
    return laid if objective(laid.cost, problem) <= objective(best.cost, problem) else best


def agreeing_ops(graph: Graph, partitioned: PartitionedProgram, constraints: OpConstraints) -> frozenset[int]:
    """The pinned ops, by index, that a flow lays out as their pins want."""

    def agrees(constraint: OpConstraint, op: Op) -> bool:
        rows = zip((*constraint.operands, *constraint.results), (*op.inputs, *op.outputs), strict=True)
        return all(spec is None or spec == partitioned.specs[value] for spec, value in rows)

    return frozenset(
        i for i, _, laid in pairs(graph, partitioned.graph) if i in constraints and agrees(constraints[i], laid)
    )

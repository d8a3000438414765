"""Drop redundant constraints of a candidate, and shard arguments the way the program slices them."""

from __future__ import annotations

import math

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Graph, Op, OpConstraint, PartitionedProgram, ShardingRule, Spec
from shardfn.search.feasibility import is_infeasible
from shardfn.search.problem import OpConstraints, SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import results_only, used_axes

NEGLIGIBLE = 1e-4
"""Part of a device's memory: arguments that hold less together are not worth an evaluation, except in small programs."""


def drop_redundant_constraints(problem: SearchProblem, best: SearchCandidate, is_last: bool = False) -> SearchCandidate:
    """The candidate without the constraints that propagation does not need, if it stays as good.

    Args:
      problem: the question.
      best: the candidate.
      is_last: whether it is the answer; at level 2 of programs that are not small, a single evaluation is then tried.
    """
    if not best.constraints or problem.seconds_left <= 0:
        return best
    is_quick = is_last and problem.effort.skips_unlikely
    is_lost = is_quick and not problem.fits(best) and is_infeasible(problem)
    has_operands = any(s is not None for constraint in best.constraints.values() for s in constraint.operands)
    needs_all = (is_quick or problem.effort.is_large) and _gathers_arguments(problem, best)
    if is_lost or (is_quick and has_operands) or needs_all:
        return best
    rank = problem.rank(best)
    bare = problem.changed(best, constraints={})
    if problem.rank(bare) <= rank and not problem.algorithm.fully_use_devices:
        return bare  # propagation does not know that rule
    if problem.effort.is_large:
        return best
    loose = problem.changed(best, constraints={i: results_only(c) for i, c in best.constraints.items()})
    if problem.rank(loose) < rank:
        best, rank = loose, problem.rank(loose)
    if is_quick:  # a further evaluation costs more than the constraints do
        return best
    agreed = agreeing_ops(
        problem.graph, problem.partition(best.axes, best.specs, {}, best.result_specs), best.constraints
    )
    fewer = problem.changed(best, constraints={i: c for i, c in best.constraints.items() if i not in agreed})
    return fewer if problem.rank(fewer) <= rank else best


def _gathers_arguments(problem: SearchProblem, best: SearchCandidate) -> bool:
    """Whether a constraint makes an op read an argument less sharded than it is: propagation alone would shard the op's
    results instead, and from there all else."""
    specs = dict(zip(problem.inputs, best.specs, strict=True))
    return any(
        v in specs and _is_gathered(problem.graph.ops[index].rule, position, specs[v], constraint)
        for index, constraint in best.constraints.items()
        for position, v in enumerate(problem.graph.ops[index].inputs)
    )


def _is_gathered(rule: ShardingRule | None, position: int, spec: Spec, constraint: OpConstraint) -> bool:
    """Whether an axis of an operand's sharding is neither read so, nor summed over, nor found in a result."""
    wanted = constraint.operands[position]
    if wanted is not None:
        return not used_axes(spec) <= used_axes(wanted)
    if rule is None or None in constraint.results:
        return False
    in_results = {
        (factor, axis)
        for dims, result in zip(rule.results, constraint.results, strict=True)
        for factors, axes in zip(dims, result or (), strict=True)
        for factor in factors
        for axis in axes
    }
    return any(
        not any(factor in rule.reduction or (factor, axis) in in_results for factor in factors)
        for factors, axes in zip(rule.operands[position], spec, strict=False)
        for axis in axes
    )


def shard_sliced_arguments(problem: SearchProblem, best: SearchCandidate) -> SearchCandidate:
    """The candidate with each open argument that the program slices before any other use sharded like the slice, if that is
    as good. At level 2 of programs that are not small, only arguments of some size are worth it."""
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
            (sliced,) = found
            spec, shape = sliced[: len(problem.shapes[i])], problem.shapes[i]
            if used_axes(spec) <= sizes.keys() and all(
                n % math.prod(sizes[a] for a in dim) == 0 for n, dim in zip(shape, spec, strict=True)
            ):
                specs[i] = spec
    changed = [v for v, was, now in zip(inputs, best.specs, specs, strict=True) if was != now]
    worth = NEGLIGIBLE * best.cost.memory.peak if problem.effort.skips_unlikely else 0
    if not changed or sum(map(partitioned.local_bytes, changed)) < worth:
        return best
    sharded = problem.changed(best, specs=tuple(specs))
    return sharded if problem.rank(sharded) <= problem.rank(best) else best


def agreeing_ops(graph: Graph, partitioned: PartitionedProgram, constraints: OpConstraints) -> frozenset[int]:
    """The constrained ops, by index, that a partitioned program shards as their constraints want."""

    def agrees(constraint: OpConstraint, op: Op) -> bool:
        rows = zip((*constraint.operands, *constraint.results), (*op.inputs, *op.outputs), strict=True)
        return all(spec is None or spec == partitioned.specs[value] for spec, value in rows)

    return frozenset(
        i for i, _, made in pairs(graph, partitioned.graph) if i in constraints and agrees(constraints[i], made)
    )

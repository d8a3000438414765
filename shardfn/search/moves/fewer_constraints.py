"""The move of the local search that takes constraints away."""

from __future__ import annotations

from collections.abc import Iterator

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Graph, Op, OpConstraint
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.specs import results_only
from shardfn.search.moves.array_changes import proposal_from
from shardfn.search.problem import OpConstraints, Proposal, SearchCandidate, SearchProblem


def fewer_constraints(problem: SearchProblem, candidate: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The candidate without the constraints that propagation does not need, with those of results alone, and without any."""
    if not candidate.constraints:
        return
    none: OpConstraints = {}
    free = problem.partition(candidate.axes, candidate.specs, none, candidate.result_specs)
    agreed = agreeing_ops(problem.graph, free, candidate.constraints)
    yield proposal_from(
        problem, candidate, constraints={i: c for i, c in candidate.constraints.items() if i not in agreed}
    )
    yield proposal_from(problem, candidate, constraints={i: results_only(c) for i, c in candidate.constraints.items()})
    yield proposal_from(problem, candidate, constraints=none)


def agreeing_ops(graph: Graph, partitioned: PartitionedProgram, constraints: OpConstraints) -> frozenset[int]:
    """The constrained ops, by index, that a partitioned program shards as their constraints want."""

    def agrees(constraint: OpConstraint, op: Op) -> bool:
        rows = zip((*constraint.operands, *constraint.results), (*op.inputs, *op.outputs), strict=True)
        return all(spec is None or spec == partitioned.specs[value] for spec, value in rows)

    return frozenset(
        i for i, _, there in pairs(graph, partitioned.graph) if i in constraints and agrees(constraints[i], there)
    )

"""Moves of the local search that take constraints away, and that shard arguments the way the program slices them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Graph, Op, OpConstraint, PartitionedProgram
from shardfn.search.array_changes import proposal_from
from shardfn.search.problem import OpConstraints, Proposal, SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import results_only, used_axes


def fewer_constraints(problem: SearchProblem, made: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The candidate without the constraints that propagation does not need, with those of results alone, and without any."""
    if not made.constraints:
        return
    none: OpConstraints = {}
    free = problem.partition(made.axes, made.specs, none, made.result_specs)
    agreed = agreeing_ops(problem.graph, free, made.constraints)
    yield proposal_from(problem, made, constraints={i: c for i, c in made.constraints.items() if i not in agreed})
    yield proposal_from(problem, made, constraints={i: results_only(c) for i, c in made.constraints.items()})
    yield proposal_from(problem, made, constraints=none)


def sliced_arguments(problem: SearchProblem, made: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The candidate with each open argument that the program slices before any other use sharded like the slice."""
    partitioned = problem.partitioned_of(made)
    inputs = partitioned.graph.arguments(len(made.specs))
    readers: dict[int, list[Op]] = {value: [] for value in inputs}
    for op in partitioned.graph.ops:
        for value in set(op.inputs) & readers.keys():
            readers[value].append(op)
    sizes, specs = dict(made.axes), list(made.specs)
    for i, value in enumerate(inputs):
        found = {partitioned.specs[op.outputs[0]] for op in readers[value] if op.name == "all_slice"}
        if problem.specs[i] is None and len(found) == 1 and all(op.name == "all_slice" for op in readers[value]):
            (sliced,) = found
            spec, shape = sliced[: len(problem.shapes[i])], problem.shapes[i]
            if used_axes(spec) <= sizes.keys() and all(
                n % math.prod(sizes[a] for a in dim) == 0 for n, dim in zip(shape, spec, strict=True)
            ):
                specs[i] = spec
    if tuple(specs) != made.specs:
        yield proposal_from(problem, made, specs=tuple(specs))


def agreeing_ops(graph: Graph, partitioned: PartitionedProgram, constraints: OpConstraints) -> frozenset[int]:
    """The constrained ops, by index, that a partitioned program shards as their constraints want."""

    def agrees(constraint: OpConstraint, op: Op) -> bool:
        rows = zip((*constraint.operands, *constraint.results), (*op.inputs, *op.outputs), strict=True)
        return all(spec is None or spec == partitioned.specs[value] for spec, value in rows)

    return frozenset(
        i for i, _, made in pairs(graph, partitioned.graph) if i in constraints and agrees(constraints[i], made)
    )

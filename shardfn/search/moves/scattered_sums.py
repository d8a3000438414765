"""The move of the local search that shards what matmuls sum over devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import OpConstraint, Spec
from shardfn.ir.op_traits import CONTRACTIONS
from shardfn.search.moves.array_changes import proposal_from
from shardfn.search.problem import Proposal, SearchCandidate, SearchProblem


def scattered_sums(problem: SearchProblem, candidate: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The candidate with the results of matmuls that are all-reduced sharded along one of their dimensions instead.

    Each device then receives its part of a sum (reduce-scatter), works on it, and gathers it where all of it is read: of
    activations this is sequence parallelism. All sums over the same axes change together, each dimension is one proposal.
    """
    partitioned, sizes = problem.partitioned_of(candidate), dict(candidate.axes)
    summed = {
        c.operand: c for c in partitioned.communications if c.kind == "all-reduce" and sizes.keys() >= set(c.axes)
    }
    found: dict[tuple[tuple[str, ...], int], dict[int, OpConstraint]] = {}
    for index, op, there in pairs(problem.graph, partitioned.graph):
        c = summed.get(there.outputs[0]) if op.name in CONTRACTIONS else None
        if c is None or index not in problem.can_constrain:
            continue
        known = candidate.constraints.get(index, OpConstraint((None,) * len(op.inputs), ()))
        for dim, n in enumerate(problem.graph.values[op.outputs[0]].shape):
            if (spec := _with_axes(partitioned.specs[c.result], dim, n, c.axes, sizes)) is not None:
                found.setdefault((c.axes, dim), {})[index] = known._replace(results=(spec,))
    for constraints in found.values():
        yield proposal_from(problem, candidate, constraints={**candidate.constraints, **constraints})


def _with_axes(spec: Spec, dim: int, size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Spec | None:
    """The sharding with a dimension sharded over more axes; None where they do not divide it."""
    own = (*spec[dim], *axes)
    if not sizes.keys() >= set(own) or size % math.prod(sizes[a] for a in own):
        return None
    order = list(sizes)
    return tuple(tuple(sorted(own, key=order.index)) if d == dim else dim_axes for d, dim_axes in enumerate(spec))

"""Sharding constraints for open results.

Propagation reaches results from arguments only. It would replicate what a function computes from no sharded argument, such as
parameters initialised from a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from shardfn.ir.model import Axes, Spec
from shardfn.ir.specs import map_specs, merge_axes
from shardfn.search.labels import MeshSolution, SolvedProposal, specs_of
from shardfn.search.moves import baselines
from shardfn.search.problem import Proposal, ResultSpecs, SearchCandidate, SearchProblem


def results_as_solved(problem: SearchProblem, candidate: SearchCandidate, found: MeshSolution) -> Proposal | None:
    """A candidate with each open result sharded as in the solution that it comes from; None where it is already.

    A result whose sharding is no decision there, such as zeros, takes the sharding of another result of its shape, or the
    smallest shards.
    """
    spec_of = specs_of(problem, found)
    wanted = _wanted(problem, found.axes, lambda v: spec_of(v) if v in found.space.layouts else None)
    proposal = _with_results(problem, candidate, found.axes, wanted)
    if proposal is None:
        return None
    return SolvedProposal(
        proposal.name, proposal.axes, proposal.specs, proposal.constraints, proposal.result_specs, solution=found
    )


def smallest_results(problem: SearchProblem, candidate: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The candidate with all open results in their smallest shards."""
    proposal = _with_results(problem, candidate, candidate.axes, _wanted(problem, candidate.axes, lambda v: None))
    if proposal is not None:
        yield proposal


def _with_results(
    problem: SearchProblem, candidate: SearchCandidate, axes: Axes, wanted: Mapping[int, Spec]
) -> Proposal | None:
    """The candidate, on `axes` or with some of them merged, with other shardings of results on `axes`, where they divide."""
    parts, sizes = _parts(axes, candidate.axes), dict(axes)

    def fine(spec: Spec) -> Spec:
        return tuple(tuple(p for a in dim for p in parts.get(a, (a,))) for dim in spec)

    now = {at: fine(spec) for at, spec in result_specs_of(problem, candidate).items()}
    results = {
        at: spec for at, spec in wanted.items() if spec != now[at] and fits(problem.open_results[at].shape, spec, sizes)
    }
    if not results:
        return None
    specs = [fine(spec) for spec in candidate.specs]
    constraints = {i: map_specs(constraint, fine) for i, constraint in candidate.constraints.items()}
    if not problem.axes:
        axes, every, constraints = merge_axes(axes, [*specs, *results.values()], constraints)
        specs, results = every[: len(specs)], dict(zip(results, every[len(specs) :], strict=True))
    return Proposal(candidate.name, axes, tuple(specs), constraints, results)


def _wanted(problem: SearchProblem, axes: Axes, spec_of: Callable[[int], Spec | None]) -> dict[int, Spec]:
    """The sharding that each open result should have: by `spec_of`, else that of another result of its shape, else the smallest
    shards."""
    found = {at: spec_of(result.value) for at, result in problem.open_results.items()}
    same_shape = {problem.open_results[at].shape: spec for at, spec in found.items() if spec is not None}
    every = [name for name, _ in axes]
    return {
        at: (spec or same_shape.get(result.shape) or baselines.shard_groups(result.shape, (), axes, {}, every))[
            : len(result.shape)
        ]
        for (at, result), spec in zip(problem.open_results.items(), found.values(), strict=True)
    }


def result_specs_of(problem: SearchProblem, candidate: SearchCandidate) -> ResultSpecs:
    """The shardings of the open results in a candidate's partitioned program."""
    if not problem.open_results:
        return {}
    partitioned = problem.partitioned_of(candidate)
    return {
        at: partitioned.specs[partitioned.graph.outputs[result.at]][: len(result.shape)]
        for at, result in problem.open_results.items()
    }


def fits(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> bool:
    """Whether the axes of a sharding divide their dimensions, as JAX requires of arguments and results.

    >>> fits((6, 4), (("a",), ()), {"a": 4}), fits((6, 4), ((), ("a",)), {"a": 4})
    (False, True)
    """
    shards = (math.prod(sizes.get(a, 0) for a in dim) for dim in spec)
    return all(c == 1 or (n and c and n % c == 0) for n, c in zip(shape, shards, strict=True))


def _parts(fine: Axes, axes: Axes) -> dict[str, tuple[str, ...]]:
    """For each axis the neighbouring axes of a finer mesh that it consists of.

    >>> _parts((("a", 2), ("b", 2), ("c", 3)), (("a", 4), ("b", 3)))
    {'a': ('a', 'b'), 'b': ('c',)}
    """
    found, rest = {}, list(fine)
    for name, size in axes:
        taken: list[str] = []
        while rest and size > 1:
            part, n = rest.pop(0)
            taken.append(part)
            size //= n
        found[name] = tuple(taken)
    return found

"""The fast search: divide the devices again and again, each time with the best further strategy for every op.

A division takes the square root of the devices that are left, and decides one mesh axis of that size for all ops together, with
earlier axes fixed. So an op has few labels at a time, and 4,096 devices take four divisions. Nothing is decided twice. The
search evaluates the plan that it finds and the baselines that shard the batch, and little else. It knows no bound of its gap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from shardfn.ir.model import Axes
from shardfn.partition.resharding import divisors
from shardfn.search import default_policy
from shardfn.search.baselines import batch_baselines, hasty_baselines
from shardfn.search.constrained_candidates import fully_constrained
from shardfn.search.constraint_reduction import drop_redundant_constraints
from shardfn.search.exact import budget_of, less_memory, solve_division
from shardfn.search.explanation import explained_answer, meshes_text
from shardfn.search.mesh_solution import MeshSolution, estimate_holds
from shardfn.search.objectives import Rank, other_level
from shardfn.search.op_labels import FREE
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem, runner_up
from shardfn.solver.budget import Budget
from shardfn.solver.labelling import Array


def search(problem: SearchProblem) -> Answer:
    """The best of what the divisions find and of the baselines that shard the batch.

    The divisions are for the problem's level, and where that estimate was too low for another level too.
    """
    if not problem.is_open:
        return default_policy.search(problem)
    budget, found = budget_of(problem), list[MeshSolution]()
    rated: list[tuple[SearchCandidate, MeshSolution | None]] = []
    for level in (problem.level, other_level(problem.level)):
        one = divided(dataclasses.replace(problem, level=level), budget)
        if one is not None:
            found.append(one)
            rated += evaluated(problem, one, budget)
        if budget.is_over or any(solution and estimate_holds(problem, solution, made) for made, solution in rated):
            break
    found_first = min((problem.rank(made) for made, _ in rated), default=None)
    rated += [(one, None) for one in _baselines(problem, found_first)]
    if not rated:
        return default_policy.search(problem)
    rated.sort(key=lambda pair: problem.rank(pair[0]))
    (best, solution), others = rated[0], tuple(made for made, _ in rated[1:])
    last = drop_redundant_constraints(problem, best, is_last=True)
    meshes = meshes_text(problem, [one.axes for one in found], ())
    what = f"recursive search at level {problem.level}"
    answer = explained_answer(problem, what, found, meshes, False, last, solution)
    return dataclasses.replace(answer, runner_up=runner_up(last, others), others=others, variants=(best,))


def _baselines(problem: SearchProblem, best: Rank | None) -> tuple[SearchCandidate, ...]:
    """The baselines that shard the batch; at level 2 only one, unless that one beats the `best` of the divisions."""
    if problem.seconds_left <= 0:
        return hasty_baselines(problem)
    first = batch_baselines(problem, every=problem.level != 2)
    loses = problem.level == 2 and (best is None or any(problem.rank(one) < best for one in first))
    return batch_baselines(problem) if loses else first


def divided(problem: SearchProblem, budget: Budget) -> MeshSolution | None:
    """The solution after deciding all axes one after the other; None where the given shardings leave none."""
    axes: Axes = problem.axes or tuple((f"x{i}", size) for i, size in enumerate(divisions(problem.devices)))
    chosen: Sequence[Array] | None = None
    found: MeshSolution | None = None
    for count in range(1, len(axes) + 1):
        found = solve_division(problem, axes[:count], budget, chosen)
        if found is None:
            return None
        decided = zip(found.space.nodes, found.solution.choice, strict=True)
        chosen = [np.append(node.labels[label], FREE) for node, label in decided]
    return None if found is None else dataclasses.replace(found, is_exact=False)


def divisions(devices: int) -> list[int]:
    """The sizes of the axes: each time the least divisor of the devices left that is no less than their square root.

    >>> divisions(8), divisions(64), divisions(4096), divisions(6), divisions(7)
    ([4, 2], [8, 4, 2], [64, 8, 4, 2], [3, 2], [7])
    """
    found = []
    while devices > 1:
        size = next(d for d in divisors(devices, devices) if d * d >= devices)
        found.append(size)
        devices //= size
    return found


def evaluated(
    problem: SearchProblem, one: MeshSolution, budget: Budget
) -> Iterator[tuple[SearchCandidate, MeshSolution]]:
    """The candidate of a solution; where it exceeds the memory limit, also that of a solution with less memory."""
    made = fully_constrained(problem, one)
    yield made, one
    if not problem.fits(made):
        for less in less_memory(problem, one, made, budget):
            made = fully_constrained(problem, less)
            yield made, less
            if problem.fits(made):
                return

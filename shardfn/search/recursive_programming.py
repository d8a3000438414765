"""The recursive search: divide the devices again and again, each time with the best further strategy for every op.

One division decides one axis of a prime size for all ops together, with earlier axes fixed, so the time is linear in the ops
and in the number of divisions. Greedy divisions can end in pure data parallelism. The search therefore starts twice, once
with a first division for memory (at level 0 a third time, for level 2), and afterwards decides every axis again.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from shardfn.ir.model import Axes
from shardfn.partition.resharding import primes
from shardfn.search import default_policy
from shardfn.search.alternatives import cached_search, improve_answer
from shardfn.search.exact import budget_of, estimated_rank, less_memory, solve_mesh
from shardfn.search.mesh_solution import MeshSolution
from shardfn.search.op_labels import FREE
from shardfn.search.problem import Answer, SearchProblem
from shardfn.search.selection import answer_of
from shardfn.solver.budget import Budget

SWEEPS = 2
"""How often every axis is decided again."""


def search(problem: SearchProblem) -> Answer:
    """The best answer found by dividing the devices."""
    if not problem.is_open:
        return default_policy.search(problem)
    return improve_answer(problem, cached_search(problem, search_once), search_once)


def search_once(problem: SearchProblem) -> Answer:
    """The search for the problem's level by itself."""
    axes = problem.axes or tuple((f"x{i}", p) for i, p in enumerate(sorted(primes(problem.devices), reverse=True)))
    budget = budget_of(problem)
    starts = [(problem, first) for first in dict.fromkeys((problem.level, 1))]
    if problem.level == 0:  # greedy divisions send least where most of the work is replicated
        starts.append((dataclasses.replace(problem, level=2), 2))
    found: list[MeshSolution] = []
    for asked, first in starts:
        if not found or not budget.is_over:
            found += [one] if (one := divided(asked, axes, first, budget)) is not None else []
    found.sort(key=functools.partial(estimated_rank, problem))
    return answer_of(problem, found, "recursive search", functools.partial(less_memory, budget=budget))


def divided(problem: SearchProblem, axes: Axes, first: int, budget: Budget) -> MeshSolution | None:
    """The solution after deciding all axes one after the other, the first at level `first`, and then each again."""
    rows: list[np.ndarray] | None = None
    found: MeshSolution | None = None
    for count in range(1, len(axes) + 1):
        chosen = None if rows is None else [np.append(row, FREE) for row in rows]
        asked = dataclasses.replace(problem, level=first) if count == 1 else problem
        found = _best(asked, axes[:count], chosen, budget)
        if found is None:
            return None
        rows = _rows(found)
    if found is None or rows is None:
        return None
    for _ in range(SWEEPS):
        before = found.solution.cost
        for column in range(len(axes)):
            if budget.is_over:
                break
            better = _best(problem, axes, [_free(row, column) for row in rows], budget)
            if better is not None:
                found, rows = better, _rows(better)
        if found.solution.cost >= before * (1 - 1e-6):
            break
    return dataclasses.replace(found, is_exact=False)


def _best(problem: SearchProblem, axes: Axes, chosen: list[np.ndarray] | None, budget: Budget) -> MeshSolution | None:
    rank = functools.partial(estimated_rank, problem)
    return min(solve_mesh(problem, axes, budget.part(), chosen), key=rank, default=None)


def _rows(found: MeshSolution) -> list[np.ndarray]:
    return [node.labels[label] for node, label in zip(found.space.nodes, found.solution.choice, strict=True)]


def _free(row: np.ndarray, column: int) -> np.ndarray:
    row = row.copy()
    row[column] = FREE
    return row

"""The recursive search: the devices are divided again and again, and each time every op takes its best further cut.

One division decides one axis of a prime size for all ops together (`search.solver.solve`), with what earlier divisions cut
held, so the time is linear in the ops and in the number of divisions. What divisions decide one by one can collapse to
pure data parallel: therefore it starts twice, once with a first division for memory (at level 0 a third time, for the
aim of level 2), and afterwards every axis is decided again with the others held, until nothing improves.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shardfn.partition.resharding import primes
from shardfn.search import default_policy
from shardfn.search.alternatives import cached_search, improve_answer
from shardfn.search.exact import budget_of, less_memory_within, order, solve_mesh
from shardfn.search.mesh_solution import MeshSolution
from shardfn.search.op_labels import FREE
from shardfn.search.problem import Answer, SearchProblem
from shardfn.search.resharding_costs import Axes
from shardfn.search.selection import answer_of
from shardfn.solver.budget import Budget

SWEEPS = 2


def search(problem: SearchProblem) -> Answer:
    """The best layout found by dividing the devices."""
    if not problem.is_open:
        return default_policy.search(problem)
    return improve_answer(problem, cached_search(problem, search_once), search_once)


def search_once(problem: SearchProblem) -> Answer:
    """The same without what other levels find."""
    axes = problem.axes or tuple((f"x{i}", p) for i, p in enumerate(sorted(primes(problem.devices), reverse=True)))
    budget = budget_of(problem)
    starts = [(problem, first) for first in dict.fromkeys((problem.level, 1))]
    if problem.level == 0:  # one division after the other sends least where most of the work is done by everyone
        starts.append((dataclasses.replace(problem, level=2), 2))
    found: list[MeshSolution] = []
    for asked, first in starts:
        if not found or not budget.is_over:
            found += [one] if (one := divided(asked, axes, first, budget)) is not None else []
    found.sort(key=lambda f: order(problem, f))
    return answer_of(problem, found, "recursive search", less_memory_within(budget))


def divided(problem: SearchProblem, axes: Axes, first: int, budget: Budget) -> MeshSolution | None:
    """All axes decided one after the other, the first at level `first`, and then each again."""
    rows: list[np.ndarray] | None = None
    found: MeshSolution | None = None
    for count in range(1, len(axes) + 1):
        chosen = None if rows is None else [np.append(row, FREE) for row in rows]
        asked = dataclasses.replace(problem, level=first) if count == 1 else problem
        found = _best(asked, axes[:count], chosen, budget)
        if found is None:
            return None
        rows = _rows(found)
    for _ in range(SWEEPS):
        before = found.solution.cost if found else 0.0
        for column in range(len(axes)):
            if budget.is_over:
                break
            assert rows is not None
            better = _best(problem, axes, [_free(row, column) for row in rows], budget)
            if better is not None:
                found, rows = better, _rows(better)
        if found is None or found.solution.cost >= before * (1 - 1e-6):
            break
    if found is None:
        return None
    return dataclasses.replace(found, is_exact=False)


def _best(problem: SearchProblem, axes: Axes, chosen: list[np.ndarray] | None, budget: Budget) -> MeshSolution | None:
    return min(solve_mesh(problem, axes, budget.part(), chosen), key=lambda f: order(problem, f), default=None)


def _rows(found: MeshSolution) -> list[np.ndarray]:
    return [node.labels[label] for node, label in zip(found.space.nodes, found.solution.choice, strict=True)]


def _free(row: np.ndarray, column: int) -> np.ndarray:
    row = row.copy()
    row[column] = FREE
    return row

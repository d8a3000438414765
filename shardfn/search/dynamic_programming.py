"""The exact search: the best strategy of every op under the label model, on every mesh of one or two axes.

The choices on each mesh are a labelling problem, solved to proven optimality where elimination can, else to a stated gap. For
small programs the best mesh is divided into three axes too. `selection` evaluates the solutions and takes the best.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from shardfn.ir.model import Axes
from shardfn.partition.resharding import divisors
from shardfn.search import default_policy
from shardfn.search.alternatives import cached_search, improve_answer
from shardfn.search.exact import (
    EFFORT,
    FIRST,
    budget_of,
    estimated_rank,
    less_memory,
    other_objective,
    solve_mesh,
)
from shardfn.search.mesh_solution import MeshSolution, transposed_mesh
from shardfn.search.problem import Answer, SearchProblem
from shardfn.search.resharding_costs import MeshModel
from shardfn.search.selection import answer_of
from shardfn.solver.budget import Budget
from shardfn.solver.solve import solve

WORTH = 0.95
"""The part of the least cost below which a mesh's bound must be for a second solution; for small programs 1."""


def search(problem: SearchProblem) -> Answer:
    """The best answer at the problem's level; for small programs also compared with those of other levels."""
    if not problem.is_open:
        return default_policy.search(problem)
    return improve_answer(problem, cached_search(problem, search_once), search_once)


def search_once(problem: SearchProblem) -> Answer:
    """The search for the problem's level by itself."""
    tried, budget = meshes(problem), budget_of(problem)
    found, untried = solve_meshes(problem, tried, (), budget)
    rank = functools.partial(estimated_rank, problem)
    if found and not problem.axes and problem.effort.three_axes:
        best = min(found, key=rank).axes
        twin = transposed_mesh(best, found)
        both = (best, *([twin.axes] if twin is not None else ()))
        more = list(dict.fromkeys(axes for one in both for axes in three_axis_meshes(problem, one)))
        again, left = solve_meshes(problem, more, found, budget)
        tried, found, untried = tried + more, found + again, untried + left
    found = sorted(solved_again(problem, found, budget), key=rank)
    less, other = (functools.partial(f, budget=budget) for f in (less_memory, other_objective))
    return answer_of(problem, found, "exact search", less, tried, untried, other)


def solve_meshes(problem: SearchProblem, tried: Sequence[Axes], before: Sequence[MeshSolution],
                 budget: Budget) -> tuple[list[MeshSolution], list[Axes]]:  # fmt: skip
    """The best solutions on each mesh, and the meshes that the budget left out; one mesh is always solved.

    Meshes with the most equal sizes come first, as they are often the best. A mesh whose bound is not among the best few is
    left out, except the mesh of one axis. Each mesh may take half of the work left, the last one all of it.
    """
    made: dict[Axes, list[MeshSolution]] = {}
    most = problem.effort.max_evaluated
    turn = sorted(tried, key=lambda axes: sum(size for _, size in axes))
    for number, axes in enumerate(turn):
        known = [*before, *(f for some in made.values() for f in some)]
        if budget.is_over and known:
            break
        fit = sorted(f.solution.cost for f in known if f.peak <= problem.memory_limit)
        is_bound = problem.level == 2 and len(axes) > 1 and len(fit) >= most
        part = budget.part(0.5 if number + 1 < len(turn) else 1.0)
        made[axes] = list(solve_mesh(problem, axes, part, ceiling=fit[most - 1] if is_bound else math.inf))
    return [f for axes in tried for f in made.get(axes, ())], [axes for axes in tried if axes not in made]


def solved_again(problem: SearchProblem, found: Sequence[MeshSolution], budget: Budget) -> list[MeshSolution]:
    """The solutions, with a smaller gap for the best one and for those that may still beat it."""
    least = min((f.solution.cost for f in found), default=0.0)
    close, worth = (EFFORT.close, 1.0) if problem.effort.three_axes else (FIRST.close, WORTH)
    again = []
    for one in found:
        is_open = one.solution.gap > close + 1e-9 and (one.solution.cost == least or one.solution.bound < worth * least)
        solution = solve(one.labels, budget.part(), EFFORT) if is_open and problem.level == 2 else one.solution
        again.append(dataclasses.replace(one, solution=solution))
    return again


def meshes(problem: SearchProblem) -> list[Axes]:
    """The user's mesh where a sharding was given, else every split of the devices into one or two axes.

    The order of the axes matters only where their links differ: between nodes, or on a torus.
    """
    return [problem.axes] if problem.axes else _distinct(problem, splits(problem.devices, 2))


def three_axis_meshes(problem: SearchProblem, axes: Axes) -> list[Axes]:
    """The meshes of three axes that divide an axis of a mesh of two."""
    if len(axes) != 2:
        return []
    (_, a), (_, b) = axes
    return _distinct(problem, [(*s, b) for s in splits(a, 2)[1:]] + [(a, *s) for s in splits(b, 2)[1:]])


def _distinct(problem: SearchProblem, sizes: Sequence[tuple[int, ...]]) -> list[Axes]:
    found: dict[tuple[int, ...], Axes] = {}
    for one in sizes:
        axes = tuple(zip("abc", one, strict=False))
        links = MeshModel.on(problem.hardware, axes).links
        is_even = len({(link.bytes_s, link.exchange_bytes_s) for link in links}) == 1
        found.setdefault(tuple(sorted(one, reverse=True)) if is_even else one, axes)
    return list(found.values())


def splits(n: int, most: int) -> list[tuple[int, ...]]:
    """Every way to write `n` as a product of up to `most` ordered sizes above 1, the fewest and largest first.

    >>> splits(8, 3)
    [(8,), (4, 2), (2, 4), (2, 2, 2)]
    """
    if most == 1 or n == 1:
        return [(n,)]
    found = [(n,)]
    for first in divisors(n, n)[1:-1]:
        found += [(first, *rest) for rest in splits(n // first, most - 1)]
    return sorted(found, key=lambda s: (len(s), [-size for size in s]))

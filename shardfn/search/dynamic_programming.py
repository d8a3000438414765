"""The exact search: the best layout of every op under the cost model, on every grid of one or two axes.

Each grid's choices are a labelling problem (`search.solver.solve`, at the problem's level: `search.levels`), solved to proven
optimality where elimination can, else to a stated gap. Of small programs the best grid is divided once more, into three
axes. `search.choose` takes the best by Shardy's flow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from shardfn.partition.resharding import divisors
from shardfn.search import default_policy
from shardfn.search.alternatives import cached_search, improve_answer
from shardfn.search.exact import EFFORT, FIRST, budget_of, less_memory_within, order, other_objective_within, solve_mesh
from shardfn.search.mesh_solution import MeshSolution, transposed_mesh
from shardfn.search.problem import Answer, SearchProblem
from shardfn.search.resharding_costs import Axes, MeshModel
from shardfn.search.selection import answer_of
from shardfn.solver.budget import Budget
from shardfn.solver.solve import solve

WORTH = 0.95
"""Of the least cost: what a grid must promise to be looked at again; of a small program, anything less than that cost."""


def search(problem: SearchProblem) -> Answer:
    """The cheapest layout at the problem's level; of small programs what other levels find stands beside it."""
    if not problem.is_open:
        return default_policy.search(problem)
    return improve_answer(problem, cached_search(problem, search_once), search_once)


def search_once(problem: SearchProblem) -> Answer:
    """The search for the problem's level by itself."""
    tried, budget = meshes(problem), budget_of(problem)
    found, untried = on_grids(problem, tried, (), budget)
    if found and not problem.axes and problem.effort.three_axes:
        best = min(found, key=lambda f: order(problem, f)).axes
        twin = transposed_mesh(best, found)
        more = list(
            dict.fromkeys(
                (
                    *three_axis_meshes(problem, best),
                    *(three_axis_meshes(problem, twin.axes) if twin is not None else ()),
                )
            )
        )
        again, left = on_grids(problem, more, found, budget)
        tried, found, untried = tried + more, found + again, untried + left
    found = sorted(settled(problem, found, budget), key=lambda f: order(problem, f))
    return answer_of(
        problem, found, "exact search", less_memory_within(budget), tried, untried, other_objective_within(budget)
    )


def on_grids(problem: SearchProblem, tried: Sequence[Axes], before: Sequence[MeshSolution],
             budget: Budget) -> tuple[list[MeshSolution], list[Axes]]:  # fmt: skip
    """What is best on each grid, and the grids that the budget leaves nothing for, unless nothing is found yet.

    The grids of the most equal sizes go first: often the best are among them. What can't be among the first ones to be
    priced is left out, but for the grid of one axis, which is priced where the flows of the others disappoint. A grid may
    take half of what is left, the last one all of it.
    """
    made: dict[Axes, list[MeshSolution]] = {}
    most = problem.effort.found_at_most
    turn = sorted(tried, key=lambda axes: sum(size for _, size in axes))
    for number, axes in enumerate(turn):
        known = [*before, *(f for some in made.values() for f in some)]
        if budget.is_over and known:
            break
        fit = sorted(f.solution.cost for f in known if f.peak <= problem.memory_limit)
        is_bound = problem.level == 2 and len(axes) > 1 and len(fit) >= most
        ceiling = fit[most - 1] if is_bound else math.inf
        part = budget.part(0.5 if number + 1 < len(turn) else 1.0)
        made[axes] = list(solve_mesh(problem, axes, part, ceiling=ceiling))
    return [f for axes in tried for f in made.get(axes, ())], [axes for axes in tried if axes not in made]


def settled(problem: SearchProblem, found: Sequence[MeshSolution], budget: Budget) -> list[MeshSolution]:
    """The same, with another look at the best, and at what may yet be better by a good part."""
    least = min((f.solution.cost for f in found), default=0.0)
    close, worth = (EFFORT.close, 1.0) if problem.effort.three_axes else (FIRST.close, WORTH)
    again = []
    for one in found:
        is_open = one.solution.gap > close + 1e-9 and (one.solution.cost == least or one.solution.bound < worth * least)
        solution = solve(one.labels, budget.part(), EFFORT) if is_open and problem.level == 2 else one.solution
        again.append(dataclasses.replace(one, solution=solution))
    return again


def meshes(problem: SearchProblem) -> list[Axes]:
    """The user's grid where a cut was given, else every split of the devices into one or two axes.

    The order of the axes matters only where their links differ: between nodes, or on a torus.
    """
    if problem.axes:
        return [problem.axes]
    return _distinct(problem, splits(problem.devices, 2))


def three_axis_meshes(problem: SearchProblem, axes: Axes) -> list[Axes]:
    """The grids of three axes that divide an axis of a grid of two."""
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

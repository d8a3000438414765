"""The exact search: for each mesh of one or two axes, and for divisions of the best into three, the best strategy of every op.

The choices on a mesh are a labelling problem, solved to proven optimality where elimination can, else to a stated gap. A
solution becomes a candidate with few constraints at first, and with more while the partitioned program is worse than the
solver's estimate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from shardfn.cost.devices.links import are_alike, links
from shardfn.ir.model import Axes
from shardfn.partition.resharding import divisors
from shardfn.search.archive import Archive
from shardfn.search.constrained import constrained
from shardfn.search.filters import filtered, with_loss
from shardfn.search.label_tables import LabelSpace, build
from shardfn.search.level_costs import labelling_of, with_smallest_arguments
from shardfn.search.mesh_solution import MeshSolution, estimated_rank, transposed_mesh
from shardfn.search.problem import Proposal, SearchProblem
from shardfn.search.resharding_costs import MeshModel
from shardfn.solver.budget import Budget
from shardfn.solver.labelling import Array, Labelling, total_cost
from shardfn.solver.peak import Peak, least_peak
from shardfn.solver.solve import Effort, Solution, solve

SLACK = 1.02
"""Objective memory: the peak of the cheapest labelling near the least peak, as a multiple of that peak."""

MARGIN = 0.98
"""The part of a memory limit that a solution within it aims at: estimates of memory are rough."""

BUILD_WORK = 1e4
"""Work per op to build the labelling of a mesh, in the solver's units."""

SHARE = 0.25
"""The part of the work left that one solve may take."""

PEAK_STEPS = 40
"""Steps towards the least peak."""

EFFORT = Effort(rounds=4, close=0.005)
"""For meshes that elimination does not solve: a gap of 0.5 % suffices."""

NEAR = Effort(rounds=2, steps=10, neighbourhoods=4, parts=1, close=0.1)
"""Near the least peak, where every labelling is expensive and a small gap is worth little."""

COMPUTE_WEIGHTS = (0.3, 10.0)
"""Objective communication: the weights of FLOPs that are solved for, in multiples of the exchange rate. With the first, plans use
the share of work that counts as balanced to save bytes. With the second they balance the work first, and hold less memory."""


MOST_CONSTRAINED = {0: 4, 1: 2, 2: 4}
"""By level, the proposals of one solution, each with more constraints. The last two save reshardings, and hardly memory."""


def generate(level: int, problem: SearchProblem, archive: Archive) -> Iterator[Proposal | None]:
    """The generator of the exact search for the objective of a level.

    The solutions of a mesh are proposed at once if the estimate of the first of them is the best so far, and else when every
    mesh is solved.
    """
    at, found, waiting = problem.at(level), list[MeshSolution](), list[MeshSolution]()
    turn = sorted(meshes(problem), key=lambda axes: sum(size for _, size in axes))
    while turn:
        axes = turn.pop(0)
        best = min((estimated_rank(at, one) for one in found), default=None)
        first = None
        for one in solve_mesh(at, axes, archive):
            found.append(one)
            archive.solutions.append(one)
            first = first or one
            if best is None or estimated_rank(at, first) < best:
                yield from constrained(at, one, archive, MOST_CONSTRAINED[level])
            else:
                waiting.append(one)
                yield None
        if not turn and found and not problem.axes and len(axes) < 3:
            turn = three_axis_meshes(problem, min(found, key=lambda one: estimated_rank(at, one)), found)
    for one in sorted(waiting, key=lambda one: estimated_rank(at, one)):
        yield from constrained(at, one, archive, MOST_CONSTRAINED[level])


def within_limit(level: int, problem: SearchProblem, archive: Archive) -> Iterator[Proposal | None]:
    """The generator of solutions within the memory limit, for the objective of a level, on the meshes that were solved for it.

    Estimates of memory are rough: the solver's limit is scaled by what the candidates of a solution hold.
    """
    at = problem.at(level)
    for found in sorted(
        (one for one in archive.solutions if one.level == level), key=lambda one: estimated_rank(at, one)
    ):
        made = archive.best_of(found, level)
        peak = found.peak if made is None else made.cost.memory.peak
        if peak > problem.memory_limit:
            for less in within(found, MARGIN * problem.memory_limit / peak * found.peak, archive.budget):
                yield from constrained(at, less, archive, MOST_CONSTRAINED[level])
        yield None


def solve_mesh(problem: SearchProblem, axes: Axes, archive: Archive) -> Iterator[MeshSolution]:
    """The solutions on one mesh.

    At level 2 the optimum, at level 0 one for each weight of FLOPs. At level 1 the one that sends least with
    balanced work and the fastest, both with every argument in its smallest shards, and one near the least peak.
    """
    space, budget = label_space(problem, axes, archive), archive.budget

    def stated(level: int, weight: float = 1.0) -> tuple[Labelling, float]:
        return filtered(labelling_of(space, problem.at(level), weight), space, problem.graph, tuple(size for _, size in axes),
                        problem.algorithm)  # fmt: skip

    def solved(labels: Labelling, lost: float = 0.0) -> MeshSolution:
        return MeshSolution(
            axes, space, labels, with_loss(solve(labels, budget.part(SHARE), EFFORT), lost), problem.level
        )

    if problem.level == 1:
        by_time = with_smallest_arguments(stated(2)[0], space)
        for labels in (with_smallest_arguments(stated(0, COMPUTE_WEIGHTS[-1])[0], space), by_time):
            one = solved(labels)
            rated = dataclasses.replace(one.solution, cost=total_cost(by_time, one.solution.choice), proved=False)
            yield from _possible(dataclasses.replace(one, labels=by_time, solution=rated))
        if (near := _near_least_peak(one, stated(1)[0], budget)) is not None:
            yield near
        return
    for weight in COMPUTE_WEIGHTS if problem.level == 0 else (1.0,):
        yield from _possible(dataclasses.replace(solved(*stated(problem.level, weight)), weight=weight))


def _possible(found: MeshSolution) -> Iterator[MeshSolution]:
    if math.isfinite(found.solution.cost):
        yield found


def within(found: MeshSolution, limit: float, budget: Budget) -> Iterator[MeshSolution]:
    """Solutions that hold less: the cheapest within a limit in bytes, or near the least peak; and with every argument in its
    smallest shards."""
    solution = solve(dataclasses.replace(found.labels, limit=limit), budget.part(SHARE), EFFORT)
    if solution.feasible:
        yield dataclasses.replace(found, solution=solution)
    elif (near := _near_least_peak(found, found.labels, budget)) is not None:
        yield near
    smallest = with_smallest_arguments(found.labels, found.space)
    solution = solve(smallest, budget.part(SHARE), EFFORT)
    yield from _possible(dataclasses.replace(found, labels=smallest, solution=solution))


def _near_least_peak(found: MeshSolution, labels: Labelling, budget: Budget) -> MeshSolution | None:
    """A cheap labelling near the least peak, or that of the least peak itself."""
    least = least_peak(labels, budget.part(SHARE), PEAK_STEPS)
    if least is None:
        return None
    near = solve(dataclasses.replace(labels, limit=SLACK * least.peak), budget.part(SHARE), NEAR)
    return dataclasses.replace(found, labels=labels, solution=near if near.feasible else _peak_solution(least, labels))


def _peak_solution(least: Peak, labels: Labelling) -> Solution:
    return Solution(least.choice, total_cost(labels, least.choice), -math.inf, False, False)


def solve_division(
    problem: SearchProblem, axes: Axes, archive: Archive, chosen: Sequence[Array] | None
) -> MeshSolution | None:
    """The best solution on a mesh whose axes but the last are `chosen`; None where no label is possible."""
    space = label_space(problem, axes, archive, chosen)
    labels = labelling_of(space, problem)
    labels, lost = filtered(labels, space, problem.graph, tuple(size for _, size in axes), problem.algorithm)
    labels = with_smallest_arguments(labels, space) if problem.level == 1 else labels
    solution = with_loss(solve(labels, archive.budget.part(SHARE), EFFORT), lost)
    return MeshSolution(axes, space, labels, solution, problem.level) if math.isfinite(solution.cost) else None


def label_space(
    problem: SearchProblem, axes: Axes, archive: Archive, chosen: Sequence[Array] | None = None
) -> LabelSpace:
    """All choices on a mesh; where labels are `chosen`, only those that extend them."""
    if chosen is None and axes in archive.spaces:
        return archive.spaces[axes]
    given = {v: spec for v, spec in zip(problem.inputs, problem.specs, strict=True) if spec is not None}
    mesh = MeshModel.on(problem.hardware, axes)
    archive.budget.spend(BUILD_WORK * len(problem.graph.ops))
    space = build(problem.graph, mesh, given, problem.results, problem.same_as, chosen, problem.facts, problem.inner,
                  problem.operands)  # fmt: skip
    if chosen is None:
        archive.spaces[axes] = space
    return space


def meshes(problem: SearchProblem) -> list[Axes]:
    """The user's mesh where a sharding was given, else every split of the devices into one or two axes.

    The order of the axes matters only where their links differ: between nodes, or on a torus.
    """
    return [problem.axes] if problem.axes else _distinct(problem, splits(problem.devices, 2))


def three_axis_meshes(problem: SearchProblem, best: MeshSolution, found: Sequence[MeshSolution]) -> list[Axes]:
    """The meshes of three axes that divide an axis of the best mesh of two, or of its transpose where that was solved."""
    twin = transposed_mesh(best.axes, found)
    sizes: list[tuple[int, ...]] = []
    for axes in (best.axes, *([twin.axes] if twin is not None else ())):
        if len(axes) == 2:
            (_, a), (_, b) = axes
            sizes += [(*s, b) for s in splits(a, 2)[1:]] + [(a, *s) for s in splits(b, 2)[1:]]
    return _distinct(problem, sizes)


def _distinct(problem: SearchProblem, sizes: Sequence[tuple[int, ...]]) -> list[Axes]:
    found: dict[tuple[int, ...], Axes] = {}
    for one in sizes:
        axes = tuple(zip("abc", one, strict=False))
        is_even = are_alike(links(problem.hardware, axes))
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

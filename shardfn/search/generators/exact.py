"""The exact search: for each mesh of one or two axes, and for divisions of the best into three, the best strategy of every op.

The choices on a mesh are a labelling problem, solved to proven optimality where elimination can, else to a stated gap. The
solution of the best estimate makes the first candidates, with more constraints until the partitioned program costs what the
estimate says.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from shardfn.ir.model import Axes, mesh_sizes
from shardfn.search.engine import Archive, meshes, three_axis_meshes
from shardfn.search.labels import (
    LEAST_SENT,
    LEAST_TIME,
    LEAST_TIME_IN_LESS_MEMORY,
    LabelSpace,
    MeshModel,
    MeshSolution,
    Objective,
    build,
    estimated_rank,
    filtered,
    labelling_of,
    with_loss,
    with_smallest_arguments,
)
from shardfn.search.moves import constrained
from shardfn.search.problem import MEMORY, Proposal, Rank, SearchProblem, is_no_worse
from shardfn.solver.budget import Budget
from shardfn.solver.labelling import Array, Labelling, total_cost
from shardfn.solver.peak import least_peak
from shardfn.solver.solve import Effort, Solution, solve

MEMORY_MARGIN = 0.02
"""A small part of a peak, for three uses. A cheap labelling near the least peak may exceed it by this part. A solution aims this
far below a limit, because estimates of memory are rough. Each next solution of `less_memory` must take less than the least
peak so far by this part."""

BUILD_WORK = 1e4
"""Work per op to build the labelling of a mesh, in the solver's units."""

SOLVE_EVALUATIONS = 4
"""The most work of one solve, in evaluations of a candidate: a solution whose gap is not closed by then is evaluated as it is."""

PEAK_STEPS = 40
"""Steps towards the least peak."""

EFFORT = Effort(rounds=4, close=0.005, least_peak=False)
"""For meshes that elimination does not solve: a gap of 0.5 % suffices."""

COARSE_EFFORT = Effort(rounds=2, steps=10, neighbourhoods=4, parts=1, close=0.1, least_peak=False)
"""Near the least peak, where every labelling is expensive and a small gap is worth little."""


def generate(objective: Objective, problem: SearchProblem, archive: Archive) -> Iterator[Proposal]:
    """The generator of the exact search for an objective of the solver, which first solves every mesh of one or two axes that the
    time limit leaves time for."""
    at = problem.at(objective.level)
    by_size = sorted(meshes(problem), key=lambda axes: sum(size for _, size in axes))
    within_time = itertools.takewhile(lambda axes: archive.budget.seconds_left > 0, by_size)
    found = [solve_mesh(at, objective, axes, archive) for axes in within_time]
    yield from best_first(at, [one for one in found if one is not None], archive)


def three_axes(objective: Objective, problem: SearchProblem, archive: Archive) -> Iterator[Proposal | None]:
    """The generator of the exact search on the meshes that divide the best mesh of two axes into three."""
    at = problem.at(objective.level)
    known = [one for one in archive.solutions if one.objective == objective]
    found = list[MeshSolution]()
    if known and not problem.axes:
        for axes in three_axis_meshes(problem, min(known, key=lambda one: estimated_rank(at, one)), known):
            one = solve_mesh(at, objective, axes, archive)
            found += [one] if one is not None else []
            yield None
    yield from best_first(at, found, archive)


def best_first(problem: SearchProblem, found: Sequence[MeshSolution], archive: Archive) -> Iterator[Proposal]:
    """Proposals of solutions, those of the best estimate first; of equals, as peaks often are, those of the least cost for the
    solver. The first makes one at least; one whose estimate does not beat
    the best candidate makes no more.

    Estimates count less where a candidate on the mesh of a solution, of whichever generator, was better than its estimate.
    """
    archive.solutions += found
    ranked = [(estimated_rank(problem, one), one) for one in found]
    ranked.sort(key=lambda pair: (pair[0].over, pair[0].aim[0], pair[1].solution.cost, pair[0].ties))
    is_first = True
    for estimate, solution in ranked:
        for proposal in constrained(problem, solution, archive):
            if not is_first and not _may_beat(estimate, _least_ratio(problem, ranked, archive), archive, problem):
                break
            yield proposal
            is_first = False


def _least_ratio(problem: SearchProblem, ranked: Sequence[tuple[Rank, MeshSolution]], archive: Archive) -> float:
    """The least ratio of a candidate's aim to the estimate of the solution on its mesh; at most 1."""
    estimates = ((estimate.aim[0], archive.least_aim(problem.level, one.axes)) for estimate, one in ranked)
    return min([1.0, *(least / estimate for estimate, least in estimates if estimate)])


def _may_beat(estimate: Rank, ratio: float, archive: Archive, problem: SearchProblem) -> bool:
    """Whether an estimate, times a ratio, is no worse than the best candidate."""
    best = problem.rank(archive.best(problem.level))
    return is_no_worse(
        estimate._replace(aim=(ratio * estimate.aim[0], *estimate.aim[1:]), ties=()), best._replace(ties=())
    )


def within_limit(level: int, problem: SearchProblem, archive: Archive) -> Iterator[Proposal | None]:
    """The generator of solutions within the memory limit, for the objective of a level, on the meshes that were solved for it.

    Estimates of memory are rough: the solver's limit is scaled by what the candidates of a solution hold.
    """
    at = problem.at(level)
    for found in sorted(
        (one for one in archive.solutions if one.objective.level == level), key=lambda one: estimated_rank(at, one)
    ):
        candidate = archive.best_of(found, level)
        peak = found.peak if candidate is None else candidate.cost.memory.peak
        if peak > problem.memory_limit:
            for less in within(found, (1 - MEMORY_MARGIN) * problem.memory_limit / peak * found.peak, archive):
                yield from constrained(at, less, archive)
        yield None


def less_memory(problem: SearchProblem, archive: Archive) -> Iterator[Proposal | None]:
    """The generator of the best solutions within less memory than the least so far, on one mesh after the other, in the order of
    the solver's cost, which is in seconds for both objectives.

    The solver's limit is scaled by what the candidates of a mesh hold, as estimates of memory are rough.
    """
    at = problem.at(MEMORY)
    tried = set[object]()
    while least := _least_peak(archive):
        every = [one for one in archive.solutions if one.objective in (LEAST_TIME, LEAST_SENT) and one.peak < math.inf]
        every.sort(key=lambda one: one.solution.cost)
        for found in every:
            if (found.axes, found.objective, least) in tried:
                continue
            tried.add((found.axes, found.objective, least))
            limit = (1 - MEMORY_MARGIN) * least
            for _ in range(2):
                solution = solve(dataclasses.replace(found.labels, limit=limit), _part(archive), COARSE_EFFORT)
                if not solution.feasible:
                    yield None
                    break
                less = dataclasses.replace(found, solution=solution, objective=LEAST_TIME_IN_LESS_MEMORY)
                candidate = yield from constrained(at, less, archive)
                if not candidate.cost.memory.peak:
                    return
                limit = (1 - MEMORY_MARGIN) * (1 - MEMORY_MARGIN) * least / candidate.cost.memory.peak * less.peak
            if _least_peak(archive) < least:
                break
        else:
            return


def _least_peak(archive: Archive) -> float:
    return archive.best(MEMORY).cost.memory.peak


def solve_mesh(
    problem: SearchProblem,
    objective: Objective,
    axes: Axes,
    archive: Archive,
    chosen: Sequence[Array] | None = None,
    charged: Callable[[Labelling, LabelSpace], Labelling] = lambda labels, space: labels,
) -> MeshSolution | None:
    """The solution of an objective on one mesh, with labels that extend the `chosen` ones; None where no label is possible.
    `charged` puts costs on labels that are no time.
    """
    space = label_space(problem, axes, archive, chosen)
    labels, lost = filtered(
        labelling_of(space, problem, objective.weight),
        space,
        problem.graph,
        mesh_sizes(axes),
        problem.algorithm,
    )
    if objective.is_sharded:
        labels = with_smallest_arguments(labels, space)
    labels = charged(labels, space)
    solution = with_loss(solve(labels, _part(archive), EFFORT), lost)
    return MeshSolution(axes, space, labels, solution, objective) if math.isfinite(solution.cost) else None


def _part(archive: Archive) -> Budget:
    """The budget of one solve. It does not depend on what is left of the search's budget, or a larger budget would change the
    candidates."""
    return Budget(SOLVE_EVALUATIONS * archive.evaluation_work, archive.budget.seconds_left, archive.budget)


def within(found: MeshSolution, limit: float, archive: Archive) -> Iterator[MeshSolution]:
    """Solutions that take less memory: the cheapest within a limit in bytes, or one near the least peak where none keeps the
    limit; then the cheapest with every argument in its smallest shards."""
    solution = solve(dataclasses.replace(found.labels, limit=limit), _part(archive), EFFORT)
    if solution.feasible:
        yield dataclasses.replace(found, solution=solution)
    elif (near := _near_least_peak(found.labels, archive)) is not None:
        yield dataclasses.replace(found, solution=near)
    smallest = with_smallest_arguments(found.labels, found.space)
    solution = solve(smallest, _part(archive), EFFORT)
    if math.isfinite(solution.cost):
        yield dataclasses.replace(found, labels=smallest, solution=solution)


def _near_least_peak(labels: Labelling, archive: Archive) -> Solution | None:
    """A cheap labelling near the least peak, or that of the least peak itself."""
    least = least_peak(labels, _part(archive), PEAK_STEPS)
    if least is None:
        return None
    near = solve(dataclasses.replace(labels, limit=(1 + MEMORY_MARGIN) * least.peak), _part(archive), COARSE_EFFORT)
    at_peak = Solution(least.choice, total_cost(labels, least.choice), -math.inf, False, False)
    return near if near.feasible else at_peak


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

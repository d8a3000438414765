"""The exact search on one mesh: the optimum of the label model, solutions with less memory, and those for the other objective."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from shardfn.ir.model import Axes
from shardfn.search.feasibility import is_infeasible
from shardfn.search.filters import filtered, with_loss
from shardfn.search.label_tables import LabelSpace, build
from shardfn.search.level_costs import labelling_of, totals, with_smallest_arguments
from shardfn.search.mesh_solution import MeshSolution
from shardfn.search.objectives import aim, other_level, over
from shardfn.search.problem import SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import MeshModel
from shardfn.solver.budget import SECOND, Budget
from shardfn.solver.labelling import Array, Labelling, total_cost
from shardfn.solver.peak import Peak, least_peak
from shardfn.solver.solve import Effort, Solution, solve, solve_within

SLACK = 1.02
"""At level 1, the memory of the cheapest labelling near the least peak, as a multiple of that peak."""

WORK = 60 * SECOND
"""Work of one search on all meshes together."""

BUILD_WORK = 1e4
"""Work per op to build the labelling of a mesh."""

PEAK_STEPS, EXTRA_WORK = 40, 2 * SECOND
"""Steps towards the least peak; and the work of one additional search within a tighter limit or for another objective."""

NEAR = Effort(rounds=2, steps=10, neighbourhoods=4, parts=1, close=0.1)
"""Near the least peak, where every labelling is expensive and a small gap is worth little."""

COMPUTE_WEIGHTS = (1e3, 0.1)
"""At level 0, the weight of compute seconds against communication seconds: first so large that compute decides; then so that
a tenth of the compute weighs as much as all bytes of the first solution."""

EFFORT, FIRST = Effort(rounds=4, close=0.005), Effort(rounds=2, close=0.03)
"""For meshes that elimination does not solve: a gap of 0.5 % suffices, 3 % in the first solution."""

LessMemory = Callable[[SearchProblem, MeshSolution, SearchCandidate], Iterable[MeshSolution]]
"""Solutions to try where a candidate exceeds the memory limit."""

OtherObjective = Callable[[SearchProblem, MeshSolution], Iterable[MeshSolution]]
"""Solutions for the other objective on the mesh of a solution whose estimate was too low."""


def budget_of(problem: SearchProblem) -> Budget:
    """The budget of one search: work, and the user's time limit."""
    return Budget(WORK, problem.seconds_left)


def estimated_rank(problem: SearchProblem, found: MeshSolution) -> tuple[float, ...]:
    """The rank of a solution by its estimate."""
    imbalance, sent, peak = 0.0, 0.0, found.peak
    if problem.level == 0:
        made = totals(found.space, found.solution.choice)
        imbalance, sent = problem.imbalance(made.flops, made.matrix_flops), made.sent
    least = aim(problem.level, imbalance=imbalance, sent=sent, time_s=found.solution.cost, peak=peak)
    return (over(peak, problem.memory_limit), *least, len(found.axes))


def solve_mesh(problem: SearchProblem, axes: Axes, budget: Budget, ceiling: float = math.inf) -> Iterator[MeshSolution]:
    """The optimum on one mesh, and solutions that may have less memory where memory counts.

    At level 1: the fastest and the one that sends least, both with every argument in its smallest shards, and one near the
    least peak. At level 2: nothing where every labelling costs more than `ceiling`.
    """
    space, sizes = label_space(problem, axes, budget), tuple(size for _, size in axes)

    def asked(compute_weight: float = 1.0, level: int = problem.level) -> tuple[Labelling, float]:
        labels = labelling_of(space, dataclasses.replace(problem, level=level), compute_weight)
        return filtered(labels, space, problem.graph, sizes, problem.algorithm)

    def solved(labels: Labelling, lost: float, **fields: bool | int) -> MeshSolution:
        effort = FIRST if problem.level == 2 else EFFORT
        found = MeshSolution(axes, space, labels, with_loss(solve(labels, budget.part(), effort), lost))
        return dataclasses.replace(found, **fields)

    if problem.level == 1:
        labels, lost = asked()
        yield from _possible(solved(with_smallest_arguments(labels, space), lost, is_fully_sharded=True, kind=1))
        by_bytes = with_smallest_arguments(asked(COMPUTE_WEIGHTS[0], 0)[0], space)
        sends = solved(by_bytes, 0.0, is_fully_sharded=True, kind=2)
        evaluated = dataclasses.replace(sends.solution, cost=total_cost(labels, sends.solution.choice))
        yield from _possible(dataclasses.replace(sends, labels=labels, solution=evaluated))
        least = least_peak(labels, budget.part(), PEAK_STEPS)
        if least is not None:
            near = MeshSolution(axes, space, labels, _peak_solution(least, labels))
            yield _within(near, SLACK * least.peak, budget.part(), NEAR)
        return
    if math.isfinite(ceiling):
        labels, lost = asked()
        solution = solve_within(labels, ceiling + lost, budget.part(), FIRST)
        if solution is None:
            return
        found = MeshSolution(axes, space, labels, with_loss(solution, lost))
    else:
        found = solved(*asked(COMPUTE_WEIGHTS[0]))
    if problem.level == 0 and math.isfinite(found.solution.cost):
        made, chip = totals(space, found.solution.choice), problem.hardware.chip
        weight = made.sent / chip.link_bytes_s / max(COMPUTE_WEIGHTS[1] * made.flops / chip.flops, 1e-30)
        few = solved(*asked(weight))
        is_over = few.peak > problem.memory_limit and not is_infeasible(problem)
        within = [_within(few, problem.memory_limit, budget.part(work=EXTRA_WORK), EFFORT)] if is_over else []
        found = min((found, few, *within), key=lambda f: estimated_rank(problem, f))
    if not math.isfinite(found.solution.cost):
        return
    yield found
    if found.peak > problem.memory_limit and not is_infeasible(problem):
        yield from _possible(solved(with_smallest_arguments(found.labels, space), 0.0, is_fully_sharded=True))


def solve_division(
    problem: SearchProblem, axes: Axes, budget: Budget, chosen: Sequence[Array] | None
) -> MeshSolution | None:
    """The best solution on a mesh whose axes but the last are `chosen`; None where no label is possible."""
    space = label_space(problem, axes, budget, chosen)
    labels = labelling_of(space, problem, COMPUTE_WEIGHTS[0])
    labels, lost = filtered(labels, space, problem.graph, tuple(size for _, size in axes), problem.algorithm)
    labels = with_smallest_arguments(labels, space) if problem.level == 1 else labels
    solution = with_loss(solve(labels, budget.part(), FIRST), lost)
    return MeshSolution(axes, space, labels, solution) if math.isfinite(solution.cost) else None


def label_space(
    problem: SearchProblem, axes: Axes, budget: Budget, chosen: Sequence[Array] | None = None
) -> LabelSpace:
    """All choices on a mesh; where labels are `chosen`, only those that extend them."""
    given = {v: spec for v, spec in zip(problem.inputs, problem.specs, strict=True) if spec is not None}
    budget.spend(BUILD_WORK * len(problem.graph.ops))
    mesh = MeshModel.on(problem.hardware, axes)
    return build(problem.graph, mesh, given, problem.results, problem.same_as, chosen, problem.facts, problem.inner,
                 problem.operands)  # fmt: skip


def other_objective(problem: SearchProblem, found: MeshSolution, budget: Budget) -> Iterator[MeshSolution]:
    """Solutions for the other of levels 0 and 2 on the same mesh, as they are and with every argument in its smallest shards.

    Their cost is stated at the problem's own level.
    """
    across = dataclasses.replace(problem, level=other_level(problem.level))
    labels, _ = filtered(labelling_of(found.space, across, COMPUTE_WEIGHTS[0]), found.space, problem.graph,
                         tuple(size for _, size in found.axes), problem.algorithm)  # fmt: skip
    for asked, is_sharded in ((labels, False), (with_smallest_arguments(labels, found.space), True)):
        solution = solve(asked, budget.part(work=EXTRA_WORK), FIRST)
        cost = total_cost(found.labels, solution.choice)
        evaluated = dataclasses.replace(solution, cost=cost, bound=found.solution.bound, proved=False)
        is_sharded = is_sharded or found.is_fully_sharded
        yield from _possible(dataclasses.replace(found, solution=evaluated, is_fully_sharded=is_sharded))


def less_memory(
    problem: SearchProblem, found: MeshSolution, made: SearchCandidate, budget: Budget
) -> Iterator[MeshSolution]:
    """Solutions for a candidate that exceeds the limit: with every argument in its smallest shards, and within a limit that
    makes up for the error of the estimate; where nothing fits, the least peak. None at level 1, which tries these anyway."""
    if problem.level == 1:
        return
    if is_infeasible(problem):
        yield _with_least_peak(found, budget.part(work=EXTRA_WORK))
        return
    if not found.is_fully_sharded:
        labels = with_smallest_arguments(found.labels, found.space)
        solution = solve(labels, budget.part(), EFFORT)
        yield from _possible(dataclasses.replace(found, labels=labels, solution=solution, is_fully_sharded=True))
    limit = 0.98 * problem.memory_limit / made.cost.memory.peak * found.peak
    yield _within(found, limit, budget.part(work=EXTRA_WORK))


def _possible(found: MeshSolution) -> Iterator[MeshSolution]:
    if math.isfinite(found.solution.cost):
        yield found


def _within(found: MeshSolution, limit: float, budget: Budget, effort: Effort | None = None) -> MeshSolution:
    """The cheapest labelling of a mesh that holds at most `limit` bytes, or one of the least peak where none does."""
    solution = solve(dataclasses.replace(found.labels, limit=limit), budget, effort)
    return dataclasses.replace(found, solution=solution) if solution.feasible else _with_least_peak(found, budget)


def _with_least_peak(found: MeshSolution, budget: Budget) -> MeshSolution:
    least = least_peak(found.labels, budget.part(), PEAK_STEPS)
    return found if least is None else dataclasses.replace(found, solution=_peak_solution(least, found.labels))


def _peak_solution(least: Peak, labels: Labelling) -> Solution:
    return Solution(least.choice, total_cost(labels, least.choice), -math.inf, False, False)

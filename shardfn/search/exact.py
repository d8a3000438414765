"""The exact search on one grid: the optimum of the model there, what may hold less, and what else is tried where a flow does
not do what the model promised."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from shardfn.search.feasibility import is_infeasible
from shardfn.search.filters import narrowed, with_loss
from shardfn.search.label_tables import build
from shardfn.search.level_costs import in_pieces, labelling_of, totals
from shardfn.search.mesh_solution import MeshSolution
from shardfn.search.objectives import aim, other_level, over
from shardfn.search.problem import SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import Array, Axes, MeshModel
from shardfn.solver.budget import SECOND, Budget
from shardfn.solver.labelling import Labelling, total_cost
from shardfn.solver.peak import Peak, least_peak
from shardfn.solver.solve import Effort, Solution, solve, solve_within

SLACK = 1.02
"""At level 1, how much above the least peak of the model the cheapest labelling is looked for."""

WORK = 60 * SECOND
"""What one search may do on all grids together."""

BUILT = 1e4
"""Work for each op of a program until its choices on a grid are there."""

STEPS, WITHIN = 40, 2 * SECOND
"""Steps towards the least peak, and work for one search aside: within a limit that a flow has shown to be too tight, or for
another aim."""

NEAR = Effort(rounds=2, steps=10, neighbourhoods=4, parts=1, close=0.1)
"""Near the least peak, where any labelling is dear: how close to the cheapest one is of little worth."""

SPREADS = (1e3, 0.1)
"""At level 0, how much the work weighs against the bytes: first it alone, then so that a tenth of it weighs as much as all
the bytes that are sent then."""

EFFORT, FIRST = Effort(rounds=4, close=0.005), Effort(rounds=2, close=0.03)
"""For a grid that elimination does not solve: a gap of half a percent will do, of three at a first look."""

Mend = Callable[[SearchProblem, MeshSolution, SearchCandidate], Iterable[MeshSolution]]
"""What to try instead of something found whose flow holds more than the limit."""

Turn = Callable[[SearchProblem, MeshSolution], Iterable[MeshSolution]]
"""What else to try on the grid of something found whose flow breaks the model's promise."""


def budget_of(problem: SearchProblem) -> Budget:
    """For one search: work, and the user's time limit."""
    return Budget(WORK, problem.seconds_left)


def order(problem: SearchProblem, found: MeshSolution) -> tuple[float, ...]:
    """What the model thinks of something found: within the limit first."""
    idle, sent, peak = 0.0, 0.0, found.peak
    if problem.level == 0:
        made = totals(found.space, found.solution.choice)
        idle, sent = problem.idle(made), made.sent
    least = aim(problem.level, idle=idle, sent=sent, time_s=found.solution.cost, peak=peak)
    return (over(peak, problem.memory_limit), *least, len(found.axes))


def solve_mesh(problem: SearchProblem, axes: Axes, budget: Budget, chosen: Sequence[Array] | None = None,
            ceiling: float = math.inf) -> Iterator[MeshSolution]:  # fmt: skip
    """The optimum on one grid, and where memory counts what else may have the least, or fit the limit.

    At level 1 that is the fastest and what sends least with the arguments in pieces, and what is near the least peak;
    at level 2, nothing where all costs more than `ceiling`.
    """
    given = {v: spec for v, spec in zip(problem.inputs, problem.specs, strict=True) if spec is not None}
    grid = MeshModel.on(problem.hardware, axes)
    budget.spend(BUILT * len(problem.graph.ops))
    space = build(problem.graph, grid, given, problem.results, problem.same_as, chosen, problem.facts)

    def asked(spread: float = 1.0, level: int = problem.level) -> tuple[Labelling, float]:
        labels = labelling_of(space, dataclasses.replace(problem, level=level), spread)
        return narrowed(labels, space, problem.graph, grid.sizes, problem.algorithm)

    def solved(labels: Labelling, lost: float, cut: bool = False) -> MeshSolution:
        effort = FIRST if problem.level == 2 else EFFORT
        return MeshSolution(
            axes, space, labels, with_loss(solve(labels, budget.part(), effort), lost), is_in_pieces=cut
        )

    if problem.level == 1:
        labels, lost = asked()
        yield from _possible(dataclasses.replace(solved(in_pieces(labels, space), lost, True), kind=1))
        sends = solved(in_pieces(asked(SPREADS[0], 0)[0], space), 0.0, True)
        evaluated = dataclasses.replace(sends.solution, cost=total_cost(labels, sends.solution.choice))
        yield from _possible(dataclasses.replace(sends, labels=labels, solution=evaluated, kind=2))
        least = least_peak(labels, budget.part(), STEPS)
        if least is not None:
            near = MeshSolution(axes, space, labels, _of_least(least, labels))
            yield _within(near, SLACK * least.peak, budget.part(), NEAR)
        return
    if math.isfinite(ceiling):
        labels, lost = asked()
        solution = solve_within(labels, ceiling + lost, budget.part(), FIRST)
        if solution is None:
            return
        found = MeshSolution(axes, space, labels, with_loss(solution, lost))
    else:
        found = solved(*asked(SPREADS[0]))
    if problem.level == 0 and math.isfinite(found.solution.cost):
        made = totals(space, found.solution.choice)
        rate = problem.hardware.chip
        weight = made.sent / rate.link_bytes_s / max(SPREADS[1] * made.flops / rate.flops, 1e-30)
        few = solved(*asked(weight))
        is_over = few.peak > problem.memory_limit and not is_infeasible(problem)
        within = [_within(few, problem.memory_limit, budget.part(work=WITHIN), EFFORT)] if is_over else []
        found = min((found, few, *within), key=lambda f: order(problem, f))
    if not math.isfinite(found.solution.cost):
        return
    yield found
    if found.peak > problem.memory_limit and not is_infeasible(problem):
        yield from _possible(solved(in_pieces(found.labels, space), 0.0, True))


def _possible(found: MeshSolution) -> Iterator[MeshSolution]:
    if math.isfinite(found.solution.cost):
        yield found


def other_objective_within(budget: Budget) -> Turn:
    """`other_objective` within a budget."""
    return lambda problem, found: other_objective(problem, found, budget)


def other_objective(problem: SearchProblem, found: MeshSolution, budget: Budget) -> Iterator[MeshSolution]:
    """What the model finds on the same grid for the other of the levels 0 and 2, as it is and with the arguments in pieces,
    with its cost at the problem's own: where a flow breaks the model's promise, the layout that was meant for the other aim
    may serve this one better."""
    across = dataclasses.replace(problem, level=other_level(problem.level))
    labels, _ = narrowed(labelling_of(found.space, across, SPREADS[0]), found.space, problem.graph,
                         tuple(size for _, size in found.axes), problem.algorithm)  # fmt: skip
    for asked, cut in ((labels, False), (in_pieces(labels, found.space), True)):
        solution = solve(asked, budget.part(work=WITHIN), FIRST)
        cost = total_cost(found.labels, solution.choice)
        evaluated = dataclasses.replace(solution, cost=cost, bound=found.solution.bound, proved=False)
        yield from _possible(dataclasses.replace(found, solution=evaluated, is_in_pieces=cut or found.is_in_pieces))


def less_memory_within(budget: Budget) -> Mend:
    """`less_memory` within a budget."""
    return lambda problem, found, made: less_memory(problem, found, made, budget)


def less_memory(
    problem: SearchProblem, found: MeshSolution, made: SearchCandidate, budget: Budget
) -> Iterator[MeshSolution]:
    """Where the flow holds more than the limit: what the model finds with the arguments in pieces, and within a limit that
    allows for the difference between them; where nothing fits, what holds least."""
    if problem.level == 1:  # where all of this is tried anyway
        return
    if is_infeasible(problem):
        yield _of_least_peak(found, budget.part(work=WITHIN))
        return
    if not found.is_in_pieces:
        pieces = in_pieces(found.labels, found.space)
        solution = solve(pieces, budget.part(), EFFORT)
        yield from _possible(dataclasses.replace(found, labels=pieces, solution=solution, is_in_pieces=True))
    limit = 0.98 * problem.memory_limit / made.cost.memory.peak * found.peak
    yield _within(found, limit, budget.part(work=WITHIN))


def _within(found: MeshSolution, limit: float, budget: Budget, effort: Effort | None = None) -> MeshSolution:
    """The cheapest labelling on a grid that holds at most `limit`, or one of the least peak where none does."""
    solution = solve(dataclasses.replace(found.labels, limit=limit), budget, effort)
    if solution.feasible:
        return dataclasses.replace(found, solution=solution)
    return _of_least_peak(found, budget)


def _of_least_peak(found: MeshSolution, budget: Budget) -> MeshSolution:
    least = least_peak(found.labels, budget.part(), STEPS)
    return found if least is None else dataclasses.replace(found, solution=_of_least(least, found.labels))


def _of_least(least: Peak, labels: Labelling) -> Solution:
    return Solution(least.choice, total_cost(labels, least.choice), -math.inf, False, False)

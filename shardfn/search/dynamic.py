"""The exact search: the best layout of every op under the cost model, on every grid of one or two axes.

Each grid's choices are a labelling problem (`search.solver.solve`, at the problem's level: `search.levels`), solved to proven
optimality where elimination can, else to a stated gap. Of small programs the best grid is divided once more, into three
axes. `search.choose` takes the best by Shardy's flow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from shardfn.cuts import divisors
from shardfn.search import propagation
from shardfn.search.beside import asked_once, bettered
from shardfn.search.choose import Mend, Turn, answer_of, weighed
from shardfn.search.filters import loosened, narrowed
from shardfn.search.found import Found
from shardfn.search.grid import Array, Axes, Grid
from shardfn.search.levels import in_pieces, labelling_of, totals
from shardfn.search.problem import Answer, Candidate, Problem
from shardfn.search.room import fits_nowhere
from shardfn.search.solver.budget import SECOND, Budget
from shardfn.search.solver.labelling import Labelling, cost_of
from shardfn.search.solver.peak import Peak, least_peak
from shardfn.search.solver.solve import Effort, Solution, solve, solve_within
from shardfn.search.strategies import build

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

WORTH = 0.95
"""Of the least cost: what a grid must promise to be looked at again; of a small program, anything less than that cost."""

SPREADS = (1e3, 0.1)
"""At level 0, how much the work weighs against the bytes: first it alone, then so that a tenth of it weighs as much as all
the bytes that are sent then."""

EFFORT, FIRST = Effort(rounds=4, close=0.005), Effort(rounds=2, close=0.03)
"""For a grid that elimination does not solve: a gap of half a percent will do, of three at a first look."""


def search(problem: Problem) -> Answer:
    """The cheapest layout at the problem's level; of small programs what other levels find stands beside it."""
    if not problem.is_open:
        return propagation.search(problem)
    return bettered(problem, asked_once(problem, alone), alone)


def alone(problem: Problem) -> Answer:
    """The search for the problem's level by itself."""
    tried, budget = grids(problem), budget_of(problem)
    found, untried = on_grids(problem, tried, (), budget)
    if found and not problem.axes and len(problem.graph.ops) <= THREE_AXES:
        best = min(found, key=lambda f: order(problem, f)).axes
        more = list(dict.fromkeys((*finer(problem, best), *finer(problem, mirrored(best, found)))))
        again, left = on_grids(problem, more, found, budget)
        tried, found, untried = tried + more, found + again, untried + left
    found = sorted(settled(problem, found, budget), key=lambda f: order(problem, f))
    return answer_of(problem, found, "exact search", mending(budget), tried, untried, turning(budget))


def budget_of(problem: Problem) -> Budget:
    """For one search: work, and the user's time limit."""
    return Budget(WORK, problem.seconds_left)


def on_grids(problem: Problem, tried: Sequence[Axes], before: Sequence[Found],
             budget: Budget) -> tuple[list[Found], list[Axes]]:  # fmt: skip
    """What is best on each grid, and the grids that the budget leaves nothing for, unless nothing is found yet.

    The grids of the most equal sizes go first: often the best are among them. What can't be among the first ones to be
    priced is left out, but for the grid of one axis, which is priced where the flows of the others disappoint. A grid may
    take half of what is left, the last one all of it.
    """
    made: dict[Axes, list[Found]] = {}
    most = weighed(problem)
    turn = sorted(tried, key=lambda axes: sum(size for _, size in axes))
    for number, axes in enumerate(turn):
        known = [*before, *(f for some in made.values() for f in some)]
        if budget.is_over and known:
            break
        fit = sorted(f.solution.cost for f in known if f.peak <= problem.memory_limit)
        is_bound = problem.level == 2 and len(axes) > 1 and len(fit) >= most
        ceiling = fit[most - 1] if is_bound else math.inf
        part = budget.part(0.5 if number + 1 < len(turn) else 1.0)
        made[axes] = list(on_grid(problem, axes, part, ceiling=ceiling))
    return [f for axes in tried for f in made.get(axes, ())], [axes for axes in tried if axes not in made]


def settled(problem: Problem, found: Sequence[Found], budget: Budget) -> list[Found]:
    """The same, with another look at the best, and at what may yet be better by a good part."""
    least = min((f.solution.cost for f in found), default=0.0)
    is_tiny = len(problem.graph.ops) <= THREE_AXES
    close, worth = (EFFORT.close, 1.0) if is_tiny else (FIRST.close, WORTH)
    again = []
    for one in found:
        is_open = one.solution.gap > close + 1e-9 and (one.solution.cost == least or one.solution.bound < worth * least)
        solution = solve(one.labels, budget.part(), EFFORT) if is_open and problem.level == 2 else one.solution
        again.append(dataclasses.replace(one, solution=solution))
    return again


def order(problem: Problem, found: Found) -> tuple[float, ...]:
    """What the model thinks of something found: within the limit first."""
    over = max(0.0, found.peak - problem.memory_limit)
    if problem.level == 0:
        made = totals(found.space, found.solution.choice)
        return over, problem.idle(made.flops), made.sent, len(found.axes)
    if problem.level == 1:
        return over, found.peak, found.solution.cost, len(found.axes)
    return over, found.solution.cost, len(found.axes)


THREE_AXES = 400
"""Ops up to which grids of three axes are tried: they have up to 256 labels for each op."""


def grids(problem: Problem) -> list[Axes]:
    """The user's grid where a cut was given, else every split of the devices into one or two axes.

    The order of the axes matters only where their links differ: between nodes, or on a torus.
    """
    if problem.axes:
        return [problem.axes]
    return _distinct(problem, splits(problem.devices, 2))


def finer(problem: Problem, axes: Axes) -> list[Axes]:
    """The grids of three axes that divide an axis of a grid of two."""
    if len(axes) != 2:
        return []
    (_, a), (_, b) = axes
    return _distinct(problem, [(*s, b) for s in splits(a, 2)[1:]] + [(a, *s) for s in splits(b, 2)[1:]])


def mirrored(axes: Axes, found: Sequence[Found]) -> Axes:
    """The grid with the sizes the other way round, if it was looked at too: between nodes and on a torus it has other links."""
    sizes = tuple(size for _, size in reversed(axes))
    return next((f.axes for f in found if tuple(size for _, size in f.axes) == sizes), ())


def _distinct(problem: Problem, sizes: Sequence[tuple[int, ...]]) -> list[Axes]:
    found: dict[tuple[int, ...], Axes] = {}
    for one in sizes:
        axes = tuple(zip("abc", one, strict=False))
        links = Grid.on(problem.hardware, axes).links
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


def on_grid(problem: Problem, axes: Axes, budget: Budget, chosen: Sequence[Array] | None = None,
            ceiling: float = math.inf) -> Iterator[Found]:  # fmt: skip
    """The optimum on one grid, and where memory counts what else may have the least, or fit the limit.

    At level 1 that is the fastest and what sends least with the arguments in pieces, and what is near the least peak;
    at level 2, nothing where all costs more than `ceiling`.
    """
    given = {v: spec for v, spec in zip(problem.inputs, problem.specs, strict=True) if spec is not None}
    grid = Grid.on(problem.hardware, axes)
    budget.spend(BUILT * len(problem.graph.ops))
    space = build(problem.graph, grid, given, problem.results, problem.same_as, chosen, problem.facts)

    def asked(spread: float = 1.0, level: int = problem.level) -> tuple[Labelling, float]:
        labels = labelling_of(space, dataclasses.replace(problem, level=level), spread)
        return narrowed(labels, space, problem.graph, grid.sizes, problem.algorithm)

    def solved(labels: Labelling, lost: float, cut: bool = False) -> Found:
        effort = FIRST if problem.level == 2 else EFFORT
        return Found(axes, space, labels, loosened(solve(labels, budget.part(), effort), lost), is_in_pieces=cut)

    if problem.level == 1:
        labels, lost = asked()
        yield from _possible(dataclasses.replace(solved(in_pieces(labels, space), lost, True), kind=1))
        sends = solved(in_pieces(asked(SPREADS[0], 0)[0], space), 0.0, True)
        priced = dataclasses.replace(sends.solution, cost=cost_of(labels, sends.solution.choice))
        yield from _possible(dataclasses.replace(sends, labels=labels, solution=priced, kind=2))
        least = least_peak(labels, budget.part(), STEPS)
        if least is not None:
            near = Found(axes, space, labels, _held(least, labels))
            yield _within(near, SLACK * least.peak, budget.part(), NEAR)
        return
    if math.isfinite(ceiling):
        labels, lost = asked()
        solution = solve_within(labels, ceiling + lost, budget.part(), FIRST)
        if solution is None:
            return
        found = Found(axes, space, labels, loosened(solution, lost))
    else:
        found = solved(*asked(SPREADS[0]))
    if problem.level == 0 and math.isfinite(found.solution.cost):
        made = totals(space, found.solution.choice)
        rate = problem.hardware.chip
        weight = made.sent / rate.link_bytes_s / max(SPREADS[1] * made.flops / rate.flops, 1e-30)
        found = min((found, solved(*asked(weight))), key=lambda f: order(problem, f))
    if not math.isfinite(found.solution.cost):
        return
    yield found
    if found.peak > problem.memory_limit and not fits_nowhere(problem):
        yield from _possible(solved(in_pieces(found.labels, space), 0.0, True))


def _possible(found: Found) -> Iterator[Found]:
    if math.isfinite(found.solution.cost):
        yield found


def turning(budget: Budget) -> Turn:
    """`turned` within a budget."""
    return lambda problem, found: turned(problem, found, budget)


def turned(problem: Problem, found: Found, budget: Budget) -> Iterator[Found]:
    """What the model finds on the same grid for the other of the levels 0 and 2, as it is and with the arguments in pieces,
    with its cost at the problem's own: where a flow breaks the model's promise, the layout that was meant for the other aim
    may serve this one better."""
    other = dataclasses.replace(problem, level=2 - problem.level)
    labels, _ = narrowed(labelling_of(found.space, other, SPREADS[0]), found.space, problem.graph,
                         tuple(size for _, size in found.axes), problem.algorithm)  # fmt: skip
    for asked, cut in ((labels, False), (in_pieces(labels, found.space), True)):
        solution = solve(asked, budget.part(work=WITHIN), FIRST)
        cost = cost_of(found.labels, solution.choice)
        priced = dataclasses.replace(solution, cost=cost, bound=found.solution.bound, proved=False)
        yield from _possible(dataclasses.replace(found, solution=priced, is_in_pieces=cut or found.is_in_pieces))


def mending(budget: Budget) -> Mend:
    """`mended` within a budget."""
    return lambda problem, found, made: mended(problem, found, made, budget)


def mended(problem: Problem, found: Found, made: Candidate, budget: Budget) -> Iterator[Found]:
    """Where the flow holds more than the limit: what the model finds with the arguments in pieces, and within a limit that
    allows for the difference between them; where nothing fits, what holds least."""
    if problem.level == 1:  # where all of this is tried anyway
        return
    if fits_nowhere(problem):
        yield _of_least_peak(found, budget.part(work=WITHIN))
        return
    if not found.is_in_pieces:
        pieces = in_pieces(found.labels, found.space)
        solution = solve(pieces, budget.part(), EFFORT)
        yield from _possible(dataclasses.replace(found, labels=pieces, solution=solution, is_in_pieces=True))
    limit = 0.98 * problem.memory_limit / made.price.memory.peak * found.peak
    yield _within(found, limit, budget.part(work=WITHIN))


def _within(found: Found, limit: float, budget: Budget, effort: Effort | None = None) -> Found:
    """The cheapest labelling on a grid that holds at most `limit`, or one of the least peak where none does."""
    solution = solve(dataclasses.replace(found.labels, limit=limit), budget, effort)
    if solution.feasible:
        return dataclasses.replace(found, solution=solution)
    return _of_least_peak(found, budget)


def _of_least_peak(found: Found, budget: Budget) -> Found:
    least = least_peak(found.labels, budget.part(), STEPS)
    return found if least is None else dataclasses.replace(found, solution=_held(least, found.labels))


def _held(least: Peak, labels: Labelling) -> Solution:
    return Solution(least.choice, cost_of(labels, least.choice), -math.inf, False, False)

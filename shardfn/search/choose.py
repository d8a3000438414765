"""From what was found on the grids to an answer: each is priced by Shardy's flow with more or less of it held (`holding`), the
best flow wins, and what propagation finds by itself is let go."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from shardfn.search import plain, propagation
from shardfn.search.facts import bytes_of
from shardfn.search.filters import keeps
from shardfn.search.found import (
    KINDS,
    NEARLY,
    Found,
    decided,
    keeps_promise,
    layout_of,
    mirrored,
    promises,
    runners_up,
    works_as_found,
    written,
)
from shardfn.search.grid import Axes
from shardfn.search.holding import candidates
from shardfn.search.letgo import as_sliced, let_go
from shardfn.search.ongrid import Mend, Turn
from shardfn.search.polish import LINE, in_line
from shardfn.search.problem import Answer, Candidate, Problem, objective, runner_up
from shardfn.search.results import ends_of, held_as
from shardfn.search.room import fits_nowhere

MOST = 3
"""Of what was found, how much is priced by its flow at least, where the rest promises more than the first few turned out to
hold."""

SHORT = 1.1
"""Of the time of the best flow so far, or of its promise where that is more: what was found for level 0 and promises no less
than that is not priced at level 2, as of 28 plans its flow took 1.8 to 109 times as long as the best."""

LET_GO = 3
"""Of what was priced, where all flows disappoint, how much is let go of what it need not hold before the best is taken: of
what promises more than the best."""


def answer_of(
    problem: Problem, found: Sequence[Found], what: str, mend: Mend, grids: Sequence[Axes] = (),
    untried: Sequence[Axes] = (), turn: Turn | None = None,
) -> Answer:  # fmt: skip
    """The best of what was found and of the plain layouts, as their flows show, with all that is to be said of it.

    After the time limit only the first thing found is priced, a plain layout beside it, and a last flow or two of what was
    taken.

    Args:
      problem: what is asked.
      found: best first; of large programs only the first few are priced.
      what: the name of the search.
      mend: what else to try where a flow holds more than the limit.
      grids: all that were looked at, those too of which nothing is in `found`.
      untried: those of them that nothing was left for.
      turn: what else to try where all flows break the model's promises.
    """
    rated: list[_Rated] = []
    aside: list[Candidate] = []
    is_small, is_large = problem.is_small, problem.is_large
    least, disappoints = plain.least(problem), True
    for count, one in enumerate(_in_turn(found)[: weighed(problem)]):
        if rated and problem.seconds_left <= 0:
            break
        is_left = bool(rated) and (count >= priced(problem) or fastest(problem, rated) < math.inf)
        if is_left and not promises(problem, one, min(r[0] for r in rated)):
            break
        made, *more = sorted(
            candidates(problem, one, fastest(problem, rated)), key=lambda c: objective(c.price, problem)
        )
        aside += more
        made = let_go(problem, made) if is_small else made
        # By how much a program is too large that fits nowhere is worth little.
        is_lost = made.price.memory.peak > problem.memory_limit and fits_nowhere(problem)
        is_kept = (works_as_found if is_lost else keeps_promise)(problem, one, made)
        disappoints = disappoints and not is_kept
        rated.append(_row(problem, made, one))
        if (is_small or weighs(problem, made)) and problem.seconds_left > 0:
            other = held_as(problem, made, one.axes, decided(problem, one))
            rated += [] if other is None else [_row(problem, other, one)]
        if problem.is_rough or (not is_large and (is_small or not is_kept or problem.level != 2)):
            rated += _in_line(problem, one, made)
        is_over = least < problem.memory_limit < made.price.memory.peak and not (is_large and is_lost)
        if is_over and problem.seconds_left > 0:
            for other in mend(problem, one, made):
                rated += [_row(problem, c, other) for c in candidates(problem, other)]
    rated += _beyond(problem, found, rated)
    is_over = bool(rated) and all(made.price.memory.peak > problem.memory_limit for _, made, _ in rated)
    is_lost = is_over and fits_nowhere(problem)
    if rated and (disappoints or not is_large) and problem.level != 1 and not is_lost:
        rated += _otherwise(problem, found, rated, turn if not is_large else None, disappoints)
        if is_large and problem.level == 0:
            rated += _pieces(problem, rated, mend)
    if is_large and rated and (disappoints or problem.level == 1 or problem.is_rougher_than_flows):
        rated += [_row(problem, c) for c in plain.of_batch(problem)]
    elif not is_large or not rated:
        peak = min((made.price.memory.peak for _, made, _ in rated), default=math.inf)
        simple = plain.candidates(problem, problem.level == 1, peak, fastest(problem, rated))
        rated += [_row(problem, c) for c in simple]
    if problem.seconds_left <= 0:
        rated += [_row(problem, c) for c in plain.in_haste(problem)]
    if not rated:
        return propagation.search(problem)
    rated.sort(key=lambda r: r[0])
    if disappoints and not is_small and not is_large:
        rated = _let_go(problem, rated)
    _, best, at = rated[0]
    best = as_sliced(problem, best)
    others = tuple(c for _, c, _ in rated[1:])
    looked = (*(f.axes for f in found), *(axes for axes in grids if axes not in untried))
    tried, runner = _tried(problem, looked, untried), runner_up(best, others)
    aside.append(best)
    best = best if is_small and at is not None else let_go(problem, best, is_last=True)
    answer = _told(problem, f"{what} at level {problem.level}", found, tried, bool(untried), best, at)
    is_doubtful = disappoints or at is None
    return dataclasses.replace(answer, runner_up=runner, others=others, aside=tuple(aside), is_doubtful=is_doubtful)


def _told(
    problem: Problem, what: str, found: Sequence[Found], tried: str, is_cut_short: bool, best: Candidate,
    at: Found | None,
) -> Answer:  # fmt: skip
    """What was taken, with its reasons: made of `at`, or a plain layout where that is None."""
    if at is None:
        policy = (
            f"{what}, grids tried: {tried}{_optimum(problem, found)}; a plain layout has the better flow: {best.name}"
        )
        reason, gap = f"plain layout, better by its flow than the optimum of the cost model: {best.name}", None
    else:
        gap = _gap(problem, at, found) if not is_cut_short and keeps_promise(problem, at, best) else None
        where = "; grids tried:" if problem.level == 0 else " on the grids tried:"
        policy = f"{what}: {_proof(best, gap)} under the cost model, op by op{where} {tried}"
        policy += f"; {LINE}" if best.name.endswith(LINE) else ""
        reason = "the optimum of all ops together"
    reasons = tuple("" if given is not None else reason for given in problem.specs)
    return Answer(best.axes, best.specs, reasons, policy, pins=best.pins, gap=gap, ends=best.ends,
                  runners_up=() if at is None else runners_up(problem, at))  # fmt: skip


def _tried(problem: Problem, looked: Iterable[Axes], untried: Sequence[Axes]) -> str:
    """The grids that were looked at, and what there was no time for."""
    tried = ", ".join(dict.fromkeys(map(written, looked)))
    if untried:
        bound = f"{problem.seconds:g} s" if problem.seconds_left <= 0 else "the work that a search may do"
        return f"{tried}; not in {bound}: {', '.join(map(written, untried))}"
    return f"{tried}; {problem.seconds:g} s were over before all was tried" if problem.seconds_left <= 0 else tried


def _proof(best: Candidate, gap: float | None) -> str:
    """The grid, and what is known of how far the answer is from the optimum."""
    grid = " x ".join(f"{name}={size}" for name, size in best.axes)
    if gap is None:
        return f"grid {grid}, no bound of how far from the optimum"
    return f"grid {grid}, {f'within {gap:.1%} of the optimum' if gap else 'proved'}"


_Rated = tuple[tuple[float, ...], Candidate, Found | None]


def _row(problem: Problem, made: Candidate, one: Found | None = None) -> _Rated:
    """A candidate by the level's aim, with what was found that it was made of; None of plain layouts."""
    return objective(made.price, problem), made, one


def _first(problem: Problem, one: Found, best_s: float = math.inf) -> Candidate:
    """The best candidate of something found."""
    return min(candidates(problem, one, best_s), key=lambda c: objective(c.price, problem))


def fastest(problem: Problem, rated: Sequence[_Rated]) -> float:
    """The least modelled time so far of what fits, or of all where nothing can; at level 2 of programs that are not small,
    elsewhere infinite: there more is tried than that is sure to fail."""
    if problem.level != 2 or problem.is_small:
        return math.inf
    every = [made.price for _, made, _ in rated]
    fit = [price for price in every if price.memory.peak <= problem.memory_limit]
    if every and not fit and fits_nowhere(problem):
        fit = every
    return min((price.time_s for price in fit), default=math.inf)


def _beyond(problem: Problem, found: Sequence[Found], rated: Sequence[_Rated]) -> list[_Rated]:
    """At level 2 the best by the model of what holds more than the limit by it, if it is better by the model than all that was
    priced: of some programs the model tells too much."""
    if not rated or problem.level != 2 or problem.is_small or problem.is_large:
        return []
    least = min((one.solution.cost for _, _, one in rated if one is not None), default=0.0)
    over = [f for f in found if f.peak > problem.memory_limit and f.solution.cost < least]
    if not over or fits_nowhere(problem):
        return []
    one = min(over, key=lambda f: f.solution.cost)
    return [_row(problem, _first(problem, one, fastest(problem, rated)), one)]


def _otherwise(
    problem: Problem, found: Sequence[Found], rated: Sequence[_Rated], turn: Turn | None, disappoints: bool
) -> Iterator[_Rated]:
    """What was found for the other aim on the best grid, as it is and in line. Where all flows disappoint, also with the
    arguments in pieces, on the model's own best grid and that one's mirror image, and on the grid of one axis, which is
    priced then too; of small programs, whose flows cost little, on all grids whose flows were priced, whether they
    disappoint or not. At level 2 of others what was found for level 0 on the best grid alone, as long as all fits, and if
    it promises about as much."""
    at = {id(one): one for _, _, one in rated}
    (first, _, best), is_small = min(rated, key=lambda r: r[0]), problem.is_small
    is_over = any(made.price.memory.peak > problem.memory_limit for _, made, _ in rated)
    is_tight = is_over and not fits_nowhere(problem)
    is_clear = fastest(problem, rated) < math.inf
    single = [f for f in found if len(f.axes) == 1][:1] if disappoints or is_small else []
    tried = [f for f in single if id(f) not in at and not (is_clear and not promises(problem, f, first))]
    if turn is not None and problem.level == 2 and not is_small and not is_tight and best is not None:
        most = SHORT * max(fastest(problem, rated), best.solution.cost)
        tried += [one for one in itertools.islice(turn(problem, best), 1) if one.solution.cost < most]
    elif turn is not None:
        own = [f for f in found[:1] if f.peak <= problem.memory_limit] if disappoints and not is_small else []
        every = at.values() if is_small else (best, *own, *(mirrored(f.axes, found) for f in own))
        again = {id(f): f for f in (*every, *single) if f is not None}
        for f in again.values() if problem.seconds_left > 0 else ():
            tried += itertools.islice(turn(problem, f), None if f is best and disappoints and not is_small else 1)
    for one in tried:
        if problem.seconds_left > 0:
            made = _first(problem, one, fastest(problem, rated))
            yield _row(problem, made, one)
            if turn is not None:
                yield from _in_line(problem, one, made)


def _pieces(problem: Problem, rated: Sequence[_Rated], mend: Mend) -> Iterator[_Rated]:
    """The best with all arguments in pieces: of a large program of which all flows disappoint that is the one other
    layout on the grid that is priced at level 0."""
    _, made, best = min(rated, key=lambda r: r[0])
    if best is not None and not best.is_in_pieces and problem.seconds_left > 0 and not fits_nowhere(problem):
        for one in itertools.islice(mend(problem, best, made), 1):
            yield _row(problem, _first(problem, one), one)


def _in_line(problem: Problem, one: Found, made: Candidate) -> Iterator[_Rated]:
    if one.axes == made.axes and problem.seconds_left > 0:
        other = as_sliced(problem, in_line(problem, made, layout_of(problem, one)))
        if keeps(problem.flow_of(other), problem.algorithm):
            yield _row(problem, other, one)


def _let_go(problem: Problem, rated: Sequence[_Rated]) -> list[_Rated]:
    """The same, best first, with the first few of what promises more than the best of them holds let go of its pins."""
    gone: dict[int, _Rated] = {}
    tried: set[int] = set()
    for at, (_, made, one) in enumerate(rated):
        if one is not None and id(one) not in tried and len(tried) < LET_GO and promises(problem, one, rated[0][0]):
            tried.add(id(one))
            gone[at] = _row(problem, let_go(problem, made), one)
    return sorted((gone.get(at, row) for at, row in enumerate(rated)), key=lambda r: r[0])


def _optimum(problem: Problem, found: Sequence[Found]) -> str:
    """What is known of the model's best, on its own grid, where something else is taken."""
    if not found or not found[0].is_exact or problem.level == 1 or found[0].solution.gap >= 1:
        return ""
    gap, grid = found[0].solution.gap, written(found[0].axes)
    return f"; the optimum of the cost model on the grid {grid} is {f'known within {gap:.1%}' if gap else 'proved'}"


def _gap(problem: Problem, at: Found, found: Sequence[Found]) -> float | None:
    """How far what was chosen may be from the optimum of all grids; at level 0, where costs are weighed on each grid by
    itself, of its own."""
    if not at.is_exact or problem.level == 1:
        return None
    if problem.level == 0:
        return at.solution.gap
    bound = min(f.solution.cost if f.solution.proved else f.solution.bound for f in found)
    gap = 1 - bound / at.solution.cost if at.solution.cost > 0 else 0.0
    return gap if gap > 1e-6 else 0.0


def weighed(problem: Problem) -> int:
    """How many of what was found may be priced: the first few, and what promises more than they turned out to hold."""
    return max(priced(problem), 1 if problem.is_large else MOST)


def priced(problem: Problem) -> int:
    """How many flows are priced: fewer for larger programs, whatever the machine; at level 1 one or two of each kind."""
    count = len(problem.graph.ops)
    return max((KINDS if problem.is_large else 2 * KINDS) if problem.level == 1 else 1, min(12, 2000 // max(1, count)))


def _in_turn(found: Sequence[Found]) -> list[Found]:
    kinds = ([f for f in found if f.kind == kind] for kind in range(KINDS))
    return [f for row in itertools.zip_longest(*kinds) for f in row if f is not None]


def weighs(problem: Problem, made: Candidate) -> bool:
    """Whether the results that are open are a good part of what one device holds at the peak."""
    laid, sizes = ends_of(problem, made), {name: float(size) for name, size in made.axes}
    held = sum(
        bytes_of(problem.graph.values[end.value]) / math.prod(sizes.get(a, 1.0) for dim in laid[at] for a in dim)
        for at, end in problem.ends.items()
    )
    return held > (NEARLY - 1) * made.price.memory.peak

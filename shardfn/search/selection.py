"""From what was found on the grids to an answer: each is priced by Shardy's flow with more or less of it held (`holding`), the
best flow wins, and what propagation finds by itself is let go."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from shardfn.search import baselines, default_policy
from shardfn.search.constrained_candidates import candidates
from shardfn.search.constraint_reduction import drop_redundant_constraints, shard_sliced_arguments
from shardfn.search.exact import Mend, Turn
from shardfn.search.explanation import explained_answer, meshes_text
from shardfn.search.feasibility import is_infeasible
from shardfn.search.filters import keeps_rules
from shardfn.search.graph_facts import array_bytes
from shardfn.search.mesh_solution import (
    NEARLY,
    MeshSolution,
    decided_specs,
    estimate_holds,
    matches_estimate,
    may_beat,
    specs_of,
    transposed_mesh,
)
from shardfn.search.objectives import Rank, is_no_worse
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem, objective, runner_up
from shardfn.search.refinement import follow_products
from shardfn.search.resharding_costs import Axes
from shardfn.search.result_shardings import constrain_results, result_specs_of

SHORT = 1.1
"""Of the time of the best flow so far, or of its promise where that is more: what was found for level 0 and promises no less
than that is not priced at level 2, as of 28 plans its flow took 1.8 to 109 times as long as the best."""

ALIKE = 1.1
"""What flows took of what was promised, up to which others will take as much more: beyond, the model misses what may lie
otherwise in each of them (on CPU, where it is 1.2 to 1.5, plans were 7 % worse)."""


def answer_of(
    problem: SearchProblem, found: Sequence[MeshSolution], what: str, mend: Mend, meshes: Sequence[Axes] = (),
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
    first = _priced(problem, found, mend)
    rated, disappoints = [*first.rated, *_beyond(problem, found, first.rated)], first.disappoints
    rated += _elsewise(problem, found, rated, turn, mend, disappoints)
    rated += [_row(problem, made) for made in _plain(problem, rated, disappoints)]
    if not rated:
        return default_policy.search(problem)
    rated.sort(key=lambda r: r[0])
    if disappoints and problem.effort.reduced_candidates:
        rated = _let_go(problem, rated)
    looked = (*(f.axes for f in found), *(axes for axes in meshes if axes not in untried))
    tried = meshes_text(problem, looked, untried)
    answer = _taken(problem, f"{what} at level {problem.level}", found, rated, tried, bool(untried))
    of_found = (r for r, _, one in rated if one is not None)
    is_uncertain = disappoints or not any(is_no_worse(r, rated[0][0], NEARLY - 1) for r in of_found)
    return dataclasses.replace(answer, variants=(*first.variants, *answer.variants), is_uncertain=is_uncertain)


@dataclasses.dataclass(frozen=True)
class _Priced:
    """What was found, by its flows; what of the same layouts was priced beside; and whether no flow kept what was promised."""

    rated: list[_Rated]
    variants: tuple[SearchCandidate, ...]
    disappoints: bool


def _priced(problem: SearchProblem, found: Sequence[MeshSolution], mend: Mend) -> _Priced:
    """What was found, the first few of it and what promises more than they hold, each with what is tried beside it."""
    rated: list[_Rated] = []
    variants: list[SearchCandidate] = []
    disappoints = True
    for count, one in enumerate(_in_turn(found)[: problem.effort.found_at_most]):
        if rated and _is_enough(problem, one, rated, count):
            break
        made, *more = sorted(
            candidates(problem, one, fastest(problem, rated)), key=lambda c: objective(c.cost, problem)
        )
        variants += more
        made = drop_redundant_constraints(problem, made) if problem.is_small else made
        is_kept = _is_kept(problem, one, made)
        disappoints = disappoints and not is_kept
        rated += [_row(problem, made, one), *_beside(problem, one, made, is_kept, mend)]
    return _Priced(rated, tuple(variants), disappoints)


def _is_enough(problem: SearchProblem, one: MeshSolution, rated: Sequence[_Rated], count: int) -> bool:
    """Whether `count` things are priced already, and what comes next is not."""
    if problem.seconds_left <= 0:
        return True
    is_left = count >= problem.effort.found or can_tell(problem, rated)
    return is_left and not may_beat(problem, one, min(r[0] for r in rated), _stretch(problem, rated))


def _stretch(problem: SearchProblem, rated: Sequence[_Rated]) -> float:
    """How much longer a flow took than was promised that did what was found, if what is sure to fail is left out: about as much
    as others will, if it is little."""
    if not problem.skips_unlikely:
        return 1.0
    kept = ((made.cost.time_s, one) for _, made, one in rated if one is not None and _is_kept(problem, one, made))
    more = min((time_s / one.solution.cost for time_s, one in kept), default=1.0)
    return more if 1.0 < more < ALIKE else 1.0


def _is_lost(problem: SearchProblem, made: SearchCandidate) -> bool:
    """Whether a flow is over a limit that nothing keeps."""
    return made.cost.memory.peak > problem.memory_limit and is_infeasible(problem)


def _is_kept(problem: SearchProblem, one: MeshSolution, made: SearchCandidate) -> bool:
    """Whether a flow does what was found: by how much a program is too large that fits nowhere is worth little."""
    return (matches_estimate if _is_lost(problem, made) else estimate_holds)(problem, one, made)


def _beside(
    problem: SearchProblem, one: MeshSolution, made: SearchCandidate, is_kept: bool, mend: Mend
) -> Iterator[_Rated]:
    """The same with open results as found, and in line; where it holds more than the limit, what may hold less."""
    is_small, is_large = problem.is_small, problem.is_large
    if (is_small or weighs(problem, made)) and problem.seconds_left > 0:
        other = constrain_results(problem, made, one.axes, decided_specs(problem, one))
        if other is not None:
            yield _row(problem, other, one)
    if problem.is_quick_look or (not is_large and (is_small or not is_kept or problem.level != 2)):
        yield from _in_line(problem, one, made)
    is_over = baselines.least(problem) < problem.memory_limit < made.cost.memory.peak
    if is_over and not (is_large and _is_lost(problem, made)) and problem.seconds_left > 0:
        for less in mend(problem, one, made):
            yield from (_row(problem, c, less) for c in candidates(problem, less))


def _elsewise(
    problem: SearchProblem, found: Sequence[MeshSolution], rated: Sequence[_Rated], turn: Turn | None, mend: Mend,
    disappoints: bool,
) -> list[_Rated]:  # fmt: skip
    """What was found for the other aim, but at level 1, of large programs only where all flows disappoint, and nowhere if
    nothing fits; at level 0 of these the best in pieces instead."""
    is_large = problem.is_large
    if not rated or problem.level == 1 or (is_large and not disappoints):
        return []
    if all(made.cost.memory.peak > problem.memory_limit for _, made, _ in rated) and is_infeasible(problem):
        return []
    more = _otherwise(problem, found, rated, None if is_large else turn, disappoints)
    return [*more, *_pieces(problem, [*rated, *more], mend)] if is_large and problem.level == 0 else more


def _plain(problem: SearchProblem, rated: Sequence[_Rated], disappoints: bool) -> Sequence[SearchCandidate]:
    """The plain layouts: of a large program those of the batch alone, at level 2 where flows keep the model's promise fully
    sharded data parallel alone: the model does not know what is computed in one kernel, and of GPUs that was worth up to 7 %.
    If nothing else is there all."""
    if problem.is_large and rated and problem.seconds_left > 0:
        return baselines.batch_baselines(problem, disappoints or problem.level != 2 or problem.model_is_partial)
    if problem.seconds_left <= 0:
        return baselines.hasty_baselines(problem)
    peak = min((made.cost.memory.peak for _, made, _ in rated), default=math.inf)
    return baselines.candidates(problem, problem.level == 1, peak, fastest(problem, rated))


def _taken(
    problem: SearchProblem, what: str, found: Sequence[MeshSolution], rated: Sequence[_Rated], tried: str, is_cut_short: bool
) -> Answer:  # fmt: skip
    """The first of what was priced as an answer, without what it need not hold; aside stands what it was before that."""
    _, best, at = rated[0]
    sliced = shard_sliced_arguments(problem, best)
    others = tuple(c for _, c, _ in rated[1:])
    last = sliced if problem.is_small and at is not None else drop_redundant_constraints(problem, sliced, is_last=True)
    answer = explained_answer(problem, what, found, tried, is_cut_short, last, at)
    return dataclasses.replace(answer, runner_up=runner_up(sliced, others), others=others, variants=(sliced,))


_Rated = tuple[Rank, SearchCandidate, MeshSolution | None]


def _row(problem: SearchProblem, made: SearchCandidate, one: MeshSolution | None = None) -> _Rated:
    """A candidate by the level's aim, with what was found that it was made of; None of plain layouts."""
    return objective(made.cost, problem), made, one


def _first(problem: SearchProblem, one: MeshSolution, best_s: float = math.inf) -> SearchCandidate:
    """The best candidate of something found."""
    return min(candidates(problem, one, best_s), key=lambda c: objective(c.cost, problem))


def fastest(problem: SearchProblem, rated: Sequence[_Rated]) -> float:
    """The least modelled time so far of what fits, or of all where nothing can, if what is sure to fail is left out, else
    infinite."""
    if not problem.skips_unlikely:
        return math.inf
    every = [made.cost for _, made, _ in rated]
    fit = [cost for cost in every if cost.memory.peak <= problem.memory_limit]
    if every and not fit and is_infeasible(problem):
        fit = every
    return min((cost.time_s for cost in fit), default=math.inf)


def can_tell(problem: SearchProblem, rated: Sequence[_Rated]) -> bool:
    """Whether what is sure to fail is left out, and a flow is there to tell by."""
    return fastest(problem, rated) < math.inf


def _beyond(problem: SearchProblem, found: Sequence[MeshSolution], rated: Sequence[_Rated]) -> list[_Rated]:
    """At level 2 the best by the model of what holds more than the limit by it, if it is better by the model than all that was
    priced: of some programs the model tells too much."""
    if not rated or not problem.skips_unlikely or problem.is_large:
        return []
    least = min((one.solution.cost for _, _, one in rated if one is not None), default=0.0)
    over = [f for f in found if f.peak > problem.memory_limit and f.solution.cost < least]
    if not over or is_infeasible(problem):
        return []
    one = min(over, key=lambda f: f.solution.cost)
    return [_row(problem, _first(problem, one, fastest(problem, rated)), one)]


def _otherwise(
    problem: SearchProblem, found: Sequence[MeshSolution], rated: Sequence[_Rated], turn: Turn | None, disappoints: bool
) -> list[_Rated]:
    """What was found for the other aim on the best grid, as it is and in line. Where all flows disappoint, also with the
    arguments in pieces, on the model's own best grid and that one's mirror image, and on the grid of one axis, which is
    priced then too; of small programs, whose flows cost little, on all grids whose flows were priced, whether they
    disappoint or not. At level 2 of others what was found for level 0 on the best grid alone, as long as all fits, and if
    it promises about as much."""
    at = {id(one): one for _, _, one in rated}
    (first, _, best), is_small = min(rated, key=lambda r: r[0]), problem.is_small
    is_over = any(made.cost.memory.peak > problem.memory_limit for _, made, _ in rated)
    is_tight = is_over and not is_infeasible(problem)
    is_clear = can_tell(problem, rated)
    single = [f for f in found if len(f.axes) == 1][:1] if disappoints or is_small else []
    tried = [f for f in single if id(f) not in at and not (is_clear and not may_beat(problem, f, first))]
    if turn is not None and problem.skips_unlikely and not is_tight and best is not None:
        most = SHORT * max(fastest(problem, rated), best.solution.cost)
        tried += [one for one in itertools.islice(turn(problem, best), 1) if one.solution.cost < most]
    elif turn is not None:
        own = [f for f in found[:1] if f.peak <= problem.memory_limit] if disappoints and not is_small else []
        every = at.values() if is_small else (best, *own, *(transposed_mesh(f.axes, found) for f in own))
        again = {id(f): f for f in (*every, *single) if f is not None}
        for f in again.values() if problem.seconds_left > 0 else ():
            tried += itertools.islice(turn(problem, f), None if f is best and disappoints and not is_small else 1)
    more: list[_Rated] = []
    for one in tried:
        if problem.seconds_left > 0:
            made = _first(problem, one, fastest(problem, [*rated, *more]))
            more.append(_row(problem, made, one))
            if turn is not None and (disappoints or not problem.skips_unlikely):
                more += _in_line(problem, one, made)
    return more


def _pieces(problem: SearchProblem, rated: Sequence[_Rated], mend: Mend) -> Iterator[_Rated]:
    """The best with all arguments in pieces: of a large program of which all flows disappoint that is the one other
    layout on the grid that is priced at level 0."""
    _, made, best = min(rated, key=lambda r: r[0])
    if best is not None and not best.is_in_pieces and problem.seconds_left > 0 and not is_infeasible(problem):
        for one in itertools.islice(mend(problem, best, made), 1):
            yield _row(problem, _first(problem, one), one)


def _in_line(problem: SearchProblem, one: MeshSolution, made: SearchCandidate) -> Iterator[_Rated]:
    if one.axes == made.axes and problem.seconds_left > 0:
        other = shard_sliced_arguments(problem, follow_products(problem, made, specs_of(problem, one)))
        if keeps_rules(problem.partitioned_of(other), problem.algorithm):
            yield _row(problem, other, one)


def _let_go(problem: SearchProblem, rated: Sequence[_Rated]) -> list[_Rated]:
    """The same, best first, with the first few of what promises more than the best of them holds let go of its pins."""
    gone: dict[int, _Rated] = {}
    tried: set[int] = set()
    for at, (_, made, one) in enumerate(rated):
        if (
            one is not None
            and id(one) not in tried
            and len(tried) < problem.effort.reduced_candidates
            and may_beat(problem, one, rated[0][0])
        ):
            tried.add(id(one))
            gone[at] = _row(problem, drop_redundant_constraints(problem, made), one)
    return sorted((gone.get(at, row) for at, row in enumerate(rated)), key=lambda r: r[0])


def _in_turn(found: Sequence[MeshSolution]) -> list[MeshSolution]:
    kinds = ([f for f in found if f.kind == kind] for kind in sorted({f.kind for f in found}))
    return [f for row in itertools.zip_longest(*kinds) for f in row if f is not None]


def weighs(problem: SearchProblem, made: SearchCandidate) -> bool:
    """Whether the results that are open are a good part of what one device holds at the peak."""
    laid, sizes = result_specs_of(problem, made), {name: float(size) for name, size in made.axes}
    held = sum(
        array_bytes(problem.graph.values[end.value]) / math.prod(sizes.get(a, 1.0) for dim in laid[at] for a in dim)
        for at, end in problem.open_results.items()
    )
    return held > (NEARLY - 1) * made.cost.memory.peak

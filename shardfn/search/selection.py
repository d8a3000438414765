"""From mesh solutions to an answer: evaluate candidates of each with more or fewer constraints, add baselines, take the best,
and drop its redundant constraints."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from shardfn.ir.model import Axes
from shardfn.search import baselines, default_policy
from shardfn.search.constrained_candidates import constrained_candidates
from shardfn.search.constraint_reduction import drop_redundant_constraints, shard_sliced_arguments
from shardfn.search.exact import LessMemory, OtherObjective
from shardfn.search.explanation import explained_answer, meshes_text
from shardfn.search.feasibility import is_infeasible
from shardfn.search.filters import keeps_rules
from shardfn.search.graph_facts import array_bytes
from shardfn.search.mesh_solution import (
    NEARLY,
    MeshSolution,
    estimate_holds,
    matches_estimate,
    may_beat,
    specs_of,
    transposed_mesh,
)
from shardfn.search.objectives import Rank, is_no_worse
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem, runner_up
from shardfn.search.refinement import follow_products
from shardfn.search.result_shardings import constrain_results_as, result_specs_of

SHORT = 1.1
"""Multiple of the best time, or of its estimate where that is more: at level 2, a solution for level 0 that is estimated above
it is not evaluated."""

USUAL_ERROR = 1.1
"""Multiple of the estimate up to which a candidate's time predicts that of others. Above it, the model misses something that
may differ between candidates."""


def answer_of(
    problem: SearchProblem, solutions: Sequence[MeshSolution], what: str, less_memory: LessMemory,
    meshes: Sequence[Axes] = (), untried: Sequence[Axes] = (), other: OtherObjective | None = None,
) -> Answer:  # fmt: skip
    """The best of the solutions' candidates and of the baselines.

    After the time limit it evaluates the first solution, one baseline, and one or two variants of the best.

    Args:
      problem: the question.
      solutions: best first; for large programs only the first few are evaluated.
      what: the name of the search.
      less_memory: solutions to try where a candidate exceeds the limit.
      meshes: all meshes, those without a solution included.
      untried: those of them that the budget left out.
      other: solutions to try where all estimates are too low.
    """
    first = _evaluated(problem, solutions, less_memory)
    too_low = first.too_low
    rated = [*first.rated, *_over_limit(problem, solutions, first.rated)]
    rated += _for_other_objective(problem, solutions, rated, other, less_memory, too_low)
    rated += [_row(problem, made) for made in _baselines(problem, rated, too_low)]
    if not rated:
        return default_policy.search(problem)
    rated.sort(key=lambda r: r[0])
    if too_low and problem.effort.reduced_candidates:
        rated = _reduced(problem, rated)
    tried = (*(f.axes for f in solutions), *(axes for axes in meshes if axes not in untried))
    text = meshes_text(problem, tried, untried)

    _, best, solution = rated[0]
    sliced = shard_sliced_arguments(problem, best)
    others = tuple(c for _, c, _ in rated[1:])
    is_reduced = problem.effort.is_small and solution is not None
    last = sliced if is_reduced else drop_redundant_constraints(problem, sliced, is_last=True)
    answer = explained_answer(
        problem, f"{what} at level {problem.level}", solutions, text, bool(untried), last, solution
    )
    ranks = (rank for rank, _, one in rated if one is not None)
    is_uncertain = too_low or not any(is_no_worse(rank, rated[0][0], NEARLY - 1) for rank in ranks)
    return dataclasses.replace(answer, runner_up=runner_up(sliced, others), others=others,
                               variants=(*first.variants, sliced), is_uncertain=is_uncertain)  # fmt: skip


_Rated = tuple[Rank, SearchCandidate, MeshSolution | None]
"""A candidate with its rank and the solution that it comes from; None for baselines."""


@dataclasses.dataclass(frozen=True)
class _Evaluated:
    """Candidates of the solutions, evaluated variants of them, and whether all estimates were too low."""

    rated: list[_Rated]
    variants: tuple[SearchCandidate, ...]
    too_low: bool


def _evaluated(problem: SearchProblem, solutions: Sequence[MeshSolution], less_memory: LessMemory) -> _Evaluated:
    """Candidates of the first solutions, and of further ones while their estimates beat the best."""
    rated: list[_Rated] = []
    variants: list[SearchCandidate] = []
    too_low = True
    for count, one in enumerate(_in_turn(solutions)[: problem.effort.max_evaluated]):
        if rated and _is_enough(problem, one, rated, count):
            break
        made, *more = sorted(constrained_candidates(problem, one, best_time(problem, rated)), key=problem.rank)
        variants += more
        made = drop_redundant_constraints(problem, made) if problem.effort.is_small else made
        holds = _holds(problem, one, made)
        too_low = too_low and not holds
        rated += [_row(problem, made, one), *_variants(problem, one, made, holds, less_memory)]
    return _Evaluated(rated, tuple(variants), too_low)


def _is_enough(problem: SearchProblem, one: MeshSolution, rated: Sequence[_Rated], count: int) -> bool:
    """Whether `count` solutions suffice: enough are evaluated, and the next estimate does not beat the best."""
    if problem.seconds_left <= 0:
        return True
    is_left = count >= problem.effort.min_evaluated or best_time(problem, rated) < math.inf
    return is_left and not may_beat(problem, one, min(r[0] for r in rated), _error_factor(problem, rated))


def _error_factor(problem: SearchProblem, rated: Sequence[_Rated]) -> float:
    """The least ratio of time to estimate where the estimate held, if that is small (`USUAL_ERROR`); else 1."""
    if not problem.effort.skips_unlikely:
        return 1.0
    kept = ((made.cost.time_s, one) for _, made, one in rated if one is not None and _holds(problem, one, made))
    factor = min((time_s / one.solution.cost for time_s, one in kept), default=1.0)
    return factor if 1.0 < factor < USUAL_ERROR else 1.0


def _is_lost(problem: SearchProblem, made: SearchCandidate) -> bool:
    """Whether a candidate exceeds a limit that no plan keeps."""
    return not problem.fits(made) and is_infeasible(problem)


def _holds(problem: SearchProblem, one: MeshSolution, made: SearchCandidate) -> bool:
    """Whether the estimate holds; of a program that fits nowhere, memory aside."""
    return (matches_estimate if _is_lost(problem, made) else estimate_holds)(problem, one, made)


def _variants(
    problem: SearchProblem, one: MeshSolution, made: SearchCandidate, holds: bool, less_memory: LessMemory
) -> Iterator[_Rated]:
    """The candidate with open results constrained, and following the products; above the limit, solutions with less memory."""
    effort = problem.effort
    if (effort.is_small or _results_matter(problem, made)) and problem.seconds_left > 0:
        other = constrain_results_as(problem, made, one)
        if other is not None:
            yield _row(problem, other, one)
    if problem.is_quick_look or (not effort.is_large and (effort.is_small or not holds or problem.level != 2)):
        yield from _following_products(problem, one, made)
    is_over = baselines.least_resident_bytes(problem) < problem.memory_limit < made.cost.memory.peak
    if is_over and not (effort.is_large and _is_lost(problem, made)) and problem.seconds_left > 0:
        for less in less_memory(problem, one, made):
            yield from (_row(problem, c, less) for c in constrained_candidates(problem, less))


def _baselines(problem: SearchProblem, rated: Sequence[_Rated], too_low: bool) -> Sequence[SearchCandidate]:
    """The baselines to compare with. For large programs only those that shard the batch; at level 2 FSDP alone where an
    estimate held, as the model does not know which ops share a kernel."""
    if problem.effort.is_large and rated and problem.seconds_left > 0:
        return baselines.batch_baselines(problem, too_low or problem.level != 2 or problem.model_is_partial)
    if problem.seconds_left <= 0:
        return baselines.hasty_baselines(problem)
    peak = min((made.cost.memory.peak for _, made, _ in rated), default=math.inf)
    return baselines.evaluated_baselines(problem, problem.level == 1, peak, best_time(problem, rated))


def _row(problem: SearchProblem, made: SearchCandidate, one: MeshSolution | None = None) -> _Rated:
    return problem.rank(made), made, one


def _best_candidate(problem: SearchProblem, one: MeshSolution, best_s: float = math.inf) -> SearchCandidate:
    return min(constrained_candidates(problem, one, best_s), key=problem.rank)


def best_time(problem: SearchProblem, rated: Sequence[_Rated]) -> float:
    """The least modelled time in seconds of the candidates that fit, or of all where none can; infinite unless the search
    skips unlikely candidates."""
    if not problem.effort.skips_unlikely:
        return math.inf
    fit = [made for _, made, _ in rated if problem.fits(made)]
    if rated and not fit and is_infeasible(problem):
        fit = [made for _, made, _ in rated]
    return min((made.cost.time_s for made in fit), default=math.inf)


def _over_limit(problem: SearchProblem, solutions: Sequence[MeshSolution], rated: Sequence[_Rated]) -> list[_Rated]:
    """At level 2, the fastest solution whose estimate exceeds the limit, if it beats all evaluated estimates: the model
    overestimates the memory of some programs."""
    if not rated or not problem.effort.skips_unlikely or problem.effort.is_large:
        return []
    least = min((one.solution.cost for _, _, one in rated if one is not None), default=0.0)
    over = [f for f in solutions if f.peak > problem.memory_limit and f.solution.cost < least]
    if not over or is_infeasible(problem):
        return []
    one = min(over, key=lambda f: f.solution.cost)
    return [_row(problem, _best_candidate(problem, one, best_time(problem, rated)), one)]


def _for_other_objective(
    problem: SearchProblem, solutions: Sequence[MeshSolution], rated: Sequence[_Rated], other: OtherObjective | None,
    less_memory: LessMemory, too_low: bool,
) -> list[_Rated]:  # fmt: skip
    """Candidates for the other objective, and others where estimates were too low.

    None at level 1, where nothing fits, and for large programs whose estimates hold. For other large programs at level 0,
    the best with every argument in its smallest shards too.
    """
    is_large = problem.effort.is_large
    if not rated or problem.level == 1 or (is_large and not too_low):
        return []
    if not any(problem.fits(made) for _, made, _ in rated) and is_infeasible(problem):
        return []
    more = _further(problem, solutions, rated, None if is_large else other, too_low)
    if not is_large or problem.level != 0:
        return more
    _, made, best = min([*rated, *more], key=lambda r: r[0])
    if best is not None and not best.is_fully_sharded and problem.seconds_left > 0 and not is_infeasible(problem):
        for one in itertools.islice(less_memory(problem, best, made), 1):
            more.append(_row(problem, _best_candidate(problem, one), one))
    return more


def _further(
    problem: SearchProblem, solutions: Sequence[MeshSolution], rated: Sequence[_Rated], other: OtherObjective | None,
    too_low: bool,
) -> list[_Rated]:  # fmt: skip
    """Solutions for the other objective on the best mesh, as they are and following the products.

    Where all estimates were too low, also on the mesh of the best estimate, on its transpose, and on the mesh of one axis,
    whose own solution is evaluated then too. For small programs on every evaluated mesh. At level 2 of other programs only
    one solution on the best mesh, if everything fits and its estimate is not much higher.
    """
    at = {id(one): one for _, _, one in rated}
    (first, _, best), is_small = min(rated, key=lambda r: r[0]), problem.effort.is_small
    is_over = not all(problem.fits(made) for _, made, _ in rated)
    is_tight = is_over and not is_infeasible(problem)
    skips = best_time(problem, rated) < math.inf
    single = [f for f in solutions if len(f.axes) == 1][:1] if too_low or is_small else []
    tried = [f for f in single if id(f) not in at and not (skips and not may_beat(problem, f, first))]
    if other is not None and problem.effort.skips_unlikely and not is_tight and best is not None:
        most = SHORT * max(best_time(problem, rated), best.solution.cost)
        tried += [one for one in itertools.islice(other(problem, best), 1) if one.solution.cost < most]
    elif other is not None:
        own = [f for f in solutions[:1] if f.peak <= problem.memory_limit] if too_low and not is_small else []
        every = at.values() if is_small else (best, *own, *(transposed_mesh(f.axes, solutions) for f in own))
        again = {id(f): f for f in (*every, *single) if f is not None}
        for f in again.values() if problem.seconds_left > 0 else ():
            tried += itertools.islice(other(problem, f), None if f is best and too_low and not is_small else 1)
    more: list[_Rated] = []
    for one in tried:
        if problem.seconds_left > 0:
            made = _best_candidate(problem, one, best_time(problem, [*rated, *more]))
            more.append(_row(problem, made, one))
            if other is not None and (too_low or not problem.effort.skips_unlikely):
                more += _following_products(problem, one, made)
    return more


def _following_products(problem: SearchProblem, one: MeshSolution, made: SearchCandidate) -> Iterator[_Rated]:
    if one.axes == made.axes and problem.seconds_left > 0:
        other = shard_sliced_arguments(problem, follow_products(problem, made, specs_of(problem, one)))
        if keeps_rules(problem.partitioned_of(other), problem.algorithm):
            yield _row(problem, other, one)


def _reduced(problem: SearchProblem, rated: Sequence[_Rated]) -> list[_Rated]:
    """The candidates, best first, after dropping redundant constraints of the first few whose estimates beat the best."""
    reduced: dict[int, _Rated] = {}
    tried: set[int] = set()
    for at, (_, made, one) in enumerate(rated):
        if one is None or id(one) in tried or len(tried) >= problem.effort.reduced_candidates:
            continue
        if may_beat(problem, one, rated[0][0]):
            tried.add(id(one))
            reduced[at] = _row(problem, drop_redundant_constraints(problem, made), one)
    return sorted((reduced.get(at, row) for at, row in enumerate(rated)), key=lambda r: r[0])


def _in_turn(solutions: Sequence[MeshSolution]) -> list[MeshSolution]:
    """The best of each kind, then the second best, and so on."""
    kinds = ([f for f in solutions if f.kind == kind] for kind in sorted({f.kind for f in solutions}))
    return [f for row in itertools.zip_longest(*kinds) for f in row if f is not None]


def _results_matter(problem: SearchProblem, made: SearchCandidate) -> bool:
    """Whether open results are a good part of the peak memory."""
    specs, sizes = result_specs_of(problem, made), {name: float(size) for name, size in made.axes}
    size = sum(
        array_bytes(problem.graph.values[end.value]) / math.prod(sizes.get(a, 1.0) for dim in specs[at] for a in dim)
        for at, end in problem.open_results.items()
    )
    return size > (NEARLY - 1) * made.cost.memory.peak

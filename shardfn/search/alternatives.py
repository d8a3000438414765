"""Improve an answer by searches for other objectives and by local search.

For a small program, searches at other levels and one-array changes make sure that no level's plan is worse at its own
objective than what another level finds. For others, only `with_less_memory` and `with_other_objective` apply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from shardfn.ir.model import is_gpu
from shardfn.search.explanation import gap_text
from shardfn.search.feasibility import is_infeasible
from shardfn.search.objectives import is_no_worse, other_level
from shardfn.search.one_array_changes import changed_arrays, improve
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem, runner_up

LESS = 0.99
"""The part of the memory found last that the next search for less may use."""

SearchOnce = Callable[[SearchProblem], Answer]


def improve_answer(problem: SearchProblem, own: Answer, search_once: SearchOnce) -> Answer:
    """The best of an answer and its alternatives.

    Args:
      problem: the question.
      own: its answer.
      search_once: the search by itself, to be asked at other levels.
    """
    if not problem.effort.is_small:
        return (with_less_memory if problem.level == 1 else with_other_objective)(problem, own, search_once)
    if problem.seconds_left <= 0:
        return own
    first = problem.as_candidate("this search's", own)
    rank = problem.rank(first)
    is_least = problem.level == 0 and not any((rank.over, *rank.aim))  # sends nothing, and all devices work
    elsewhere = [] if is_least else list(_of_other_levels(problem, first, search_once))
    best = min((first, *(c for of_level in elsewhere for c in of_level)), key=problem.rank)
    rest = sorted((first, *(of_level[0] for of_level in elsewhere)), key=problem.rank, reverse=True)
    starts = list(({_sizes(c): c for c in rest} | {_sizes(best): best}).values())
    improved = [improve(problem, start) for start in starts]
    start, best = min(zip(starts, improved, strict=True), key=lambda pair: problem.rank(pair[1]))
    if problem.level == 1 and best.cost.memory.peak < LESS * start.cost.memory.peak and problem.seconds_left > 0:
        tighter = dataclasses.replace(problem, level=0, memory_limit=float(best.cost.memory.peak - 1))
        again = _of_level(tighter, search_once)[0]
        other = improve(problem, again)
        if other.cost.memory.peak < best.cost.memory.peak:
            start, best = again, other
    if best is first or is_no_worse(rank, problem.rank(best)):
        return own
    before = [first] if start is first else [start, first]
    others = sorted((c for c in (*before, *own.others) if c is not best), key=problem.rank)
    return _replaced(problem, own, first, start, best, others)


def with_less_memory(problem: SearchProblem, own: Answer, search_once: SearchOnce) -> Answer:
    """An answer of level 1, or what other levels find within ever less memory.

    A search within a limit that is just missed tries more than a search for the least memory.
    """
    if problem.is_quick_look:
        return own
    best, least = own, problem.evaluate_answer(own).memory.peak
    for level, times in problem.effort.memory_levels:
        for _ in range(times):
            if problem.seconds_left <= 0:
                break
            other = cached_search(_within_less(problem, level, least), search_once)
            peak = problem.evaluate_answer(other).memory.peak
            if peak >= least:
                break
            best, least = other, peak
    if best is own:
        return own
    reasons = tuple(reason and "less memory than what the search found first" for reason in best.reasons)
    levels = " and ".join(str(level) for level, _ in problem.effort.memory_levels)
    asked = f"levels {levels} find" if len(problem.effort.memory_levels) > 1 else f"level {levels} finds"
    policy = f"{own.policy}; less memory: what {asked} within {LESS:.0%} of the least so far"
    return dataclasses.replace(best, reasons=reasons, policy=policy, gap=None, runner_up="", runners_up=())


def with_other_objective(problem: SearchProblem, own: Answer, search_once: SearchOnce) -> Answer:
    """An answer of level 0 or 2, or what the other of them finds if that is better.

    Searches only where the estimates were too low or the label model is known to be partial. At level 0 on GPUs it also
    searches within less memory, as the model misses sums that XLA combines. Large programs keep the answer.
    """
    if problem.effort.is_large or problem.seconds_left <= 0 or is_infeasible(problem):
        return own
    first, asked = problem.as_candidate("this search's", own), list[SearchProblem]()
    if own.is_uncertain or problem.model_is_partial:
        asked.append(dataclasses.replace(problem, level=other_level(problem.level)))
    if problem.level == 0 and is_gpu(problem.hardware.platform):
        asked.append(_within_less(problem, 0, first.cost.memory.peak))
    best = min((c for one in asked for c in _of_level(one, search_once)), key=problem.rank, default=first)
    if problem.rank(best) >= problem.rank(first):
        return own
    return _replaced(problem, own, first, best, best, [first, *own.others])


def cached_search(problem: SearchProblem, search_once: SearchOnce) -> Answer:
    """The answer of a search by itself, computed once for each level, limit and given sharding."""
    key = (search_once, problem.level, problem.memory_limit, problem.is_quick_look, problem.axes, problem.specs,
           problem.algorithm)  # fmt: skip
    answers = problem.memo.answers
    if key not in answers:
        answers[key] = search_once(problem)
    return answers[key]


def _of_other_levels(
    problem: SearchProblem, first: SearchCandidate, search_once: SearchOnce
) -> Iterator[list[SearchCandidate]]:
    """The candidates of other levels; those of level 0 for level 1 within ever less memory."""
    peak = first.cost.memory.peak
    for level, times in problem.effort.other_levels:
        is_tight = (problem.level, level) == (1, 0)
        for _ in range(times):
            if problem.seconds_left <= 0:
                return
            asked = _within_less(problem, level, peak) if is_tight else dataclasses.replace(problem, level=level)
            yield (found := _of_level(asked, search_once))
            least = min(one.cost.memory.peak for one in found)
            if least >= peak:
                break
            peak = least


def _within_less(problem: SearchProblem, level: int, peak: float) -> SearchProblem:
    """The problem at a level, within a little less than `peak` bytes."""
    return dataclasses.replace(problem, level=level, memory_limit=min(problem.memory_limit, float(int(LESS * peak))))


def _sizes(made: SearchCandidate) -> tuple[int, ...]:
    return tuple(size for _, size in made.axes)


def _of_level(problem: SearchProblem, search_once: SearchOnce) -> list[SearchCandidate]:
    one, name = cached_search(problem, search_once), f"level {problem.level}'s"
    others = (dataclasses.replace(other, name=f"{name} {other.name}") for other in one.others)
    return [problem.as_candidate(name, one), *others]


def _replaced(
    problem: SearchProblem,
    own: Answer,
    first: SearchCandidate,
    start: SearchCandidate,
    best: SearchCandidate,
    others: Sequence[SearchCandidate],
) -> Answer:
    """An answer with a better candidate in place of its `first` one, found from `start`."""
    is_own = start is first
    changed = changed_arrays(problem, start, best)
    policy = own.policy.replace(gap_text(own.axes, own.gap), gap_text(own.axes, None))
    policy += "" if is_own else f"; better: {start.name}"
    policy += f"; changed by local search: {changed}" if changed else ""
    reasons = tuple(
        reason if not reason or (is_own and one == two) else "better than what the search found first"
        for reason, one, two in zip(own.reasons, first.specs, best.specs, strict=True)
    )
    return dataclasses.replace(
        own, axes=best.axes, specs=best.specs, constraints=best.constraints, result_specs=best.result_specs,
        reasons=reasons, policy=policy, runner_up=runner_up(best, others), runners_up=(), gap=None, others=tuple(others),
    )  # fmt: skip

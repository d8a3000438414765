"""What stands beside an answer. Of a small program, whose flows cost little: what the search finds for other aims, and the plans
that differ from it in one array; no level's plan is worse at its own aim than what the searches of the levels 0 and 2 find. Of
others, what is found for less memory (`with_less_memory`) and for the other aim (`with_other_objective`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from shardfn.ir.model import is_gpu
from shardfn.search.explanation import gap_text
from shardfn.search.feasibility import is_infeasible
from shardfn.search.objectives import is_no_worse, other_level
from shardfn.search.one_array_changes import changed_arrays, improve
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem, objective, runner_up

LESS = 0.99
"""How much of the memory that was found last is looked for, where less is."""

Alone = Callable[[SearchProblem], Answer]


def improve_answer(problem: SearchProblem, own: Answer, search_once: Alone) -> Answer:
    """The best by its flow of an answer and what stands beside it; programs that are not small keep the answer, but for level
    1 (`with_less_memory`), and where the model is known to be wrong (`with_other_objective`).

    Args:
      problem: what is asked.
      own: its answer.
      alone: the search by itself, to be asked at other levels.
    """
    if not problem.is_small:
        return (with_less_memory if problem.level == 1 else with_other_objective)(problem, own, search_once)
    if problem.seconds_left <= 0:
        return own
    first = problem.as_candidate("this search's", own)
    rank = objective(first.cost, problem)
    is_least = problem.level == 0 and not any((rank.over, *rank.aim))  # sends nothing, and all devices work
    elsewhere = [] if is_least else list(_elsewhere(problem, first, search_once))
    best = min((first, *(c for of_level in elsewhere for c in of_level)), key=lambda c: objective(c.cost, problem))
    rest = sorted(
        (first, *(of_level[0] for of_level in elsewhere)), key=lambda c: objective(c.cost, problem), reverse=True
    )
    starts = list(({_sizes(c): c for c in rest} | {_sizes(best): best}).values())
    improved_ = [improve(problem, start) for start in starts]
    start, best = min(zip(starts, improved_, strict=True), key=lambda pair: objective(pair[1].cost, problem))
    if problem.level == 1 and best.cost.memory.peak < LESS * start.cost.memory.peak and problem.seconds_left > 0:
        start, best = _lessened(problem, start, best, search_once)
    if best is first or is_no_worse(objective(first.cost, problem), objective(best.cost, problem)):
        return own
    before = [first] if start is first else [start, first]
    others = sorted((c for c in (*before, *own.others) if c is not best), key=lambda c: objective(c.cost, problem))
    return _told(problem, own, first, start, best, others)


def _elsewhere(problem: SearchProblem, first: SearchCandidate, search_once: Alone) -> Iterator[list[SearchCandidate]]:
    """What other levels find; level 0, where level 1 asks it, within ever a little less memory than is held already."""
    held = first.cost.memory.peak
    for level, times in problem.effort.beside:
        is_tight = (problem.level, level) == (1, 0)
        for _ in range(times):
            if problem.seconds_left <= 0:
                return
            asked = _within_less(problem, level, held) if is_tight else dataclasses.replace(problem, level=level)
            yield (found := _of_level(asked, search_once))
            least = min(one.cost.memory.peak for one in found)
            if least >= held:
                break
            held = least


def _lessened(
    problem: SearchProblem, start: SearchCandidate, best: SearchCandidate, search_once: Alone
) -> tuple[SearchCandidate, SearchCandidate]:
    """What level 0 finds within less memory than the best holds with one array changed, and this with one array changed, if it
    holds less: what stood beside was looked for before any was changed. Asked where that change was worth something."""
    asked = dataclasses.replace(problem, level=0, memory_limit=float(best.cost.memory.peak - 1))
    again = _of_level(asked, search_once)[0]
    other = improve(problem, again)
    return (again, other) if other.cost.memory.peak < best.cost.memory.peak else (start, best)


def _within_less(problem: SearchProblem, level: int, held: float) -> SearchProblem:
    """The same at another level, within a little less memory than is held already."""
    return dataclasses.replace(problem, level=level, memory_limit=min(problem.memory_limit, float(int(LESS * held))))


def with_less_memory(problem: SearchProblem, own: Answer, search_once: Alone) -> Answer:
    """An answer of level 1, or what level 2 finds within ever less memory than that holds, and then level 0: where a limit is
    just missed, a search for it tries more than one for the least."""
    if problem.is_quick_look:
        return own
    best, least = own, problem.evaluate_answer(own).memory.peak
    for level, times in problem.effort.for_less:
        for _ in range(times):
            if problem.seconds_left <= 0:
                break
            other = cached_search(_within_less(problem, level, least), search_once)
            held = problem.evaluate_answer(other).memory.peak
            if held >= least:
                break
            best, least = other, held
    if best is own:
        return own
    reasons = tuple(reason and "less memory by its flow than what the search found first" for reason in best.reasons)
    levels = " and ".join(str(level) for level, _ in problem.effort.for_less)
    asked = f"levels {levels} find" if len(problem.effort.for_less) > 1 else f"level {levels} finds"
    policy = f"{own.policy}; less memory by its flow: what {asked} within {LESS:.0%} of the least so far"
    return dataclasses.replace(best, reasons=reasons, policy=policy, gap=None, runner_up="", runners_up=())


def with_other_objective(problem: SearchProblem, own: Answer, search_once: Alone) -> Answer:
    """An answer of level 0 or 2, or what the other of them finds if that is better by its flow. Asked where no flow did what the
    search's model promised, or this is known not to tell all. At level 0 on GPUs also what it finds itself within a little less
    memory: the model does not know all sums that are put together, and of a mixture of experts on 512 GPUs that sent 14 % less.
    Large programs keep the answer."""
    if problem.is_large or problem.seconds_left <= 0 or is_infeasible(problem):
        return own
    first, asked = problem.as_candidate("this search's", own), list[SearchProblem]()
    if own.is_uncertain or problem.model_is_partial:
        asked.append(dataclasses.replace(problem, level=other_level(problem.level)))
    if problem.level == 0 and is_gpu(problem.hardware.platform):
        asked.append(_within_less(problem, 0, first.cost.memory.peak))
    made = [c for one in asked for c in _of_level(one, search_once)]
    best = min(made, key=lambda c: objective(c.cost, problem), default=first)
    if objective(best.cost, problem) >= objective(first.cost, problem):
        return own
    return _told(problem, own, first, best, best, [first, *own.others])


def _sizes(made: SearchCandidate) -> tuple[int, ...]:
    return tuple(size for _, size in made.axes)


def _of_level(problem: SearchProblem, search_once: Alone) -> list[SearchCandidate]:
    one = cached_search(problem, search_once)
    name = f"level {problem.level}'s"
    return [
        problem.as_candidate(name, one),
        *(dataclasses.replace(other, name=f"{name} {other.name}") for other in one.others),
    ]


def cached_search(problem: SearchProblem, search_once: Alone) -> Answer:
    """The answer of a search by itself; what a problem was answered by it at a level and a limit is not searched again."""
    key = (
        search_once,
        problem.level,
        problem.memory_limit,
        problem.is_quick_look,
        problem.axes,
        problem.specs,
        problem.algorithm,
    )
    answers = problem.memo.answers
    if key not in answers:
        answers[key] = search_once(problem)
    return answers[key]


def _told(
    problem: SearchProblem,
    own: Answer,
    first: SearchCandidate,
    start: SearchCandidate,
    best: SearchCandidate,
    others: Sequence[SearchCandidate],
) -> Answer:
    """An answer with a better candidate in its place, and where that comes from."""
    is_own = start is first
    changed = changed_arrays(problem, start, best)
    policy = own.policy.replace(gap_text(own.axes, own.gap), gap_text(own.axes, None))
    policy += "" if is_own else f"; better by its flow: {start.name}"
    policy += f"; changed for a better flow: {changed}" if changed else ""
    reasons = tuple(
        reason if not reason or (is_own and one == two) else "better by its flow than what the search found first"
        for reason, one, two in zip(own.reasons, first.specs, best.specs, strict=True)
    )
    return dataclasses.replace(
        own, axes=best.axes, specs=best.specs, constraints=best.constraints, result_specs=best.result_specs,
        reasons=reasons, policy=policy,
        runner_up=runner_up(best, others), runners_up=(), gap=None, others=tuple(others),
    )  # fmt: skip

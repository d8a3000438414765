"""The plan of the same call for another objective."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from shardfn.errors import StrategyTypeError, fail
from shardfn.frontend.option_checks import check
from shardfn.frontend.options import Options
from shardfn.planning.answers import (
    chosen,
    is_correct,
    plan_fixed_answer,
    plan_search_answer,
    search,
    with_completed_entries,
    without_workarounds,
)
from shardfn.planning.call import PosedCall, in_other_form, memoized, place_call
from shardfn.planning.plan import Plan, answered_call
from shardfn.search.problem import OBJECTIVES, Answer, Proposal, objective


def at(plan: Plan, level: Any) -> Plan:
    """The plan for another objective (`Plan.at`): what the first search evaluated counts again, and the best of both is taken.

    Raises:
      StrategyError: there is no such objective, or the plan was pickled.
    """
    options = Options(level=level)
    check(options, None)
    if level is None:
        fail(StrategyTypeError, "`at` takes an objective, not None", where="level = None",
             why="it makes the plan for that objective", fix=f"write one of {', '.join(map(repr, OBJECTIVES))}")  # fmt: skip
    answered = answered_call(plan)
    posed = _posed(answered.posed, options.level)
    first = in_other_form(answered.posed, posed, answered.answer)
    made = plan_search_answer(posed, _best(posed, search(posed), first, plan.level))
    if objective(plan.cost, posed.problem) < objective(made.cost, posed.problem):  # workarounds cost more than was seen
        found = made, plan_fixed_answer(posed, dataclasses.replace(first, policy=_found_for(plan.level)))
        return min(found, key=lambda one: objective(one.cost, posed.problem))
    return made


def _posed(posed: PosedCall, level: int) -> PosedCall:
    """The call posed for a level; the costs of what was evaluated for another one are known."""
    first = without_workarounds(posed.call)
    call = dataclasses.replace(first, search=dataclasses.replace(first.search, level=level))
    if first is not posed.call:
        return with_completed_entries(place_call(call, []))
    problem = dataclasses.replace(posed.problem.at(level), partition=memoized(posed.partition), begun=time.monotonic())
    return dataclasses.replace(posed, call=call, problem=problem)


def _best(posed: PosedCall, answer: Answer, other: Answer, level: int) -> Answer:
    """An answer, or the best candidate of the answer for another level where that is better."""
    problem = posed.problem
    found: list[Proposal] = [Proposal(f"the plan for the least {OBJECTIVES[level]}", other.axes, other.specs,
                                      other.constraints, other.result_specs), *other.others]  # fmt: skip
    known = sorted((problem.candidate(one) for one in found), key=problem.rank)
    best = next((one for one in known if is_correct(posed, one)), None)
    if best is None or not problem.rank(best) < objective(problem.evaluate_answer(answer), problem):
        return answer
    return chosen(answer, best, _found_for(level))


def _found_for(level: int) -> str:
    return f"found by the search for the least {OBJECTIVES[level]}"

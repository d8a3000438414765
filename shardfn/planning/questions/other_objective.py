"""The plan of the same call for another objective."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from shardfn.errors import StrategyTypeError, fail
from shardfn.frontend.option_checks import check
from shardfn.frontend.options import Options
from shardfn.planning.answers import chosen, is_correct, plan_search_answer, search, without_workarounds
from shardfn.planning.call import AnsweredCall, PosedCall, memoized, place_call
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
    return plan_search_answer(posed, _best(posed, search(posed), answered, plan.level))


def _posed(posed: PosedCall, level: int) -> PosedCall:
    """The call posed for a level; the costs of what was evaluated for another one are known."""
    call = without_workarounds(posed.call)
    call = dataclasses.replace(call, search=dataclasses.replace(posed.call.search, level=level))
    if call.function is not posed.call.function:
        return place_call(call, [])
    problem = dataclasses.replace(posed.problem.at(level), partition=memoized(posed.partition), begun=time.monotonic())
    return dataclasses.replace(posed, call=call, problem=problem)


def _best(posed: PosedCall, answer: Answer, other: AnsweredCall, level: int) -> Answer:
    """An answer, or the best candidate of another search where that is better."""
    problem, of_other = posed.problem, other.answer
    found: list[Proposal] = [Proposal(f"the plan for the least {OBJECTIVES[level]}", of_other.axes, of_other.specs,
                                      of_other.constraints, of_other.result_specs), *of_other.others]  # fmt: skip
    if problem.graph is not other.problem.graph:  # its ops have other numbers
        found = [dataclasses.replace(one, constraints={}) for one in found]
    known = sorted((problem.candidate(one) for one in found), key=problem.rank)
    best = next((one for one in known if is_correct(posed, one)), None)
    if best is None or not problem.rank(best) < objective(problem.evaluate_answer(answer), problem):
        return answer
    return chosen(answer, best, f"found by the search for the least {OBJECTIVES[level]}")

"""A memory limit that an answer does not keep: the answer of least memory, or the error that says what holds it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from shardfn.cost.memory.live_ranges import MemoryEstimate, at_peak
from shardfn.errors import StrategyError, fail
from shardfn.ir.model import Op
from shardfn.search.feasibility import is_infeasible
from shardfn.search.graph_facts import array_bytes
from shardfn.search.problem import Answer, Search, SearchProblem

NAMED = 4
"""Tensors that an error names."""

SLIP = 100
"""So many times a limit's bytes are less than an even share of the arguments: it is not searched for what comes nearest to it."""

ERROR = 0.25
"""Of the peak: how far what XLA makes is from the prediction in 94 of the 97 of `benchmarks/truth.py` (docs/cost-model.md)."""


def near_limit_note(memory: MemoryEstimate, limit: float) -> list[str]:
    """What there is to say of a plan that keeps a limit by less than the model's error. Arguments and results are exact:
    only what is in between can be wrong.

    >>> near_limit_note(MemoryEstimate(600, 100, 200), 1e6), len(near_limit_note(MemoryEstimate(600, 100, 200), 1000))
    ([], 1)
    """
    if not memory.peak <= limit < memory.peak + min(memory.temporaries, ERROR * memory.peak):
        return []
    return [
        f"near the memory limit: {memory.peak:,} of {limit:,.0f} bytes per device are predicted, {memory.temporaries:,} of "
        f"them temporaries, and the model's error is up to {ERROR:.0%} in nine of ten plans measured: compile_candidates=4 keeps "
        "the limit as compiled, and plan.verify() holds this plan against what XLA makes"
    ]


def within_limit(problem: SearchProblem, answer: Answer, search: Search, is_asked: bool = True) -> Answer:
    """An answer whose flow holds at most the problem's memory limit: the one given, or else the one of least memory.

    Unless `is_asked`, where the limit is the user's, the one given stays where nothing found fits.

    Raises:
      StrategyError: even that one holds more.
    """
    if _fits(problem, answer):
        return answer
    looked = list(_looked_for(problem, search)) if problem.is_open and (is_asked or not is_infeasible(problem)) else []
    last = looked[-1].answer if looked else answer
    if not _fits(problem, last):
        if not is_asked:
            return answer
        last = _named(problem, answer, looked, search)
        if not _fits(problem, last):
            _refuse(problem, last)
    return dataclasses.replace(
        last, policy=f"{last.policy}; of least memory, as nothing else that was found fits the limit"
    )


@dataclasses.dataclass(frozen=True)
class _Looked:
    """What was asked for less memory, and its answer."""

    asked: SearchProblem
    answer: Answer


def _looked_for(problem: SearchProblem, search: Search) -> Iterator[_Looked]:
    """The answers to what asks for less, up to the first that fits."""
    for asked in _asking_less(problem):
        yield (found := _Looked(asked, search(asked)))
        if _fits(problem, found.answer):
            return


def _named(problem: SearchProblem, answer: Answer, looked: Sequence[_Looked], search: Search) -> Answer:
    """Of what was found, the answer that an error names: one that this level keeps, as without any limit, since what is found
    depends on the limit."""
    peak = functools.partial(_peak, problem)
    least = min((answer, *(one.answer for one in looked)), key=peak)
    free = [one.answer for one in looked if one.asked.memory_limit == math.inf]
    if any(least is one for one in free):
        return least
    again = search(dataclasses.replace(problem, memory_limit=peak(least))) if problem.is_open else least
    return again if peak(again) <= peak(least) else min(free or [least], key=peak)


def _asking_less(problem: SearchProblem) -> Iterator[SearchProblem]:
    """What to ask where an answer holds too much: level 1; and, unless the program is large, each level without a limit, as what
    is found depends on it."""
    if problem.level != 1:
        yield dataclasses.replace(problem, level=1)
    for level in (1, 0, 2) if not problem.is_large else ():
        yield dataclasses.replace(problem, level=level, memory_limit=math.inf)


def refuse_infeasible_limit(problem: SearchProblem, search: Search) -> None:
    """Refuse a limit of the user's that nothing can keep, after a first look at what holds least instead of a search; of small
    programs, which are searched as fast, not.

    Raises:
      StrategyError: it names what holds least of what was looked at.
    """
    if problem.is_open and not problem.is_small and is_infeasible(problem):
        least = search(dataclasses.replace(problem, level=1, is_quick_look=True))
        if not _fits(problem, least):
            _refuse(problem, least, " at a first look", "; level=1 without a limit may find a little less")


def refuse_implausible_limit(problem: SearchProblem) -> None:
    """Refuse a limit of the user's that is so small that its unit must be a slip, without a search.

    Raises:
      StrategyError: it says what the arguments alone are.
    """
    graph = problem.graph
    given = sum(array_bytes(graph.values[v]) for v in graph.inputs)
    if problem.memory_limit * SLIP < given / problem.devices:
        fail(StrategyError, f"no layout holds at most {problem.memory_limit:,.0f} bytes per device",
             where=f"memory_limit = {problem.memory_limit:,.0f}",
             why=f"the arguments alone, however they are cut, are at least {given / problem.devices:,.0f} bytes on each device",
             fix='write the unit that is meant, as in "14GiB" or "16GB", or leave memory_limit out')  # fmt: skip


def _refuse(problem: SearchProblem, least: Answer, how: str = "", more: str = "") -> NoReturn:
    """Raise that nothing fits, with what holds least, how that was found, and what finds more."""
    memory = problem.evaluate_answer(least).memory
    fail(StrategyError, f"no layout found holds at most {problem.memory_limit:,.0f} bytes per device",
         where=f"memory_limit = {problem.memory_limit:,.0f}",
         why=f"the least found{how} is {memory.peak:,} bytes: {memory.arguments:,} of arguments, {memory.results:,} of results "
             f"({memory.donated:,} in the place of donated arguments) and {memory.temporaries:,} in between; the largest: "
             + "; ".join(_largest(problem, least)),
         fix="use more devices, a smaller batch, donate_argnums for what is given back, jax.checkpoint for what is kept for "
             f"the backward pass, or memory_limit={memory.peak}{more}")  # fmt: skip


def _peak(problem: SearchProblem, answer: Answer) -> int:
    return problem.evaluate_answer(answer).memory.peak


def _fits(problem: SearchProblem, answer: Answer) -> bool:
    return _peak(problem, answer) <= problem.memory_limit


def _largest(problem: SearchProblem, answer: Answer) -> list[str]:
    """The largest arrays that an answer has in memory at its peak, equal ones of a line together: what each is, who made it, and
    bytes on one device."""
    partitioned, held = at_peak(problem.partitioned_of(answer), problem.donated, problem.hardware.chip)
    names = {
        v: f"`{name}`" for v, name in zip(partitioned.graph.arguments(len(problem.names)), problem.names, strict=True)
    }
    made = {v: op for op in partitioned.graph.ops for v in op.outputs}
    counts: dict[tuple[int, str], int] = {}
    for values, size in held:
        text = "a copy by XLA"
        if values:
            v = next((v for v in values if v in names or v in made), values[0])
            at = source_line(made, v) if v in made else ""
            name = names.get(v) or (
                made[v].name if v in made else "captured" if v in partitioned.graph.inputs else "carried"
            )
            text = f"{name} {partitioned.graph.values[v]}{at and f' at {at}'}"
        key = -size, text
        counts[key] = counts.get(key, 0) + 1
    return [
        f"{text}: {-size:,} bytes" + (f", {counts[size, text]} of them" if counts[size, text] > 1 else "")
        for size, text in sorted(counts)[:NAMED]
    ]


def source_line(made: Mapping[int, Op], value: int) -> str:
    """The line that a value comes from: of the op that makes it, or else of the nearest that makes what that op reads, as
    sums of gradients have none of their own."""
    level, seen = [value], {value}
    while level:
        ops = [made[v] for v in level if v in made]
        found = next((op.where for op in ops if op.where), "")
        if found:
            return found
        level = [v for v in dict.fromkeys(v for op in ops for v in op.inputs) if v not in seen]
        seen.update(level)
    return ""

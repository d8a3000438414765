"""The candidates that a search evaluated, without duplicates and with distinct names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from shardfn.cost.estimate import Cost
from shardfn.frontend.paths import few
from shardfn.ir.specs import strategy_of
from shardfn.planning.plan import Candidate, Candidates, Figures
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem, objective

BATCH = "batch sharded"
"""How styles name candidates that shard dimension 0 of what they take for the batch."""


def candidates(problem: SearchProblem, answer: Answer, cost: Cost) -> Candidates:
    """The plan itself, as `this plan`, and the other evaluated candidates, best first; () if the search had no choice."""
    own = Figures.of(cost)
    evaluated = sorted(answer.others, key=lambda c: objective(c.cost, problem))
    # Candidates of equal cost differ in axis names only, or are equally good.
    found = {Figures.of(c.cost): c for c in reversed(answer.others)}
    others = [c for c in evaluated if found[Figures.of(c.cost)] is c and Figures.of(c.cost) != own]
    names = distinct_names(problem.names, others)
    rows = [Candidate(name, c.axes, Figures.of(c.cost)) for name, c in zip(names, others, strict=True)]
    return Candidates((Candidate("this plan", answer.axes, own), *rows) if rows or problem.is_open else ())


def of_rows(found: Sequence[Candidate]) -> Candidates:
    """The candidates of a function outside neural networks, which has no batch: styles shard its rows."""
    return Candidates(dataclasses.replace(c, name=c.name.replace(BATCH, "rows sharded")) for c in found)


def distinct_names(names: Sequence[str], found: Sequence[SearchCandidate]) -> list[str]:
    """Distinct names of the candidates.

    Candidates of one name on one mesh get what distinguishes them: strategies of arguments, the number of constraints, or
    else a number.
    """
    groups: dict[object, list[SearchCandidate]] = {}
    for c in found:
        groups.setdefault((c.name, c.axes), []).append(c)
    suffix = {id(c): text for same in groups.values() for c, text in zip(same, _differing(names, same), strict=True)}
    return [c.name + suffix[id(c)] for c in found]


def _differing(names: Sequence[str], same: Sequence[SearchCandidate]) -> list[str]:
    """For each of some candidates, what distinguishes it from the others, as a suffix of its name."""
    facts: list[list[str]] = [[] for _ in same]
    constrained = (
        lambda c: _count(len(c.constraints), "op") + " constrained",
        lambda c: _count(len(c.result_specs), "result") + " constrained",
    )
    for fact in (*(_strategy(i, name) for i, name in enumerate(names)), *constrained):
        if len(set(map(tuple, facts))) == len(same):
            break
        _add_if_distinct(facts, [fact(c) for c in same])
    seen: dict[str, int] = {}
    texts = []
    for each in facts:
        text = f": {few(each, 3)}" if each else ""
        seen[text] = seen.get(text, 0) + 1
        texts.append(text + (f" ({seen[text]})" if seen[text] > 1 else ""))
    return texts


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s'[: number != 1]}"


def _strategy(i: int, name: str) -> Callable[[SearchCandidate], str]:
    return lambda c: f"{name} {strategy_of(c.specs[i], c.axes)}"


def _add_if_distinct(facts: list[list[str]], more: Sequence[str]) -> None:
    """Add a fact to each candidate if it distinguishes any that were equal so far."""
    if len(set(zip(map(tuple, facts), more, strict=True))) > len(set(map(tuple, facts))):
        for each, text in zip(facts, more, strict=True):
            each.append(text)

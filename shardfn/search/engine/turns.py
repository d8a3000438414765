"""The search: generators take turns to propose candidates, and an archive evaluates and keeps them, until the budget is spent.

A generator is a function of the problem and the archive. It yields a `Proposal`, whose evaluated candidate the archive has when
the generator goes on (`Archive.of`); a yield of None ends its turn without one. Local search around the best candidates of
the archive is a generator like the others.

Baselines come first, whatever the budget. Then each generator counts its turns since it last found a better plan, and the one
with the lowest count goes next. Counts start at 0, 1, 2, … in the order of the list, which is thus that of the first turns.
The sequence of evaluations does not depend on the budget, which only ends it, as does a proof within the tolerance. So

- no plan is worse than a baseline;
- a larger budget never gives a worse plan (a second run within a memory limit starts where the budget ended the first);
- every machine finds the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from shardfn.search.engine.archive import Archive
from shardfn.search.problem import FIXED_VISITS, VISIT, Proposal, SearchProblem, is_no_worse
from shardfn.session import is_interactive, without_collection

CandidateGenerator = Callable[[SearchProblem, Archive], Iterator[Proposal | None]]
"""A generator of candidates."""

MIN_IMPROVEMENT = 1e-3
"""A plan is better than another where its cost is less by this part."""

MAX_IDLE_TURNS = 1000
"""Turns in a row without a new candidate after which a generator is over: it may yield None, or what is known, for ever."""

FEWEST_CANDIDATES = 3
"""Candidates that each run evaluates however short its time limit is, as far as there are any."""


@dataclasses.dataclass(eq=False)
class _Turn:
    """A generator that is running."""

    name: str
    proposals: Iterator[Proposal | None]
    in_vain: int
    """Turns since it last found a better plan; at the start its place in the list."""
    idle: int = 0
    """Turns since it last proposed what was not known."""
    is_fresh: bool = True
    """Whether it had no turn."""


def run(
    problem: SearchProblem,
    generators: Mapping[str, CandidateGenerator],
    baselines: Mapping[str, CandidateGenerator] | None = None,
    known: Archive | None = None,
) -> Archive:
    """The archive of all candidates that the generators propose within the problem's budget.

    After the user's time limit, or at Ctrl-C in an interactive session, the candidates so far are all; after the time limit at
    least `FEWEST_CANDIDATES`.

    Args:
      problem: the question.
      generators: by name, in the order of their first turns.
      baselines: generators whose proposals are all evaluated first, whatever the budget.
      known: the archive of the same problem within another memory limit, which this search goes on from.

    Raises:
      KeyboardInterrupt: nothing was evaluated yet, or the session is not interactive: whoever runs a script wants it to end.
    """
    archive = Archive(problem, known)
    budget, least = archive.budget, len(archive) + FEWEST_CANDIDATES
    try:
        for name, generator in (baselines or {}).items():
            for proposal in generator(problem, archive):
                if budget.seconds_left <= 0 and len(archive) >= least:
                    return archive
                if proposal is not None:
                    with without_collection():
                        _evaluate(archive, proposal, name)
        least = max(least, len(archive) + 1)
        _take_turns(problem, generators, archive, least)
    except KeyboardInterrupt:
        if not len(archive) or not is_interactive():
            raise
        archive.was_interrupted = True
    return archive


def _take_turns(
    problem: SearchProblem, generators: Mapping[str, CandidateGenerator], archive: Archive, least: int
) -> None:
    """Let the generators propose until the best plan is proved within the tolerance, each had a turn, and as many turns as
    there are generators found no other; or until the budget is spent, `least` candidates are evaluated, and a turn finds no
    better plan."""
    budget, is_better, unchanged = archive.budget, False, 0
    running = [
        _Turn(name, iter(generator(problem, archive)), place)
        for place, (name, generator) in enumerate(generators.items())
    ]
    while running and (is_better or len(archive) < least or not budget.is_over):
        turn = min(running, key=lambda each: each.in_vain)
        best, known = archive.best_rank(), len(archive)
        chosen = archive.best(problem.level) if known else None
        with without_collection():
            try:
                proposal = next(turn.proposals)
            except StopIteration:
                running.remove(turn)
                is_better = False
                continue
            if proposal is None:
                budget.spend(VISIT * FIXED_VISITS)
            else:
                _evaluate(archive, proposal, turn.name)
        found = archive.best_rank()
        unchanged = unchanged + 1 if known and archive.best(problem.level) is chosen else 0
        turn.is_fresh = False
        if not any(each.is_fresh for each in running) and unchanged >= len(running) and archive.is_proved():
            return
        is_better = best is not None and found is not None and not is_no_worse(best, found, MIN_IMPROVEMENT)
        turn.in_vain = 0 if is_better else turn.in_vain + 1
        turn.idle = turn.idle + 1 if len(archive) == known else 0
        if turn.idle == MAX_IDLE_TURNS:
            running.remove(turn)


def _evaluate(archive: Archive, proposal: Proposal, name: str) -> None:
    archive.evaluate(proposal, name)
    if archive.problem.watch is not None:
        archive.problem.watch(name, archive)

"""The search: generators take turns to propose candidates, and an archive evaluates and keeps them, until the budget is spent.

A generator is a function of the problem and the archive. It yields a `Proposal`, whose evaluated candidate the archive has when
the generator goes on (`Archive.of`); a yield of None ends its turn without one. Local search around the best candidates of
the archive is a generator like the others.

The next turn goes to the generator that has spent least since it last found a better plan for some objective. The k-th starts
with the work of k evaluations, so that the order of the list is the order of the first turns. The sequence of evaluations
depends neither on the objective nor on the budget, which only ends it. So

- no objective's plan is worse at its own aim than that of another objective;
- a larger budget never gives a worse plan;
- every machine finds the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from shardfn.search.archive import Archive
from shardfn.search.budget import FIXED_VISITS, VISIT
from shardfn.search.objectives import is_no_worse
from shardfn.search.problem import Proposal, SearchProblem

CandidateGenerator = Callable[[SearchProblem, Archive], Iterator[Proposal | None]]
"""A generator of candidates."""

WORTH = 1e-3
"""A plan is better than another where its cost is less by this part."""

LEAST = 3
"""Candidates that each run evaluates however small the budget is, as far as there are any."""


@dataclasses.dataclass(eq=False)
class _Turn:
    """A generator that is running."""

    name: str
    proposals: Iterator[Proposal | None]
    head: float
    """The work that the generator starts with."""
    spent: float = 0.0
    """Work since it last found a better plan for some objective."""


def run(problem: SearchProblem, generators: Mapping[str, CandidateGenerator], known: Archive | None = None) -> Archive:
    """The archive of all candidates that the generators propose within the problem's budget.

    After the user's time limit, or at Ctrl-C, the candidates so far are all; after the time limit at least `LEAST`.

    Args:
      problem: the question.
      generators: by name, in the order of their first turns.
      known: the archive of the same problem within another memory limit, which this search goes on from.

    Raises:
      KeyboardInterrupt: nothing was evaluated yet.
    """
    archive = Archive(problem, known)
    budget, least = archive.budget, len(archive) + LEAST
    running = [
        _Turn(name, iter(generator(problem, archive)), place * archive.evaluation_work)
        for place, (name, generator) in enumerate(generators.items())
    ]
    try:
        while running and (len(archive) < least or not budget.is_over):
            turn = min(running, key=lambda each: each.head + each.spent)
            before, best = budget.spent, archive.best_ranks()
            try:
                proposal = next(turn.proposals)
            except StopIteration:
                running.remove(turn)
                continue
            if proposal is None:
                budget.spend(VISIT * FIXED_VISITS)
            else:
                archive.evaluate(proposal, turn.name)
                if problem.watch is not None:
                    problem.watch(turn.name, archive)
            turn.spent += budget.spent - before
            if any(not is_no_worse(old, new, WORTH) for old, new in zip(best, archive.best_ranks(), strict=False)):
                turn.spent = 0.0
    except KeyboardInterrupt:
        if not len(archive):
            raise
        archive.was_interrupted = True
    return archive

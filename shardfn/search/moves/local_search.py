"""Local search: moves around the best candidates of an objective, until none of them makes a better one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from shardfn.search.engine import Archive
from shardfn.search.moves.array_changes import alike_array_changes, one_array_changes
from shardfn.search.moves.fewer_constraints import fewer_constraints
from shardfn.search.moves.many_array_changes import follow_matmuls, fully_sharded, sliced_arguments
from shardfn.search.moves.result_shardings import smallest_results
from shardfn.search.moves.scattered_sums import scattered_sums
from shardfn.search.problem import Proposal, SearchCandidate, SearchProblem

Move = Callable[[SearchProblem, SearchCandidate, int], Iterator[Proposal]]
"""A move makes proposals that change a candidate. The number counts the proposals that were better so far, so that a move
of single arrays does not begin with the same array each time."""

MOVES: tuple[Move, ...] = (
    fewer_constraints,
    scattered_sums,
    sliced_arguments,
    follow_matmuls,
    fully_sharded,
    smallest_results,
    alike_array_changes,
    one_array_changes,
)
"""In the order in which they are tried."""


def generate(level: int, problem: SearchProblem, archive: Archive) -> Iterator[Proposal | None]:
    """The generator of the local search for the objective of a level.

    It starts from the best candidate of each mesh, the best of all first. A better candidate replaces its start: if the local
    search proposed that, it repeats the move that made it; if another generator did, it begins with the first move.
    """
    at, proposed, ended, better, moves = problem.at(level), set[object](), set[object](), 0, deque(MOVES)
    while (start := _start(archive, level, ended)) is not None:
        if start.key not in proposed:
            moves = deque(MOVES)
        for _ in MOVES:
            for proposal in moves[0](at, start, better):
                if proposal.key not in proposed:
                    proposed.add(proposal.key)
                    yield proposal
                    proposed.add(archive.of(proposal).key)  # `SearchProblem.candidate` may have changed constraints
                    if _start(archive, level, ended) is not start:
                        better += 1
                        break
            else:
                moves.rotate(-1)
                continue
            break
        else:
            ended.add(start.key)


def _start(archive: Archive, level: int, ended: set[object]) -> SearchCandidate | None:
    """The best candidate around which not all moves were tried, of those that are the best of their mesh."""
    best = (candidate for candidate in archive.best_of_each_mesh(level) if candidate.key not in ended)
    return next(best, None)

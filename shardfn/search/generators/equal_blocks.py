"""Equal blocks are planned once: the search of a large program is that of the program with fewer of its equal blocks, whose best
candidates are evaluated for the whole program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from shardfn.search.engine import Archive, CandidateGenerator, run, visits
from shardfn.search.problem import FIXED_VISITS, Proposal, SearchProblem, SmallerProblem, is_no_worse

NAME = "equal blocks"
"""The name of the generator."""

LARGE = 32
"""A program is large where its budget does not pay for so many candidates."""

MOST, ALMOST = 2, 0.01
"""At most `MOST` candidates are evaluated for the whole program: those within `ALMOST` of the best with fewer blocks."""


def is_large(problem: SearchProblem) -> bool:
    """Whether the budget pays for few candidates."""
    return visits(problem) < LARGE * (FIXED_VISITS + len(problem.graph.ops))


def generate(
    smaller: SmallerProblem,
    generators: Mapping[str, CandidateGenerator],
    baselines: Mapping[str, CandidateGenerator],
    problem: SearchProblem,
    archive: Archive,
) -> Iterator[Proposal]:
    """The generator of the best candidates of a search with fewer blocks."""
    small = dataclasses.replace(smaller.problem.at(problem.level), memory_limit=math.inf)
    found = run(small, generators, baselines)
    archive.was_interrupted = found.was_interrupted
    archive.tried_by_blocks = tuple(one.axes for one in found.solutions if one.objective.level == problem.level)
    best, *_ = ranked = found.ranked(problem.level)
    seen = set[object]()
    for candidate in ranked:
        if len(seen) == MOST or not is_no_worse(small.rank(candidate), small.rank(best), ALMOST):
            break
        if (candidate.axes, candidate.specs) not in seen:
            seen.add((candidate.axes, candidate.specs))
            yield smaller.whole(candidate)

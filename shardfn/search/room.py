"""Whether there is room at all: a program of which no layout fits into a device need not be searched for one that does."""

from __future__ import annotations

import itertools

from shardfn.search.facts import Known, bytes_of
from shardfn.search.problem import Problem

SURE = 0.75
"""How much of an even share counts: flows hold it and more, up to a hundred times; the least that was seen was 0.87."""


def fits_nowhere(problem: Problem) -> bool:
    """Whether one device would hold more than the limit though arguments, and what is alive at once beside them, were spread
    evenly over all devices. Where a chip keeps arrays in a memory of its own beside, nobody can tell."""
    return not problem.hardware.chip.fast_bytes and SURE * even_share(problem) > problem.memory_limit


def even_share(problem: Problem) -> float:
    """Bytes of arguments, and of what is alive at once beside them, over the devices."""
    given = sum(bytes_of(problem.graph.values[v]) for v in problem.graph.inputs)
    return (given + alive(problem.facts)) / problem.devices


def alive(facts: Known) -> float:
    """The most bytes that are alive at once in a program on one device, beside its arguments."""
    change: dict[int, float] = {}
    for place in facts.places:
        change[place.start] = change.get(place.start, 0.0) + place.bytes
        change[place.end + 1] = change.get(place.end + 1, 0.0) - place.bytes
    return max(itertools.accumulate(change[tick] for tick in sorted(change)), default=0.0)

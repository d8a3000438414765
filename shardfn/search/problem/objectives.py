"""The objective of each level as a rank, for partitioned programs, mesh solutions and compiled programs alike.

`level_costs` states them as the costs of a labelling, without memory.
"""

from __future__ import annotations

from typing import NamedTuple

COMMUNICATION, MEMORY, TIME = 0, 1, 2
"""The levels."""

OBJECTIVES = ("communication", "memory", "time")
"""By level, in a word: the least time in communication with the work evenly spread, the smallest peak per device, the shortest
modelled step with a small charge for memory."""

LEVELS = (TIME, COMMUNICATION, MEMORY)
"""All objectives. The first ranks the candidates to compile."""

BALANCED = 1.1
"""Compute counts as balanced up to this multiple of an even share per device."""

FULL_MEMORY_SHARE = 0.01
"""At level 2, the part of the time that a full device memory adds."""


class Figures(NamedTuple):
    """What an objective looks at: of a plan, of the estimate of a solution, or of a compiled program."""

    communication_s: float
    """Seconds of a call that one device sends and waits for others, the start of each collective included."""
    compute_s: float
    """Seconds of a call that one device computes."""
    even_s: float
    """Seconds of a device's even share of the compute (`SearchProblem.even_s`)."""
    peak: float
    """The device's peak memory in bytes."""
    memory_bytes: float
    """The device's memory."""

    @property
    def time_s(self) -> float:
        """Seconds of a call."""
        return self.communication_s + self.compute_s


def aim(level: int, of: Figures) -> tuple[float, ...]:
    """The objective of a level, to be minimised lexicographically.

    Level 0 is the time of communication and what a device computes beyond a balanced share (`BALANCED`): replicated work sends
    nothing, but takes time. Level 1 is the peak memory, then the time. Level 2 is the time, and what memory costs:
    `FULL_MEMORY_SHARE` of the time for all memory of the device, in proportion.

    >>> figures = Figures(communication_s=2.0, compute_s=2.0, even_s=1.0, peak=64, memory_bytes=128)
    >>> aim(COMMUNICATION, figures), aim(MEMORY, figures), aim(TIME, figures)
    ((2.9,), (64, 4.0), (4.02,))
    """
    beyond_s = max(0.0, of.compute_s - BALANCED * of.even_s)
    charged_s = of.time_s * (1 + FULL_MEMORY_SHARE * of.peak / of.memory_bytes)
    return {COMMUNICATION: (of.communication_s + beyond_s,), MEMORY: (of.peak, of.time_s), TIME: (charged_s,)}[level]


class Rank(NamedTuple):
    """How good a plan is at a level; less is better."""

    over: float
    """Bytes beyond the memory limit."""
    aim: tuple[float, ...]
    """The level's objective."""
    ties: tuple[float, ...]
    """What decides between equals."""


def rank(level: int, limit: float, of: Figures) -> Rank:
    """The rank at a level within a memory limit in bytes.

    >>> rank(COMMUNICATION, 48, Figures(communication_s=2.0, compute_s=3.0, even_s=1.0, peak=64, memory_bytes=128))
    Rank(over=16, aim=(3.9,), ties=(64, 5.0))
    """
    ties = {COMMUNICATION: (of.peak, of.time_s), MEMORY: (), TIME: (of.peak,)}[level]
    return Rank(over(of.peak, limit), aim(level, of), ties)


def over(peak: float, limit: float) -> float:
    """Bytes beyond a limit. They rank before any level's objective."""
    return max(0.0, peak - limit)


def is_no_worse(one: Rank, other: Rank, tolerance: float = 1e-9) -> bool:
    """Whether `one` is no worse than `other`, up to a relative tolerance.

    >>> is_no_worse(Rank(0, (1.0,), (5,)), Rank(0, (1.0 - 1e-12,), (5,))), is_no_worse(Rank(0, (1.0,), ()), Rank(0, (0.9,), ()))
    (True, False)
    >>> is_no_worse(Rank(0, (1.0,), ()), Rank(0, (0.98,), ()), tolerance=0.05)
    True
    """
    pairs = zip((one.over, *one.aim, *one.ties), (other.over, *other.aim, *other.ties), strict=True)
    first = next(((a, b) for a, b in pairs if abs(a - b) > tolerance * max(abs(a), abs(b))), (0.0, 0.0))
    return first[0] <= first[1]

"""The objective of each level as a rank, for partitioned programs, mesh solutions and compiled programs alike.

`level_costs` states the same objectives as the costs of a labelling.
"""

from __future__ import annotations

from typing import NamedTuple

BALANCED = 1.1
"""Work counts as balanced up to this multiple of an even share per device."""


def other_level(level: int) -> int:
    """The other of levels 0 and 2, whose plan may serve this level better; level 2 for level 1.

    >>> other_level(0), other_level(1), other_level(2)
    (2, 2, 0)
    """
    return 0 if level == 2 else 2


def aim(level: int, *, imbalance: float, sent: float, time_s: float, peak: float) -> tuple[float, ...]:
    """The objective of a level, to be minimised lexicographically.

    Level 0 balances the work before it saves bytes: replicated work sends none.

    >>> aim(0, imbalance=0.0, sent=8, time_s=1e-3, peak=64)
    (0.0, 8)
    """
    return {0: (imbalance, sent), 1: (peak, time_s), 2: (time_s,)}[level]


class Rank(NamedTuple):
    """How good a plan is at a level; less is better."""

    over: float
    """Bytes beyond the memory limit."""
    aim: tuple[float, ...]
    """The level's objective."""
    ties: tuple[float, ...]
    """What decides between equals."""


def rank(level: int, limit: float, *, imbalance: float, sent: float, time_s: float, peak: float) -> Rank:
    """The rank at a level within a memory limit in bytes.

    >>> rank(0, 48, imbalance=0.0, sent=8, time_s=1e-3, peak=64)
    Rank(over=16, aim=(0.0, 8), ties=(0.001,))
    """
    ties = {0: (time_s,), 1: (), 2: (peak,)}[level]
    return Rank(over(peak, limit), aim(level, imbalance=imbalance, sent=sent, time_s=time_s, peak=peak), ties)


def over(peak: float, limit: float) -> float:
    """Bytes beyond a limit. They rank before any level's objective."""
    return max(0.0, peak - limit)


def imbalance(flops: float, share: float) -> float:
    """By how much one device's FLOPs exceed its `share`, in hundredths of that; 0 without work."""
    return round(max(0.0, flops / share - 1), 2) if share else 0.0


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

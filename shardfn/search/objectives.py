"""What each level makes least, of whatever it is told: a flow (`problem.objective`), what was found on a grid (`ongrid.order`), a
compiled program (`compile_candidates`). The costs by which labels are searched say it in their own form (`levels`)."""

from __future__ import annotations

from typing import NamedTuple

SPREAD = 1.1
"""Work counts as spread over all devices up to this multiple of an even share."""


def other_level(level: int) -> int:
    """The other of levels 0 and 2: what is meant for one of these aims may serve the other better. Of level 1 it is level 2.

    >>> other_level(0), other_level(1), other_level(2)
    (2, 2, 0)
    """
    return 0 if level == 2 else 2


def aim(level: int, *, idle: float, sent: float, time_s: float, peak: float) -> tuple[float, ...]:
    """What a level makes least, the first before the second.

    Level 0 spreads the work before it saves bytes: doing it all everywhere sends none.

    >>> aim(0, idle=0.0, sent=8, time_s=1e-3, peak=64)
    (0.0, 8)
    """
    return {0: (idle, sent), 1: (peak, time_s), 2: (time_s,)}[level]


class Rank(NamedTuple):
    """How good something is at a level, less before more."""

    over: float
    """Bytes beyond the memory limit."""
    aim: tuple[float, ...]
    """What the level makes least."""
    ties: tuple[float, ...]
    """What decides between equals."""


def rank(level: int, limit: float, *, idle: float, sent: float, time_s: float, peak: float) -> Rank:
    """What a level makes least within a limit of bytes, with what decides between equals.

    >>> rank(0, 48, idle=0.0, sent=8, time_s=1e-3, peak=64)
    Rank(over=16, aim=(0.0, 8), ties=(0.001,))
    """
    ties = {0: (time_s,), 1: (), 2: (peak,)}[level]
    return Rank(over(peak, limit), aim(level, idle=idle, sent=sent, time_s=time_s, peak=peak), ties)


def over(peak: float, limit: float) -> float:
    """Bytes beyond a limit: less of them comes before any level's aim."""
    return max(0.0, peak - limit)


def idle(flops: float, share: float) -> float:
    """How much of one device's work is more than its `share`, in hundredths of that; 0 where there is no work."""
    return round(max(0.0, flops / share - 1), 2) if share else 0.0


def is_no_worse(one: Rank, other: Rank, but: float = 1e-9) -> bool:
    """Whether `one` is no worse than `other` but for a part of it, by itself for rounding.

    >>> is_no_worse(Rank(0, (1.0,), (5,)), Rank(0, (1.0 - 1e-12,), (5,))), is_no_worse(Rank(0, (1.0,), ()), Rank(0, (0.9,), ()))
    (True, False)
    >>> is_no_worse(Rank(0, (1.0,), ()), Rank(0, (0.98,), ()), but=0.05)
    True
    """
    pairs = zip((one.over, *one.aim, *one.ties), (other.over, *other.aim, *other.ties), strict=True)
    apart = next(((a, b) for a, b in pairs if abs(a - b) > but * max(abs(a), abs(b))), (0.0, 0.0))
    return apart[0] <= apart[1]

"""What each level makes least, of whatever it is told: a flow (`problem.objective`), what was found on a grid (`ongrid.order`), a
compiled program (`finalists`). The costs by which labels are searched say it in their own form (`levels`)."""

from __future__ import annotations

SPREAD = 1.1
"""Work counts as spread over all devices up to this multiple of an even share."""


def aim(level: int, *, idle: float, sent: float, time_s: float, peak: float) -> tuple[float, ...]:
    """What a level makes least, the first before the second.

    Level 0 spreads the work before it saves bytes: doing it all everywhere sends none.

    >>> aim(0, idle=0.0, sent=8, time_s=1e-3, peak=64)
    (0.0, 8)
    """
    return {0: (idle, sent), 1: (peak, time_s), 2: (time_s,)}[level]


def aim_and_ties(level: int, *, idle: float, sent: float, time_s: float, peak: float) -> tuple[float, ...]:
    """The same, with what decides between equals."""
    ties = {0: (time_s,), 1: (), 2: (peak,)}[level]
    return (*aim(level, idle=idle, sent=sent, time_s=time_s, peak=peak), *ties)


def over(peak: float, limit: float) -> float:
    """Bytes beyond a limit: less of them comes before any level's aim."""
    return max(0.0, peak - limit)


def idle(flops: float, share: float) -> float:
    """How much of one device's work is more than its `share`, in hundredths of that; 0 where there is no work."""
    return round(max(0.0, flops / share - 1), 2) if share else 0.0

"""The objective of each level as a rank, for partitioned programs, mesh solutions and compiled programs alike.

`level_costs` states them as the costs of a labelling, without memory.
"""

from __future__ import annotations

from typing import NamedTuple

COMMUNICATION, MEMORY, TIME = 0, 1, 2
"""The levels."""

LEVELS = (TIME, COMMUNICATION, MEMORY)
"""All objectives. The first ranks the candidates to compile."""

BALANCED = 1.1
"""Work counts as balanced up to this multiple of an even share per device."""

FULL_MEMORY_SHARE = 0.01
"""At level 2, the part of the time that a full device memory adds."""


def aim(
    level: int, *, sent: float, excess: float, time_s: float, peak: float, memory_bytes: float
) -> tuple[float, ...]:
    """The objective of a level, to be minimised lexicographically.

    Level 0 adds what work beyond an even share costs (`excess_bytes`) to the bytes sent: replicated work sends none.
    Level 2 adds what memory costs to the time: `FULL_MEMORY_SHARE` of the time for all memory of the device, in proportion.

    Args:
      level: 0, 1 or 2.
      sent: bytes that one device sends in one call.
      excess: bytes, of `excess_bytes`.
      time_s: seconds of one call.
      peak: the device's peak memory in bytes.
      memory_bytes: the device's memory.

    >>> aim(0, sent=8, excess=2.0, time_s=1e-3, peak=64, memory_bytes=128)
    (10.0,)
    >>> aim(2, sent=8, excess=2.0, time_s=1.0, peak=64, memory_bytes=128)
    (1.005,)
    """
    charged_s = time_s * (1 + FULL_MEMORY_SHARE * peak / memory_bytes)
    return {COMMUNICATION: (sent + excess,), MEMORY: (peak, time_s), TIME: (charged_s,)}[level]


class Rank(NamedTuple):
    """How good a plan is at a level; less is better."""

    over: float
    """Bytes beyond the memory limit."""
    aim: tuple[float, ...]
    """The level's objective."""
    ties: tuple[float, ...]
    """What decides between equals."""


def rank(
    level: int, limit: float, *, sent: float, excess: float, time_s: float, peak: float, memory_bytes: float
) -> Rank:
    """The rank at a level within a memory limit in bytes; the other arguments are those of `aim`.

    >>> rank(0, 48, sent=8, excess=0.0, time_s=1e-3, peak=64, memory_bytes=128)
    Rank(over=16, aim=(8.0,), ties=(64, 0.001))
    """
    ties = {COMMUNICATION: (peak, time_s), MEMORY: (), TIME: (peak,)}[level]
    objective = aim(level, sent=sent, excess=excess, time_s=time_s, peak=peak, memory_bytes=memory_bytes)
    return Rank(over(peak, limit), objective, ties)


def over(peak: float, limit: float) -> float:
    """Bytes beyond a limit. They rank before any level's objective."""
    return max(0.0, peak - limit)


def excess_bytes(flops: float, share: float, data_bytes: float) -> float:
    """What a device's FLOPs beyond a balanced share cost at level 0, in bytes.

    The exchange rate: computing one even share again costs as much as sending all arguments and results of the program once.

    Args:
      flops: of one device.
      share: an even share of the program's FLOPs.
      data_bytes: the bytes of its arguments and results.

    >>> excess_bytes(110, 100, 1e6), excess_bytes(200, 100, 1e6), excess_bytes(0, 0, 1e6)
    (0.0, 900000.0, 0.0)
    """
    return data_bytes * round(max(0.0, flops / share - BALANCED), 6) if share else 0.0


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

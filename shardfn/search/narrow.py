"""The least labelling without a limit on memory, where elimination alone needs tables that are too large.

A few passes give a lower bound, and how fast it rises says about how far the optimum is above it. Labels that cost more
than that guess are left out, which leaves a far smaller problem, solved the same way in turn and in the end exactly.
If what comes out costs no more than was guessed, no labelling with a left-out label is cheaper; otherwise the bound has
reached the guess, and the next guess is larger.
"""

from __future__ import annotations

import math
import time

from shardfn.search.branch import minimum
from shardfn.search.labelling import Array
from shardfn.search.lagrange import Ascent

PASSES = 3  # between two guesses
MOST_PASSES = 60  # until the bound counts as stuck
FEWER = 0.5  # of the labels: what makes leaving the others out worth a problem of its own
ENTRIES, TOTAL = 3e5, 2e7  # of the tables of an exact solution


class Stuck(Exception):
    """The bound has stopped below the optimum, or the time is over."""


def narrow(ascent: Ascent, ceiling: float, deadline: float = math.inf) -> Array | None:
    """The labels of least cost, memory aside; None where that is more than `ceiling`.

    Raises:
      Stuck: neither was proved.
    """
    rises: list[float] = []
    last, floor, wider = -math.inf, -math.inf, 1.0
    labels = len(ascent.base)
    for number in range(1, MOST_PASSES):
        if time.monotonic() > deadline:
            raise Stuck
        ascent.messages.forward()
        bound = ascent.sweep()
        if bound > ceiling:
            return None
        rises.append(bound - last)
        last = bound
        if number % PASSES:
            continue
        gap = max(wider * _ahead(rises), floor - bound, 1e-7 * abs(bound))
        base = ascent.base
        ascent.messages.forward()
        ascent.sweep(min(gap, ceiling - bound))
        if not (ascent.open() > 0).all():
            found = None
        elif ascent.open().sum() > FEWER * labels:
            ascent.base = base
            ascent.messages.set_costs(base)
            continue
        else:
            found = _inside(ascent.compact(), min(bound + gap, ceiling), deadline)
        ascent.base = base
        ascent.messages.set_costs(base)
        if found is not None or bound + gap >= ceiling:
            return found
        floor, wider = bound + gap, 3 * wider
    raise Stuck


def _inside(ascent: Ascent, ceiling: float, deadline: float) -> Array | None:
    found = minimum(ascent, ENTRIES, TOTAL)
    if found is None:
        return narrow(ascent, ceiling, deadline)
    return found if ascent.cost_of(found) <= ceiling else None


def _ahead(rises: list[float]) -> float:
    """How much further a bound will rise that rises ever more slowly."""
    now, before = rises[-1], rises[-2]
    ratio = min(max(now / before, 0.0), 0.9) if before > 0 else 0.5
    return 1.5 * max(now, 0.0) * ratio / (1 - ratio)

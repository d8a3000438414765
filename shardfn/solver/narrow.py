"""The least labelling without a memory limit, where elimination alone needs too large tables.

A few passes give a lower bound, and its rise suggests the distance to the optimum. Labels above that guess are excluded, which
leaves a far smaller problem, solved the same way and in the end exactly. The result is the optimum if it costs no more than
the guess. Otherwise the bound has reached the guess, and the next guess is larger, up to the best result so far.
"""

from __future__ import annotations

import dataclasses
import math

from shardfn.solver.branch_and_bound import minimum
from shardfn.solver.labelling import Array
from shardfn.solver.lagrange import Ascent

PASSES = 3  # between two guesses
MOST_PASSES = 60  # until the bound counts as stuck
FEWER = 0.5  # of the labels: what makes leaving the others out worth a problem of its own
LESS = 0.7  # of the labels: the same where the others are left out for good
MUCH = 0.2  # of the way to the best cost: a guess beyond it goes all the way
ROUNDING = 1e-9  # of a cost
ENTRIES, TOTAL = 3e5, 2e7  # of the tables of an exact solution


@dataclasses.dataclass
class Best:
    """The cheapest labelling found so far, of the nodes of the start."""

    cost: float = math.inf
    labels: Array | None = None

    def offer(self, ascent: Ascent, labels: Array) -> None:
        """Keep it if it is cheaper."""
        cost = ascent.cost_of(labels)
        if cost < self.cost:
            self.cost, self.labels = cost, labels


class Stuck(Exception):
    """The bound has converged below the optimum, or the budget is used up; `best` is the cheapest labelling found."""

    def __init__(self, best: Best):
        super().__init__("the bound has stopped")
        self.best = best


def narrow(ascent: Ascent) -> Array | None:
    """The labels of least cost, memory aside; None where every labelling is forbidden. The ascent is used up.

    Raises:
      Stuck: neither was proved.
    """
    best = Best()
    _search(ascent, math.inf, best)
    return best.labels


def _search(ascent: Ascent, ceiling: float, best: Best) -> None:
    """Afterwards no labelling that costs at most `ceiling` is cheaper than `best`."""
    rises: list[float] = []
    last, floor, wider = -math.inf, -math.inf, 1.0
    labels = len(ascent.base)
    for number in range(1, MOST_PASSES):
        if ascent.budget.is_over:
            raise Stuck(best)
        ascent.messages.forward()
        bound = ascent.sweep()
        upper = min(ceiling, best.cost)
        if bound > upper - (ROUNDING * abs(upper) if best.cost <= ceiling else 0.0):
            return
        rises.append(bound - last)
        last = bound
        if number % PASSES:
            continue
        gap = max(wider * _ahead(rises), floor - bound, 1e-7 * abs(bound))
        room = upper - bound + ROUNDING * abs(upper) if math.isfinite(upper) else math.inf
        is_all = gap > MUCH * room  # what is left out then can't be in anything better
        gap = room if is_all else gap
        base = ascent.base
        ascent.messages.forward()
        ascent.sweep(gap)
        left = ascent.open()
        if (left > 0).all():
            if left.sum() > (LESS if is_all else FEWER) * labels:
                if not is_all:
                    _restore(ascent, base)
                continue
            _inside(ascent.compact(), min(bound + gap, ceiling), best)
        _restore(ascent, base)
        if is_all or best.cost <= bound + gap:
            return
        floor, wider = bound + gap, 3 * wider
    raise Stuck(best)


def _restore(ascent: Ascent, base: Array) -> None:
    ascent.base = base
    ascent.messages.set_costs(base)


def _inside(ascent: Ascent, ceiling: float, best: Best) -> None:
    if not ascent.possible():
        return
    found = minimum(ascent, ENTRIES, TOTAL)
    if found is None:
        _search(ascent, ceiling, best)
    else:
        best.offer(ascent, found)


def _ahead(rises: list[float]) -> float:
    """How much further a bound will rise whose rises shrink."""
    now, before = rises[-1], rises[-2]
    ratio = min(max(now / before, 0.0), 0.9) if before > 0 else 0.5
    return 1.5 * max(now, 0.0) * ratio / (1 - ratio)

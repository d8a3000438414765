"""A lower bound under the memory limit: the messages of `bound`, and a price on memory at each time.

Using more than the limit at time `t` costs `multipliers[t]` a unit, using less pays it back: no labelling within the
limit gets dearer, so the least of the priced problem is a bound. The prices climb along the excess of the labelling
that the messages suggest (a subgradient), in steps that shrink when the bound stops growing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfn.search.bound import Messages
from shardfn.search.labelling import Array
from shardfn.search.memory import Memory

PATIENCE = 5  # steps without a better bound until the steps shrink


class Ascent:
    """The messages and prices, and the best bound they have given (`out[v]`: labels that no better solution takes)."""

    def __init__(self, costs: Sequence[Array], tables: Sequence[dict[int, Array]], memory: Memory):
        self.base = list(costs)
        self.memory = memory
        self.messages = Messages(costs, tables)
        self.multipliers = np.zeros(len(memory.limit))
        self.direction = np.zeros(len(memory.limit))
        self.unit = float(max(1.0, np.abs(memory.limit).max(initial=0.0)))
        self.bound = -np.inf
        self.best = self.multipliers
        self.size = 0.1
        self.failures = 0

    def set_prices(self, multipliers: Array) -> None:
        self.multipliers = multipliers
        if multipliers.any():
            price = self.memory.price(multipliers)
            first = self.memory.first
            self.messages.costs = [own + price[first[v]:first[v + 1]] for v, own in enumerate(self.base)]  # fmt: skip
        else:
            self.messages.costs = list(self.base)

    def sweep(self, gap: float = np.inf) -> float:
        """A pass back: the bound at these prices; with `gap`, labels are put out for good."""
        bound = self.messages.backward(gap) - float(self.multipliers @ self.memory.limit)
        if gap < np.inf:
            self.base = [np.where(now == np.inf, np.inf, own)
                         for now, own in zip(self.messages.costs, self.base, strict=True)]  # fmt: skip
        return bound

    def step(self, upper: float = np.inf) -> list[int]:
        """One pass forth and back and one change of the prices; the labelling that the messages suggest."""
        choice = self.messages.forward(decide=True)
        assert choice is not None
        bound = self.sweep()
        if bound > self.bound:
            self.bound, self.best, self.failures = bound, self.multipliers, 0
        else:
            self.failures += 1
        if not len(self.multipliers):
            return choice
        start = self.multipliers
        if self.failures >= PATIENCE:
            self.size, self.failures, start = self.size * 0.7, 0, self.best
        excess = (self.memory.held(self.memory.first[:-1] + np.array(choice)) - self.memory.limit) / self.unit
        self.direction = np.where((start > 0) | (excess > 0), 0.7 * self.direction + 0.3 * excess, 0.0)
        move = np.where((start > 0) | (self.direction > 0), self.direction, 0.0)
        length = min(self.size * max(abs(self.bound), 1e-9), max(upper - self.bound, 0.0))
        scale = length / max(float(move @ move), 1e-9) / self.unit
        self.set_prices(np.maximum(0.0, start + scale * move))
        return choice

    def fix(self, upper: float, passes: int = 3) -> None:
        """At the best prices, put out every label that no solution cheaper than `upper` takes."""
        self.set_prices(self.best)
        bound = -np.inf
        for _ in range(passes):
            self.messages.forward()
            bound = self.sweep(max(upper - bound, 0.0) if bound > -np.inf else np.inf)
            if bound > self.bound:
                self.bound = bound
            if bound >= upper:
                break

    def left(self) -> list[Array]:
        """The labels of each node that are not out."""
        return [np.flatnonzero(np.isfinite(own)) for own in self.base]

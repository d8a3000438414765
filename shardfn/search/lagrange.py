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

MOST_TIMES = 200  # at which single labels are held against the limit
PATIENCE = 5  # steps without a better bound until the steps shrink


class Ascent:
    """The messages and prices, and the best bound they have given.

    Labels that no better solution takes are put out for good: their cost becomes infinite, and `compact` leaves them
    and the nodes with a single label out. `nodes` and `labels` say what the remaining ones were at the start.
    """

    def __init__(self, costs: Sequence[Array], tables: Sequence[dict[int, Array]], memory: Memory):
        self.base = list(costs)
        self.tables = list(tables)
        self.memory = memory
        self.messages = Messages(costs, tables)
        self.multipliers = np.zeros(len(memory.limit))
        self.direction = np.zeros(len(memory.limit))
        self.unit = float(max(1.0, np.abs(memory.limit).max(initial=0.0)))
        self.bound = -np.inf
        self.best = self.multipliers
        self.size = 0.1
        self.failures = 0
        self.constant = 0.0
        self.nodes = list(range(len(self.base)))
        self.labels = [np.arange(len(own)) for own in self.base]
        self.settled = [0] * len(self.base)
        self.watched = np.arange(len(memory.limit))
        self.held = np.zeros((0, 0))

    def full(self, choice: Sequence[int]) -> list[int]:
        """The labels of all nodes of the start."""
        labels = list(self.settled)
        for v, kept, at in zip(self.nodes, self.labels, choice, strict=True):
            labels[v] = int(kept[at])
        return labels

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
        bound = self.messages.backward(gap) - float(self.multipliers @ self.memory.limit) + self.constant
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

    def fits(self) -> bool:
        """Put out labels that do not fit with the least that all others hold; False where a node keeps none."""
        if not len(self.memory.limit):
            return True
        if not self.held.size:
            self.watched = np.sort(np.argsort(-self.best, kind="stable")[:MOST_TIMES])
            self.held = self.memory.dense(self.watched)
        first = self.memory.first
        out = ~np.isfinite(np.concatenate(self.base))
        held = np.where(out[:, None], np.inf, self.held)
        least = np.minimum.reduceat(held, first[:-1], axis=0)
        room = self.memory.limit[self.watched] - least.sum(0)
        if not (room >= 0).all():
            return False
        bad = (held > np.repeat(least + room, np.diff(first), axis=0)).any(1) & ~out
        for v in np.unique(np.searchsorted(first, np.flatnonzero(bad), "right") - 1):
            self.base[v] = np.where(bad[first[v]:first[v + 1]], np.inf, self.base[v])  # fmt: skip
            if not np.isfinite(self.base[v]).any():
                return False
        if bad.any():
            self.set_prices(self.multipliers)
        return True

    def compact(self) -> Ascent:
        """The same without the labels that are out, and without the nodes that have one label left."""
        kept = self.left()
        stay = [v for v, labels in enumerate(kept) if len(labels) > 1]
        place = {v: at for at, v in enumerate(stay)}
        rows = [self.memory.first[v] + labels for v, labels in enumerate(kept)]
        single = [int(rows[v][0]) for v in range(len(kept)) if v not in place]
        limit = self.memory.limit - self.memory.held(np.array(single, np.int64))
        first = np.cumsum([0] + [len(kept[v]) for v in stay])
        staying = np.concatenate([np.zeros(0, np.int64), *(rows[v] for v in stay)])
        costs = [self.base[v][kept[v]] for v in stay]
        tables: list[dict[int, Array]] = [{} for _ in stay]
        constant, settled = self.constant, list(self.settled)
        for v, labels in enumerate(kept):
            if v not in place:
                settled[self.nodes[v]] = int(self.labels[v][labels[0]])
                constant += float(self.base[v][labels[0]])
            for w, table in self.tables[v].items():
                if v in place and w in place:
                    tables[place[v]][place[w]] = table[np.ix_(labels, kept[w])]
                elif v in place:
                    costs[place[v]] = costs[place[v]] + table[labels, kept[w][0]]
                elif w not in place and v < w:
                    constant += float(table[labels[0], kept[w][0]])
        new = Ascent(costs, tables, Memory(self.memory.change[staying], limit, first))
        for at, v in enumerate(stay):
            near = [w in place for w in sorted(self.tables[v])]
            new.messages.into[at][:] = self.messages.into[v][near][:, kept[v]]
        new.constant, new.settled, new.bound, new.size = constant, settled, self.bound, self.size
        new.nodes = [self.nodes[v] for v in stay]
        new.labels = [self.labels[v][kept[v]] for v in stay]
        new.best, new.unit = self.best, self.unit
        new.set_prices(self.best)
        return new

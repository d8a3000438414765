"""A lower bound under the memory limit: the messages of `bound`, and a price on memory at each time (Lagrangian relaxation).

Each unit above the limit at time `t` costs `multipliers[t]`, and each unit below the limit earns as much. No labelling within
the limit gets more expensive, so the minimum with these prices is a lower bound. The prices follow the excess of the suggested
labelling (a subgradient), in steps that shrink when the bound stops growing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from shardfn.solver.bound import Messages
from shardfn.solver.budget import CALL, Budget
from shardfn.solver.content import Store, part
from shardfn.solver.debug_nans import check_numbers
from shardfn.solver.labelling import Array
from shardfn.solver.memory import MemoryConstraint

MOST_TIMES, MOST_USES = 200, 1e6  # at which `fits` compares single labels with the limit; times labels
FIX_PASSES = 3  # over the messages, each of which excludes labels
PATIENCE = 5  # steps without a better bound until the steps shrink
LONGER, LONGEST = 1.1, 0.2  # a step after a better bound, in steps before it; and at most, in bounds


class Ascent:
    """The messages and prices, and the best bound they have given.

    `base` holds the costs of all labels of all nodes in a row. Labels that no better solution takes are put out for
    good: their cost becomes infinite, and `compact` leaves them and the nodes with a single label out. `nodes` and
    `labels` say what the remaining ones were at the start.
    """

    def __init__(self, costs: Sequence[Array], tables: Sequence[dict[int, Array]], memory: MemoryConstraint,
                 budget: Budget | None = None):  # fmt: skip
        self.base = np.concatenate([np.zeros(0), *costs])
        self.first = memory.first
        self.start = costs, tables
        self.tables = list(tables)
        self.memory = memory
        self.budget = budget or Budget()
        self.messages = Messages(costs, self.first, tables, self.budget)
        self.multipliers = np.zeros(len(memory.limit))
        self.direction = np.zeros(len(memory.limit))
        self.unit = float(max(1.0, np.abs(memory.limit).max(initial=0.0)))
        self.bound = -np.inf
        self.best = self.multipliers
        self.size = 0.1
        self.failures = 0
        self.constant = 0.0
        self.nodes = np.arange(len(costs))
        self.labels = [np.arange(len(own)) for own in costs]
        self.settled = np.zeros(len(costs), np.int64)
        self.watched = np.arange(len(memory.limit))
        self.usage = np.zeros((0, 0))

    def full(self, choice: Array) -> Array:
        """The labels of all nodes of the start."""
        labels = self.settled.copy()
        if len(self.nodes):
            labels[self.nodes] = np.concatenate(self.labels)[self.first[:-1] + choice]
        return labels

    def cost_of(self, labels: Array) -> float:
        """The cost of labels of the nodes of the start."""
        costs, tables = self.start
        at = labels.tolist()
        own = math.fsum(cost[label] for cost, label in zip(costs, at, strict=True))
        return own + math.fsum(t[at[u], at[v]] for u, row in enumerate(tables) for v, t in row.items() if u < v)

    def set_prices(self, multipliers: Array) -> None:
        if not math.isfinite(float(multipliers.sum())):
            check_numbers(multipliers, "a price of memory")
        self.multipliers = multipliers
        self.messages.set_costs(self.base + self.memory.price(multipliers) if multipliers.any() else self.base)

    def sweep(self, gap: float = np.inf) -> float:
        """A pass back: the bound at these prices; with `gap`, labels are put out for good."""
        bound = self.messages.backward(gap) - float(self.multipliers @ self.memory.limit) + self.constant
        if gap < np.inf:
            self.base = np.where(np.isinf(self.messages.costs()), np.inf, self.base)
        return bound

    def step(self, upper: float = np.inf) -> Array:
        """One pass forth and back and one change of the prices; the labelling that the messages suggest."""
        choice = self.messages.forward(decide=True)
        assert choice is not None
        bound = self.sweep()
        if bound > self.bound:
            self.bound, self.best, self.failures = bound, self.multipliers, 0
            self.size = min(self.size * LONGER, LONGEST)
        else:
            self.failures += 1
        if not len(self.multipliers):
            return choice
        start = self.multipliers
        if self.failures >= PATIENCE:
            self.size, self.failures, start = self.size * 0.7, 0, self.best
        self.budget.spend(4 * self.memory.change.nnz + 4 * len(self.base) + 20 * CALL)
        excess = (self.memory.usage(self.first[:-1] + choice) - self.memory.limit) / self.unit
        self.direction = np.where((start > 0) | (excess > 0), 0.7 * self.direction + 0.3 * excess, 0.0)
        move = np.where((start > 0) | (self.direction > 0), self.direction, 0.0)
        wide = move * (start + 0.1 * float(start.mean()) if start.any() else 1.0)  # a high price moves further
        length = min(self.size * max(abs(self.bound), 1e-9), max(upper - self.bound, 0.0))
        gain = self.unit * max(float(wide @ move), 1e-9 * float(wide.max(initial=0.0)))  # no gain: nothing is to move
        self.set_prices(np.maximum(0.0, start + length / gain * wide) if gain > 0 else start)
        return choice

    def fix(self, upper: float) -> None:
        """At the best prices, put out every label that no solution cheaper than `upper` takes."""
        self.set_prices(self.best)
        bound = -np.inf
        for _ in range(FIX_PASSES):
            self.messages.forward()
            bound = self.sweep(max(upper - bound, 0.0) if bound > -np.inf else np.inf)
            if bound > self.bound:
                self.bound = bound
            if bound >= upper:
                break

    def open(self) -> Array:
        """How many labels of each node are not out."""
        return np.add.reduceat(np.isfinite(self.base), self.first[:-1], dtype=np.int64)

    def left(self) -> list[Array]:
        """The labels of each node that are not out."""
        at = np.flatnonzero(np.isfinite(self.base))
        place = at - np.repeat(self.first[:-1], np.diff(self.first))[at]
        bounds = np.searchsorted(at, self.first).tolist()
        return [place[a:b] for a, b in itertools.pairwise(bounds)]

    def possible(self) -> bool:
        """Whether every node has a label that is not out."""
        return bool((self.open() > 0).all())

    def fits(self) -> bool:
        """Put out labels that do not fit with the least that all others hold; False where a node keeps none."""
        if not self.possible():
            return False
        if not len(self.memory.limit):
            return True
        if not self.usage.size:
            most = min(MOST_TIMES, int(MOST_USES / len(self.base)) + 1)
            self.watched = np.sort(np.argsort(-self.best, kind="stable")[:most])
            self.usage = self.memory.dense(self.watched)
        self.budget.spend(4 * self.usage.size + 4 * CALL)
        out = ~np.isfinite(self.base)
        usage = np.where(out[:, None], np.inf, self.usage)
        least = np.minimum.reduceat(usage, self.first[:-1], axis=0)
        room = self.memory.limit[self.watched] - least.sum(0)
        if not (room >= 0).all():
            return False
        bad = (usage > np.repeat(least + room, np.diff(self.first), axis=0)).any(1) & ~out
        if bad.any():
            self.base = np.where(bad, np.inf, self.base)
            self.set_prices(self.multipliers)
        return self.possible()

    def compact(self) -> Ascent:
        """The same without the labels that are out, and without the nodes that have one label left.

        A single label may forbid all labels of another node: the result is then no longer `possible`.
        """
        store = Store()
        kept = [store.of(labels) for labels in self.left()]
        first = self.first
        stay = [v for v, labels in enumerate(kept) if len(labels) > 1]
        place = {v: at for at, v in enumerate(stay)}
        rows = [first[v] + labels for v, labels in enumerate(kept)]
        single = np.array([int(rows[v][0]) for v in range(len(kept)) if v not in place], np.int64)
        limit = self.memory.limit - self.memory.usage(single)
        staying = np.concatenate([np.zeros(0, np.int64), *(rows[v] for v in stay)])
        costs = [store.of(self.base[rows[v]]) for v in stay]
        tables: list[dict[int, Array]] = [{} for _ in stay]
        constant, settled = self.constant + float(self.base[single].sum()), self.settled.copy()
        whole = [len(labels) == size for labels, size in zip(kept, np.diff(first).tolist(), strict=True)]
        for v, labels in enumerate(kept):
            if v not in place:
                settled[self.nodes[v]] = int(self.labels[v][labels[0]])
            for w, table in self.tables[v].items():
                if v in place and w in place:
                    if v < w:
                        smaller = table if whole[v] and whole[w] else store.call(part, table, labels, kept[w])
                        tables[place[v]][place[w]] = smaller
                        tables[place[w]][place[v]] = store.transposed(smaller)
                elif v in place:
                    costs[place[v]] = store.of(costs[place[v]] + table[labels, kept[w][0]])
                elif w not in place and v < w:
                    constant += float(table[labels[0], kept[w][0]])
        firsts = np.cumsum([0] + [len(kept[v]) for v in stay])
        new = Ascent(costs, tables, MemoryConstraint(self.memory.change[staying], limit, firsts), self.budget)
        new.messages.take(self.messages, kept, stay)
        new.constant, new.settled, new.bound, new.size = constant, settled, self.bound, self.size
        new.nodes = self.nodes[stay]
        new.labels = [self.labels[v][kept[v]] for v in stay]
        new.start = self.start
        new.best, new.unit = self.best, self.unit
        new.set_prices(self.best)
        return new

"""Better labellings from a good one: free some nodes, solve them exactly with memory priced, keep what fits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from shardfn.solver.bound import ranges
from shardfn.solver.budget import CALL, Budget
from shardfn.solver.content import Store
from shardfn.solver.eliminate import eliminate
from shardfn.solver.labelling import Array
from shardfn.solver.lagrange import Ascent
from shardfn.solver.memory import MemoryConstraint

BALLS = (40, 120, 400) * 4 + (0,)  # nodes freed, 0: all
ENTRIES = (1e4, 1e5)  # of the largest table of an exact solution
ENTRIES_FEW = (1e5, 1e6)  # the same for a problem of fewer than `FEW` nodes
FEW = 1000
PASSES = 20  # over all nodes, while any takes a better label
SMALL_BALL = 120  # of larger ones only the smaller tables are built
MOST_RAISES = 8  # of prices, until labels fit
SCALES = (1.0, 2.0, 4.0, 0.5, 0.0)  # of the prices of memory
REPAIRS = 60  # neighbourhoods solved to get rid of forbidden costs
REPAIR_BALLS = (0, 40, 40, 120, 40, 40, 120)  # nodes freed there, 0: all


def fitted(ascent: Ascent, local: Local, factor: float, halvings: int = 0) -> Array | None:
    """The labelling that the messages suggest once prices are high enough for it to fit: they rise by `factor` until it does.

    Then bisection (`halvings` steps) between these prices and the last ones that were too low uses more of the limit.
    """
    if not len(ascent.nodes):
        return None
    before, sent = ascent.multipliers, ascent.messages.sent.copy()
    low, prices, found = ascent.best, ascent.best, None
    for attempt in range(MOST_RAISES):
        labels = _suggested(ascent, prices)
        excess = local.excess(labels)
        if excess.max(initial=0.0) <= 0:
            found = labels
        if found is not None or ascent.budget.is_over:
            break
        low, prices = prices, local.raised(prices, excess, factor * 1.5**attempt)
    for _ in range(halvings if found is not None and low is not prices else 0):
        if ascent.budget.is_over:
            break
        middle = (low + prices) / 2
        labels = _suggested(ascent, middle)
        if local.excess(labels).max(initial=0.0) <= 0:
            prices, found = middle, labels
            local.offer(labels)
        else:
            low = middle
    ascent.set_prices(before)
    ascent.messages.sent[:] = sent  # what was sent at other prices would set the bound back
    return found


def _suggested(ascent: Ascent, prices: Array) -> Array:
    ascent.set_prices(prices)
    ascent.messages.forward()
    ascent.messages.backward()
    choice = ascent.messages.forward(decide=True)
    ascent.messages.backward()
    assert choice is not None
    return ascent.full(choice)


class Local:
    """A problem's costs, tables and memory, and the best labelling within the limit so far."""

    def __init__(self, costs: Sequence[Array], tables: Sequence[dict[int, Array]], memory: MemoryConstraint,
                 budget: Budget | None = None):  # fmt: skip
        self.budget = budget or Budget()
        self.costs, self.tables, self.memory = list(costs), list(tables), memory
        pairs = [(u, v, table) for u, row in enumerate(tables) for v, table in row.items() if u < v]
        self.ends = np.array([(u, v) for u, v, _ in pairs], np.int64).reshape(-1, 2)
        self.start = np.cumsum([0] + [table.size for *_, table in pairs])[:-1]
        self.width = np.array([table.shape[1] for *_, table in pairs], np.int64)
        self.entries = np.concatenate([np.zeros(0), *(table.ravel() for *_, table in pairs)])
        self.own = np.concatenate([np.zeros(0), *self.costs])
        first = memory.first
        u, v = self.ends.T
        tall, wide = np.diff(first)[u], self.width
        self.asked = np.concatenate([ranges(first[u], tall), ranges(first[v], wide)])  # a label of one end, given
        self.given = np.concatenate([np.repeat(v, tall), np.repeat(u, wide)])  # that of the other: where it is in
        self.step = np.concatenate(
            [np.ones(int(tall.sum()), np.int64), np.repeat(wide, wide)]
        )  # entries, by steps from
        self.at = np.concatenate([ranges(np.zeros_like(u), tall) * np.repeat(wide, tall) + np.repeat(self.start, tall),
                                  ranges(self.start, wide)])  # fmt: skip
        self.random = np.random.default_rng(0)
        self.best: Array | None = None
        self.cost = np.inf
        self.visits = 0
        self.sizes = ENTRIES_FEW if len(self.costs) < FEW else ENTRIES
        self.unit = float(max(1.0, np.abs(memory.limit).max(initial=0.0)))
        some = self.cost_of(np.zeros(len(self.costs), np.int64))
        self.typical = max(abs(some) if np.isfinite(some) else _most(self.own), 1.0)

    def cost_of(self, labels: Array) -> float:
        at = labels
        u, v = self.ends.T
        return float(self.own[self.memory.first[:-1] + at].sum()
                     + self.entries[self.start + at[u] * self.width + at[v]].sum())  # fmt: skip

    def possible(self, labels: Array) -> bool:
        """Whether no forbidden label or pair is taken."""
        return bool(np.isfinite(self.cost_of(labels)))

    @functools.cached_property
    def soft(self) -> tuple[list[Array], list[dict[int, Array]]]:
        """Costs and tables in which forbidden entries cost more than all else together, but finitely much."""
        store = Store()
        finite = _Finite(2 * (_most(self.own) + _most(self.entries)) + 1.0)
        tables: list[dict[int, Array]] = [{} for _ in self.tables]
        for u, row in enumerate(self.tables):
            for v, table in row.items():
                if u < v:
                    tables[u][v] = store.call(finite, table)
                    tables[v][u] = store.transposed(tables[u][v])
        return [store.call(finite, cost) for cost in self.costs], tables

    def repair(self, labels: Array, multipliers: Array) -> Array:
        """Labels with as few forbidden entries as were found: neighbourhoods of forbidden entries are solved again and again.

        Entries that stay forbidden cost more each time (Morris, The breakout method, AAAI 1993), so that the rounds differ.
        """
        fewest, best = np.inf, labels
        for number in range(REPAIRS):
            u, v = self.ends.T
            bad = np.flatnonzero(np.isinf(self.entries[self.start + labels[u] * self.width + labels[v]]))
            own = np.flatnonzero(np.isinf(self.own[self.memory.first[:-1] + labels]))
            if len(bad) + len(own) < fewest:
                fewest, best = len(bad) + len(own), labels
            if not fewest or self.budget.is_over:
                break
            size = REPAIR_BALLS[number % len(REPAIR_BALLS)]
            if number:
                for at in bad.tolist():
                    self.raise_forbidden(int(u[at]), int(v[at]))
            some = np.concatenate([u[bad], own])
            centre = int(some[int(self.random.integers(len(some)))])
            labels = self.solve(labels, multipliers, self.sizes[0], self.ball(size, centre))
        return best

    def raise_forbidden(self, u: int, v: int) -> None:
        """Forbidden entries between two nodes cost half as much again in `soft`."""
        tables = self.soft[1]
        raised = np.where(np.isinf(self.tables[u][v]), 1.5 * tables[u][v], tables[u][v])
        tables[u][v], tables[v][u] = raised, raised.T

    def conditional(self, labels: Array) -> Array:
        """What each label costs, own and tables, with all other nodes as they are."""
        given = self.entries[self.at + self.step * labels[self.given]]
        return self.own + np.bincount(self.asked, given, len(self.own))

    def descend(self, labels: Array) -> Array:
        """Labels that fit, after single nodes took better labels that fit as well, while any did."""
        labels = labels.copy()
        first, change = self.memory.first, self.memory.change
        owner = np.repeat(np.arange(len(self.costs)), np.diff(first))
        excess = self.excess(labels)
        for _ in range(PASSES):
            if self.budget.is_over or not self.possible(labels):
                break
            self.budget.spend(len(self.at) + 4 * CALL)
            cost = self.conditional(labels)
            gain = np.repeat(cost[first[:-1] + labels], np.diff(first)) - cost
            better = np.flatnonzero(gain > 1e-9 * abs(self.cost_of(labels)))
            touched: set[int] = set()
            for at in better[np.argsort(-gain[better], kind="stable")].tolist():
                v = int(owner[at])
                if v in touched:
                    continue
                moved = change[at] - change[first[v] + labels[v]]
                self.budget.spend(len(excess) + CALL)
                after = excess + np.cumsum(moved.toarray().ravel())[: len(excess)] if moved.nnz else excess
                if after.max(initial=0.0) > 0:
                    continue
                excess, labels[v] = after, at - first[v]
                touched.add(v)
                touched.update(self.tables[v])
            if not touched:
                break
        return labels

    def excess(self, labels: Array) -> Array:
        """How far over the limit each time is; negative below it."""
        return self.memory.usage(self.memory.first[:-1] + labels) - self.memory.limit

    def offer(self, labels: Array) -> bool:
        """Keep a labelling that fits and is cheaper; whether it fits and takes nothing forbidden."""
        if self.excess(labels).max(initial=0.0) > 0:
            return False
        cost = self.cost_of(labels)
        if cost < self.cost:
            self.best, self.cost = np.array(labels), cost
        return bool(np.isfinite(cost))

    def priced(self, costs: list[Array], multipliers: Array, free: Sequence[int] | None) -> list[Array]:
        """The costs of the free nodes with memory priced."""
        if not multipliers.any():
            return costs
        price = self.memory.price(multipliers)
        first = self.memory.first
        costs = list(costs)
        for v in range(len(costs)) if free is None else free:
            costs[v] = costs[v] + price[first[v]:first[v + 1]]  # fmt: skip
        return costs

    def solve(self, current: Array, multipliers: Array, entries: float,
              free: Sequence[int] | None = None) -> Array:  # fmt: skip
        rank = self.random.permutation(len(self.costs)).tolist()
        costs, tables = (self.costs, self.tables) if self.possible(current) else self.soft
        found = eliminate(
            self.priced(costs, multipliers, free),
            tables,
            entries,
            free=free,
            current=current.tolist(),
            rank=rank,
            budget=self.budget,
        )
        assert found is not None
        return np.array(found, np.int64)

    def raised(self, multipliers: Array, excess: Array, factor: float) -> Array:
        """Higher prices of memory where a labelling exceeds the limit."""
        over = excess > 0
        paid = multipliers[multipliers > 0]
        typical = float(paid.mean()) if len(paid) else self.typical / self.unit
        share = excess / max(float(excess.max(initial=0.0)), 1e-300)
        return multipliers + np.where(over, (multipliers + 0.1 * typical * share) * factor, 0.0)

    def fit(self, labels: Array, multipliers: Array, tries: int, entries: float = 1e4,
            free: Sequence[int] | None = None) -> bool:  # fmt: skip
        """Raise prices and solve again until the labels fit."""
        for attempt in range(tries):
            if not self.possible(labels):
                labels = self.repair(labels, multipliers)
            excess = self.excess(labels)
            if excess.max(initial=0.0) <= 0 or self.budget.is_over:
                break
            multipliers = self.raised(multipliers, excess, 0.5 * 1.3**attempt)
            labels = self.solve(labels, multipliers, entries, free)
        return self.offer(labels)

    def seed(self) -> int:
        """A node: any, or in two of three cases one where the best labelling pays much."""
        if self.best is None or self.visits % 3 == 0:
            return int(self.random.integers(len(self.costs)))
        at = self.best
        u, v = self.ends.T
        between = np.abs(self.entries[self.start + at[u] * self.width + at[v]])
        paid = np.abs(self.own[self.memory.first[:-1] + at]) + 1e-300
        paid += np.bincount(u, between, len(paid)) + np.bincount(v, between, len(paid))
        total = np.cumsum(paid)
        return min(int(np.searchsorted(total, self.random.random() * total[-1])), len(paid) - 1)

    def again(self, labels: Array, multipliers: Array, rounds: int) -> None:
        """Improve other labels, and keep the result if it is better."""
        best, cost = self.best, self.cost
        self.best, self.cost = None, np.inf
        labels = self.solve(labels, multipliers, self.sizes[0] if rounds else ENTRIES[0])
        if self.fit(labels, multipliers, 5):
            self.improve(multipliers, rounds)
        if not self.cost < cost:
            self.best, self.cost = best, cost

    def ball(self, size: int, centre: int | None = None) -> list[int] | None:
        """Nodes around `centre` or a random one, and around others where too few hang together; all of them for 0."""
        count = len(self.costs)
        if not size or size >= count:
            return None
        seen = {self.seed() if centre is None else centre: None}
        queue = list(seen)
        while len(seen) < size:
            if not queue:
                queue = [int(self.random.integers(count))]
                seen[queue[0]] = None
            at = int(self.random.integers(len(queue)))
            queue[at], queue[-1] = queue[-1], queue[at]
            for w in self.tables[queue.pop()]:
                if w not in seen and len(seen) < size:
                    seen[w] = None
                    queue.append(w)
        return list(seen)

    def improve(self, multipliers: Array, rounds: int) -> float:
        """Solve `rounds` neighbourhoods of the best labelling; the part of the cost that was saved."""
        before = self.cost
        for _ in range(rounds):
            if self.best is None or self.budget.is_over:
                break
            self.visits += 1
            free = self.ball(BALLS[self.visits % len(BALLS)])
            scale = SCALES[int(self.random.integers(len(SCALES)))]
            prices = multipliers * scale
            entries = self.sizes[int(self.random.integers(len(self.sizes)))]
            if free is None or len(free) > SMALL_BALL:
                entries = self.sizes[0]
            labels = self.solve(self.best, prices, entries, free)
            if not np.array_equal(labels, self.best):
                self.fit(labels, prices, 1 if free is None else 3, entries, free)
        return (before - self.cost) / max(abs(before), 1e-300) if self.cost < before else 0.0


@dataclasses.dataclass(frozen=True)
class _Finite:
    """An array in which what is infinite costs `most`."""

    most: float

    def __call__(self, array: Array) -> Array:
        return np.where(np.isinf(array), self.most, array)


def _most(array: Array) -> float:
    """The sum of the sizes of what is finite."""
    return float(np.abs(array[np.isfinite(array)]).sum())

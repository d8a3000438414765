"""The least possible peak of any labelling: the message where a limit cannot be kept.

Weights on the times, summing to 1, price memory; the least priced labelling bounds every peak from below. The weights move to
the times at which the labellings found so far use most (multiplicative weights: Arora, Hazan and Kale, Theory of Computing 8,
2012), and each labelling is improved at its own peak.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from shardfn.solver.bound import Messages
from shardfn.solver.budget import CALL, Budget
from shardfn.solver.content import Store
from shardfn.solver.contract import contract
from shardfn.solver.labelling import Array, Labelling
from shardfn.solver.local_search import Local
from shardfn.solver.memory import MemoryConstraint, memory_constraint

STEPS = 400
PASSES = 2  # of messages in each step
MOVES = 40  # of single nodes, to lower the peak of one labelling
AGAIN = 20  # steps between repairs of labels that are forbidden together, once a possible labelling is known
CLOSE = 1e-6  # of the peak: a gap that counts as none


@dataclasses.dataclass(frozen=True)
class Peak:
    """A labelling, its peak, and a lower bound of every peak."""

    choice: tuple[int, ...]
    peak: float
    bound: float


def least_peak(problem: Labelling, budget: Budget | None = None, steps: int = STEPS) -> Peak | None:
    """A labelling of the least peak found; None where every labelling is forbidden.

    >>> from shardfn.solver.labelling import labelling
    >>> least_peak(labelling([[0, 1], [0, 1]], [[5, 4], [5, 3]], [(0, 2), (1, 3)]))
    Peak(choice=(1, 1), peak=7.0, bound=7.0)
    """
    budget = budget or Budget()
    tables = tuple(dataclasses.replace(t, cost=_free(t.cost)) for t in problem.tables)
    bare = dataclasses.replace(problem, costs=tuple(map(_free, problem.costs)), tables=tables, limit=-1.0)
    core = contract(bare, store=Store())
    if not core.possible:
        return None
    nodes = sorted(core.costs)
    place = {v: at for at, v in enumerate(nodes)}
    near = [{place[w]: table for w, table in core.tables[v].items()} for v in nodes]
    memory = memory_constraint(bare, core, nodes)
    always = -1.0 - memory.limit  # the usage of every choice at each time
    search = _Search([core.costs[v] for v in nodes], near, memory, always, budget)
    search.run(steps)
    full = core.full(dict(zip(nodes, search.best.tolist(), strict=True)))
    choice = tuple(full[: len(problem.costs)].tolist())
    return Peak(choice, search.peak, min(search.bound, search.peak))


def fitting_labels(
    costs: list[Array], tables: list[dict[int, Array]], memory: MemoryConstraint, budget: Budget
) -> Array | None:
    """Labels of a contracted problem within the limit at any cost; None where none were found."""
    bare = Store()
    free = [bare.call(_free, cost) for cost in costs]
    rows = [{w: bare.call(_free, table) for w, table in row.items()} for row in tables]
    search = _Search(free, rows, memory, -memory.limit, budget, 0.0)
    search.run(STEPS)
    return search.best if search.peak <= 0 else None


def _free(cost: Array) -> Array:
    """0 where a label is allowed."""
    return np.where(np.isfinite(cost), 0.0, np.inf)


class _Search:
    """The weights and the best labels. `always` is the usage at each time whatever is chosen; the search stops at a peak of
    `enough`."""

    def __init__(self, costs: list[Array], tables: list[dict[int, Array]], memory: MemoryConstraint, always: Array,
                 budget: Budget, enough: float = -math.inf):  # fmt: skip
        self.memory, self.always, self.budget, self.enough = memory, always, budget, enough
        self.messages = Messages(costs, memory.first, tables, budget)
        self.costs, self.tables = costs, tables
        self.free = np.array([not row for row in tables], bool)
        self.local: Local | None = None
        self.peak, self.bound = math.inf, -math.inf
        self.best = np.zeros(len(costs), np.int64)

    def run(self, steps: int) -> None:
        self.base = np.concatenate([np.zeros(0), *self.costs])
        count = len(self.always)
        if not count or not len(self.costs):
            self.offer(np.zeros(len(self.costs), np.int64))
            self.bound = self.peak
            return
        score = np.zeros(count)
        scale = max(float(self.always.max()), 1e-300)
        for step in range(steps):
            weights = np.exp(score - score.max())
            weights /= weights.sum()
            use = self.usage(self.cheapest(weights, math.isinf(self.peak) or step % AGAIN == 0))
            scale = max(float(np.ptp(use)), 1e-3 * float(use.max()), 1e-300)
            score = score + np.sqrt(8 * math.log(count + 1) / (step + 1)) * (use - use.max()) / scale
            close = self.bound >= self.peak - CLOSE * abs(self.peak)
            if close or self.peak <= self.enough or self.budget.is_over:
                return

    def usage(self, labels: Array) -> Array:
        """The usage of labels at each time."""
        return self.always + self.memory.usage(self.memory.first[:-1] + labels)

    def offer(self, labels: Array) -> None:
        peak = float(self.usage(labels).max(initial=0.0))
        if peak < self.peak:
            self.peak, self.best = peak, labels

    def cheapest(self, weights: Array, repair: bool) -> Array:
        """Labels of nearly the least priced usage, which also raise the bound. With `repair`, forbidden pairs are repaired."""
        price = self.memory.price(weights)
        self.messages.set_costs(self.base + price)
        labels = np.zeros(len(self.costs), np.int64)
        bound = -math.inf
        for _ in range(1 if self.free.all() else PASSES):
            found = self.messages.forward(decide=True)
            assert found is not None
            labels = found
            bound = self.messages.backward()
        self.bound = max(self.bound, bound + float(weights @ self.always))
        if repair and not self.possible(labels):
            self.local = self.local or Local(self.costs, self.tables, self.memory, self.budget)
            labels = self.local.repair(labels, weights)
        if self.possible(labels):
            self.offer(self.with_lower_peak(labels))
        return labels

    def possible(self, labels: Array) -> bool:
        """Whether no forbidden pair is taken."""
        at = labels.tolist()
        return all(math.isfinite(t[at[u], at[v]]) for u, row in enumerate(self.tables) for v, t in row.items() if u < v)

    def with_lower_peak(self, labels: Array) -> Array:
        """Labels with a lower peak: one node after the other takes the label with the least usage at the peak."""
        labels = labels.copy()
        first = self.memory.first
        use = self.usage(labels)
        for _ in range(MOVES):
            worst = int(use.argmax())
            self.budget.spend(self.memory.change.nnz + 4 * len(self.base) + 8 * CALL)
            holds = np.asarray(self.memory.dense(np.array([worst]))).ravel()
            saved = holds[first[:-1] + labels] - np.minimum.reduceat(holds + self.base, first[:-1])
            for v in np.argsort(-saved, kind="stable")[:8].tolist():
                if saved[v] <= 0:
                    return labels
                better = self.move(labels, use, v, holds)
                if better is not None:
                    labels, use = better
                    break
            else:
                return labels
        return labels

    def move(self, labels: Array, use: Array, v: int, holds: Array) -> tuple[Array, Array] | None:
        """Another label of `v` with a lower peak, and the usage then."""
        first = self.memory.first
        own = holds[first[v]:first[v + 1]]  # fmt: skip
        for label in np.argsort(own, kind="stable")[:4].tolist():
            if own[label] >= own[labels[v]] or math.isinf(self.costs[v][label]):
                continue
            if any(math.isinf(table[label, labels[w]]) for w, table in self.tables[v].items()):
                continue
            change = self.memory.change[first[v] + label] - self.memory.change[first[v] + labels[v]]
            self.budget.spend(len(use) + CALL)
            after = use + np.cumsum(change.toarray().ravel())[: len(use)]
            if after.max() < use.max():
                found = labels.copy()
                found[v] = label
                return found, after
        return None

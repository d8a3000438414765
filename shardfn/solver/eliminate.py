"""Exact minimisation of a sum of tables, one node at a time, while the tables on the way stay small (bucket elimination:
Dechter, Artificial Intelligence 113, 1999).

A node is removed by minimising the sum of its tables over it, which leaves one table over its neighbours. The node that leaves
the smallest goes first. Where even that one is too large, a node is fixed at its current label: the result is then the best of
all labellings that agree with the fixed nodes, a very large neighbourhood.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

from shardfn.solver.budget import CALL, Budget
from shardfn.solver.content import Store
from shardfn.solver.labelling import Array

NodeSet = tuple[int, ...]

STEP = 10 * CALL
"""What removing a node costs beside the entries of its table."""


@dataclasses.dataclass
class Elimination:
    """The state: what is left of the tables, and how each removed node follows from the later ones."""

    costs: dict[int, Array]
    tables: dict[int, tuple[NodeSet, Array]]
    of: dict[int, dict[int, None]]
    steps: list[tuple[int, NodeSet, Array]]
    store: Store | None = None
    serial: int = 0

    def add(self, scope: NodeSet, table: Array) -> None:
        if len(scope) == 1:
            v = scope[0]
            self.costs[v] = self.store.call(np.add, self.costs[v], table) if self.store else self.costs[v] + table
            return
        self.tables[self.serial] = scope, table
        for v in scope:
            self.of[v][self.serial] = None
        self.serial += 1

    def take(self, v: int) -> list[tuple[NodeSet, Array]]:
        found = []
        for key in self.of.pop(v):
            scope, table = self.tables.pop(key)
            found.append((scope, table))
            for w in scope:
                if w != v:
                    del self.of[w][key]
        return found

    def remove(self, v: int, rest: NodeSet) -> None:
        """Minimise over `v`, whose neighbours are `rest`."""
        scope = (v, *rest)
        place = {w: at for at, w in enumerate(scope)}
        found = sorted(self.take(v), key=lambda found: -found[1].size)
        least_of = Least(tuple(tuple(place[w] for w in nodes) for nodes, _ in found), len(scope))
        arrays = (self.costs.pop(v), *(table for _, table in found))
        best, least = self.store.call(least_of, *arrays) if self.store else least_of(*arrays)
        self.steps.append((v, rest, best))
        if rest:
            self.add(rest, least)

    def fix(self, v: int, label: int) -> None:
        """Fix `v` at `label`."""
        del self.costs[v]
        for nodes, table in self.take(v):
            place = nodes.index(v)
            self.add(nodes[:place] + nodes[place + 1:], table.take(label, place))  # fmt: skip
        self.steps.append((v, (), np.array(label)))


@dataclasses.dataclass(frozen=True)
class Least:
    """The argument of the least sum over the first dim, and the least, of a cost and tables over the dims `places`."""

    places: tuple[tuple[int, ...], ...]
    dims: int

    def __call__(self, cost: Array, *tables: Array) -> tuple[Array, Array]:
        total = self.total(cost, *tables)
        least = np.asarray(np.minimum.reduce(total, 0))
        best = (total == least).argmax(0)  # over this dim NumPy's argmin takes up to five times as long
        return best.astype(np.min_scalar_type(len(total))), least

    def total(self, cost: Array, *tables: Array) -> Array:
        """The sum."""
        total = cost.reshape(-1, *(1 for _ in range(self.dims - 1)))
        for places, table in zip(self.places, tables, strict=True):
            order = sorted(range(len(places)), key=places.__getitem__)
            sizes = dict(zip(places, table.shape, strict=True))
            total = total + table.transpose(order).reshape([sizes.get(d, 1) for d in range(self.dims)])
        return total


def eliminate(costs: Sequence[Array], tables: Sequence[dict[int, Array]], most_entries: float, total: float = math.inf,
              free: Iterable[int] | None = None, current: Sequence[int] | None = None,
              rank: Sequence[int] | None = None, store: Store | None = None,
              budget: Budget | None = None) -> list[int] | None:  # fmt: skip
    """The labels of least cost, or None where a table of more than `most_entries` (or `total` in all) would be needed.

    With `current`, the nodes outside `free` stay as they are, and further nodes are fixed instead of returning None. `rank`
    decides between nodes that are equally good to remove and touch none removed before: of equal blocks, equal nodes go
    one after the other, and with the `store` that the costs and tables came from, each table is computed once.

    >>> path = [{1: np.array([[0.0, 9], [9, 0]])}, {0: np.array([[0.0, 9], [9, 0]])}]
    >>> eliminate([np.array([1.0, 5]), np.array([4.0, 2])], path, 100)
    [0, 0]
    """
    count = len(costs)
    inside = set(range(count) if free is None else free)
    near = {v: {w for w in tables[v] if w in inside} for v in sorted(inside)}
    budget = budget or Budget()
    budget.spend(STEP * len(inside))
    order = EliminationOrder({v: len(costs[v]) for v in inside}, near, rank if rank is not None else range(count))
    steps = order.found(most_entries, total, current is not None, budget)
    if steps is None:
        return None
    label = [0] * count if current is None else list(current)
    state = Elimination({}, {}, {v: {} for v in inside}, [], store)
    for v in sorted(inside):
        own = costs[v]
        for w, table in tables[v].items():
            if w not in inside:
                own = own + table[:, label[w]]
        state.costs[v] = own
    for v in sorted(inside):
        for w, table in tables[v].items():
            if v < w and w in inside:
                state.add((v, w), table)
    for v, rest in steps:
        if rest is None:
            state.fix(v, label[v])
        else:
            state.remove(v, rest)
    for v, scope, best in reversed(state.steps):
        label[v] = int(best[tuple(label[w] for w in scope)])
    return label


@dataclasses.dataclass
class EliminationOrder:
    """The order of elimination. It depends on the numbers of labels and the neighbours, not on costs, so that a table that is too
    large is known before any is made."""

    size: dict[int, int]
    near: dict[int, set[int]]
    """Used up on the way."""
    turn: Sequence[int]

    def score(self, v: int) -> int:
        """Entries of the table that `v` is removed from."""
        return math.prod([self.size[w] for w in self.near[v]], start=self.size[v])

    def found(
        self, most_entries: float, total: float, can_fix: bool, budget: Budget
    ) -> list[tuple[int, NodeSet | None]] | None:
        """Each node with its neighbours by then, or with None where it is fixed; None where it cannot be done."""
        near, turn, score = self.near, self.turn, self.score
        depth = dict.fromkeys(near, 0)
        spent = 0.0
        steps: list[tuple[int, NodeSet | None]] = []
        heap = [(score(v), 0, turn[v], v) for v in near]
        heapq.heapify(heap)
        while heap:
            was, deep, _, v = heapq.heappop(heap)
            if v not in near:
                continue
            now = score(v)
            if (now, depth[v]) != (was, deep):  # it has been pushed again since
                continue
            changed = near[v]
            if now <= most_entries:
                spent += now
                budget.spend(now)
                if spent > total:
                    return None
                steps.append((v, tuple(sorted(changed))))
                for w in changed:
                    depth[w] = max(depth[w], depth[v] + 1)
                    near[w].discard(v)
                for w in changed:
                    near[w] |= changed
                    near[w].discard(w)
            elif not can_fix:
                return None
            else:
                v = max((v, *changed), key=lambda w: (score(w), turn[w]))
                changed = near[v]
                steps.append((v, None))
                for w in changed:
                    near[w].discard(v)
            del near[v]
            for w in changed:
                heapq.heappush(heap, (score(w), depth[w], turn[w], w))
        return steps

"""Shrink a labelling problem without losing its optimum, for every price of memory at once.

Most ops follow another: the label of one leaves a single possible label of the other. Such a node is merged into the one it
follows. Labels with no possible partner go, a table that is a sum of two vectors moves into the costs of its nodes, and a node
without usage and with few neighbours is minimised away.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from shardfn.solver.content import Store
from shardfn.solver.labelling import Array, Labelling, limited_nodes

MOST_ENTRIES = 1 << 18  # of the tables of one node after a merge or a minimisation


@dataclasses.dataclass(frozen=True)
class Follow:
    """Node `node` takes label `label[label of leader]` (labels of the original problem)."""

    node: int
    leader: int
    label: Array


@dataclasses.dataclass(frozen=True)
class Minimised:
    """Node `node` takes `label[labels of others]`, the argument of a minimum (-1 where that is forbidden)."""

    node: int
    others: tuple[int, ...]
    label: Array


@dataclasses.dataclass
class Core:
    """What is left: `costs[v]` of the labels `kept[v]` of each remaining node, `tables[u][v]`, and how to get back.

    `constant` is the cost already settled; `possible` is False where no labelling avoids every forbidden cost.
    """

    costs: dict[int, Array]
    kept: dict[int, Array]
    tables: dict[int, dict[int, Array]]
    steps: list[Follow | Minimised]
    constant: float
    possible: bool
    sizes: list[int]

    def full(self, labels: dict[int, int]) -> Array:
        """The original problem's choice, from a position in `kept[v]` for every remaining node."""
        choice = np.zeros(len(self.sizes), np.int64)
        for node, position in labels.items():
            choice[node] = self.kept[node][position]
        for step in reversed(self.steps):
            if isinstance(step, Follow):
                choice[step.node] = step.label[choice[step.leader]]
            else:
                choice[step.node] = step.label[tuple(choice[other] for other in step.others)]
        return choice


def contract(problem: Labelling, store: Store | None = None) -> Core:
    """The problem with every safe reduction made, tables of three and more nodes turned into nodes of their own.

    With a `store`, the costs and tables of the result came from there.
    """
    return Contraction(problem, store or Store()).run()


class Contraction:
    """Works a queue of nodes until no rule changes anything. The costs and tables of the result come from `store`."""

    def __init__(self, problem: Labelling, store: Store):
        self.store = store
        self.costs: list[Array] = [store.of(cost) for cost in problem.costs]
        self.limited: list[bool] = limited_nodes(problem)
        self.tables: list[dict[int, Array]] = [{} for _ in self.costs]
        self.combined: set[int] = set()
        """Nodes that stand for combinations of labels of others."""
        self.queue: deque[int] = deque()
        self.waiting: list[bool] = [False] * len(self.costs)
        self.steps: list[Follow | Minimised] = []
        self.constant = 0.0
        self.possible = all(len(cost) for cost in self.costs)
        for table in problem.tables:
            self.add(table.nodes, table.cost)
        self.sizes = [len(cost) for cost in self.costs]
        every = {size: store.of(np.arange(size)) for size in set(self.sizes)}
        self.kept = [every[size] for size in self.sizes]
        self.alive = [True] * len(self.costs)
        for v in range(len(self.costs)):
            self.push(v)

    def add(self, nodes: tuple[int, ...], cost: Array) -> None:
        if len(nodes) != len(set(nodes)):  # the same node twice: only the diagonal is ever taken
            order = tuple(dict.fromkeys(nodes))
            cost = np.einsum(cost, [order.index(node) for node in nodes], list(range(len(order))))
            nodes = order
        if len(nodes) == 1:
            self.pay(nodes[0], self.store.of(cost))
        elif len(nodes) == 2:
            self.join(*nodes, self.store.of(cost))
        else:
            self.wide(nodes, cost)

    def wide(self, nodes: tuple[int, ...], cost: Array) -> None:
        """A table of three and more becomes one between a new node and the node with the most labels.

        The new node's labels are the combinations of the others' that are possible: so nothing is larger than the table.
        """
        last = max(range(len(nodes)), key=lambda at: cost.shape[at])
        cost = np.moveaxis(cost, last, -1)
        rest = (*nodes[:last], *nodes[last + 1 :])
        combinations = np.argwhere(np.isfinite(cost).any(-1))
        new = len(self.costs)
        self.combined.add(new)
        self.costs.append(self.store.of(np.zeros(len(combinations))))
        self.limited.append(False)
        self.waiting.append(False)
        self.tables.append({})
        self.possible &= len(combinations) > 0
        self.join(nodes[last], new, self.store.of(np.ascontiguousarray(cost[tuple(combinations.T)].T)))
        for column, node in enumerate(rest):
            match = combinations[:, column][None] == np.arange(len(self.costs[node]))[:, None]
            self.join(node, new, self.store.of(np.where(match, 0.0, np.inf)))

    def pay(self, v: int, cost: Array) -> None:
        self.costs[v] = self.store.call(np.add, self.costs[v], cost)

    def put(self, u: int, v: int, table: Array) -> None:
        self.tables[u][v], self.tables[v][u] = table, self.store.transposed(table)

    def join(self, u: int, v: int, cost: Array) -> None:
        self.put(u, v, self.store.call(np.add, self.tables[u][v], cost) if v in self.tables[u] else cost)
        self.push(u)
        self.push(v)

    def drop_table(self, u: int, v: int) -> None:
        del self.tables[u][v], self.tables[v][u]

    def push(self, v: int) -> None:
        if not self.waiting[v]:
            self.waiting[v] = True
            self.queue.append(v)

    def run(self, kept: Mapping[int, Array] | None = None, limited: Mapping[int, bool] | None = None) -> Core:
        """Contract until no rule changes anything.

        To go on from the result: `kept` are the positions of the labels that are left of some nodes, and `limited` says
        whether these differ in usage.
        """
        for v, chosen in (kept or {}).items():
            if len(chosen) < len(self.costs[v]):
                self.keep(v, chosen)
                self.push(v)
        for v, differs in (limited or {}).items():
            if self.limited[v] and not differs:
                self.limited[v] = False
                self.push(v)
        while self.queue and self.possible:
            v = self.queue.popleft()
            self.waiting[v] = False
            if self.alive[v]:
                self.visit(v)
        left = [v for v in range(len(self.costs)) if self.alive[v]]
        return Core({v: self.costs[v] for v in left}, {v: self.kept[v] for v in left},
                    {v: self.tables[v] for v in left}, self.steps, self.constant, self.possible,
                    self.sizes)  # fmt: skip

    def visit(self, v: int) -> None:
        self.consistent(v)
        if not self.possible:
            return
        self.split(v)
        if len(self.costs[v]) == 1:
            for w, table in list(self.tables[v].items()):
                self.pay(w, self.store.call(_first, table))
                self.drop_table(v, w)
                self.push(w)
        if not self.tables[v]:
            if not self.limited[v] or len(self.costs[v]) == 1:
                self.minimise(v)
            return
        for u in self.tables[v]:
            if self.follow(v, u):
                return
        if not self.limited[v] and self.worth(v):
            self.minimise(v)

    def consistent(self, v: int) -> None:
        """Drop labels that are forbidden or have no partner left in some neighbour."""
        masks = [self.store.call(_finite, self.costs[v])]
        masks += [self.store.call(_partnered, table) for table in self.tables[v].values()]
        if not any(mask is not None for mask in masks):
            return
        possible = np.logical_and.reduce([mask for mask in masks if mask is not None])
        self.possible &= bool(possible.any())
        self.keep(v, self.store.of(np.flatnonzero(possible)))

    def keep(self, v: int, chosen: Array) -> None:
        """Leave a node only some of its labels."""
        self.costs[v], self.kept[v] = (self.store.call(_rows, each, chosen) for each in (self.costs[v], self.kept[v]))
        for w, table in list(self.tables[v].items()):
            self.put(v, w, self.store.call(_rows, table, chosen))
            self.push(w)

    def split(self, v: int) -> None:
        """A table that is a sum of two vectors belongs to the costs of its two nodes."""
        for w, table in list(self.tables[v].items()):
            parts = self.store.call(_halves, table)
            if parts is not None:
                self.pay(v, parts[0])
                self.pay(w, parts[1])
                self.drop_table(v, w)
                self.push(w)

    def follow(self, v: int, u: int) -> bool:
        """Merge `v` into `u` where each label of `u` leaves `v` a single one and the tables stay small."""
        table = self.tables[u][v]
        label = self.store.call(_only, table)
        if label is None:
            return False
        if len(table) == len(self.costs[v]) and len(self.tables[v]) > len(self.tables[u]):
            self.merge(u, v, self.store.call(np.argsort, label))  # one to one: the one with more neighbours stays
            return True
        new = len(table) * sum(len(self.costs[w]) for w in self.tables[v] if w != u)
        if len(table) > len(self.costs[v]) and new > (table.size if u in self.combined else MOST_ENTRIES):
            return False
        self.merge(v, u, label)
        return True

    def merge(self, v: int, u: int, label: Array) -> None:
        """`v` becomes a part of `u`, whose label says its own."""
        self.pay(u, self.store.call(_led, self.costs[v], self.tables[u][v], label))
        self.drop_table(u, v)
        for w, mine in list(self.tables[v].items()):
            self.drop_table(v, w)
            self.join(u, w, self.store.call(_rows, mine, label))
        names = np.full(self.sizes[u], -1)
        names[self.kept[u]] = self.kept[v][label]
        self.steps.append(Follow(v, u, names))
        self.limited[u] = self.limited[u] or self.limited[v]
        self.alive[v] = False
        self.push(u)

    def worth(self, v: int) -> bool:
        """Minimising `v` away makes no table larger than those it removes, or a small one."""
        if len(self.tables[v]) == 1:
            return True
        if len(self.tables[v]) != 2:
            return False
        a, b = (len(self.costs[w]) for w in self.tables[v])
        mine = len(self.costs[v])
        return a * b * mine <= MOST_ENTRIES and (a * b <= mine * (a + b) or a * b <= 4096)

    def minimise(self, v: int) -> None:
        """The best label of `v` for every combination of its neighbours, at most two, replaces it."""
        others = tuple(self.tables[v])
        best, least = self.store.call(_minimised, self.costs[v], *(self.tables[v][w] for w in others))
        sizes = tuple(self.sizes[w] for w in others)
        names = self.store.call(_Named(sizes), best, self.kept[v], *(self.kept[w] for w in others))
        for w in others:
            self.drop_table(v, w)
        self.steps.append(Minimised(v, others, names))
        self.alive[v] = False
        if not others:
            self.constant += float(least)
        elif len(others) == 1:
            self.pay(others[0], least)
            self.push(others[0])
        else:
            self.join(others[0], others[1], least)


@dataclasses.dataclass(frozen=True)
class _Named:
    """Labels of the original problem, from positions among those that were kept."""

    sizes: tuple[int, ...]

    def __call__(self, best: Array, mine: Array, *kept: Array) -> Array:
        names = np.full(self.sizes, -1)
        names[np.ix_(*kept)] = mine[best]
        return names


def _minimised(cost: Array, *tables: Array) -> tuple[Array, Array]:
    """The argument of the least sum over the labels of a node, and the least."""
    if len(tables) < 2:
        total = cost if not tables else cost[:, None] + tables[0]
    else:
        total = (cost[:, None] + tables[0])[:, :, None] + tables[1][:, None, :]
    least = np.minimum.reduce(total, 0)
    return (total == least).argmax(0), np.asarray(least)  # over this dim NumPy's argmin takes several times as long


def _finite(cost: Array) -> Array | None:
    finite = np.isfinite(cost)
    return None if finite.all() else finite


def _partnered(table: Array) -> Array | None:
    return _finite(np.minimum.reduce(table, 1)) if table.shape[1] else np.zeros(len(table), bool)


def _rows(array: Array, chosen: Array) -> Array:
    return array[chosen]


def _first(table: Array) -> Array:
    return np.ascontiguousarray(table[0])


def _led(cost: Array, table: Array, label: Array) -> Array:
    return cost[label] + table[np.arange(len(label)), label]


def _halves(table: Array) -> tuple[Array, Array] | None:
    """The two vectors that a table is the sum of."""
    if not math.isfinite(table[0, -1]) or not np.isfinite(table).all():
        return None
    mine = table[:, 0]
    theirs = table - mine[:, None]
    if np.abs(theirs - theirs[0]).max() > 1e-13 * np.abs(table).max():
        return None
    return np.ascontiguousarray(mine), np.ascontiguousarray(theirs[0])


def _only(table: Array) -> Array | None:
    """The one possible column of each row."""
    if table.shape[1] > 1 and math.isfinite(table[0, 0]) and math.isfinite(table[0, -1]):
        return None
    possible = np.isfinite(table)
    if np.count_nonzero(possible) != len(table) or not possible.any(1).all():
        return None
    return possible.argmax(1)

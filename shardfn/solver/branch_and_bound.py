"""Close the gap between the bound and the best labelling: split the labels of one node in two, and bound each subproblem.

A subproblem whose bound reaches the best cost is done. The split node is one on which the suggested labellings disagree most;
its labels are split by their memory price, because that is where the bound is weak. The subproblem with the least bound goes
first, so the bound of the whole rises with each.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable

import numpy as np

from shardfn.solver.content import Store, part
from shardfn.solver.eliminate import eliminate
from shardfn.solver.labelling import Array
from shardfn.solver.lagrange import Ascent
from shardfn.solver.local_search import Local, fitted

STEPS = 12  # of the ascent, in each part
FEWER = 0.7  # of the labels, below which a part leaves out those that are out
NEIGHBOURHOODS = 8  # of the best labelling, every eight parts
CANDIDATES = 40  # nodes weighed for a split
MOST_BYTES = 2e9  # that waiting parts hold, about
ENTRIES, TOTAL = 1e5, 3e6  # of the tables of a part that is solved exactly


@dataclasses.dataclass
class Subproblem:
    """A subset of the labellings: an ascent over it, its costs, and where the ascent stood when it was made."""

    ascent: Ascent
    base: Array
    sent: Array
    multipliers: Array
    bound: float
    split: tuple[int, int] | None = None
    """The node, and which of its two sides, that made this part of another."""
    nbytes: float = 0.0
    """Approximate bytes of the arrays that only this part needs."""


Queue = list[tuple[float, int, Subproblem]]
"""Bound, number, part: a heap."""


class Gains:
    """The average rise of the bound by splitting a node, on either side: pseudo-costs (Benichou et al., Mathematical Programming
    1, 1971)."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int], list[float]] = {}

    def learn(self, split: tuple[int, int] | None, gain: float) -> None:
        """A part that was made by a split has been bounded."""
        if split is not None:
            self.sums.setdefault(split, []).append(max(gain, 0.0))

    def of(self, node: int) -> float | None:
        """The product of the two sides' gains; None for a node of which not both were seen."""
        sides = [self.sums.get((node, side)) for side in (0, 1)]
        if not all(sides):
            return None
        return math.prod(math.fsum(side) / len(side) for side in sides if side)


def save(ascent: Ascent, bound: float) -> Subproblem:
    """The current state of the ascent as a subproblem."""
    return Subproblem(ascent, ascent.base, ascent.messages.sent.copy(), ascent.best, bound)


def load(part: Subproblem, size: float) -> Ascent | None:
    """The ascent at a subproblem, compacted where many labels are excluded; None where nothing fits."""
    ascent = part.ascent
    ascent.base = part.base
    ascent.messages.sent[:] = part.sent
    ascent.best, ascent.bound, ascent.failures = part.multipliers, -np.inf, 0
    ascent.direction = np.zeros_like(ascent.direction)
    ascent.set_prices(part.multipliers)
    if not ascent.possible():
        return None
    if ascent.open().sum() < FEWER * len(ascent.base):
        ascent = ascent.compact()
    ascent.size = size
    return ascent if ascent.possible() else None


def branch(ascent: Ascent, local: Local, goal: Callable[[], float], most: int) -> float:
    """The bound after at most `most` subproblems; the labellings found go to `local`.

    Only costs below `goal()` are searched: with a bound of at least `goal()`, nothing below it exists.
    """
    queue: Queue = [(ascent.bound, 0, save(ascent, ascent.bound))]
    count, nbytes = 0, 0.0
    gains = Gains()
    size = max(ascent.size, 0.003)
    while queue and count < most and not ascent.budget.is_over:
        bound, _, part = _next(queue, nbytes > MOST_BYTES)
        nbytes -= part.nbytes
        if bound >= goal():
            continue
        count += 1
        now = load(part, size)
        if now is None:
            continue
        if not len(now.nodes):
            local.offer(now.full(np.zeros(0, np.int64)))
            continue
        seen = _explore(now, local, goal)
        bound = max(bound, now.bound)
        gains.learn(part.split, (goal() if seen is None else bound) - part.bound)
        if count % 4 == 1 and seen:
            found = fitted(now, local, 0.05 * (1 + count % 3))
            if found is not None:
                local.offer(local.descend(found))
        if count % 32 == 1 and seen:
            local.fit(local.solve(now.full(seen[-1]), now.best, 1e4), now.best, 2)
        if count % 8 == 0:
            local.improve(part.multipliers, NEIGHBOURHOODS)
        if seen is None or bound >= goal():
            continue
        own = 12 * now.messages.effort if now is not part.ascent else 0.0  # half of its tables, both ways
        part = save(now, bound)
        node, sides = _split(now, seen, gains)
        for side, labels in enumerate(sides):
            base = part.base.copy()
            base[now.first[node] + labels] = np.inf
            size_of = own + base.nbytes + part.sent.nbytes / 2
            made = dataclasses.replace(part, base=base, split=(int(now.nodes[node]), side), nbytes=size_of)
            nbytes += size_of
            heapq.heappush(queue, (bound, 2 * count + side, made))
    return min([goal(), *(bound for bound, *_ in queue)])


def _next(queue: Queue, is_crowded: bool) -> tuple[float, int, Subproblem]:
    """The subproblem with the least bound, or with the greatest where too many wait."""
    if not is_crowded:
        return heapq.heappop(queue)
    found = queue.pop(max(range(len(queue)), key=lambda at: queue[at][:2]))
    heapq.heapify(queue)
    return found


def _explore(ascent: Ascent, local: Local, goal: Callable[[], float]) -> list[Array] | None:
    """Raise the bound of a subproblem; the labellings it suggested, or None where it has nothing better."""
    seen = []
    for number in range(STEPS):
        if number % 3 == 0 and not ascent.fits():
            return None
        labels = ascent.step(local.cost)
        local.offer(ascent.full(labels))
        seen.append(labels)
        if ascent.bound >= goal() or ascent.budget.is_over:
            return seen
        if number % 4 == 3:
            ascent.fix(goal())
            if not ascent.possible():
                return None
    if _solved(ascent, local) or (ascent.open() == 1).all():
        return None
    return seen


def _solved(ascent: Ascent, local: Local) -> bool:
    """Whether elimination solves the subproblem, memory aside, and its minimum fits."""
    found = minimum(ascent, ENTRIES, TOTAL)
    return found is not None and local.offer(found)


def minimum(ascent: Ascent, entries: float, total: float) -> Array | None:
    """The best of the labels that are not excluded, memory aside; None where tables would be too large."""
    costs, tables, kept, store = remaining_tables(ascent)
    found = eliminate(costs, tables, entries, total, store=store, budget=ascent.budget)
    if found is None:
        return None
    return ascent.full(np.array([int(k[at]) for k, at in zip(kept, found, strict=True)], np.int64))


def remaining_tables(ascent: Ascent) -> tuple[list[Array], list[dict[int, Array]], list[Array], Store]:
    """Costs, tables and numbers of the labels that are not excluded, and the store of all of them."""
    store = Store()
    kept = [store.of(labels) for labels in ascent.left()]
    tables: list[dict[int, Array]] = [{} for _ in kept]
    for v, row in enumerate(ascent.tables):
        for w, table in row.items():
            if v < w:
                tables[v][w] = store.call(part, table, kept[v], kept[w])
                tables[w][v] = store.transposed(tables[v][w])
    costs = [store.of(ascent.base[at + k]) for at, k in zip(ascent.first, kept, strict=False)]
    return costs, tables, kept, store


def _split(ascent: Ascent, seen: list[Array], gains: Gains) -> tuple[int, list[Array]]:
    """A node, and the labels to exclude for each of two subproblems, by memory price.

    Of the nodes on which the suggestions disagree most, the one whose splits raised the bound most; a node never split counts
    as an average one, weighted by the disagreement.
    """
    kept = ascent.left()
    price = ascent.memory.price(ascent.best)
    first = ascent.first
    every = np.stack(seen[len(seen) // 2:])  # fmt: skip
    unsure = np.zeros(len(kept))
    for v, labels in enumerate(kept):
        if len(labels) < 2:
            continue
        paid = price[first[v]:first[v + 1]]  # fmt: skip
        unsure[v] = float(paid[every[:, v]].std()) + 1e-3 * float(np.ptp(paid[labels]))
        unsure[v] += 1e-6 * float((every[:, v] != every[0, v]).mean()) + 1e-12
    asked = [v for v in np.argsort(-unsure, kind="stable")[:CANDIDATES].tolist() if unsure[v] > 0]
    known = {v: gain for v in asked if (gain := gains.of(int(ascent.nodes[v]))) is not None}
    rate = math.fsum(known.values()) / max(math.fsum(float(unsure[v]) for v in known), 1e-300) if known else 1.0
    choice = max(asked, key=lambda v: known.get(v, rate * float(unsure[v])))
    labels = kept[choice]
    paid = price[first[choice]:first[choice + 1]][labels]  # fmt: skip
    middle = (paid.min() + paid.max()) / 2
    low = paid <= middle
    if low.all():
        low = np.arange(len(labels)) < len(labels) // 2
        last = labels == every[-1, choice]
        if last.any():
            low = last
    return choice, [labels[~low], labels[low]]

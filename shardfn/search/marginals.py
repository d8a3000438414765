"""What every label of a node would cost at least: the runner-up of each decision, and by how much it loses.

The nodes are minimised away one by one, and what each leaves to the rest is handed back in the opposite order, so that
every node learns what all others cost. Where the tables on the way would be too large, labels that provably cost much
more than the optimum are left out, and the answer says for these only that they cost at least so much.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from shardfn.search.branch import parts
from shardfn.search.content import Store
from shardfn.search.contract import Core, Follow, contract
from shardfn.search.eliminate import Least
from shardfn.search.labelling import Array, Labelling
from shardfn.search.lagrange import Ascent
from shardfn.search.memory import memory_of
from shardfn.search.narrow import Stuck, narrow

ENTRIES, TOTAL = 2e6, 2e7  # of the tables on the way
PASSES = 24  # after which labels are judged
SHARES = (
    0.05,
    0.02,
    0.01,
    5e-3,
    2e-3,
    1e-3,
    5e-4,
    2e-4,
    1e-4,
    3e-5,
    1e-5,
)  # of the optimum, how far labels are looked at


@dataclasses.dataclass(frozen=True)
class Marginal:
    """The least total cost with the node held at each label; a lower bound of it where not `exact`.

    An impossible label costs infinity.
    """

    cost: Array
    exact: Array

    @property
    def runner_up(self) -> tuple[int, float, bool]:
        """The second best label (-1: there is none), how much more it costs, and whether that is exact or at least so.

        >>> Marginal(np.array([5.0, 3.0, 4.0]), np.array([False, True, True])).runner_up
        (2, 1.0, True)
        """
        order = np.argsort(self.cost, kind="stable")
        if len(order) < 2 or math.isinf(self.cost[order[1]]):
            return -1, math.inf, True
        return int(order[1]), float(self.cost[order[1]] - self.cost[order[0]]), bool(self.exact[order[1]])


def min_marginals(problem: Labelling, nodes: Sequence[int]) -> list[Marginal] | None:
    """For each of `nodes` the least total cost with it held at each label, memory aside; None where that is too hard.

    >>> from shardfn.search.labelling import labelling
    >>> (first,) = min_marginals(labelling([[1, 5], [4, 2]], tables=[((0, 1), [0, 9, 9, 0])]), [0])
    >>> first.cost.tolist(), first.runner_up
    ([5.0, 7.0], (1, 2.0, True))
    """
    problem = problem.unlimited()
    store = Store()
    core = contract(problem, store=store, keep=nodes)
    if not core.possible:
        return [
            Marginal(np.full(len(cost), np.inf), np.full(len(cost), True))
            for cost in map(problem.costs.__getitem__, nodes)
        ]
    left = sorted(core.costs)
    place = {v: at for at, v in enumerate(left)}
    costs = [core.costs[v] for v in left]
    tables = [{place[w]: table for w, table in core.tables[v].items()} for v in left]
    found = _all(costs, tables, store)
    if found is None:
        found = _near(Ascent(costs, tables, memory_of(problem, core, left)))
    return None if found is None else _original(core, dict(zip(left, found, strict=True)), nodes)


def _original(core: Core, found: dict[int, Marginal], nodes: Sequence[int]) -> list[Marginal]:
    """The same for nodes and labels of the problem before it was contracted."""
    known: dict[int, Marginal] = {}
    best = core.constant + min([float(each.cost.min()) for each in found.values()], default=0.0)
    for v, each in found.items():
        cost, exact = np.full(core.sizes[v], np.inf), np.full(core.sizes[v], True)
        cost[core.kept[v]], exact[core.kept[v]] = each.cost + core.constant, each.exact
        known[v] = Marginal(cost, exact)
    for step in reversed(core.steps):
        cost, exact = np.full(core.sizes[step.node], np.inf), np.full(core.sizes[step.node], True)
        if isinstance(step, Follow):
            if step.leader in known:
                leader = known[step.leader]
                led = np.flatnonzero(step.label >= 0)
                np.minimum.at(cost, step.label[led], leader.cost[led])
                loose = led[~leader.exact[led]]
                at = step.label[loose]
                exact[at[leader.cost[loose] <= cost[at]]] = False
                known[step.node] = Marginal(cost, exact)
        elif not step.others:
            cost[int(step.label)] = best
            known[step.node] = Marginal(cost, exact)
    return [known[v] for v in nodes]


def _near(ascent: Ascent) -> list[Marginal] | None:
    """The same for labels whose least cost is near the optimum, as far as tables allow; a lower bound for the others."""
    try:
        chosen = narrow(ascent, math.inf)
    except Stuck:
        return None
    if chosen is None:
        return None
    best, bound = ascent.cost_of(chosen), -math.inf
    for _ in range(PASSES):
        ascent.messages.forward()
        bound = ascent.sweep()
    base, sent = ascent.base, ascent.messages.sent.copy()
    for share in SHARES:
        reach = share * abs(best)
        ascent.messages.forward()
        ascent.sweep(best + reach - bound)
        costs, tables, kept, store = parts(ascent)
        found = _all(costs, tables, store)
        if found is not None:
            break
        ascent.base = base
        ascent.messages.sent[:] = sent
        ascent.messages.set_costs(base)
    else:
        return None
    result = []
    for own, labels, inside in zip(ascent.labels, kept, found, strict=True):
        cost, exact = np.full(len(own), best + reach), np.full(len(own), False)
        known = inside.cost <= best + reach
        cost[labels[known]], exact[labels[known]] = inside.cost[known], True
        result.append(Marginal(cost, exact))
    return result


def _all(costs: Sequence[Array], tables: Sequence[dict[int, Array]], store: Store) -> list[Marginal] | None:
    """Exact for every node and label; None where a table on the way would be too large."""
    order = _order(costs, tables)
    if order is None:
        return None
    turn = {v: at for at, (v, _) in enumerate(order)}
    given: dict[int, list[tuple[tuple[int, ...], Array]]] = {v: [] for v in turn}
    own = {v: store.of(cost) for v, cost in enumerate(costs)}
    for v, row in enumerate(tables):
        for w, table in row.items():
            if turn[v] < turn[w]:
                given[v].append(((v, w), table))
    totals, leaves, parent = {}, {}, {}
    constant = 0.0
    for v, scope in order:
        at = {w: place for place, w in enumerate(scope)}
        least = Least(tuple(tuple(at[w] for w in nodes) for nodes, _ in given[v]), len(scope))
        arrays = (own[v], *(table for _, table in given[v]))
        totals[v], leaves[v] = store.call(_Both(least), *arrays)
        rest = scope[1:]
        if not rest:
            constant += float(leaves[v])
        elif len(rest) == 1:
            parent[v] = rest[0]
            own[rest[0]] = store.call(np.add, own[rest[0]], leaves[v])
        else:
            parent[v] = min(rest, key=turn.__getitem__)
            given[parent[v]].append((rest, leaves[v]))
    scopes = dict(order)
    result: dict[int, Marginal] = {}
    for v, scope in reversed(order):
        total = totals[v]
        if v in parent:
            total = total + _handed(totals[parent[v]], scopes[parent[v]], scope[1:], leaves[v])
            totals[v] = total
            extra = 0.0
        else:
            extra = constant - float(leaves[v])
            totals[v] = total = total + extra
        cost = total.min(tuple(range(1, total.ndim)))
        result[v] = Marginal(cost, np.full(len(cost), True))
    return [result[v] for v in range(len(costs))]


def _handed(total: Array, scope: tuple[int, ...], rest: tuple[int, ...], left: Array) -> Array:
    """What the others cost for each label of `rest`, without what the node itself had left there; its dim in front."""
    away = tuple(place for place, w in enumerate(scope) if w not in rest)
    stay = [w for w in scope if w in rest]
    whole = total.min(away) if away else total
    whole = whole.transpose([stay.index(w) for w in rest])
    return np.where(np.isfinite(whole), whole, np.inf)[None] - np.where(np.isfinite(left), left, 0.0)[None]


@dataclasses.dataclass(frozen=True)
class _Both:
    """The sum of a node's tables, and its least over the node."""

    least: Least

    def __call__(self, cost: Array, *tables: Array) -> tuple[Array, Array]:
        total = self.least.total(cost, *tables)
        return total, np.asarray(np.minimum.reduce(total, 0))


def _order(costs: Sequence[Array], tables: Sequence[dict[int, Array]]) -> list[tuple[int, tuple[int, ...]]] | None:
    """The nodes in the order in which they go, each with those it then shares a table with."""
    near = [set(row) for row in tables]
    size = [len(cost) for cost in costs]
    gone = [False] * len(near)
    depth = [0] * len(near)

    def score(v: int) -> int:
        return math.prod([size[w] for w in near[v]], start=size[v])

    heap = [(score(v), 0, v) for v in range(len(near))]
    heapq.heapify(heap)
    order, spent = [], 0
    while heap:
        was, deep, v = heapq.heappop(heap)
        if gone[v] or (was, deep) != (score(v), depth[v]):
            continue
        spent += was
        if was > ENTRIES or spent > TOTAL:
            return None
        gone[v] = True
        order.append((v, (v, *sorted(near[v]))))
        for w in near[v]:
            near[w] |= near[v]
            near[w] -= {v, w}
            depth[w] = max(depth[w], depth[v] + 1)
        for w in near[v]:
            heapq.heappush(heap, (score(w), depth[w], w))
    return order

"""The cheapest labelling by trying everything: what the solver is held against.

Depth first, one node after the other, and back as soon as what is spent and the least that the rest can cost are no less
than the best so far, or where the labels that the rest can see were met before at no more. It shares no code with
`search.solver.solve`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from shardfn.errors import ShardError, fail
from shardfn.solver.labelling import Array, Labelling

STEPS = 200_000
NEAR = 1e-12
"""Of the best cost: what gains less is rounding."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The cheapest labels with their cost, none and infinite where there is none; `steps` labels were tried."""

    choice: tuple[int, ...]
    cost: float
    steps: int


def exhaustive(problem: Labelling, below: float = math.inf, most: int = STEPS) -> Best:
    """The cheapest labelling that costs less than `below`, within the limit; tables are of one or two nodes.

    Raises:
      ShardError: `most` labels were tried and there is more to try, or a table is of more nodes.

    >>> from shardfn.solver.labelling import labelling
    >>> best = exhaustive(labelling([[1, 5], [4, 2]], tables=[((0, 1), [0, 9, 9, 0])]))
    >>> best.choice, best.cost
    ((0, 0), 5.0)
    """
    own, pairs = _merged(problem)
    order = _order(own, pairs)
    costs, later = _towards_first([own[v] for v in order], _placed(pairs, order))
    held, extra = _held(problem, order)
    least = math.fsum(cost.min(initial=math.inf) for cost in costs)
    seen = _seen(later)
    stack: list[tuple[tuple[int, ...], float, list[Array], float, Array]] = [((), 0.0, costs, least, held)]
    met: dict[tuple[int, ...], float] = {}
    cost, steps = below, 0
    taken: tuple[int, ...] | None = None
    while stack:
        labels, spent, rows, rest, alive = stack.pop()
        depth = len(labels)
        bound = spent + rest
        if math.isinf(bound) or bound >= cost - NEAR * abs(bound) or alive.max(initial=0.0) > problem.limit:
            continue
        if depth == len(order):
            cost, taken = spent, labels
            continue
        if not extra:  # what is held depends on all labels before
            view = (depth, *(labels[place] for place in seen[depth]))
            if met.get(view, math.inf) <= spent:
                continue
            met[view] = spent
        row = rows[depth]
        for label in np.argsort(-row, kind="stable").tolist():  # the cheapest last, to be tried first
            if not math.isfinite(row[label]):
                continue
            steps += 1
            if steps > most:
                fail(ShardError, f"a labelling of {len(order)} nodes is too large to try everything",
                     where=f"most = {most:,} labels", why="what is left to try grows with the product of all labels",
                     fix="ask for a smaller one, or use search.solve")  # fmt: skip
            after, left = list(rows), rest - float(row.min())
            for place, table in later[depth].items():
                after[place] = rows[place] + table[label]
                left += after[place].min() - rows[place].min()
            more = alive + extra[depth][label] if extra else alive
            stack.append(((*labels, label), spent + float(row[label]), after, float(left), more))
    if taken is None:
        return Best((), math.inf, steps)
    choice = dict(zip(order, taken, strict=True))
    total = [own[v][label] for v, label in choice.items()]
    total += [table[choice[a], choice[b]] for (a, b), table in pairs.items()]
    return Best(tuple(choice[v] for v in range(len(order))), math.fsum(total), steps)


Pairs = Mapping[tuple[int, int], Array]


def _merged(problem: Labelling) -> tuple[list[Array], Pairs]:
    """Each node's own costs, and one table for each pair of neighbours, the smaller node first."""
    own, pairs = [cost.copy() for cost in problem.costs], {}
    for table in problem.tables:
        if len(table.nodes) == 1:
            own[table.nodes[0]] += table.cost
        elif len(table.nodes) == 2:
            a, b = table.nodes
            key, cost = ((a, b), table.cost) if a < b else ((b, a), table.cost.T)
            pairs[key] = pairs[key] + cost if key in pairs else cost
        else:
            fail(ShardError, f"a table of {len(table.nodes)} nodes cannot be tried", where=f"nodes {table.nodes}",
                 why="only tables of one or two nodes are read", fix="use search.solve")  # fmt: skip
    return own, pairs


def _order(own: list[Array], pairs: Pairs) -> list[int]:
    """The nodes, each next one that leaves the fewest before it with neighbours to come."""
    near: list[set[int]] = [set() for _ in own]
    for a, b in pairs:
        near[a].add(b)
        near[b].add(a)
    left, order = set(range(len(own))), []
    open_: set[int] = set()

    def opened(v: int) -> int:
        return sum(not near[w].isdisjoint(left - {v}) for w in open_ | {v})

    while left:
        around = {w for v in open_ for w in near[v]} & left
        v = min(around or left, key=lambda v: (opened(v), -len(near[v] & open_), v))
        left.remove(v)
        order.append(v)
        open_ = {w for w in open_ | {v} if not near[w].isdisjoint(left)}
    return order


def _placed(pairs: Pairs, order: list[int]) -> list[dict[int, Array]]:
    """For each place in the order the tables with later places."""
    at = {v: place for place, v in enumerate(order)}
    later: list[dict[int, Array]] = [{} for _ in order]
    for (a, b), table in pairs.items():
        first, second, cost = (at[a], at[b], table) if at[a] < at[b] else (at[b], at[a], table.T)
        later[first][second] = cost
    return later


def _seen(later: list[dict[int, Array]]) -> list[list[int]]:
    """At each depth the places before it that have a table with a later one."""
    last = [max(tables, default=-1) for tables in later]
    return [[place for place in range(depth) if last[place] >= depth] for depth in range(len(later))]


def _towards_first(costs: list[Array], later: list[dict[int, Array]]) -> tuple[list[Array], list[dict[int, Array]]]:
    """The same total for every labelling, with what a node costs at least, whatever it gets, charged to an earlier one.

    Last node first: its own costs go into the table with its nearest earlier neighbour, and from each of its tables the
    least of each row into the earlier node. On a tree the bound is then the optimum.
    """
    costs, later = list(costs), [dict(tables) for tables in later]
    earlier: list[list[int]] = [[] for _ in costs]
    for first, tables in enumerate(later):
        for second in tables:
            earlier[second].append(first)
    for place in reversed(range(len(costs))):
        for first in sorted(earlier[place], reverse=True):
            table = later[first][place]
            if first == max(earlier[place]):
                table = table + costs[place]
                costs[place] = np.where(np.isfinite(costs[place]), 0.0, np.inf)
            least = table.min(axis=1)
            costs[first] = costs[first] + least
            later[first][place] = table - np.where(np.isfinite(least), least, 0.0)[:, None]
    return costs, later


def _held(problem: Labelling, order: list[int]) -> tuple[Array, list[Array]]:
    """At each time what is held at least, and per place and label what is held beyond that: [labels, times]."""
    if math.isinf(problem.limit):
        return np.zeros(1), []
    nodes, intervals, usages = problem.usage_rows
    times = np.unique(intervals[:, 0])
    used = [np.zeros((len(cost), len(times))) for cost in problem.costs]
    for v, (start, end), usage in zip(nodes.tolist(), intervals.tolist(), usages, strict=True):
        used[v] += usage[:, None] * ((times >= start) & (times < end))
    least = [each.min(axis=0) for each in used]
    return sum(least, np.zeros(len(times))), [used[v] - least[v] for v in order]

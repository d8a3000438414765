"""The labelling problem as plain data: one label per node at the least total cost, with a limit on the memory alive at once.

A node is a decision, a label one option. A label has a cost, and a usage while the node is alive. A table gives the cost of
the labels of two or more nodes together. This is the form of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray
FORBIDDEN = 1e17
"""Costs of at least this much mean "never" and become infinite: added up, they would cancel the digits of other costs."""


@dataclasses.dataclass(frozen=True)
class CostTable:
    """The cost of the labels of `nodes` together: one dim per node."""

    nodes: tuple[int, ...]
    cost: Array


@dataclasses.dataclass(frozen=True)
class UsageInterval:
    """The usage of `node` in the half-open `[start, end)`, per label."""

    node: int
    start: int
    end: int
    usage: Array


@dataclasses.dataclass(frozen=True)
class Labelling:
    """Nodes with a cost and a usage per label, alive in the half-open `[start, end)`, and tables between them.

    A node that stands for many values has more usage at other times: any number of `usage_intervals`.

    >>> two = labelling([[1, 5], [4, 2]], tables=[((0, 1), [0, 9, 9, 0])])
    >>> total_cost(two, (0, 0)), total_cost(two, (1, 1))
    (5.0, 7.0)
    """

    costs: tuple[Array, ...]
    usages: tuple[Array, ...]
    intervals: Array
    tables: tuple[CostTable, ...]
    limit: float = math.inf
    usage_intervals: tuple[UsageInterval, ...] = ()

    @functools.cached_property
    def usage_rows(self) -> tuple[Array, Array, list[Array]]:
        """All usage as rows: node, interval (rows x 2) and usage per label."""
        rows = [(v, start, end, usage) for v, ((start, end), usage)
                in enumerate(zip(self.intervals.tolist(), self.usages, strict=True))]  # fmt: skip
        rows += [(each.node, each.start, each.end, each.usage) for each in self.usage_intervals]
        rows = [row for row in rows if row[1] < row[2] and len(row[3]) and row[3].any()]
        numbers = np.array([row[:3] for row in rows], np.int64).reshape(-1, 3)
        return numbers[:, 0], numbers[:, 1:], [row[3] for row in rows]


def labelling(costs: Sequence[Sequence[float]], usages: Sequence[Sequence[float]] | None = None,
              intervals: Sequence[Sequence[int]] | None = None,
              tables: Sequence[tuple[Sequence[int], Sequence[float]]] = (),
              limit: float | None = None,
              usage_intervals: Sequence[tuple[int, int, int, Sequence[float]]] = ()) -> Labelling:  # fmt: skip
    """The problem from lists: tables row-major, costs of `FORBIDDEN` and more never taken.

    Args:
      costs: for each node, the cost of each label.
      usages: the same for memory; without them nothing is used.
      intervals: for each node `(start, end)` of its usage; without them all nodes are alive at one time.
      tables: rows of (nodes, costs of all combinations of their labels).
      limit: of the usage alive at any time; None for no limit.
      usage_intervals: more usage, rows of (node, start, end, usage of each label).

    Raises:
      ValueError: lists whose lengths do not match, a negative usage, or a cost that is not a number.
    """
    found = tuple(_cost_array(cost) for cost in costs)
    uses = tuple(np.asarray(u, float) for u in usages) if usages is not None else tuple(np.zeros(len(c)) for c in found)
    alive = np.asarray(intervals if intervals is not None else [(0, 1)] * len(found), np.int64).reshape(-1, 2)
    if [len(u) for u in uses] != [len(c) for c in found] or len(alive) != len(found):
        raise ValueError("costs, usages and intervals differ in length: give each node the same number of labels")
    more = tuple(
        UsageInterval(node, start, end, np.asarray(usage, float)) for node, start, end, usage in usage_intervals
    )
    if any(not 0 <= each.node < len(found) or len(each.usage) != len(found[each.node]) for each in more):
        raise ValueError("a usage interval does not fit its node: give a node that exists, and a usage for each label")
    if any((u < 0).any() or not np.isfinite(u).all() for u in (*uses, *(each.usage for each in more))):
        raise ValueError("a usage is negative or not finite: give what each label uses, 0 for nothing")
    rows = []
    for nodes, flat in tables:
        if not nodes or min(nodes) < 0 or max(nodes) >= len(found):
            raise ValueError(f"a table names nodes {list(nodes)} of {len(found)}: name nodes that exist")
        shape = tuple(len(found[node]) for node in nodes)
        if len(flat) != math.prod(shape):
            raise ValueError(f"the table of nodes {list(nodes)} has {len(flat)} costs: give {math.prod(shape)}")
        rows.append(CostTable(tuple(nodes), _cost_array(flat).reshape(shape)))
    return Labelling(found, uses, alive, tuple(rows), math.inf if limit is None else float(limit), more)


def _cost_array(values: Sequence[float]) -> Array:
    cost = np.array(values, float)
    if np.isnan(cost).any() or (cost == -np.inf).any():
        raise ValueError("a cost is not a number: give a finite cost, or one of 1e17 and more for never")
    cost[cost >= FORBIDDEN] = np.inf
    return cost


def total_cost(problem: Labelling, choice: Sequence[int]) -> float:
    """The total cost of one label per node, infinite where a forbidden one is taken."""
    own = math.fsum(cost[label] for cost, label in zip(problem.costs, choice, strict=True))
    return own + math.fsum(table.cost[tuple(choice[node] for node in table.nodes)] for table in problem.tables)


def peak_of(problem: Labelling, choice: Sequence[int]) -> float:
    """The largest usage alive at any time."""
    nodes, intervals, usages = problem.usage_rows
    if not len(nodes):
        return 0.0
    usage = np.array([each[choice[v]] for v, each in zip(nodes.tolist(), usages, strict=True)])
    start, end = intervals.T
    times, at = np.unique(np.concatenate([start, end]), return_inverse=True)
    change = np.bincount(at, np.concatenate([usage, -usage]), len(times))
    return float(np.max(np.cumsum(change), initial=0.0))


def busy_times(problem: Labelling) -> Array:
    """The times that decide the peak: the nodes alive at any other time are a subset of those alive at one of these."""
    _, intervals, _ = problem.usage_rows
    starts, ends = np.unique(intervals[:, 0]), np.unique(intervals[:, 1])
    if not len(starts):
        return starts
    following = np.append(starts[1:], ends[-1] + 1)
    return starts[np.searchsorted(ends, following, "right") > np.searchsorted(ends, starts, "right")]


def tight_times(problem: Labelling) -> Array:
    """The busy times at which some choice may exceed the limit."""
    times = busy_times(problem)
    most = np.array([usage.max() for usage in problem.usage_rows[2]])
    return times[alive_total(problem, most, times) > problem.limit]


def alive_total(problem: Labelling, usage: Array, times: Array) -> Array:
    """The sum of `usage` over the rows of `problem.usage_rows` alive at each of `times` (ascending)."""
    begin, finish = np.searchsorted(times, problem.usage_rows[1]).reshape(-1, 2).T
    change = np.bincount(begin, usage, len(times) + 1) - np.bincount(finish, usage, len(times) + 1)
    return np.cumsum(change)[: len(times)]


def limited_nodes(problem: Labelling) -> list[bool]:
    """For each node, whether its label changes the usage at a time at which the limit can be exceeded."""
    nodes, intervals, usages = problem.usage_rows
    begin, end = np.searchsorted(tight_times(problem), intervals).reshape(-1, 2).T
    found = [False] * len(problem.costs)
    for v, usage, alive in zip(nodes.tolist(), usages, (begin < end).tolist(), strict=True):
        found[v] = found[v] or (alive and bool(np.ptp(usage)))
    return found

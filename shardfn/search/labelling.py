"""One label for every node at the least total cost, with a limit on what is alive at once: the problem as plain data.

A node is something to decide (how one op is cut), a label one way to do it. A label has a cost and a usage (bytes it
holds while the node is alive); a table prices the labels of neighbouring nodes together (moving data between them).
This is the form of Google's published auto-sharding problems, and what a graph of ops becomes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray
FORBIDDEN = 1e17
"""Costs from here on mean "never": scaled into a bound or a linear program they would drown the others."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The cost of the labels of `nodes` together: one dim per node."""

    nodes: tuple[int, ...]
    cost: Array


@dataclasses.dataclass(frozen=True)
class Labelling:
    """Nodes with a cost and a usage per label, alive in the half-open `[start, end)`, and tables between them.

    >>> two = labelling([[1, 5], [4, 2]], tables=[((0, 1), [0, 9, 9, 0])])
    >>> cost_of(two, (0, 0)), cost_of(two, (1, 1))
    (5.0, 7.0)
    """

    costs: tuple[Array, ...]
    usages: tuple[Array, ...]
    intervals: Array
    tables: tuple[Table, ...]
    limit: float = math.inf

    def unlimited(self) -> Labelling:
        """The same without the limit."""
        return dataclasses.replace(self, limit=math.inf)


def labelling(costs: Sequence[Sequence[float]], usages: Sequence[Sequence[float]] | None = None,
              intervals: Sequence[Sequence[int]] | None = None,
              tables: Sequence[tuple[Sequence[int], Sequence[float]]] = (),
              limit: float | None = None) -> Labelling:  # fmt: skip
    """The problem of lists as they stand in a file: tables row-major, costs of `FORBIDDEN` and more never taken.

    Without `usages` nothing is held; without `intervals` every node is alive at one common time.

    Raises:
      ValueError: lists whose lengths do not fit each other, a negative usage, a cost that is not a number.
    """
    found = tuple(_priced(cost) for cost in costs)
    held = tuple(np.asarray(u, float) for u in usages) if usages is not None else tuple(np.zeros(len(c)) for c in found)
    alive = np.asarray(intervals if intervals is not None else [(0, 1)] * len(found), np.int64).reshape(-1, 2)
    if [len(u) for u in held] != [len(c) for c in found] or len(alive) != len(found):
        raise ValueError("costs, usages and intervals differ in length: give each node the same number of labels")
    if any((u < 0).any() or not np.isfinite(u).all() for u in held):
        raise ValueError("a usage is negative or not finite: give what each label holds, 0 for nothing")
    rows = []
    for nodes, flat in tables:
        if not nodes or min(nodes) < 0 or max(nodes) >= len(found):
            raise ValueError(f"a table names nodes {list(nodes)} of {len(found)}: name nodes that exist")
        shape = tuple(len(found[node]) for node in nodes)
        if len(flat) != math.prod(shape):
            raise ValueError(f"the table of nodes {list(nodes)} has {len(flat)} costs: give {math.prod(shape)}")
        rows.append(Table(tuple(nodes), _priced(flat).reshape(shape)))
    return Labelling(found, held, alive, tuple(rows), math.inf if limit is None else float(limit))


def _priced(values: Sequence[float]) -> Array:
    cost = np.array(values, float)
    if np.isnan(cost).any() or (cost == -np.inf).any():
        raise ValueError("a cost is not a number: give a finite cost, or one of 1e17 and more for never")
    cost[cost >= FORBIDDEN] = np.inf
    return cost


def cost_of(problem: Labelling, choice: Sequence[int]) -> float:
    """The total cost of one label per node, infinite where a forbidden one is taken."""
    own = math.fsum(cost[label] for cost, label in zip(problem.costs, choice, strict=True))
    return own + math.fsum(table.cost[tuple(choice[node] for node in table.nodes)] for table in problem.tables)


def peak_of(problem: Labelling, choice: Sequence[int]) -> float:
    """The most that is alive at any one time."""
    if not len(problem.costs):
        return 0.0
    held = np.array([usage[label] for usage, label in zip(problem.usages, choice, strict=True)])
    start, end = problem.intervals[:, 0], problem.intervals[:, 1]
    real = start < end
    times, at = np.unique(np.concatenate([start[real], end[real]]), return_inverse=True)
    change = np.bincount(at, np.concatenate([held[real], -held[real]]), len(times))
    return float(np.max(np.cumsum(change), initial=0.0))


def busy_times(problem: Labelling) -> Array:
    """The times at which a largest set of nodes is alive: at every other time, less is."""
    start, end = problem.intervals[:, 0], problem.intervals[:, 1]
    holds = np.array([bool(len(usage)) and usage.max() > 0 for usage in problem.usages], bool)
    real = (start < end) & holds
    starts, ends = np.unique(start[real]), np.unique(end[real])
    if not len(starts):
        return starts
    following = np.append(starts[1:], ends[-1] + 1)
    return starts[np.searchsorted(ends, following, "right") > np.searchsorted(ends, starts, "right")]


def tight_times(problem: Labelling) -> Array:
    """The busy times at which some choice goes over the limit."""
    times = busy_times(problem)
    most = np.array([usage.max() if len(usage) else 0.0 for usage in problem.usages])
    return times[alive_total(problem, most, times) > problem.limit]


def alive_total(problem: Labelling, held: Array, times: Array) -> Array:
    """The sum of what each node holds over the nodes alive at each of `times` (ascending)."""
    begin, finish = np.searchsorted(times, problem.intervals).T
    change = np.bincount(begin, held, len(times) + 1) - np.bincount(finish, held, len(times) + 1)
    return np.cumsum(change)[: len(times)]


def holding(problem: Labelling) -> list[bool]:
    """Whether the label of a node makes a difference to what is alive at a tight time."""
    begin, end = np.searchsorted(tight_times(problem), problem.intervals).T
    return [bool(b < e and np.ptp(u)) if len(u) else False for b, e, u in zip(begin, end, problem.usages, strict=True)]

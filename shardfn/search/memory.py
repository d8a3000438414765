"""What the labels of a contracted problem hold at the times that matter, as one sparse matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import sparse

from shardfn.search.contract import Core, Follow
from shardfn.search.labelling import Array, Labelling


@dataclasses.dataclass(frozen=True)
class Memory:
    """`change[label, t]`: how usage changes at time `t` when a label is taken (all labels of all nodes in a row).

    `limit[t]` is what the choice may use at `t`, beyond the least that every choice uses (so it may be negative: then
    nothing fits). Node `v` has the labels `first[v]` to `first[v + 1]`.
    """

    change: sparse.csr_matrix
    limit: Array
    first: Array

    def held(self, labels: Array) -> Array:
        """Usage at each time, of one label (a row of `change`) per node."""
        return np.cumsum(np.asarray(self.change[labels].sum(0)).ravel())[: len(self.limit)]

    def price(self, multipliers: Array) -> Array:
        """What each label pays when one unit at time `t` costs `multipliers[t]`."""
        later = np.append(np.cumsum(multipliers[::-1])[::-1], 0.0)
        return self.change @ later

    def at(self, time: int) -> Array:
        """What each label holds at one time."""
        return self.change @ (np.arange(len(self.limit) + 1) <= time).astype(float)


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
    return times[_total(problem, most, times) > problem.limit]


def _total(problem: Labelling, held: Array, times: Array) -> Array:
    begin, finish = np.searchsorted(times, problem.intervals).T
    change = np.bincount(begin, held, len(times) + 1) - np.bincount(finish, held, len(times) + 1)
    return np.cumsum(change)[: len(times)]


def memory_of(problem: Labelling, core: Core, nodes: Sequence[int]) -> Memory:
    """The memory of `nodes`, the remaining ones of `core`, with all that became a part of them."""
    times = tight_times(problem)
    first = np.cumsum([0] + [len(core.kept[v]) for v in nodes])
    offset = dict(zip(nodes, first.tolist(), strict=False))
    label = dict(core.kept)
    root = {v: v for v in nodes}
    for step in reversed(core.steps):
        if isinstance(step, Follow) and step.leader in root:
            root[step.node] = root[step.leader]
            label[step.node] = step.label[label[step.leader]]
    intervals = np.searchsorted(times, problem.intervals)
    least = np.zeros(len(problem.costs))
    rows, columns, values = [], [], []
    for v, usage in enumerate(problem.usages):
        begin, end = intervals[v]
        if begin >= end:
            continue
        if v not in root:
            least[v] = usage.min()
            continue
        mine = usage[label[v]]
        least[v] = mine.min()
        over = mine - least[v]
        (some,) = np.nonzero(over)
        if len(some):
            at = some + offset[root[v]]
            rows += [at, at]
            columns += [np.full(len(some), begin), np.full(len(some), end)]
            values += [over[some], -over[some]]
    shape = (int(first[-1]), len(times) + 1)
    if rows:
        place = (np.concatenate(rows), np.concatenate(columns))
        change = sparse.csr_matrix((np.concatenate(values), place), shape)
    else:
        change = sparse.csr_matrix(shape)
    change.sum_duplicates()
    change.eliminate_zeros()
    limit = problem.limit - _total(problem, least, times)
    return Memory(change, limit, first)

"""The usage of the labels of a contracted problem at the times that matter, as one sparse matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import sparse

from shardfn.solver.contract import Core, Follow
from shardfn.solver.labelling import Array, Labelling, alive_total, tight_times


@dataclasses.dataclass(frozen=True)
class MemoryConstraint:
    """`change[label, t]`: the change of usage at time `t` when a label is taken (all labels of all nodes in a row).

    `limit[t]` is the usage left at `t` beyond the least of every choice; where it is negative, nothing fits. Node `v` has
    the labels `first[v]` to `first[v + 1]`.
    """

    change: sparse.csr_matrix
    limit: Array
    first: Array

    def usage(self, labels: Array) -> Array:
        """Usage at each time, of one label (a row of `change`) per node."""
        return np.cumsum(np.asarray(self.change[labels].sum(0)).ravel())[: len(self.limit)]

    def price(self, multipliers: Array) -> Array:
        """The price of each label when one unit at time `t` costs `multipliers[t]`."""
        later = np.append(np.cumsum(multipliers[::-1])[::-1], 0.0)
        return self.change @ later

    def dense(self, times: Array) -> Array:
        """The usage of each label at each of `times`."""
        until = np.arange(len(self.limit) + 1)[:, None] <= times[None]
        return np.asarray(self.change @ until.astype(float))


def memory_constraint(problem: Labelling, core: Core, nodes: Sequence[int]) -> MemoryConstraint:
    """The usage of `nodes`, the remaining ones of `core`, merged nodes included."""
    times = tight_times(problem)
    first = np.cumsum([0] + [len(core.kept[v]) for v in nodes])
    offset = dict(zip(nodes, first.tolist(), strict=False))
    label = dict(core.kept)
    root = {v: v for v in nodes}
    for step in reversed(core.steps):
        if isinstance(step, Follow):
            if step.leader in label:
                label[step.node] = step.label[label[step.leader]]
            if step.leader in root:
                root[step.node] = root[step.leader]
        elif not step.others:  # settled
            label[step.node] = step.label.reshape(1)
    owner, intervals, usages = problem.usage_rows
    mine = [usage[label[v]] if v in label else usage for v, usage in zip(owner.tolist(), usages, strict=True)]
    least, most = (np.array([get(usage) for usage in mine]) for get in (np.min, np.max))
    times = times[alive_total(problem, most, times) > problem.limit]
    rows, columns, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    places = np.searchsorted(times, intervals).reshape(-1, 2).tolist()
    for v, usage, low, high, (begin, end) in zip(owner.tolist(), mine, least, most, places, strict=True):
        if begin < end and v in root and high > low:
            over = usage - low
            (some,) = np.nonzero(over)
            at = some + offset[root[v]]
            rows += [at, at]
            columns += [np.full(len(some), begin), np.full(len(some), end)]
            values += [over[some], -over[some]]
    place = (np.concatenate(rows), np.concatenate(columns))
    change = sparse.csr_matrix((np.concatenate(values), place), (int(first[-1]), len(times) + 1))
    change.sum_duplicates()
    change.eliminate_zeros()
    return MemoryConstraint(change, problem.limit - alive_total(problem, least, times), first)

"""A labelling problem as an integer program for HiGHS: what the solver is held against where trying everything takes too long."""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, sparse

from shardfn.solver.labelling import Labelling


def integer_program(problem: Labelling, seconds: float) -> tuple[float, float]:
    """A lower and an upper bound of the least cost, both infinite where HiGHS proves that nothing fits.

    A variable in [0, 1] for each label and for each combination of a table's labels. Those of a node sum up to 1, and those
    of a table that have one label of a node to that label.

    >>> from shardfn.solver.labelling import labelling
    >>> integer_program(labelling([[1, 5], [4, 2]], tables=[((0, 1), [0, 9, 9, 0])]), seconds=10)
    (5.0, 5.0)
    """
    sizes = [len(cost) for cost in problem.costs]
    first = np.cumsum([0, *sizes])
    every = np.concatenate([np.zeros(0), *problem.costs, *(table.cost.ravel() for table in problem.tables)])
    finite = np.isfinite(every)
    rows, columns, values = [np.repeat(np.arange(len(sizes)), sizes)], [np.arange(first[-1])], [np.ones(first[-1])]
    right = [np.ones(len(sizes))]
    row, column = len(sizes), int(first[-1])
    for table in problem.tables:
        labels = np.unravel_index(np.arange(table.cost.size), table.cost.shape)
        for node, label in zip(table.nodes, labels, strict=True):
            own = np.arange(sizes[node])
            rows += [row + label, row + own]
            columns += [column + np.arange(len(label)), first[node] + own]
            values += [np.ones(len(label)), -np.ones(len(own))]
            right.append(np.zeros(len(own)))
            row += len(own)
        column += table.cost.size
    place = np.concatenate(rows), np.concatenate(columns)
    equal = sparse.csr_array((np.concatenate(values), place), (row, column))
    limits = [optimize.LinearConstraint(equal, np.concatenate(right), np.concatenate(right))]
    owner, intervals, usages = problem.usage_rows
    times = np.unique(intervals[:, 0])
    if math.isfinite(problem.limit) and len(times):
        used = np.zeros((len(times), column))
        for node, (start, end), usage in zip(owner.tolist(), intervals.tolist(), usages, strict=True):
            used[(times >= start) & (times < end), first[node] : first[node + 1]] += usage
        limits.append(optimize.LinearConstraint(used, -np.inf, problem.limit))
    scale = float(np.abs(every[finite]).max(initial=0.0)) or 1.0
    found = optimize.milp(np.where(finite, every, 0.0) / scale, integrality=np.arange(column) < first[-1],
                          bounds=optimize.Bounds(0, finite.astype(float)), constraints=limits,
                          options={"time_limit": seconds, "mip_rel_gap": 0.0})  # fmt: skip
    if found.status == 2:
        return math.inf, math.inf
    low = -math.inf if found.mip_dual_bound is None else float(found.mip_dual_bound) * scale
    return low, math.inf if found.fun is None else float(found.fun) * scale

"""Labels that a search leaves out: convolutions that XLA computes wrongly, labels that break a rule of
`set_algo_parameters`, and labels that gain next to nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from shardfn.ir.model import Graph, axes_of, axis_size
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.search.labels.label_tables import LabelSpace
from shardfn.search.labels.op_labels import NOWHERE
from shardfn.search.problem import Algorithm
from shardfn.solver.labelling import Array, Labelling
from shardfn.solver.solve import Solution


def filtered(problem: Labelling, space: LabelSpace, graph: Graph, sizes: tuple[int, ...],
             algorithm: Algorithm) -> tuple[Labelling, float]:  # fmt: skip
    """A labelling of `space` without wrong convolutions and without what `algorithm` leaves out, and the part of its optimum that
    `algo_approxi_epsilon` may lose. The rules change the question, so their cost is no loss.
    """
    problem = forbid(problem, allowed_labels(space, graph, sizes, algorithm))
    return drop_dominated(problem, algorithm.algo_approxi_epsilon) if algorithm.enable_algo_approxi else (problem, 0.0)


def allowed_labels(
    space: LabelSpace, graph: Graph, sizes: tuple[int, ...], algorithm: Algorithm
) -> Mapping[int, Array]:
    """For each node that a rule applies to, whether each label keeps the rule. A rule that no label of a node keeps is ignored.

    Args:
      space: the choices of `graph` on a mesh.
      graph: the function.
      sizes: devices along each axis of that mesh.
      algorithm: the rules.
    """
    found: dict[int, Array] = {}

    def restrict(node: int, good: Array) -> None:
        both = good & found.get(node, np.ones(len(good), bool))
        if both.any():
            found[node] = both

    for node, good in space.allowed:
        restrict(node, good)
    if algorithm.fully_use_devices:
        for node, choices in enumerate(space.nodes):
            if np.any(choices.labels > NOWHERE):  # it decides an op, not only the sharding of an array
                restrict(node, np.all(choices.labels >= 0, axis=1))
    if algorithm.tensor_slice_align_enable:
        step = algorithm.tensor_slice_align_size
        for index, (node, wanted) in space.reads.items():
            op = graph.ops[index]
            if op.name != "dot_general":
                continue
            for value, layouts in zip(op.inputs, wanted, strict=True):
                restrict(node, is_aligned(layouts, graph.values[value].shape, sizes, step))
            for value in {*op.inputs, *op.outputs} & space.layouts.keys():
                owner, layouts = space.layouts[value]
                if owner == node or value in graph.inputs:
                    restrict(owner, is_aligned(layouts, graph.values[value].shape, sizes, step))
    return found


def with_loss(solution: Solution, lost: float) -> Solution:
    """A solution of a problem that `drop_dominated` made smaller, as one of the whole problem."""
    return dataclasses.replace(solution, bound=solution.bound - lost, proved=False) if lost else solution


def keeps_rules(partitioned: PartitionedProgram, algorithm: Algorithm) -> bool:
    """Whether the matmuls of a partitioned program keep the rules."""
    for op in partitioned.graph.ops:
        if op.name != "dot_general":
            continue
        specs = [partitioned.specs[value] for value in (*op.inputs, *op.outputs)]
        used = {axis for spec in specs for axis in axes_of(spec)}
        if algorithm.fully_use_devices and math.prod(axis_size(a, partitioned.axes) for a in used) < math.prod(
            partitioned.axes.values()
        ):
            return False
        if algorithm.tensor_slice_align_enable:
            step = algorithm.tensor_slice_align_size
            for value, spec in zip((*op.inputs, *op.outputs), specs, strict=True):
                if spec and spec[-1] and partitioned.local_shape(value)[-1] % step:
                    return False
    return True


def is_aligned(layouts: Array, shape: tuple[int, ...], sizes: tuple[int, ...], step: int) -> Array:
    """Whether the last dimension is unsharded, or its shard a multiple of `step`, in each of the layouts [labels, axes].

    >>> is_aligned(np.array([[-1, 0], [1, -1], [1, 1]]), (8, 64), (2, 4), 16).tolist()
    [True, True, False]
    """
    if not shape:
        return np.ones(len(layouts), bool)
    shards = np.prod(np.where(layouts == len(shape) - 1, np.array(sizes), 1), axis=1)
    return (shards == 1) | (shape[-1] % (shards * step) == 0)


def forbid(problem: Labelling, keep: Mapping[int, Array]) -> Labelling:
    """The problem with the labels that are not kept forbidden.

    >>> from shardfn.solver.labelling import labelling
    >>> forbid(labelling([[1, 2]]), {0: np.array([False, True])}).costs[0].tolist()
    [inf, 2.0]
    """
    costs = tuple(np.where(keep[v], cost, np.inf) if v in keep else cost for v, cost in enumerate(problem.costs))
    return dataclasses.replace(problem, costs=costs)


def drop_dominated(problem: Labelling, epsilon: float) -> tuple[Labelling, float]:
    """The problem without labels that another label nearly dominates, and the most that this can lose.

    A label is dropped if one other label of its node takes no more memory and costs no more, whatever the labels of other nodes,
    up to `epsilon` of the node's least own cost. Costs are never negative, so the sum of these least costs bounds the optimum
    from below, and the loss is at most `epsilon` of the optimum.

    >>> from shardfn.solver.labelling import labelling
    >>> smaller, lost = drop_dominated(labelling([[10, 10.25], [0, 0]], tables=[((0, 1), [0.5, 0, 0, 0])]), 0.1)
    >>> smaller.costs[0].tolist(), lost
    ([10.0, inf], 0.25)
    """
    least = [float(cost.min(initial=np.inf)) for cost in problem.costs]
    best = [int(np.argmin(cost)) for cost in problem.costs]
    more = [least_ - cost for least_, cost in zip(least, problem.costs, strict=True)]
    for table in problem.tables:
        for place, node in enumerate(table.nodes):
            rows = np.moveaxis(table.cost, place, 0).reshape(len(more[node]), -1)
            mine = np.broadcast_to(rows[best[node]], rows.shape)
            # a pair that the other label forbids too is no loss
            worse = np.subtract(mine, rows, out=np.full(rows.shape, -np.inf), where=np.isfinite(rows))
            more[node] = more[node] + worse.max(axis=1, initial=-np.inf)
    heavier = [usage[at] > usage for usage, at in zip(problem.usages, best, strict=True)]
    for interval in problem.usage_intervals:
        heavier[interval.node] = heavier[interval.node] | (interval.usage[best[interval.node]] > interval.usage)
    keep: dict[int, Array] = {}
    lost = 0.0
    for node, (gain, heavy, at) in enumerate(zip(more, heavier, best, strict=True)):
        if not np.isfinite(least[node]):
            continue
        good = (gain > epsilon * least[node]) | heavy
        good[at] = True
        if not good.all():
            keep[node] = good
            lost += max(0.0, float(gain[~good].max()))
    return forbid(problem, keep), lost

"""The objective of a level as the costs of a labelling, in seconds.

Memory has no cost: `exact` finds plans that take less by a limit, or with the smallest shards. `objectives` states the objective
for partitioned and compiled programs.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shardfn.search.labels.label_tables import LabelSpace, Node
from shardfn.search.problem import SearchProblem
from shardfn.solver.labelling import CostTable, Labelling, UsageInterval

HOLDING_PASSES = 1e-3
"""A small cost of an argument's shard, so that the smaller of two otherwise equal shards wins: passes over its memory."""


def labelling_of(space: LabelSpace, problem: SearchProblem, compute_weight: float = 1.0) -> Labelling:
    """The labelling problem of a mesh: the seconds of communication and compute of each label, and the bytes it holds.

    Args:
      space: the choices.
      problem: the hardware.
      compute_weight: the weight of compute; less than 1 lets a plan use the share that counts as balanced at level 0.
    """
    rate = problem.hardware.chip.memory_bytes_s

    def own(node: Node) -> np.ndarray:
        return node.sent_s + compute_weight * node.compute_s + HOLDING_PASSES * node.argument_bytes / rate

    costs = tuple(own(node) for node in space.nodes)
    end = max((i.end for i in space.intervals), default=1)
    arguments = [
        UsageInterval(v, 0, end, node.argument_bytes) for v, node in enumerate(space.nodes) if node.argument_bytes.any()
    ]
    return Labelling(
        costs,
        tuple(np.zeros(len(c)) for c in costs),
        np.zeros((len(costs), 2), np.int64),
        tuple(CostTable((table.first, table.second), table.sent_s) for table in space.reshardings),
        usage_intervals=(*arguments, *space.intervals),
    )


def with_smallest_arguments(labels: Labelling, space: LabelSpace) -> Labelling:
    """The labelling with every argument in the smallest shards that it can have."""
    costs = tuple(
        np.where(node.argument_bytes > node.argument_bytes[np.isfinite(own)].min(initial=np.inf), np.inf, own)
        for node, own in zip(space.nodes, labels.costs, strict=True)
    )
    return dataclasses.replace(labels, costs=costs)


def totals(space: LabelSpace, choice: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of communication and of compute of one device, over all nodes and reshardings."""
    labels = list(zip(space.nodes, choice, strict=True))
    sent = sum(float(table.sent_s[choice[table.first], choice[table.second]]) for table in space.reshardings)
    return sent + sum(float(node.sent_s[at]) for node, at in labels), sum(float(n.compute_s[at]) for n, at in labels)

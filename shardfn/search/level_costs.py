"""The objective of a level as the costs of a labelling: seconds, at level 0 those in which the link sends the bytes.

Memory has no cost: `exact` finds plans that take less by a limit, or with the smallest shards. `objectives` states the objective
for partitioned and compiled programs.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shardfn.search.label_tables import LabelSpace, Node, ReshardingTable
from shardfn.search.objectives import COMMUNICATION
from shardfn.search.problem import SearchProblem
from shardfn.solver.labelling import CostTable, Labelling, UsageInterval

HOLDING_PASSES, HOLDING_SENT = 1e-3, 1e-6
"""A small cost of an argument's shard, so that the smaller of two otherwise equal shards wins: passes over its memory; at
level 0, bytes sent per byte."""


def labelling_of(space: LabelSpace, problem: SearchProblem, compute_weight: float = 1.0) -> Labelling:
    """The labelling problem of a mesh: the cost of each label at the problem's level, and the bytes it holds.

    Levels 1 and 2 add up seconds of compute and communication. Level 0 adds up the bytes sent and what all FLOPs cost at the
    exchange rate of `objectives.excess_bytes`, times `compute_weight`, over the link's rate.

    Args:
      space: the choices.
      problem: the level and the hardware.
      compute_weight: at level 0, the weight of FLOPs; less than 1 lets a plan use the share that counts as balanced.
    """
    chip, total = problem.hardware.chip, problem.facts.flops
    bytes_per_flop = compute_weight * problem.data_bytes * problem.devices / total if total else 0.0

    def own(node: Node) -> np.ndarray:
        if problem.level == COMMUNICATION:
            return (node.sent + bytes_per_flop * node.flops + HOLDING_SENT * node.argument_bytes) / chip.link_bytes_s
        return node.sent_s + node.compute_s + HOLDING_PASSES * node.argument_bytes / chip.memory_bytes_s

    def between(table: ReshardingTable) -> np.ndarray:
        return table.sent / chip.link_bytes_s if problem.level == COMMUNICATION else table.sent_s

    costs = tuple(own(node) for node in space.nodes)
    end = max((i.end for i in space.intervals), default=1)
    arguments = [
        UsageInterval(v, 0, end, node.argument_bytes) for v, node in enumerate(space.nodes) if node.argument_bytes.any()
    ]
    return Labelling(
        costs,
        tuple(np.zeros(len(c)) for c in costs),
        np.zeros((len(costs), 2), np.int64),
        tuple(CostTable((table.first, table.second), between(table)) for table in space.reshardings),
        usage_intervals=(*arguments, *space.intervals),
    )


def with_smallest_arguments(labels: Labelling, space: LabelSpace) -> Labelling:
    """The labelling with every argument in the smallest shards that it can have."""
    costs = tuple(
        np.where(node.argument_bytes > node.argument_bytes[np.isfinite(own)].min(initial=np.inf), np.inf, own)
        for node, own in zip(space.nodes, labels.costs, strict=True)
    )
    return dataclasses.replace(labels, costs=costs)


@dataclasses.dataclass(frozen=True)
class Totals:
    """What one device does in one call: FLOPs, those of matmuls, bytes sent, and seconds of compute and of communication."""

    flops: float
    matrix_flops: float
    sent: float
    compute_s: float
    sent_s: float


def totals(space: LabelSpace, choice: tuple[int, ...]) -> Totals:
    """The sums over all nodes and reshardings."""
    labels = list(zip(space.nodes, choice, strict=True))
    between = [(table, (choice[table.first], choice[table.second])) for table in space.reshardings]
    return Totals(
        sum(float(node.flops[at]) for node, at in labels),
        sum(float(node.matrix_flops[at]) for node, at in labels),
        sum(float(node.sent[at]) for node, at in labels) + sum(float(table.sent[at]) for table, at in between),
        sum(float(node.compute_s[at]) for node, at in labels),
        sum(float(node.sent_s[at]) for node, at in labels) + sum(float(table.sent_s[at]) for table, at in between),
    )

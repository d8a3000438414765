"""What a level makes least, as the costs of a labelling: bytes at level 0, seconds at level 2, and seconds within ever less
memory at level 1. `aims` says it of what is there already: a flow, a compiled program."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from shardfn.search.label_tables import LabelSpace, Node, ReshardingTable
from shardfn.search.problem import SearchProblem
from shardfn.solver.labelling import CostTable, Labelling, UsageInterval

HOLDING = 0.1
"""Seconds charged for an argument that lies on a device, in passes over its memory: ties go to the smaller piece."""


def labelling_of(space: LabelSpace, problem: SearchProblem, spread: float = 1.0) -> Labelling:
    """The choices of a grid with the cost of each label at the problem's level, and the bytes that it holds.

    Level 2 adds up seconds of work and of communication. So does level 1, where memory is the limit. Level 0 adds up the
    bytes sent, over the link's rate, and all work, `spread` times.

    Args:
      space: the choices.
      problem: the level and the hardware.
      spread: at level 0, how much dearer a second of work is than one of communication (`ongrid.SPREADS`).
    """
    chip = problem.hardware.chip

    def own(node: Node) -> np.ndarray:
        if problem.level == 0:
            work = spread * node.flops / chip.flops
            return (node.sent + 1e-3 * node.argument_bytes) / chip.link_bytes_s + work
        return node.sent_s + node.compute_s + HOLDING * node.argument_bytes / chip.memory_bytes_s

    def between(edge: ReshardingTable) -> np.ndarray:
        return edge.sent_s if problem.level else edge.sent / chip.link_bytes_s

    costs = tuple(own(node) for node in space.nodes)
    held = (*space.held, *space.copies) if problem.level == 1 else space.held
    end = max((h.end for h in held), default=1)
    arguments = [
        UsageInterval(v, 0, end, node.argument_bytes) for v, node in enumerate(space.nodes) if node.argument_bytes.any()
    ]
    return Labelling(
        costs,
        tuple(np.zeros(len(c)) for c in costs),
        np.zeros((len(costs), 2), np.int64),
        tuple(CostTable((edge.first, edge.second), between(edge)) for edge in space.edges),
        held=(*arguments, *held),
    )


def in_pieces(labels: Labelling, space: LabelSpace) -> Labelling:
    """The same with every argument in the smallest pieces that it can lie in."""
    costs = tuple(
        np.where(node.argument_bytes > node.argument_bytes[np.isfinite(own)].min(initial=np.inf), np.inf, own)
        for node, own in zip(space.nodes, labels.costs, strict=True)
    )
    return dataclasses.replace(labels, costs=costs)


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a labelling costs one device in one call: FLOPs, those of products, and bytes sent, and the seconds that these
    take."""

    flops: float
    matrix_flops: float
    sent: float
    sent_s: float


def totals(space: LabelSpace, choice: tuple[int, ...]) -> Totals:
    """The sums over all nodes and edges."""
    labels = list(zip(space.nodes, choice, strict=True))
    between = [(edge, (choice[edge.first], choice[edge.second])) for edge in space.edges]
    return Totals(
        sum(float(node.flops[at]) for node, at in labels),
        sum(float(node.matrix_flops[at]) for node, at in labels),
        sum(float(node.sent[at]) for node, at in labels) + sum(float(edge.sent[at]) for edge, at in between),
        sum(float(node.sent_s[at]) for node, at in labels) + sum(float(edge.sent_s[at]) for edge, at in between),
    )


def repeated(space: LabelSpace, choice: tuple[int, ...]) -> int:
    """How many changes of layout do again what another one does for the same node, as for the slices of one value: a flow
    may move that value once, before it is sliced."""
    moves = collections.Counter(
        (edge.first, float(edge.sent[at]))
        for edge in space.edges
        if edge.sent[at := (choice[edge.first], choice[edge.second])] > 0
    )
    return moves.total() - len(moves)

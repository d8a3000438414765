"""Rebuild a partitioned program with other ops, and keep its communications consistent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from shardfn.ir.model import Communication, Op, PartitionedProgram, Spec, Value
from shardfn.ir.op_traits import RESHARDING_OPS


def with_ops(
    partitioned: PartitionedProgram,
    values: Sequence[Value],
    specs: Sequence[Spec],
    ops: Sequence[Op],
    sent: Mapping[int, Communication],
) -> PartitionedProgram:
    """The program with these ops, values and shardings, and its communications in the order of the ops."""
    graph = dataclasses.replace(partitioned.graph, values=tuple(values), ops=tuple(ops))
    turn = {v: i for i, op in enumerate(ops) for v in op.outputs}
    communications = tuple(sorted(sent.values(), key=lambda c: turn.get(c.result, len(ops))))
    return dataclasses.replace(partitioned, graph=graph, specs=tuple(specs), communications=communications)


def without_unread(partitioned: PartitionedProgram) -> PartitionedProgram:
    """Drop reshards whose result nothing reads."""
    graph = partitioned.graph
    read = {v for op in graph.ops for v in op.inputs}.union(graph.outputs, (v for tie in graph.ties for v in tie))
    if all(not op.outputs or op.outputs[0] in read for op in graph.ops if op.name in RESHARDING_OPS):
        return partitioned
    ops: list[Op] = []
    read = {*graph.outputs, *(v for tie in graph.ties for v in tie)}
    for op in reversed(graph.ops):
        if op.name not in RESHARDING_OPS or not read.isdisjoint(op.outputs):
            ops.append(op)
            read.update(op.inputs)
    kept = {v for op in ops for v in op.outputs}
    sent = {c.result: c for c in partitioned.communications if c.result in kept}
    return with_ops(partitioned, graph.values, partitioned.specs, ops[::-1], sent)

"""A flow made anew of other ops, with what hangs together with them: its communications, and what nothing reads any more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from shardfn.ir.model import CHANGES, Communication, Flow, Op, Spec, Value


def with_ops(
    flow: Flow, values: Sequence[Value], specs: Sequence[Spec], ops: Sequence[Op], sent: Mapping[int, Communication]
) -> Flow:
    """The flow of these ops, its communications in their order."""
    graph = dataclasses.replace(flow.graph, values=tuple(values), ops=tuple(ops))
    turn = {v: i for i, op in enumerate(ops) for v in op.outputs}
    communications = tuple(sorted(sent.values(), key=lambda c: turn.get(c.result, len(ops))))
    return dataclasses.replace(flow, graph=graph, specs=tuple(specs), communications=communications)


def without_unread(flow: Flow) -> Flow:
    """Without moves to where nothing reads them any more: what rows are added to lay as they need it already."""
    graph = flow.graph
    read = {v for op in graph.ops for v in op.inputs}.union(graph.outputs, (v for tie in graph.ties for v in tie))
    if all(not op.outputs or op.outputs[0] in read for op in graph.ops if op.name in CHANGES):
        return flow
    ops: list[Op] = []
    read = {*graph.outputs, *(v for tie in graph.ties for v in tie)}
    for op in reversed(graph.ops):
        if op.name not in CHANGES or not read.isdisjoint(op.outputs):
            ops.append(op)
            read.update(op.inputs)
    kept = {v for op in ops for v in op.outputs}
    sent = {c.result: c for c in flow.communications if c.result in kept}
    return with_ops(flow, graph.values, flow.specs, ops[::-1], sent)

"""Ops that are alike: which op of a flow is which of the graph that was laid out, and what is computed once for two.

Propagation reorders ops, and drops or copies some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shardfn.graph.model import Flow, Graph, Op


def pairs(graph: Graph, laid: Graph) -> Iterator[tuple[int, Op, Op]]:
    """(index, op, the same op in `laid`) for the ops of one name, line and shapes of which both have as many."""
    there = _alike(laid)
    for key, ops in _alike(graph).items():
        others = there.get(key, [])
        if len(ops) == len(others):  # else it cannot be told which is which
            for (index, op), (_, other) in zip(ops, others, strict=True):
                yield index, op, other


def _alike(graph: Graph) -> dict[tuple[object, ...], list[tuple[int, Op]]]:
    found: dict[tuple[object, ...], list[tuple[int, Op]]] = {}
    for index, op in enumerate(graph.ops):
        shapes = tuple(graph.values[v].shape for v in (*op.inputs, *op.outputs))
        found.setdefault((op.name, op.where, shapes), []).append((index, op))
    return found


def once(flow: Flow) -> Flow:
    """Without the ops that do what an earlier one does, of the same and laid out alike: XLA computes such once.

    Collectives stay: XLA has each of them, and what follows from it. So do the function's results.
    """
    graph, specs, values = flow.graph, flow.specs, flow.graph.values
    made: dict[object, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    held = set(graph.outputs)
    ops = []
    for op in graph.ops:
        inputs, outputs = op.inputs, op.outputs
        if same and not same.keys().isdisjoint(inputs):
            inputs = tuple([same.get(v, v) for v in inputs])
            op = op.of(inputs, outputs)
        form = op.form
        if form is not None and held.isdisjoint(outputs):
            first = made.setdefault((form, inputs, specs[outputs[0]], values[outputs[0]].dtype), outputs)
            if first is not outputs:
                same.update(zip(outputs, first, strict=True))
                continue
        ops.append(op)
    if not same:
        return flow
    ties = tuple([(same.get(a, a), same.get(b, b)) for a, b in graph.ties])
    sent = tuple([dataclasses.replace(c, operand=same[c.operand]) if c.operand in same else c for c in flow.communications])
    return dataclasses.replace(flow, graph=dataclasses.replace(graph, ops=tuple(ops), ties=ties), communications=sent)

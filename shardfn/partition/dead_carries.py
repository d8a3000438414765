"""What loops carry, or branches return, though nothing reads it: XLA's simplifiers of both remove it (JAX 0.10.2)."""

from __future__ import annotations

import dataclasses

from shardfn.ir.model import Graph, Op
from shardfn.partition.rebuild import loop_conditions


def without_dead_carries(graph: Graph) -> Graph:
    """The graph whose loops carry, and branches return, only what results, conditions and side effects are computed from."""
    if not any(op.seen or op.name == "case" for op in graph.ops):
        return graph
    live = _live_values(graph)
    ops, dead = [], set[int]()
    for op in graph.ops:
        if op.name == "case" and not live.issuperset(op.outputs):
            dead.update(v for v in op.outputs if v not in live)
            kept = [i for i, v in enumerate(op.outputs) if v in live]
            branches = (branch[i] for branch in _branches(op) for i in kept)
            op = op.of((op.inputs[0], *branches), tuple(op.outputs[i] for i in kept))
        elif op.seen:
            kept = [i for i, v in enumerate(op.seen) if v in live or op.outputs[i] in live]
            if len(kept) < len(op.seen):
                dead.update(set(op.seen) | set(op.outputs))
                ends = (*kept, *(len(op.seen) + i for i in kept))
                inputs, outputs = tuple(op.inputs[i] for i in ends), tuple(op.outputs[i] for i in kept)
                op = dataclasses.replace(op, inputs=inputs, outputs=outputs, seen=tuple(op.seen[i] for i in kept))
                dead.difference_update(op.seen, op.outputs)
        ops.append(op)
    if not dead:
        return graph
    ties = tuple(tie for tie in graph.ties if dead.isdisjoint(tie))
    return dataclasses.replace(graph, ops=tuple(ops), ties=ties)


def _branches(case: Op) -> list[tuple[int, ...]]:
    """What each branch returns."""
    n = len(case.outputs)
    return [case.inputs[first : first + n] for first in range(1, len(case.inputs), n)] if n else []


def _live_values(graph: Graph) -> set[int]:
    """The values from which the results, the conditions of loops, and ops without results are computed."""
    reads: dict[int, tuple[int, ...]] = {}
    for op in graph.ops:
        if op.name == "case":
            reads.update(
                (v, (op.inputs[0], *returned)) for v, *returned in zip(op.outputs, *_branches(op), strict=True)
            )
        elif not op.seen:
            reads.update(dict.fromkeys(op.outputs, op.inputs))
    for loop in (op for op in graph.ops if op.seen):
        for entering, seen, returned, result in zip(
            loop.inputs, loop.seen, loop.inputs[len(loop.seen) :], loop.outputs, strict=False
        ):
            reads[seen] = reads[result] = (entering, returned, seen)
    stack = [
        *graph.outputs,
        *loop_conditions(graph, graph.ops),
        *(v for op in graph.ops if not op.outputs for v in op.inputs),
    ]
    live = set(stack)
    while stack:
        for v in reads.get(stack.pop(), ()):
            if v not in live:
                live.add(v)
                stack.append(v)
    return live

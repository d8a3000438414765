"""Match ops of a propagated program to ops of the original graph; propagation reorders, drops and copies ops."""

from __future__ import annotations

from collections.abc import Iterator

from shardfn.ir.model import Graph, Op


def pairs(graph: Graph, partitioned: Graph) -> Iterator[tuple[int, Op, Op]]:
    """(index, op, the same op in `partitioned`) for ops of one name, line and shapes, where both programs have equally many."""
    there = _alike(partitioned)
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

"""Match the ops of two programs of one function; propagation reorders, drops and copies ops."""

from __future__ import annotations

from collections.abc import Iterator

from shardfn.ir.model import Graph, Op


def matches(graph: Graph, other: Graph) -> Iterator[tuple[int, int]]:
    """The indices of an op and of the same one in `other`: of one name, line and shapes, where both have equally many."""
    there = _alike(other)
    for key, ops in _alike(graph).items():
        others = there.get(key, [])
        if len(ops) == len(others):  # else it cannot be told which is which
            yield from zip(ops, others, strict=True)


def pairs(graph: Graph, partitioned: Graph) -> Iterator[tuple[int, Op, Op]]:
    """(index, op, the same op in `partitioned`) for the `matches` of two programs."""
    for index, at in matches(graph, partitioned):
        yield index, graph.ops[index], partitioned.ops[at]


def _alike(graph: Graph) -> dict[tuple[object, ...], list[int]]:
    found: dict[tuple[object, ...], list[int]] = {}
    for index, op in enumerate(graph.ops):
        shapes = tuple(graph.values[v].shape for v in (*op.inputs, *op.outputs))
        found.setdefault((op.name, op.where, shapes), []).append(index)
    return found

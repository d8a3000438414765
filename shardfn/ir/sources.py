"""From which arguments of a program its values are computed, and which dimensions of arguments it looks up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardfn.ir.model import Graph


def sources_of(graph: Graph, arguments: Sequence[int]) -> dict[int, int]:
    """The arguments from which each value is computed, a bit each."""
    reached = {v: 1 << i for i, v in enumerate(arguments)}
    ties = [pair for one, other in (*graph.ties, *graph.manual) for pair in ((one, other), (other, one))]
    before = dict[int, int]()
    while reached != before:  # more than once where a loop carries values round
        before = dict(reached)
        for op in graph.ops:
            for i, out in enumerate(op.outputs):
                for v in op.inputs[i :: len(op.outputs)] if op.name == "while" else op.inputs:
                    reached[out] = reached.get(out, 0) | reached.get(v, 0)
        for one, other in ties:
            reached[one] = reached.get(one, 0) | reached.get(other, 0)
    return reached


def looked_up(graph: Graph, sources: Mapping[int, int]) -> set[tuple[int, tuple[int, ...], int]]:
    """The dimensions of arguments along which a program reads at computed places: (bit of the argument, shape, dimension).

    A lookup is a matmul with one-hot rows: it sums over this dimension of a table, which is no batch.
    """
    found = set[tuple[int, tuple[int, ...], int]]()
    for op in graph.ops:
        if op.name in ("gather", "dynamic_slice") and op.rule is not None and sources.get(op.inputs[0]):
            read = op.rule.reduction if op.name == "gather" else op.rule.replicated
            shape = tuple(graph.values[op.inputs[0]].shape)
            dims = (d for d, factors in enumerate(op.rule.operands[0]) if read.intersection(factors))
            found |= {(sources[op.inputs[0]], shape, d) for d in dims}
    return found

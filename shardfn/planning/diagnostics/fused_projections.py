"""Fused projections: matmuls with one weight for several products, which are split apart behind it.

A fused weight [d, 3·d] makes queries, keys and values in one matmul. Sharded along its last dimension, a shard holds columns of
different parts, and the split sends them. Places are followed through the program by Shardy's rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardfn.ir.model import Graph, Op
from shardfn.ir.op_traits import ELEMENTWISE, REARRANGING

REACH = 32
"""Values that are followed from a matmul: a split comes soon after, behind a bias, an activation or a reshape."""


class FusedProjection(NamedTuple):
    """A matmul whose result is split.

    Attributes:
      weight: the argument of the function, by its number.
      dim: the dimension of it that is split, behind the matmul.
      sizes: the elements of each part along it.
      ops: the ops between the matmul and the parts.
    """

    weight: int
    dim: int
    sizes: tuple[int, ...]
    ops: tuple[Op, ...]


def fused_projections(graph: Graph) -> list[FusedProjection]:
    """The fused projections of a program by arguments, those of the gradients aside."""
    program, found = _Program(graph), dict[tuple[int, int], FusedProjection]()
    for op in graph.ops:
        for side, operand in enumerate(op.inputs if op.name == "dot_general" and op.rule is not None else ()):
            if (weight := program.argument(operand)) is not None:
                for one in program.projections(op, side, weight):
                    found.setdefault((weight, one.dim), one)
    return list(found.values())


class _Program:
    """A graph with the readers of each value."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.inputs = set(graph.inputs)
        self.readers: dict[int, list[Op]] = {}
        for op in graph.ops:
            for v in dict.fromkeys(op.inputs):
                self.readers.setdefault(v, []).append(op)

    def argument(self, value: int) -> int | None:
        """The argument that a value is, or is a layer or a conversion of."""
        while value not in self.inputs:
            maker = self.graph.maker(value)
            large = [v for v in maker.inputs if self.graph.values[v].shape] if maker is not None else []
            if len(large) != 1 or maker is None or maker.name == "while":
                return None
            (value,) = large
        return value

    def projections(self, op: Op, side: int, weight: int) -> Iterator[FusedProjection]:
        """Those of a matmul that reads a weight as its operand on one side."""
        assert op.rule is not None
        shape = self.graph.values[op.inputs[side]].shape
        for dim, role in enumerate(op.rule.matmul_roles(side)):
            dims = [d for d, n in enumerate(self.graph.values[weight].shape) if n == shape[dim]]
            if role == 1 and dims:
                factor = op.rule.operands[side][dim][0]
                out = next(d for d, factors in enumerate(op.rule.results[0]) if factor in factors)
                sizes, ops = self.split(op.outputs[0], out)
                if len(sizes) > 1 < max(sizes) and sum(sizes) == shape[dim]:
                    yield FusedProjection(weight, dims[-1], sizes, ops)

    def split(self, value: int, dim: int) -> tuple[tuple[int, ...], tuple[Op, ...]]:
        """The elements of each part that a value is split into along a dimension, and the ops up to the parts."""
        start, ops = self.graph.values[value].shape[dim], list[Op]()
        parts: dict[tuple[int, int], int] = {}  # by where it begins
        waiting, seen = [(value, dim)], {(value, dim)}
        while waiting and len(seen) <= REACH:
            v, d = waiting.pop(0)
            size = self.graph.values[v].shape[d]
            for op in self.readers.get(v, ()):
                after = list(_followed(op, v, d, self.graph))
                if after:
                    ops.append(op)
                for place in after:
                    rest = self.graph.values[place[0]].shape[place[1]]
                    if op.name == "slice" and rest < size:
                        window = next(w for w in op.window_dims if w.dim == d)
                        parts[window.low, rest] = rest * start // size
                    elif place not in seen:
                        seen.add(place)
                        waiting.append(place)
        return tuple(parts[key] for key in sorted(parts)), tuple(ops)


def _followed(op: Op, value: int, dim: int, graph: Graph) -> Iterator[tuple[int, int]]:
    """The place of the outermost part of a dimension in what an op makes of a value, where it rearranges no elements of it."""
    if op.rule is None or op.name not in _KEEPING:
        return
    outermost = _outermost(op.rule.operands[op.inputs.index(value)][dim], op.rule.sizes)
    for d, factors in enumerate(op.rule.results[0]) if outermost is not None else ():
        if _outermost(factors, op.rule.sizes) == outermost:
            yield op.outputs[0], d


def _outermost(factors: Sequence[int], sizes: Sequence[int]) -> int | None:
    """The first factor that has more than one element."""
    return next((f for f in factors if sizes[f] > 1), None)


_KEEPING = ELEMENTWISE | REARRANGING | {"slice"}

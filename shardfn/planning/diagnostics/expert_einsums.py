"""Mixtures of experts that are written in einsums: where tokens go to their experts and come back.

A mask [.., tokens, experts, slots] times the tokens gives each expert its rows. Matmuls with the experts' own matrices follow.
The mask times their results gives the tokens back (Lepikhin et al. 2020, GShard). A gradient has the same matmuls again. They
are found by following the experts' dimension through the program, by Shardy's rules.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from shardfn.ir.model import Graph, Op


class Dim(NamedTuple):
    """A dimension of a value of a graph."""

    value: int
    dim: int


class ExpertEinsums(NamedTuple):
    """The einsums of a program's mixtures of experts.

    Attributes:
      ops: the matmuls with the experts' matrices, and those that bring rows to the experts and back.
      moved: the values that are brought to the experts or back, with how often: the rows of all experts.
    """

    ops: tuple[Op, ...]
    moved: dict[int, int]


def expert_einsums(graph: Graph) -> ExpertEinsums:
    """Find the einsums of mixtures of experts; empty where there are none."""
    ops, moved = dict[int, Op](), dict[int, int]()
    like = [op for op in graph.ops if len(_batch(op)) == 1 and any(len(graph.values[v].shape) == 3 for v in op.inputs)]
    program = _Program(graph if like else Graph((), (), (), (), ()))
    for op in like:
        if (sides := program.expert_matmul(op)) is None:
            continue
        rows, results = sides
        there, back = program.dispatches(rows), program.combines(results)
        if there and back:
            ops |= {each.outputs[0]: each for each in (op, *there.values(), *back.values())}
            moved |= {value: each.trips for value, each in (*there.items(), *back.items())}
    return ExpertEinsums(tuple(ops.values()), moved)


def _batch(op: Op) -> set[tuple[int, ...]]:
    """The factors of a matmul's batch dimensions."""
    if op.name != "dot_general" or op.rule is None:
        return set()
    return set.intersection(*({dim for dim in dims if dim} for dims in (*op.rule.operands, *op.rule.results)))


class _Program:
    """A graph with the producer and the consumers of each value."""

    def __init__(self, graph: Graph):
        self.values = graph.values
        self.producers = {v: op for op in graph.ops for v in op.outputs}
        self.consumers: dict[int, list[Op]] = defaultdict(list)
        for op in graph.ops:
            for v in dict.fromkeys(op.inputs):
                self.consumers[v].append(op)

    def expert_matmul(self, op: Op) -> tuple[Dim, Dim] | None:
        """The experts' dimension of the rows and of the results, if an op is a matmul of rows with the experts' matrices.

        These are a parameter with a matrix for each expert. None for any other op.
        """
        batch = _batch(op)
        weights = [v for v in op.inputs if len(self.values[v].shape) == 3 and self.is_parameter(v)]
        if len(batch) != 1 or len(weights) != 1 or op.rule is None:
            return None
        (factor,), side = batch, 1 - op.inputs.index(weights[0])
        rows, results = op.rule.operands[side], op.rule.results[0]
        return Dim(op.inputs[side], rows.index(factor)), Dim(op.outputs[0], results.index(factor))

    def is_parameter(self, value: int) -> bool:
        """Whether a value is an argument, or a slice, a transpose or an elementwise function of one alone."""
        while value in self.producers:
            sources = [v for v in self.producers[value].inputs if math.prod(self.values[v].shape) > 1]
            if len(sources) != 1:
                return False
            (value,) = sources
        return True

    def dispatches(self, rows: Dim) -> dict[int, Op]:
        """The matmuls of tokens with a mask that give the experts' rows, by result; the mask has the experts' dimension."""
        found: dict[int, Op] = {}
        waiting, seen = [rows], {rows}
        while waiting:
            at = waiting.pop()
            op = self.producers.get(at.value)
            if op is None or op.rule is None or at.value not in op.outputs[: len(op.rule.results)]:
                continue
            factor = op.rule.results[op.outputs.index(at.value)][at.dim]
            places = zip(op.inputs, op.rule.operands, strict=False)
            sides = [Dim(v, dims.index(factor)) for v, dims in places if factor in dims]
            if op.name == "dot_general" and len(sides) == 1:
                if op.rule.reduction and not self.is_parameter(sides[0].value):
                    found[at.value] = op
            elif op.name != "dot_general" or self.expert_matmul(op):
                waiting += [side for side in sides if factor and side not in seen]
                seen.update(sides)
        return found

    def combines(self, results: Dim) -> dict[int, Op]:
        """The matmuls of the experts' results with a mask that sum over the experts' dimension for each token, by operand."""
        found: dict[int, Op] = {}
        waiting, seen = [results], {results}
        while waiting:
            at = waiting.pop()
            for op in self.consumers[at.value]:
                side = op.inputs.index(at.value)
                if op.rule is None or side >= len(op.rule.operands) or not (factor := op.rule.operands[side][at.dim]):
                    continue
                places = zip(op.outputs, op.rule.results, strict=False)
                sides = [Dim(v, dims.index(factor)) for v, dims in places if factor in dims]
                if op.name == "dot_general" and not sides:
                    if not self.is_parameter(op.inputs[1 - side]):
                        found[at.value] = op
                elif op.name != "dot_general" or self.expert_matmul(op):
                    waiting += [each for each in sides if each not in seen]
                    seen.update(sides)
        return found

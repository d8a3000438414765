"""Rotations of what was rotated or concatenated, in one kernel with a normalization (XLA on GPU before JAX 0.12).

XLA writes a shard of a rotation as a concatenation of its own rows and those of a neighbour. A softmax, or rows minus their
mean, becomes one kernel by Triton with the ops before and behind it. Where a concatenation reads another one in such a kernel,
XLA counts the rows of the inner one wrongly: it reads other rows, or does not compile (jax-ml/jax 39486 and 40588, found in
JAX 0.10.2). With an optimization barrier between them they are in kernels of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.ir.model import Graph, Op, is_gpu
from shardfn.ir.op_traits import CHEAP, EXPENSIVE, SLICES, VIEWS
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.rewrite import barred, bind_one
from shardfn.movement import Turn, rotated, turns
from shardfn.planning.workarounds.uneven_movement import Movement, movements_of_equation


def nested_concatenations(partitioned: PartitionedProgram, has_residuals: bool) -> list[tuple[Op, Turn | None]]:
    """The rotations and concatenations that may read another one in a kernel with a normalization, and the rotation that each
    is. One of the two is a rotation: the gradient of one is another, in JAX a sum of pads. Residuals may be rotated."""
    graph, found = partitioned.graph, list[tuple[Op, Turn | None]]()
    joins = [op for op in graph.ops if op.name in _JOINS]
    turned = {op.outputs[0]: Turn(w.dim, w.low) for op in joins if op.name == "rotate" for w in op.window_dims}
    if not (IS_BEFORE_JAX_0_12 and is_gpu(partitioned.platform) and turned and len(joins) + has_residuals > 1):
        return found
    normalized = _normalizations(graph)
    before = _before(graph, lambda op: not normalized.isdisjoint(op.outputs))
    joined = dict.fromkeys(graph.inputs if has_residuals else (), True)
    """By value in whose kernel there is a concatenation, whether one of them is a rotation."""
    for op in graph.ops:
        if op.name not in _FUSED:
            continue
        below = [joined[v] for v in op.inputs if v in joined]
        if not normalized.isdisjoint(op.inputs):
            normalized.update(op.outputs)
        if op.name in _JOINS:
            (value,) = op.outputs
            joined[value] = value in turned or any(below)
            if below and joined[value] and (value in before or value in normalized):
                found.append((op, turned.get(value)))
        elif below:
            joined.update(dict.fromkeys(op.outputs, any(below)))
    return found


def _normalizations(graph: Graph) -> set[int]:
    """The results of reductions, one for each row, that are broadcast to the rows again."""
    spread = _before(graph, lambda op: op.name == "broadcast_in_dim")
    return {v for op in graph.ops if op.name == "reduce" for v in op.outputs if graph.values[v].shape and v in spread}


def _before(graph: Graph, is_reader: Callable[[Op], bool]) -> set[int]:
    """The values that may be computed in the kernels of some ops."""
    found: set[int] = set()
    for op in reversed(graph.ops):
        if is_reader(op) or (op.name in _FUSED and not found.isdisjoint(op.outputs)):
            found.update(op.inputs)
    return found


_JOINS = frozenset({"rotate", "concatenate"})
_FUSED = ((CHEAP | EXPENSIVE | VIEWS | SLICES) - {"optimization_barrier"}) | {"reduce"}


def turned_movements(eqn: Any) -> list[tuple[Movement, Turn | None]]:
    """The movements that an equation may be, each with the rotations that it makes."""
    return [*itertools.product(movements_of_equation(eqn), turns(eqn) or [None])]


def separated(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The results of a rotation or concatenation that reads no other in its kernel; rotations along several dimensions are made
    one by one."""
    apart, each = [barred(x) for x in inputs], turns(eqn)
    if len(each) < 2:
        return bind_one(eqn, apart)
    (x,) = apart
    for number, turn in enumerate(each):
        x = rotated(barred(x) if number else x, -turn.first, turn.dim)
    return [x]

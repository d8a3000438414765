"""XLA's simplifications after partitioning: single-iteration loops, trivial matmuls, no-ops, common subexpressions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.ir.model import Op, PartitionedProgram, Value, WindowDim
from shardfn.ir.op_traits import RESHARDING_OPS


def simplify(partitioned: PartitionedProgram) -> PartitionedProgram:
    """The program as XLA simplifies it.

    - Loops with one iteration are inlined; on CPU before JAX 0.12 so are optimization barriers.
    - Slices of everything and sums with zeros become views.
    - A matmul whose contracting dimensions have size 1 on each device becomes a multiplication.
    - Of ops that compute the same, the first stays; constraints that change no sharding are dropped.
    """
    return _eliminate_common(_simplify_ops(_drop_barriers(_inline_single_iterations(partitioned))))


def _substituted(partitioned: PartitionedProgram, ops: Sequence[Op], same: Mapping[int, int]) -> PartitionedProgram:
    """The program with these ops, in which `same` says which value stands for another one."""
    graph = partitioned.graph
    ties = tuple([(same.get(a, a), same.get(b, b)) for a, b in graph.ties])
    outputs = tuple([same.get(v, v) for v in graph.outputs])
    sent = tuple([replace(c, operand=same[c.operand]) if c.operand in same else c for c in partitioned.communications])
    return replace(partitioned, graph=replace(graph, ops=tuple(ops), ties=ties, outputs=outputs), communications=sent)


# ---- barriers


def _drop_barriers(partitioned: PartitionedProgram) -> PartitionedProgram:
    """Drop optimization barriers: XLA's CPU backend does so before JAX 0.12."""
    graph, specs = partitioned.graph, partitioned.specs
    same: dict[int, int] = {}
    ops = []
    is_open = partitioned.platform == "cpu" and IS_BEFORE_JAX_0_12
    for op in graph.ops if is_open else ():
        inputs = tuple([same.get(v, v) for v in op.inputs]) if same else op.inputs
        if op.name == "optimization_barrier" and all(
            specs[a] == specs[b] for a, b in zip(inputs, op.outputs, strict=True)
        ):
            same.update(zip(op.outputs, inputs, strict=True))
        else:
            ops.append(op if inputs == op.inputs else op.of(inputs, op.outputs))
    if not same:
        return partitioned
    return _substituted(partitioned, ops, same)


# ---- loops that run once


def _inline_single_iterations(partitioned: PartitionedProgram) -> PartitionedProgram:
    graph = partitioned.graph
    loops = [op for op in graph.ops if op.name == "while" and op.outputs]
    if not loops:
        return partitioned
    maker = {v: op for op in graph.ops for v in op.outputs}
    same: dict[int, int] = {}
    regions: dict[int, int] = {}
    for loop in loops:
        n = len(loop.outputs)
        inside = [maker[v] for v in loop.inputs[n:] if v in maker and maker[v].form != loop.form]
        seen = _seen(graph.ties, loop)
        if seen is None or not inside or loop.where in graph.uncounted or any(op.trips != loop.trips for op in inside):
            continue
        if any(partitioned.specs[v] != partitioned.specs[given] for given, v in seen):
            continue
        same.update({v: given for given, v in seen})
        same.update(zip(loop.outputs, loop.inputs[n:], strict=True))
        regions.update({op.form[1]: loop.form[1] for op in inside if op.form and loop.form})
    if not same:
        return partitioned

    def first(v: int) -> int:
        while v in same:
            v = same[v]
        return v

    def region(r: int) -> int:
        while r in regions:
            r = regions[r]
        return r

    ops = []
    for op in graph.ops:
        if op.name == "while" and op.outputs and op.outputs[0] in same:
            continue
        op = op.of(tuple(map(first, op.inputs)), op.outputs)
        if op.form and op.form[1] in regions:
            op = replace(op, form=(op.form[0], region(op.form[1])))
        ops.append(op)
    ties = tuple(tie for a, b in graph.ties if (tie := (first(a), first(b)))[0] != tie[1])
    sent = tuple(replace(c, operand=first(c.operand)) for c in partitioned.communications)
    graph = replace(graph, ops=tuple(ops), ties=ties, outputs=tuple(map(first, graph.outputs)))
    return replace(partitioned, graph=graph, communications=sent)


def _seen(ties: tuple[tuple[int, int], ...], loop: Op) -> list[tuple[int, int]] | None:
    """Each input of a loop with the body's argument for it; None where these cannot be told. What the loop does not
    change is left out.
    """
    n = len(loop.outputs)
    at = next((i for i, (_, v) in enumerate(ties) if v == loop.outputs[0]), None)
    carried = [k for k in range(n) if loop.inputs[k] != loop.inputs[n + k]]
    if at is None or at < len(carried) or [b for _, b in ties[at : at + n]] != list(loop.outputs):
        return None
    back = ties[at - len(carried) : at]
    if [b for _, b in back] != [ties[at + k][0] for k in carried]:
        return None
    return [(loop.inputs[k], a) for k, (a, _) in zip(carried, back, strict=True)]


# ---- ops that are simpler than their names


def _simplify_ops(partitioned: PartitionedProgram) -> PartitionedProgram:
    values, devices = partitioned.graph.values, math.prod(partitioned.axes.values())
    ops = list(partitioned.graph.ops)
    for i, op in enumerate(ops):
        if op.name == "dot_general":
            depth = math.prod([values[op.inputs[side]].shape[d] for side, d in op.reduced])
            if depth <= devices and all(partitioned.local_shape(op.inputs[side])[d] == 1 for side, d in op.reduced):
                ops[i] = replace(op, name="multiply", reduced=())
        elif op.name == "reduce" and len(op.outputs) == 1 and op.reduced:
            if all(values[op.inputs[side]].shape[d] == 1 for side, d in op.reduced):
                ops[i] = replace(op, name="reshape", inputs=op.inputs[:1], rule=None, reduced=())
        elif op.same >= 0:
            part = op.inputs[op.same]
            if values[part] == values[op.outputs[0]] and partitioned.specs[part] == partitioned.specs[op.outputs[0]]:
                ops[i] = replace(op, name="reshape", inputs=(part,), rule=None)
        elif op.name == "pad" and 0 in values[op.inputs[0]].shape:
            ops[i] = replace(op, name="broadcast_in_dim", inputs=op.inputs[1:], rule=None, window_dims=())
        elif op.name == "pad" and all(_takes(window, values, op) for window in op.window_dims):
            part, result = op.inputs[0], op.outputs[0]
            is_all = values[part] == values[result] and partitioned.specs[part] == partitioned.specs[result]
            ops[i] = replace(op, name="reshape" if is_all else "slice", inputs=op.inputs[:1], rule=None, window_dims=())
        elif (
            op.name == "concatenate"
            and (parts := [v for v in op.inputs if 0 not in values[v].shape])
            and (len(parts) < len(op.inputs))
        ):
            is_all = len(parts) == 1 and partitioned.specs[parts[0]] == partitioned.specs[op.outputs[0]]
            ops[i] = replace(op, name="reshape" if is_all else op.name, inputs=tuple(parts), rule=None, window_dims=())
        elif op.name in _PARTS:
            part = op.inputs[_PARTS[op.name]]
            is_all = values[part].shape == values[op.outputs[0]].shape == values[op.inputs[0]].shape
            if is_all and partitioned.specs[part] == partitioned.specs[op.outputs[0]]:
                ops[i] = replace(op, name="reshape", inputs=(part,), rule=None, window_dims=())
    return replace(partitioned, graph=replace(partitioned.graph, ops=tuple(ops)))


def _takes(window: WindowDim, values: Sequence[Value], op: Op) -> bool:
    """Whether a pad adds nothing along a dimension."""
    before, after = values[op.inputs[0]].shape[window.dim], values[op.outputs[0]].shape[window.out_dim]
    return window.spacing == 1 and window.low >= 0 and window.low + after <= before


_PARTS = {"dynamic_slice": 0, "dynamic_update_slice": 1}
"""Ops that read or write a part, and the operand that is the result where the part is everything."""


# ---- what is computed twice


def _eliminate_common(partitioned: PartitionedProgram) -> PartitionedProgram:
    """Common subexpression elimination over ops with equal operands and shardings, and removal of constraints without
    effect.

    Collectives stay, as do the constraints that ask for them and the program's results.
    """
    graph, specs, values = partitioned.graph, partitioned.specs, partitioned.graph.values
    made: dict[object, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    held, changed = set(graph.outputs), set()
    ops = []
    for op in graph.ops:
        inputs, outputs = op.inputs, op.outputs
        if same and not same.keys().isdisjoint(inputs):
            inputs = tuple([same.get(v, v) for v in inputs])
            op = op.of(inputs, outputs)
        if op.name in RESHARDING_OPS:
            changed.update(outputs)
        is_idle = op.name == "reshard" and specs[inputs[0]] == specs[outputs[0]] and inputs[0] not in changed
        if is_idle and held.isdisjoint(outputs):
            same[outputs[0]] = inputs[0]
            continue
        form = op.form
        if form is not None and form[0] >= 0 and held.isdisjoint(outputs):
            first = made.setdefault((form, inputs, specs[outputs[0]], values[outputs[0]].dtype), outputs)
            if first is not outputs:
                same.update(zip(outputs, first, strict=True))
                continue
        ops.append(op)
    if not same:
        return partitioned
    return _substituted(partitioned, ops, same)

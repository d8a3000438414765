"""XLA's simplifications after partitioning: single-iteration loops, trivial matmuls, no-ops, common subexpressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.ir.model import Op, Value, WindowDim, trips_of
from shardfn.ir.op_traits import RESHARDING_OPS
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.loop_invariants import hoist_invariants
from shardfn.partition.rebuild import before_loops, resolved_chains


def simplify(partitioned: PartitionedProgram) -> PartitionedProgram:
    """The program as XLA simplifies it.

    - Loops with one iteration are inlined; on CPU before JAX 0.12 so are optimization barriers.
    - Slices of everything and sums with zeros become views.
    - A matmul whose contracting dimensions have size 1 on each device becomes a multiplication.
    - Loop invariants are computed before their loops.
    - Of ops that compute the same, the first stays; constraints that change no sharding are dropped.
    """
    simpler = _inline_single_iterations(partitioned)
    ops = tuple([_simplified(simpler, op) for op in simpler.graph.ops])
    return _eliminate_common(hoist_invariants(replace(simpler, graph=replace(simpler.graph, ops=ops))))


def _substituted(partitioned: PartitionedProgram, ops: Sequence[Op], same: Mapping[int, int]) -> PartitionedProgram:
    """The program with these ops, in which `same` says which value stands for another one; the ops read the others already."""
    if not same:
        return partitioned

    def first(values: Iterable[int]) -> tuple[int, ...]:
        return tuple([same.get(v, v) for v in values])

    graph = replace(
        partitioned.graph,
        ops=tuple(ops),
        outputs=first(partitioned.graph.outputs),
        ties=tuple((a, b) for a, b in map(first, partitioned.graph.ties) if a != b),
    )
    sent = tuple([replace(c, operand=same[c.operand]) if c.operand in same else c for c in partitioned.communications])
    return replace(partitioned, graph=graph, communications=sent)


def _inline_single_iterations(partitioned: PartitionedProgram) -> PartitionedProgram:
    graph, specs = partitioned.graph, partitioned.specs
    same: dict[int, int] = {}
    regions: dict[int, int] = {}
    for loop in graph.ops:
        if not loop.seen:
            continue
        returned = loop.inputs[len(loop.seen) :]
        inside = [maker for v in returned if (maker := graph.maker(v)) and maker.form != loop.form]
        if not inside or loop.where in graph.uncounted or any(op.trips != loop.trips for op in inside):
            continue
        if all(specs[seen] == specs[operand] for operand, seen, _, _ in loop.carries):
            same.update({seen: operand for operand, seen, _, _ in loop.carries})
            same.update(zip(loop.outputs, returned, strict=True))
            regions.update({op.form[1]: loop.form[1] for op in inside if op.form and loop.form})
    if not same:
        return partitioned
    same, regions = resolved_chains(same), resolved_chains(regions)
    ops = []
    for op in graph.ops:
        if op.form and op.form[1] in regions:
            op = replace(op, form=(op.form[0], regions[op.form[1]]))
        if same.keys().isdisjoint(op.outputs):
            ops.append(op.of(tuple([same.get(v, v) for v in op.inputs])))
    return _substituted(partitioned, before_loops(_makers_first(ops), trips_of(graph)), same)


def _makers_first(ops: Sequence[Op]) -> list[Op]:
    """The ops in their order, but each after the ops that make its operands.

    The partitioner emits the reshard of a loop's initial carry after the body, just before the `while`.
    """
    makers = {v: i for i, op in enumerate(ops) for v in op.outputs}
    found: dict[int, None] = {}

    def place(i: int) -> None:
        for v in ops[i].inputs:
            if makers.get(v, -1) > i and makers[v] not in found:
                place(makers[v])
        found[i] = None

    for i in range(len(ops)):
        if i not in found:
            place(i)
    return [ops[i] for i in found]


def _simplified(partitioned: PartitionedProgram, op: Op) -> Op:
    """The op, or a simpler one that does the same."""
    values = partitioned.graph.values
    if op.name == "dot_general":
        if _is_summed_over_ones(op, partitioned.local_shape):
            return replace(op, name="multiply", reduced=())
    elif op.name == "reduce" and len(op.outputs) == 1 and op.reduced:
        if _is_summed_over_ones(op, lambda v: values[v].shape):
            return _simpler(op, "reshape", op.inputs[0])
    elif op.same >= 0:
        if _is_result(partitioned, op, op.inputs[op.same]):
            return _simpler(op, "reshape", op.inputs[op.same])
    elif op.name == "pad":
        if 0 in values[op.inputs[0]].shape:
            return _simpler(op, "broadcast_in_dim", *op.inputs[1:])
        if all(_adds_nothing(window, values, op) for window in op.window_dims):
            is_whole = _is_result(partitioned, op, op.inputs[0])
            return _simpler(op, "reshape", op.inputs[0]) if is_whole else _of_operands(op, "slice", [0])
    elif op.name == "concatenate":
        parts = [i for i, v in enumerate(op.inputs) if 0 not in values[v].shape]
        if 0 < len(parts) < len(op.inputs):
            is_one = len(parts) == 1 and _is_result(partitioned, op, op.inputs[parts[0]])
            return _simpler(op, "reshape", op.inputs[parts[0]]) if is_one else _of_operands(op, op.name, parts)
    elif op.name in _PARTS:
        part = op.inputs[_PARTS[op.name]]
        if _is_result(partitioned, op, part) and values[part].shape == values[op.inputs[0]].shape:
            return _simpler(op, "reshape", part)
    return op


def _simpler(op: Op, name: str, *inputs: int) -> Op:
    return replace(op, name=name, inputs=inputs, rule=None, reduced=(), window_dims=())


def _of_operands(op: Op, name: str, kept: Sequence[int]) -> Op:
    """An op of some operands of another, that moves what that one moves."""
    rule = None if op.rule is None else replace(op.rule, operands=tuple(op.rule.operands[i] for i in kept))
    return replace(op, name=name, inputs=tuple(op.inputs[i] for i in kept), rule=rule)


def _is_result(partitioned: PartitionedProgram, op: Op, v: int) -> bool:
    """Whether a value has the shape, the dtype and the sharding of what an op makes."""
    values, specs, (result,) = partitioned.graph.values, partitioned.specs, op.outputs
    return values[v] == values[result] and specs[v] == specs[result]


def _is_summed_over_ones(op: Op, sizes: Callable[[int], tuple[int, ...]]) -> bool:
    return all([sizes(op.inputs[side])[d] == 1 for side, d in op.reduced])


def _adds_nothing(window: WindowDim, values: Sequence[Value], op: Op) -> bool:
    """Whether a pad adds nothing along a dimension."""
    before, after = values[op.inputs[0]].shape[window.dim], values[op.outputs[0]].shape[window.out_dim]
    return window.spacing == 1 and window.low >= 0 and window.low + after <= before


_PARTS = {"dynamic_slice": 0, "dynamic_update_slice": 1}
"""Ops that read or write a part, and the operand that is the result where the part is everything."""


def _eliminate_common(partitioned: PartitionedProgram) -> PartitionedProgram:
    """Common subexpression elimination over ops with equal operands and shardings, and removal of barriers that XLA's
    CPU backend ignores and of constraints without effect.

    Collectives stay, as do the constraints that ask for them and the program's results.
    """
    graph, specs, values = partitioned.graph, partitioned.specs, partitioned.graph.values
    ignored = {"optimization_barrier"} if partitioned.platform == "cpu" and IS_BEFORE_JAX_0_12 else ()
    made: dict[object, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    held, changed = set(graph.outputs), set()
    ops = []
    for op in graph.ops:
        if not same.keys().isdisjoint(op.inputs):
            op = op.of(tuple([same.get(v, v) for v in op.inputs]))
        inputs, outputs = op.inputs, op.outputs
        if op.name in RESHARDING_OPS:
            changed.update(outputs)
        is_idle = op.name == "reshard" and inputs[0] not in changed and held.isdisjoint(outputs)
        if (is_idle or op.name in ignored) and [specs[v] for v in inputs] == [specs[v] for v in outputs]:
            same.update(zip(outputs, inputs, strict=True))
            continue
        if op.form is not None and op.form[0] >= 0 and held.isdisjoint(outputs):
            first = made.setdefault((op.form, inputs, specs[outputs[0]], values[outputs[0]].dtype), outputs)
            if first is not outputs:
                same.update(zip(outputs, first, strict=True))
                continue
        ops.append(op)
    return _substituted(partitioned, ops, same)

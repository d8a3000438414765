"""Reductions that XLA combines on TPUs and GPUs, where one collective replaces several.

Rows that are scattered into zeros and then added to an array are scattered into that array. Partial sums are added
before they are all-reduced. XLA's CPU backend runs neither pass.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from shardfn.ir.extra_rules import elementwise_rule
from shardfn.ir.model import Graph, Op, Spec, Value
from shardfn.ir.partitioned import Communication, PartitionedProgram
from shardfn.partition.rebuild import ProgramBuilder, live_ops, live_out_values


def scatter_into_addend(ops: Sequence[Op], filled: Collection[int], outputs: Collection[int]) -> list[Op]:
    """Scatter into the addend: `zeros.at[rows].add(x) + y` becomes `y.at[rows].add(x)`, before partitioning.

    Args:
      ops: the ops in program order.
      filled: broadcasts of a scalar.
      outputs: the results of the program.
    """
    made = {op.outputs[0]: op for op in ops if op.name == "scatter" and len(op.inputs) == 3}
    found = list(ops)
    if not made:
        return found
    count = collections.Counter(v for op in ops for v in op.inputs)
    count.update(outputs)
    at = {op.outputs[0]: i for i, op in enumerate(ops) if op.outputs and op.outputs[0] in made}
    transposes = {op.outputs[0]: op for op in ops if op.name == "transpose"}
    for i, op in enumerate(ops):
        if op.name != "add" or len(made.keys() & op.inputs) != 1:
            continue
        rows, other = op.inputs if op.inputs[0] in made else op.inputs[::-1]
        scatter = made[rows]
        if scatter.combines == "add" and scatter.inputs[0] in filled and count[rows] == 1:
            found[i] = scatter.of((_untransposed(other, transposes), *scatter.inputs[1:]), op.outputs)
            found[at[rows]] = dataclasses.replace(scatter, name="", outputs=())
    return [op for op in found if op.name]


def _untransposed(value: int, transposes: Mapping[int, Op]) -> int:
    """The value before two transposes that cancel out."""
    last = transposes.get(value)
    first = transposes.get(last.inputs[0]) if last else None
    if last is None or first is None or last.rule is None or first.rule is None:
        return value
    there, back = (tuple(map(r.operands[0].index, r.results[0])) for r in (first.rule, last.rule))
    return first.inputs[0] if [there[d] for d in back] == sorted(there) else value


_SUMS = frozenset({"all_reduce", "reduce_scatter"})
_MOVED = frozenset({"transpose", "reshape"})
"""Ops that XLA moves behind an addition of which both operands have the same, or folds into the matmul that they read."""


def combine_partial_sums(partitioned: PartitionedProgram) -> PartitionedProgram:
    """Add partial sums before they are all-reduced, where both would be reduced over the same devices.

    XLA's all-reduce reassociation does so for sums that nothing else reads. Both may be transposed or reshaped in one way, as the
    gradient of a weight is that `x @ w` reads.
    """
    graph, builder = partitioned.graph, ProgramBuilder(partitioned)
    values, specs = builder.values, builder.specs
    sent = {c.result: c for c in partitioned.communications}
    at = {
        v: i
        for i, op in enumerate(graph.ops)
        for v in op.outputs
        if op.name in _SUMS and v in sent and not sent[v].matmul_permutes
    }
    if not at:
        return partitioned
    count = _readers(graph)
    sharded: dict[int, int] = {}
    """The sum behind a value that is a slice of it, or the sum with a sharding constraint, or a view of one of these."""
    views: dict[int, tuple[tuple[int, Op], ...]] = {}
    """The last transposes and reshapes of such a value, each with its position."""
    for i, op in enumerate(graph.ops):
        if len(op.inputs) == 1 and (v := sharded.get(op.inputs[0], op.inputs[0])) in at and count[v] == 1:
            is_held = op.name == "reshard" and op.outputs[0] not in sent and specs[op.outputs[0]] == specs[op.inputs[0]]
            is_alone = count[op.inputs[0]] == 1
            if op.name in _MOVED and is_alone:
                views[op.outputs[0]] = (*views.get(op.inputs[0], ()), (i, op))
            if op.name == "all_slice" or (is_alone and (is_held or op.name in _MOVED)):
                sharded[op.outputs[0]] = v
    ops: list[tuple[Op, ...]] = [(op,) for op in graph.ops]
    for i, op in enumerate(graph.ops):
        if (
            op.name != "add"
            or len({*op.inputs}) != 2
            or any(count[v] != 1 or count[sharded.get(v, v)] != 1 for v in op.inputs)
        ):
            continue
        pair = [sent[w] if (w := sharded.get(v, v)) in at else None for v in op.inputs]
        first, second = pair
        if not first or not second or first.trips != op.trips or specs[op.inputs[0]] != specs[op.inputs[1]]:
            continue
        if _kind(values, specs, first) != _kind(values, specs, second):
            continue
        through, other = ([of for _, of in views.get(v, ())] for v in op.inputs)
        if [_form(values, specs, of) for of in through] != [_form(values, specs, of) for of in other]:
            continue
        (result,) = op.outputs
        partial, full = builder.like(first.operand), builder.like(first.result)
        for v, c in zip(op.inputs, (first, second), strict=True):
            for where in (at.pop(c.result), *(where for where, _ in views.get(v, ()))):
                ops[where] = tuple(of for of in ops[where] if of.name == "add")  # which was combined before
            del sent[c.result]
        seen = (*(builder.like(of.inputs[0]) for of in through), result)
        moved = tuple(of.of(seen[n : n + 1], seen[n + 1 : n + 2]) for n, of in enumerate(through))
        added = op.of((first.operand, second.operand), (partial,))
        if through:  # it adds arrays of another shape
            added = dataclasses.replace(
                added, rule=elementwise_rule([values[v] for v in added.inputs], [values[partial]])
            )
        ops[i] = (
            added,
            Op(first.kind.replace("-", "_"), (partial,), (full,), None, op.trips, first.where),
            Op("all_slice", (full,), (seen[0],), None, op.trips, first.where),
            *moved,
        )
        sent[full] = dataclasses.replace(first, operand=partial, result=full)
        at[full], sharded[result], count[full], views[result] = i, full, 1, tuple((i, of) for of in moved)
    if len(values) == len(graph.values):
        return partitioned
    every = [op for some in ops for op in some]
    builder.ops = live_ops(every, live_out_values(graph), lambda op: op.name not in ("all_slice", "reshard"))
    return builder.built(sent)


def combined_matmul_counts(graph: Graph) -> dict[int, int]:
    """By op index: how many matmuls, with this one, are only added to each other.

    It is `combine_partial_sums` before partitioning, for the case that each matmul leaves partial sums.
    """
    count = _readers(graph)
    added: dict[int, tuple[int, ...]] = {}  # by value: the matmuls of which it is the sum
    views: dict[int, tuple[object, ...]] = {}  # and how it is transposed and reshaped
    for i, op in enumerate(graph.ops):
        if op.name == "dot_general":
            added[op.outputs[0]] = (i,)
            continue
        if not op.inputs or not all(v in added and count[v] == 1 for v in op.inputs):
            continue
        first, form = views.get(op.inputs[0], ()), (op.name, op.rule)
        if op.name in _MOVED:
            added[op.outputs[0]], views[op.outputs[0]] = added.pop(op.inputs[0]), (*first, form)
        elif op.name == "add" and len({*op.inputs}) == 2 and first == views.get(op.inputs[1], ()):
            added[op.outputs[0]] = tuple(j for v in op.inputs for j in added.pop(v))
            views[op.outputs[0]] = first
    return {i: len(of) for of in added.values() if len(of) > 1 for i in of}


def _readers(graph: Graph) -> collections.Counter[int]:
    """How often each value is read; each occurrence in `live_out_values` counts too."""
    count = collections.Counter(v for op in graph.ops for v in op.inputs)
    count.update(live_out_values(graph))
    return count


def _form(values: Sequence[Value], specs: Sequence[Spec], view: Op) -> object:
    """What two views must have in common to be moved behind an addition."""
    ends = (*view.inputs, *view.outputs)
    return view.name, view.rule, [(values[v], specs[v]) for v in ends]


def _kind(values: Sequence[Value], specs: Sequence[Spec], c: Communication) -> object:
    """What two reductions must have in common to be combined."""
    return c.kind, c.axes, values[c.operand], specs[c.operand], specs[c.result]

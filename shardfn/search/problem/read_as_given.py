"""Constraints that make ops read an operand in the sharding that the user gave it for a function inside.

A constraint on an operand alone does not decide how XLA computes the op: where its result is wanted in another sharding, the
partitioner reshards the operand once more. A constraint on the result, in the sharding that follows from the operands,
prevents that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardfn.ir.model import Graph, InnerSpec, Op, OpConstraint, ShardingRule, Spec, axis_name
from shardfn.ir.partitioned import PartitionedProgram


def constraints_as_given(
    graph: Graph, partitioned: PartitionedProgram, given: Mapping[int, InnerSpec], can_constrain: Collection[int]
) -> dict[int, OpConstraint]:
    """Constraints of the ops, by index, that a partitioned program lets read an operand otherwise than given.

    Args:
      graph: the function.
      partitioned: the function as partitioned.
      given: shardings of the operands, by value.
      can_constrain: the ops that can get a constraint, by index.
    """
    readers = {
        op.site: index
        for index, op in enumerate(graph.ops)
        if index in can_constrain and not given.keys().isdisjoint(op.inputs)
    }
    found: dict[int, OpConstraint] = {}
    for there in partitioned.graph.ops:
        index = readers.get(there.site)
        if index is None:
            continue
        op = graph.ops[index]
        read = [partitioned.specs[v] for v in there.inputs[: len(op.inputs)]]  # after its operands come halos
        if op.rule is None or there.rule is None or _reads_as_given(op, read, given):
            continue
        results = tuple(partitioned.specs[v] for v in there.outputs)
        found[index] = OpConstraint((None,) * len(op.inputs), _results_as_given(op, op.rule, results, given))
    return found


def _reads_as_given(op: Op, read: list[Spec], given: Mapping[int, InnerSpec]) -> bool:
    return all(
        axes is None or axes == own
        for value, spec in zip(op.inputs, read, strict=True)
        if value in given
        for axes, own in zip(given[value], spec, strict=True)
    )


def _results_as_given(
    op: Op, rule: ShardingRule, results: tuple[Spec, ...], given: Mapping[int, InnerSpec]
) -> tuple[Spec, ...]:
    """The shardings of an op's results where the factors of given operands are sharded as there, and nothing else along their
    axes. Of two operands that are given along one axis, the first has it."""
    fixed: dict[int, tuple[str, ...]] = {}
    taken: set[str] = set()
    for value, dims in zip(op.inputs, rule.operands, strict=True):
        for factors, axes in zip(dims, given.get(value, ()), strict=False):
            if axes is not None and len(factors) == 1 and factors[0] not in fixed and taken.isdisjoint(axes):
                fixed[factors[0]] = axes
                taken.update(axes)

    def dim(factors: tuple[int, ...], own: tuple[str, ...]) -> tuple[str, ...]:
        if len(factors) == 1 and factors[0] in fixed:
            return fixed[factors[0]]
        return tuple(axis for axis in own if axis_name(axis) == axis and axis not in taken)  # a part cannot be named

    return tuple(
        tuple(dim(factors, own) for factors, own in zip(dims, spec, strict=True))
        for dims, spec in zip(rule.results, results, strict=True)
    )

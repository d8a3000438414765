"""Sharding rules for the ops that Shardy has none for, in Shardy's form; `OpTraits.sharding_rule` names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardfn.ir.model import ShardingRule, Value
from shardfn.ir.op_traits import OP_TRAITS


def batch_rule(inputs: Sequence[Value], outputs: Sequence[Value]) -> ShardingRule | None:
    """All dimensions but the last are independent. The last needs replication (top_k); where the result is as long, Shardy
    passes its sharding on all the same."""
    rank = len(inputs[0].shape)
    if any(len(v.shape) != rank for v in (*inputs, *outputs)) or rank == 0:
        return None
    if all(v.shape == inputs[0].shape for v in outputs):
        return elementwise_rule(inputs, outputs)
    last = rank - 1 + len(outputs)
    dims = [tuple((d,) for d in range(rank - 1))] * (len(inputs) + len(outputs))
    ends = [*(rank - 1 for _ in inputs), *(rank + i for i in range(len(outputs)))]
    mapped = tuple((*d, (e,)) for d, e in zip(dims, ends, strict=True))
    sizes = (*inputs[0].shape[:-1], inputs[0].shape[-1], *(v.shape[-1] for v in outputs))
    return ShardingRule(
        mapped[: len(inputs)], mapped[len(inputs) :], sizes, replicated=frozenset(range(rank - 1, last + 1))
    )


def elementwise_rule(inputs: Sequence[Value], outputs: Sequence[Value]) -> ShardingRule | None:
    """Every dimension is independent."""
    shapes = {v.shape for v in (*inputs, *outputs)}
    if len(shapes) != 1:
        return None
    shape = shapes.pop()
    dims = tuple((d,) for d in range(len(shape)))
    return ShardingRule((dims,) * len(inputs), (dims,) * len(outputs), shape)


def pairwise_rule(inputs: Sequence[Value], outputs: Sequence[Value]) -> ShardingRule | None:
    """Result i is operand i (optimization_barrier)."""
    if [v.shape for v in inputs] != [v.shape for v in outputs]:
        return None
    rows: list[tuple[tuple[int, ...], ...]] = []
    sizes: list[int] = []
    for value in inputs:
        rows.append(tuple((len(sizes) + d,) for d in range(len(value.shape))))
        sizes.extend(value.shape)
    return ShardingRule(tuple(rows), tuple(rows), tuple(sizes))


def empty_rule(inputs: Sequence[Value], outputs: Sequence[Value]) -> ShardingRule | None:
    """No dimension corresponds to another one, where there are no elements (a reshape of such an array)."""
    if any(0 not in v.shape for v in (*inputs, *outputs)):
        return None
    shapes = [v.shape for v in (*inputs, *outputs)]
    starts = [sum(map(len, shapes[:i])) for i in range(len(shapes))]
    dims = [tuple((start + d,) for d in range(len(shape))) for start, shape in zip(starts, shapes, strict=True)]
    sizes = tuple(n for shape in shapes for n in shape)
    n = len(inputs)
    return ShardingRule(tuple(dims[:n]), tuple(dims[n:]), sizes, replicated=frozenset(range(len(sizes))))


_RULES = {rule.__name__: rule for rule in (batch_rule, elementwise_rule, empty_rule, pairwise_rule)}

MISSING_RULES: dict[str, Callable[[Sequence[Value], Sequence[Value]], ShardingRule | None]] = {
    name: _RULES[row.sharding_rule] for name, row in OP_TRAITS.items() if row.sharding_rule
}

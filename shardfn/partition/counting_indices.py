"""Gathers and scatters of which a column of the index counts along a dimension: `x[jnp.arange(len(i)), i]`.

Row `n` of the index then needs row `n` of the table alone. XLA on GPUs and TPUs sees it and keeps both sharded alike; on CPU the
column is hidden behind the `select` that makes negative indices positive.
"""

from __future__ import annotations

import dataclasses
import functools

from shardfn.ir.model import Graph, Op, ShardingRule
from shardfn.ir.op_traits import REARRANGING
from shardfn.partition.platforms import collective_rules

_RESHARDED = frozenset({"reshard", "sharding_constraint"})
_KEEPS_NUMBERS = REARRANGING | _RESHARDED | {"broadcast_in_dim"}
"""Ops whose result has the numbers of their first operand."""


def with_counted_rows(graph: Graph, platform: str) -> Graph:
    """The graph with the dimensions of tables that indices count along as factors of these indices, as far as the platform's XLA
    backend sees it (`CollectiveRules.sees_counting_indices`).
    """
    if not collective_rules(platform).sees_counting_indices:
        return graph
    ops = tuple(_counted(graph, op) for op in graph.ops)
    is_same = all(a is b for a, b in zip(ops, graph.ops, strict=True))
    return graph if is_same else dataclasses.replace(graph, ops=ops)


def _counted(graph: Graph, op: Op) -> Op:
    if op.name not in ("gather", "scatter") or op.rule is None or len(op.outputs) != 1:
        return op
    table, index = op.rule.operands[:2]
    rows = op.rule.results[0] if op.name == "gather" else op.rule.operands[2]
    others = {f for dim in (*index, *rows) for f in dim}
    chosen = [d for d, dim in enumerate(table) if others.isdisjoint(dim)]
    columns = _columns(graph, op.inputs[1])
    if len(chosen) != len(columns):
        return op
    rows_of, numbers_of = (graph.values[v].shape for v in op.inputs[:2])
    shared = []
    for d, column in zip(chosen, columns, strict=True):
        along = _counted_along(graph, column)
        if along is not None and rows_of[d] == numbers_of[along] and len(table[d]) == len(index[along]) == 1:
            shared.append((table[d][0], index[along][0]))
    batch = [factor for dim in table for factor in dim if factor in others]
    if len({*batch, *(factor for _, factor in shared)}) < len(batch) + len(shared):
        # A diagonal, `x[i, i]`, also where one `i` is a batch, as in `take_along_axis`: XLA does not see the columns.
        return op
    return dataclasses.replace(op, rule=_with_shared(op.rule, op.name, tuple(shared))) if shared else op


@functools.lru_cache(1 << 10)
def _with_shared(rule: ShardingRule, name: str, shared: tuple[tuple[int, int], ...]) -> ShardingRule:
    """The rule with a factor of the index, the second of each pair, in the place of the table's, the first."""
    factor, either = dict(shared), {f for pair in shared for f in pair}

    def replaced(dims: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(factor.get(f, f) for f in dim) for dim in dims)

    result = replaced(rule.results[0]) if name == "scatter" else rule.results[0]
    return dataclasses.replace(
        rule,
        operands=(replaced(rule.operands[0]), *rule.operands[1:]),
        results=(result,),
        reduction=rule.reduction - either,
        replicated=rule.replicated - either,
    )


def _columns(graph: Graph, index: int) -> tuple[int, ...]:
    """The parts of an index, one for each dimension of the table that it chooses in; none if they are not known."""
    while (maker := graph.maker(index)) is not None and maker.name in _RESHARDED:
        (index,) = maker.inputs
    parts = maker.inputs if maker is not None and maker.name == "concatenate" else (index,)
    return parts if all(graph.values[v].shape[-1:] == (1,) for v in parts) else ()


def _counted_along(graph: Graph, value: int) -> int | None:
    """The dimension along which a value counts 0, 1, 2, …; None if there is none."""
    op = graph.maker(value)
    if op is None:
        return None
    if op.name == "iota":
        return 0 if len(graph.values[value].shape) == 1 else None
    if op.name == "select":  # adds the size to negative numbers, of which there are none
        same = op.inputs[2]
        makers = graph.maker(op.inputs[0], "compare"), graph.maker(op.inputs[1], "add")
        is_wrapped = all(made is not None and made.inputs[0] == same for made in makers)
        return _counted_along(graph, same) if is_wrapped else None
    if op.name not in _KEEPS_NUMBERS:
        return None
    along = _counted_along(graph, op.inputs[0])
    if along is None or op.rule is None:
        return along
    factors = op.rule.operands[0][along]
    return next((d for d, dim in enumerate(op.rule.results[0]) if dim == factors), None)

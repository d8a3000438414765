"""Which op mixes the examples of a batch: a pipeline sees a part of the batch at a time, where such an op has another result.

The dimensions that come from those of the batch are tied by the ops' sharding rules. What an op makes of all examples, such as
a mean, has none of them; it mixes examples where it meets them again, or where it is an output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import tree_util

from shardfn.frontend.trace import trace
from shardfn.ir.dimension_groups import dimension_groups
from shardfn.ir.model import Op

_OPEN = frozenset({"gather", "scatter", "dynamic_slice", "dynamic_update_slice", "custom_call", "composite"})
"""Ops that read places which are computed: of which examples, nothing shows."""


def across_batch(function: Callable[..., Any], params: Any, batch: tuple[Any, ...], returns_examples: bool) -> str:
    """The first op that is known to mix the examples of a batch, as `name at file:line`; "" if there is none. Nothing looks into
    a loop over the examples.

    Args:
      function: `(params, *batch) -> results`.
      params: shapes.
      batch: shapes, with more than one example in dimension 0.
      returns_examples: whether the results have the batch in dimension 0; else they are of all examples, as a loss is.

    >>> import jax.numpy as jnp
    >>> def of(f): return across_batch(f, jnp.ones(2), (jnp.ones((4, 2)),), True).partition(" at ")[0]
    >>> of(lambda w, x: x @ w), of(lambda w, x: x - x.mean(0)), of(lambda w, x: x[::-1])
    ('', 'reduce', 'reverse')
    """
    leaves, treedef = tree_util.tree_flatten((params, *batch))
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    traced = trace(lambda *flat: function(*treedef.unflatten(flat)), arrays, (), "cpu")
    graph, groups = traced.graph, dimension_groups(traced.graph).of
    examples = {
        groups[v][0] for v in traced.inputs[len(tree_util.tree_leaves(params)) :] if graph.values[v].shape
    }  # the groups of the batch's dimensions

    def count(value: int) -> int:
        return sum(group in examples for group in groups[value])

    def is_mix(op: Op) -> bool:
        """Whether the result is of all examples that an operand has."""
        if op.rule is None or op.name in _OPEN:
            return False
        kept = {f for dims in op.rule.results for factors in dims for f in factors[:1]}
        kept -= op.rule.replicated | op.rule.permuted
        rows = zip(op.inputs, op.rule.operands, strict=False)
        return any(
            groups[v][d] in examples and not kept.intersection(factors[:1])
            for v, dims in rows for d, factors in enumerate(dims)
        )  # fmt: skip

    mixed: dict[int, Op] = {}
    while True:
        before = len(mixed)
        for op in graph.ops:
            found = next((mixed[v] for v in op.inputs if v in mixed), op if is_mix(op) else None)
            pairs = any(count(v) > 1 for v in op.outputs)
            if pairs or (found is not None and not op.seen and any(map(count, op.outputs))):
                return _text(op if found is None or not found.where else found)
            if found is not None and not op.seen:
                mixed |= {v: mixed.get(v, found) for v in op.outputs}
        for one, other in graph.ties:
            for a, b in ((one, other), (other, one)):
                if a in mixed and b not in mixed and not count(b):
                    mixed[b] = mixed[a]
        if len(mixed) == before:
            break
    of_all = [mixed[v] for v in traced.outputs if v in mixed] if returns_examples else []
    return _text(of_all[0]) if of_all else ""


def _text(op: Op) -> str:
    return f"{op.name} at {op.where}" if op.where else op.name

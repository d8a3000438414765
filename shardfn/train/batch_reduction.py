"""How a loss makes one number of the examples of a batch: whether it adds them or takes their mean.

Pipelines, data-parallel steps and micro-batches compute the loss of parts of a batch. They may add the parts of a loss that adds,
and take the mean of those of a mean; of another loss they cannot know the value. The loss is traced for a batch and for one twice
as large: a mean divides by a number that is twice as large there. A sum with weights that follow from the size of the batch, or
that are divided by a sum over the batch, may be a mean, and nothing is shown of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from typing import Any

import jax
import numpy as np
from jax.extend import core

from shardfn.ir.rewrite import inner
from shardfn.train.flat_jaxpr import FlatEquation, FlatJaxpr

SUM, MEAN = "sum", "mean"

_NO_BATCH = "no batch"
_REDUCES = frozenset({"reduce_sum", "dot_general"})
_KEEPS = frozenset(
    {"neg", "convert_element_type", "copy", "squeeze", "reshape", "broadcast_in_dim", "transpose", "reduce_sum"}
)
_ADDS = frozenset({"add", "sub", "add_any"})
_WEIGHTS = frozenset({"mul", "div", "dot_general"})


def batch_reduction(loss: FlatJaxpr, of_twice: FlatJaxpr) -> str | None:
    """`SUM`, `MEAN`, or None where neither can be shown.

    Args:
      loss: a loss as `trace_loss` gives it.
      of_twice: the same for a batch of twice the size.

    >>> import jax, jax.numpy as jnp
    >>> from shardfn.train.pipelines.trace_loss import trace_loss
    >>> def of(loss): return batch_reduction(*(trace_loss(loss, jnp.ones(2), (jnp.ones((n, 2)),)) for n in (4, 8)))
    >>> of(lambda w, x: jnp.sum(x @ w)), of(lambda w, x: jnp.mean(x @ w)), of(lambda w, x: jnp.max(x @ w))
    ('sum', 'mean', None)
    """
    pairs = list(zip(loss.equations, of_twice.equations, strict=False))
    if len(loss.equations) != len(of_twice.equations) or any(_name(one) != _name(other) for one, other in pairs):
        return None
    from_batch = set(range(loss.params, loss.inputs))
    for one in loss.equations:
        if not from_batch.isdisjoint(one.reads):
            from_batch.update(one.outputs)
    scaled: set[int] = set()

    def has_batch(value: Any) -> bool:
        return not isinstance(value, core.Literal) and loss.avals[value].shape != of_twice.avals[value].shape

    def of(value: Any) -> str | None:
        if isinstance(value, core.Literal) or value not in from_batch:
            return _NO_BATCH
        if value not in loss.makers or has_batch(value):
            return None
        number = loss.makers[value]
        one, other = pairs[number]
        name = _name(one)
        if any(map(has_batch, one.inputs)):
            return SUM if name in _REDUCES else None
        if name in _KEEPS:
            return of(one.inputs[0])
        kinds = [of(v) for v in one.inputs]
        if name in _ADDS:
            met = set(kinds)
            return kinds[0] if len(met) == 1 else MEAN if met == {MEAN, _NO_BATCH} else None
        if name not in ("mul", "div") or _NO_BATCH not in kinds or (name == "div" and kinds[1] != _NO_BATCH):
            return None
        at = kinds.index(_NO_BATCH) if name == "mul" else 1
        by = _growth(one.inputs[at], other.inputs[at])
        kind = kinds[1 - at]
        if by == 1:
            return kind
        scaled.add(number)
        return MEAN if kind == SUM and by == (2 if name == "div" else 0.5) else None

    live, found = _live(loss), of(loss.outputs[0])
    others = (i for i, (one, other) in enumerate(pairs) if i not in scaled and _literals(one) != _literals(other))
    if found == _NO_BATCH or any(i in live for i in others):
        return None
    if found == SUM:
        sized = _sized(loss, of_twice, from_batch)
        for one in (loss.equations[i] for i in live):
            met = from_batch.intersection(one.reads)
            is_weighted = _name(one) in _WEIGHTS and met and not sized.isdisjoint(one.reads)
            if is_weighted or (any(map(has_batch, one.outputs)) and SUM in map(of, met)):
                return None
    return found


def twice(x: Any) -> Any:
    """The shape of an array of a batch of twice the size."""
    return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]) if x.ndim else (), x.dtype)


def _live(loss: FlatJaxpr) -> set[int]:
    """The equations of the loss itself; others compute what is returned beside it."""
    read, found = {v for v in loss.outputs[:1] if not isinstance(v, core.Literal)}, set[int]()
    for number in reversed(range(len(loss.equations))):
        one = loss.equations[number]
        if not read.isdisjoint(one.outputs):
            read.update(one.reads)
            found.add(number)
    return found


def _sized(loss: FlatJaxpr, of_twice: FlatJaxpr, from_batch: Set[int]) -> set[int]:
    """The values that follow from the size of the batch and from none of its elements: the number of them, and their weights. An
    array that only has that size, such as one of ones, is none, but its sum is."""

    def has_batch(value: int) -> bool:
        return loss.avals[value].shape != of_twice.avals[value].shape

    pairs = ((v, const, of_twice.consts[v]) for v, const in loss.consts.items())
    found = {v for v, one, other in pairs if one is not other and not np.array_equal(one, other)}
    for one, other in zip(loss.equations, of_twice.equations, strict=True):
        if from_batch.isdisjoint(one.outputs):
            is_counted = any(map(has_batch, one.reads)) and not any(map(has_batch, one.outputs))
            is_counted |= _name(one) == "iota" and any(map(has_batch, one.outputs))
            if is_counted or not found.isdisjoint(one.reads) or _literals(one, "iuf") != _literals(other, "iuf"):
                found.update(one.outputs)
    return found


def _name(one: FlatEquation) -> str:
    return one.eqn.primitive.name


def _growth(value: Any, of_twice: Any) -> float:
    """The ratio of a number in the two traces; that of a value which is computed is 1."""
    if not isinstance(value, core.Literal) or not isinstance(of_twice, core.Literal):
        return 1.0
    a, b = float(value.val), float(of_twice.val)
    return 1.0 if a == b else b / a if a else math.inf


def _literals(one: FlatEquation, kinds: str = "f") -> list[str]:
    """The numbers that stand in an equation and in the programs inside it, of dtypes of these kinds; as text, as NaN is none."""
    found = [v for v in one.inputs if isinstance(v, core.Literal)]
    found += [v for body in inner(one.eqn) for v in _inside(body)]
    return [repr(float(v.val)) for v in found if getattr(getattr(v.aval, "dtype", None), "kind", " ") in kinds]


def _inside(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield from (v for v in eqn.invars if isinstance(v, core.Literal))
        for body in inner(eqn):
            yield from _inside(body)

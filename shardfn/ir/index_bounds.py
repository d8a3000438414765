"""Which integers may be in the arguments of a program: below which number each has to be to index what it indexes.

The jaxpr is walked backwards: an index of a gather, a scatter, a slice at a computed place or a branch needs a bound, and what
hands an index on as it is needs the same one. An index with several components, along its last dimension, has a bound for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

Bound = tuple[int, ...] | None
"""For each component along the last dimension a number that the index stays below, or one for all; None where none is known."""


def index_bounds(jaxpr: Any) -> tuple[int | None, ...]:
    """For each argument of a jaxpr, open or closed, the least number above all indices that may be in it.

    Returns:
      A number for each argument; None for one that the program does not index by, as far as it shows.

    >>> import jax, jax.numpy as jnp
    >>> table, tokens = jax.ShapeDtypeStruct((100, 8), "float32"), jax.ShapeDtypeStruct((4,), "int32")
    >>> index_bounds(jax.make_jaxpr(lambda table, tokens, x: table[tokens] * x)(table, tokens, 2.0))
    (None, 100, None)
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return tuple(min(bound) if bound else None for bound in _needs(jaxpr, [None] * len(jaxpr.outvars)))


def _needs(jaxpr: Any, results: Sequence[Bound]) -> list[Bound]:
    """The bounds of a jaxpr's arguments, for those of its results."""
    known: dict[Any, Bound] = {}

    def add(var: Any, bound: Bound) -> None:
        if bound is not None and not isinstance(var, core.Literal):
            known[var] = _least(known.get(var), bound)

    for var, bound in zip(jaxpr.outvars, results, strict=True):
        add(var, bound)
    for eqn in reversed(jaxpr.eqns):
        wanted = [known.get(var) for var in eqn.outvars]
        for var, bound in zip(eqn.invars, _operands(eqn, wanted), strict=True):
            add(var, bound)
    return [known.get(var) for var in jaxpr.invars]


def _least(one: Bound, other: Bound) -> Bound:
    """What keeps both bounds."""
    if one is None or other is None:
        return one or other
    if len(one) != len(other):
        one, other = (max(one),), (max(other),)
    return tuple(map(min, one, other))


def _operands(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    """The bounds of an equation's operands, for those of its results."""
    name = eqn.primitive.name
    if name in RULES:
        return RULES[name](eqn, wanted)
    if name in _KEPT:
        each = wanted if len(wanted) == len(eqn.invars) else [wanted[0]] * len(eqn.invars)  # a sort has several of both
        return [_fitted(bound, var) for bound, var in zip(each, eqn.invars, strict=True)]
    for inner in eqn.params.values():  # `jit`, `checkpoint`, `shard_map`, functions with derivatives of their own
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns") and len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(wanted):
            return _needs(inner, wanted)
    return [None] * len(eqn.invars)


def _fitted(bound: Bound, var: Any) -> Bound:
    """The bound of an operand whose elements become those of a result: one for all where its last dimension is another."""
    if bound is None or len(bound) == 1 or var.aval.shape[-1:] == (len(bound),):
        return bound
    return (max(bound),)


def _concatenate(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    (bound,), last = wanted, eqn.outvars[0].aval.ndim - 1
    if bound is None or len(bound) == 1 or eqn.params["dimension"] != last:
        return [bound] * len(eqn.invars)
    found: list[Bound] = []
    for var in eqn.invars:
        found.append(bound[: var.aval.shape[-1]])
        bound = bound[var.aval.shape[-1] :]
    return found


def _gather(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.invars[0].aval.shape
    return [wanted[0], tuple(shape[d] - sizes[d] + 1 for d in numbers.start_index_map) or None]


def _scatter(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    numbers, (operand, _, updates) = eqn.params["dimension_numbers"], (var.aval.shape for var in eqn.invars)
    left_out = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(operand)) if d not in left_out]
    sizes = dict.fromkeys(range(len(operand)), 1) | {
        d: updates[u] for d, u in zip(window, numbers.update_window_dims, strict=True)
    }
    bound = tuple(operand[d] - sizes[d] + 1 for d in numbers.scatter_dims_to_operand_dims)
    return [wanted[0], bound or None, wanted[0]]


def _dynamic_slice(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    return [wanted[0], *((n - size + 1,) for n, size in zip(shape, sizes, strict=True))]


def _dynamic_update_slice(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    shape, sizes = (var.aval.shape for var in eqn.invars[:2])
    return [wanted[0], wanted[0], *((n - size + 1,) for n, size in zip(shape, sizes, strict=True))]


def _ragged_dot(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    rows, groups = eqn.invars[0].aval.shape[-2], eqn.invars[2].aval.shape[-1]
    return [None, None, (rows // groups + 1,)]


def _cond(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    branches = eqn.params["branches"]
    found: list[Bound] = [None] * (len(eqn.invars) - 1)
    for branch in branches:
        found = list(map(_least, found, _needs(branch.jaxpr, wanted)))
    return [(len(branches),), *found]


def _scan(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    body = eqn.params["jaxpr"].jaxpr
    # What is scanned over, or stacked, has one dimension more outside than in the body.
    scanned, stacked = (
        sum(one.aval.shape != inner.aval.shape for one, inner in zip(outside, inside, strict=True))
        for outside, inside in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    )
    count = len(eqn.outvars) - stacked
    first = len(eqn.invars) - scanned - count

    def once(carried: Sequence[Bound]) -> list[Bound]:
        return _needs(body, [*carried, *wanted[count:]])

    return _looped(once, wanted[:count], first, count)


def _while(eqn: Any, wanted: Sequence[Bound]) -> list[Bound]:
    body, first, skipped = eqn.params["body_jaxpr"].jaxpr, eqn.params["body_nconsts"], eqn.params["cond_nconsts"]
    found = _looped(lambda carried: _needs(body, carried), wanted, first, len(wanted))
    return [*[None] * skipped, *found]


def _looped(
    once: Callable[[Sequence[Bound]], list[Bound]], after: Sequence[Bound], first: int, count: int
) -> list[Bound]:
    """The bounds of a loop's operands, for those of what it carries: as its first round and any later one need them."""
    found = once(after)
    return once(list(map(_least, after, found[first : first + count])))


_KEPT = frozenset(
    {"add", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "copy_p", "expand_dims", "max", "min"}
    | {"optimization_barrier", "reduce_max", "reduce_min", "reshape", "reshard", "rev", "select_n", "sharding_constraint"}
    | {"slice", "sort", "squeeze", "sub", "transpose"}
)  # fmt: skip
"""What gives elements of its operands on, as indices that are made of others are: wrapped around, moved, chosen."""

RULES: dict[str, Callable[[Any, Sequence[Bound]], list[Bound]]] = {
    "concatenate": _concatenate,
    "cond": _cond,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "scan": _scan,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-mul": _scatter,
    "scatter_add": _scatter,
    "scatter_max": _scatter,
    "scatter_min": _scatter,
    "scatter_mul": _scatter,
    "scatter_sub": _scatter,
    "while": _while,
}

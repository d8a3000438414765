"""Dims along which an op moves data from place to place, held whole over the tensor axis of a pipeline.

XLA lays out what stands between two cut products as it likes, and moves the pieces of a dim that is sliced, joined, padded
or turned by a collective-permute. That has no groups: every device of the program may have to come to it, and stages that
take another branch never do. A dim that is whole needs none; what is gathered for it is gathered within the stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec

from shardfn.ir.rewrite import bind_one, equations, inner, rebound

Dims = tuple[tuple[int, ...], ...]
"""For each array the dims that are held."""


def moved(eqn: Any, ways: int = 2) -> tuple[Dims, Dims]:
    """The dims that an equation moves data along, of its inputs and of its outputs.

    Args:
      eqn: an equation of a jaxpr.
      ways: how many pieces a dim might lie in; a reshape keeps those that divide.

    >>> import jax, jax.numpy as jnp
    >>> eqn = jax.make_jaxpr(lambda x: x[:, 1:3])(jnp.ones((8, 8))).eqns[0]
    >>> moved(eqn)
    (((1,),), ((1,),))
    """
    rule = _RULES.get(eqn.primitive.name, _closed if eqn.primitive.name.startswith("custom_") else _none)
    given, made = rule(eqn, ways)
    fill = lambda dims, count: (*dims, *((),) * (count - len(dims)))  # noqa: E731
    return fill(given, len(eqn.invars)), fill(made, len(eqn.outvars))


def bind_held(eqn: Any, inputs: Sequence[Any], ways: int) -> list[Any]:
    """The outputs of an equation, its moved dims and those of the equations inside it held whole."""
    wanted = lambda one, number: any(itertools.chain(*moved(one, ways)))  # noqa: E731

    def bind(one: Any, given: list[Any], number: int = 0) -> list[Any]:
        before, after = moved(one, ways)
        given = [_whole(x, dims) for x, dims in zip(given, before, strict=True)]
        return [_whole(x, dims) for x, dims in zip(bind_one(one, given), after, strict=True)]

    if not wanted(eqn, 0) and any(wanted(one, 0) for jaxpr in inner(eqn) for _, one, _ in equations(jaxpr)):
        return rebound(lambda *given: bind_one(eqn, given), wanted, bind)(*inputs)
    return bind(eqn, list(inputs))


def _whole(x: Any, dims: Sequence[int]) -> Any:
    """Its layout and, because that is so of a constraint, its cotangent's too."""
    if not dims:
        return x
    spec = (None if d in dims else PartitionSpec.UNCONSTRAINED for d in range(x.ndim))
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))


# ---- rules: an equation -> dims of its inputs, dims of its outputs

Rule = Callable[[Any, int], tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]]


def _none(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    return (), ()


def _closed(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    """Of a function with derivative rules of its own, which is not opened: every dim, where something moves in it."""
    moves = any(any(itertools.chain(*moved(one, ways))) for jaxpr in inner(eqn) for _, one, _ in equations(jaxpr))
    every = lambda vs: tuple(tuple(range(len(v.aval.shape))) for v in vs)  # noqa: E731
    return (every(eqn.invars), every(eqn.outvars)) if moves else ((), ())


def _differ(a: Any, b: Any) -> tuple[int, ...]:
    return tuple(d for d, (m, n) in enumerate(zip(a.aval.shape, b.aval.shape, strict=True)) if m != n)


def _all(dims: Sequence[int], eqn: Any) -> tuple[Dims, Dims]:
    """The same dims of every array that has them."""
    held = lambda vs: tuple(tuple(d for d in dims if d < len(v.aval.shape)) for v in vs)  # noqa: E731
    return held(eqn.invars), held(eqn.outvars)


def _first(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    """Of an op that takes a part of its first input."""
    dims = _differ(eqn.invars[0], eqn.outvars[0])
    return (dims,), (dims,)


def _updated(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    dims = _differ(eqn.invars[0], eqn.invars[1])
    return (dims, dims), (dims,)


def _padded(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    dims = tuple(d for d, config in enumerate(eqn.params["padding_config"]) if any(config))
    return (dims,), (dims,)


def _along(name: str) -> Rule:
    def rule(eqn: Any, ways: int) -> tuple[Dims, Dims]:
        given = eqn.params[name]
        return _all(tuple(given) if isinstance(given, tuple | list) else (int(given),), eqn)

    return rule


def _last(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    return _all((len(eqn.invars[0].aval.shape) - 1,), eqn)


def _windowed(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    """Dims along which a window sees neighbours."""
    return _all(tuple(d for d, n in enumerate(eqn.params["window_dimensions"]) if n > 1), eqn)


def _convolved(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    numbers = eqn.params["dimension_numbers"]
    return (numbers.lhs_spec[2:], numbers.rhs_spec[2:]), (numbers.out_spec[2:],)


def _gathered(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    """Dims of the operand of which a part is taken; those that are indexed one by one are summed over devices."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.invars[0].aval.shape
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape)) if d not in removed]
    part = [d for d in kept if sizes[d] != shape[d]]
    return (tuple(part),), (tuple(numbers.offset_dims[kept.index(d)] for d in part),)


def _scattered(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    numbers = eqn.params["dimension_numbers"]
    shape, update = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape)) if d not in removed]
    pairs = [(d, w) for d, w in zip(kept, numbers.update_window_dims, strict=True) if shape[d] != update[w]]
    dims = tuple(d for d, _ in pairs)
    return (dims, (), tuple(w for _, w in pairs)), (dims,)


def _reshaped(eqn: Any, ways: int) -> tuple[Dims, Dims]:
    """Of dims that become one or come from one, all but the first; the first too where its pieces would not fit."""
    given, made = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    before: list[int] = []
    after: list[int] = []
    for left, right in _groups(given, made):
        if len(left) == 1 and len(right) == 1:
            continue
        fits = left and right and given[left[0]] % ways == 0 and made[right[0]] % ways == 0
        before += left[1:] if fits else left
        after += right[1:] if fits else right
    return (tuple(before),), (tuple(after),)


def _groups(given: Sequence[int], made: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dims of two shapes that become each other, in the order of the data; dims of one element aside.

    >>> _groups((2, 6, 4), (12, 1, 2, 2))
    [([0, 1], [0]), ([2], [2, 3])]
    """
    a, b = ([d for d, n in enumerate(shape) if n != 1] for shape in (given, made))
    found = []
    while a and b:
        left, right = [a.pop(0)], [b.pop(0)]
        while (m := math.prod(given[d] for d in left)) != (n := math.prod(made[d] for d in right)):
            (left if m < n else right).append((a if m < n else b).pop(0))
        found.append((left, right))
    return found


_RULES: dict[str, Rule] = {
    "slice": _first,
    "dynamic_slice": _first,
    "dynamic_update_slice": _updated,
    "split": _along("axis"),
    "concatenate": _along("dimension"),
    "pad": _padded,
    "rev": _along("dimensions"),
    "reshape": _reshaped,
    "gather": _gathered,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max"), _scattered),
    "conv_general_dilated": _convolved,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "sort": _along("dimension"),
    **dict.fromkeys(("top_k", "approx_top_k"), _last),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windowed),
}
"""What has no row here moves nothing (elementwise, products, reductions), or is seen in what XLA compiled."""

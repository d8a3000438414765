"""Tensor parallelism within a pipeline stage: which dimensions of parameters are sharded, and which must not be.

XLA chooses the shardings between two sharded matmuls, and moves shards by a collective-permute where an op slices, joins,
pads or reshapes a sharded dimension. A collective-permute has no groups: devices in another stage's branch may never reach
it. So `bind_unsharded` keeps those dimensions unsharded; the all-gather that this needs stays within the stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec

from shardfn.errors import Problem
from shardfn.frontend.paths import met, unmet
from shardfn.frontend.strategy import short
from shardfn.ir.divisors import divisors
from shardfn.ir.rewrite import bind_one, equations, inner, rebind


def sharded_dims(
    paths: Sequence[str], shapes: Sequence[tuple[int, ...]], plan: Mapping[str, Any]
) -> tuple[list[int], int, list[Problem]]:
    """Read a pipeline's `parameter_plan`.

    Returns:
      For each parameter the sharded dimension, -1 for none; the number of shards; and what is wrong with the plan.

    >>> sharded_dims(["up", "down", "b"], [(4, 8), (8, 4), (4,)], {"up": (1, 2), "down": (2, 1)})
    ([1, 0, -1], 2, [])
    """
    dims, shards = [-1] * len(paths), 1
    problems = list(unmet("parameter_plan", plan, paths))
    for glob, entry in plan.items():
        where = f"parameter_plan[{glob!r}] = {short(entry)}"
        if not isinstance(entry, tuple | list) or not all(type(n) is int and n > 0 for n in entry):
            problems.append(Problem("an entry within a stage must be a tuple of positive ints", where,
                                    "it gives the number of shards of each dimension",
                                    "write one as (1, 2)", is_type=True))  # fmt: skip
            continue
        split = [d for d, n in enumerate(entry) if n > 1]
        if len(split) > 1 or (split and shards not in (1, entry[split[0]])):
            other = f"others are sharded {shards} ways" if len(split) == 1 else "it shards more than one dimension"
            problems.append(Problem("parameters within a stage share one mesh axis", where, other,
                                    "shard one dimension of each parameter, all with the same number of shards"))  # fmt: skip
            continue
        if not split:
            continue
        dim, shards = split[0], entry[split[0]]
        for i in met(glob, paths)[0]:
            if len(entry) != len(shapes[i]):
                problems.append(Problem(f"`{paths[i]}` has {len(shapes[i])} dims, its entry {len(entry)}", where,
                                        f"`{paths[i]}`: {list(shapes[i])}", "write one int for each dimension"))  # fmt: skip
            elif shapes[i][dim] % shards:
                fewer = [n for n in divisors(shapes[i][dim]) if 1 < n < shards]
                problems.append(Problem(f"`{paths[i]}` cannot be sharded {shards} ways along dimension {dim}", where,
                                        f"{shapes[i][dim]} is not divisible by {shards}",
                                        f"use {' or '.join(map(str, fewer))}" if fewer else "leave it unsharded"))  # fmt: skip
            else:
                dims[i] = dim
    return dims, shards, problems


Dims = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]
"""The dimensions of each input, and of each output."""


def unshardable_dims(eqn: Any, shards: int = 2) -> Dims:
    """The dimensions along which an equation would move shards, of its inputs and of its outputs.

    Args:
      eqn: an equation of a jaxpr.
      shards: how many shards a dimension might have; a reshape keeps those that divide.

    >>> import jax, jax.numpy as jnp
    >>> eqn = jax.make_jaxpr(lambda x: x[:, 1:3])(jnp.ones((8, 8))).eqns[0]
    >>> unshardable_dims(eqn)
    (((1,),), ((1,),))
    """
    default = _custom_rule if eqn.primitive.name.startswith("custom_") else _no_dims
    inputs, outputs = _RULES.get(eqn.primitive.name, default)(eqn, shards)
    fill = lambda dims, count: (*map(tuple, dims), *((),) * (count - len(dims)))  # noqa: E731
    return fill(inputs, len(eqn.invars)), fill(outputs, len(eqn.outvars))


def bind_unsharded(eqn: Any, inputs: Sequence[Any], shards: int) -> list[Any]:
    """The outputs of an equation, with `unshardable_dims` unsharded, those of equations inside it too."""
    wanted = lambda one, number: any(itertools.chain(*unshardable_dims(one, shards)))  # noqa: E731

    def bind(one: Any, given: list[Any], number: int = 0) -> list[Any]:
        before, after = unshardable_dims(one, shards)
        given = [_unsharded(x, dims) for x, dims in zip(given, before, strict=True)]
        return [_unsharded(x, dims) for x, dims in zip(bind_one(one, given), after, strict=True)]

    if not wanted(eqn, 0) and any(wanted(one, 0) for jaxpr in inner(eqn) for _, one, _ in equations(jaxpr)):
        return rebind(lambda *given: bind_one(eqn, given), wanted, bind)(*inputs)
    return bind(eqn, list(inputs))


def _unsharded(x: Any, dims: Sequence[int]) -> Any:
    """`x` with these dimensions unsharded; a constraint holds for the cotangent too."""
    if not dims:
        return x
    spec = (None if d in dims else PartitionSpec.UNCONSTRAINED for d in range(x.ndim))
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))


# ---- rules: an equation and the number of shards -> dims of its inputs, dims of its outputs


def _no_dims(eqn: Any, shards: int) -> Dims:
    return (), ()


def _custom_rule(eqn: Any, shards: int) -> Dims:
    """Of a function with derivative rules of its own, which is not rewritten: all dims, if any op inside has one."""
    inside = (one for jaxpr in inner(eqn) for _, one, _ in equations(jaxpr))
    if not any(any(itertools.chain(*unshardable_dims(one, shards))) for one in inside):
        return (), ()
    every = lambda vs: [range(len(v.aval.shape)) for v in vs]  # noqa: E731
    return every(eqn.invars), every(eqn.outvars)


def _of_all(dims: Sequence[int], eqn: Any) -> Dims:
    """The same dims of every array that has them."""
    those = lambda vs: [[d for d in dims if d < len(v.aval.shape)] for v in vs]  # noqa: E731
    return those(eqn.invars), those(eqn.outvars)


def _differing(a: Any, b: Any) -> list[int]:
    return [d for d, (m, n) in enumerate(zip(a.aval.shape, b.aval.shape, strict=True)) if m != n]


def _slice(eqn: Any, shards: int) -> Dims:
    dims = _differing(eqn.invars[0], eqn.outvars[0])
    return [dims], [dims]


def _dynamic_update_slice(eqn: Any, shards: int) -> Dims:
    return _of_all(_differing(eqn.invars[0], eqn.invars[1]), eqn)


def _pad(eqn: Any, shards: int) -> Dims:
    dims = [d for d, config in enumerate(eqn.params["padding_config"]) if any(config)]
    return [dims], [dims]


def _along(name: str) -> Callable[[Any, int], Dims]:
    def rule(eqn: Any, shards: int) -> Dims:
        dims = eqn.params[name]
        return _of_all(dims if isinstance(dims, tuple | list) else (int(dims),), eqn)

    return rule


def _last_dim(eqn: Any, shards: int) -> Dims:
    return _of_all([len(eqn.invars[0].aval.shape) - 1], eqn)


def _window(eqn: Any, shards: int) -> Dims:
    return _of_all([d for d, n in enumerate(eqn.params["window_dimensions"]) if n > 1], eqn)


def _convolution(eqn: Any, shards: int) -> Dims:
    numbers = eqn.params["dimension_numbers"]
    return [numbers.lhs_spec[2:], numbers.rhs_spec[2:]], [numbers.out_spec[2:]]


def _gather(eqn: Any, shards: int) -> Dims:
    """Partly sliced dims of the operand; XLA sums over devices along those that are indexed one by one."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.invars[0].aval.shape
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape)) if d not in removed]
    part = [d for d in kept if sizes[d] != shape[d]]
    return [part], [[numbers.offset_dims[kept.index(d)] for d in part]]


def _scatter(eqn: Any, shards: int) -> Dims:
    numbers = eqn.params["dimension_numbers"]
    shape, update = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape)) if d not in removed]
    pairs = [(d, w) for d, w in zip(kept, numbers.update_window_dims, strict=True) if shape[d] != update[w]]
    dims = [d for d, _ in pairs]
    return [dims, [], [w for _, w in pairs]], [dims]


def _reshape(eqn: Any, shards: int) -> Dims:
    """Of dims that merge or split, all but the first; the first too if its shards would not fit."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    before: list[int] = []
    after: list[int] = []
    for left, right in _reshape_groups(old, new):
        if len(left) == 1 and len(right) == 1:
            continue
        fits = left and right and old[left[0]] % shards == 0 and new[right[0]] % shards == 0
        before += left[1:] if fits else left
        after += right[1:] if fits else right
    return [before], [after]


def _reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dims of two shapes that become each other, in the order of the data, without dims of one element.

    >>> _reshape_groups((2, 6, 4), (12, 1, 2, 2))
    [([0, 1], [0]), ([2], [2, 3])]
    """
    a, b = ([d for d, n in enumerate(shape) if n != 1] for shape in (old, new))
    found = []
    while a and b:
        left, right = [a.pop(0)], [b.pop(0)]
        while (m := math.prod(old[d] for d in left)) != (n := math.prod(new[d] for d in right)):
            (left if m < n else right).append((a if m < n else b).pop(0))
        found.append((left, right))
    return found


_RULES: dict[str, Callable[[Any, int], Dims]] = {
    "slice": _slice,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "split": _along("axis"),
    "concatenate": _along("dimension"),
    "pad": _pad,
    "rev": _along("dimensions"),
    "reshape": _reshape,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max"), _scatter),
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "sort": _along("dimension"),
    **dict.fromkeys(("top_k", "approx_top_k"), _last_dim),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
}
"""Ops without a row move no shards (elementwise, matmuls, reductions); the deadlock check sees the rest."""

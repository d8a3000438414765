"""Rules of ops on windows of a few elements, which move by one row: they are ops on shifted values."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.movement.rules.call import Call
from shardfn.movement.rules.composed import combined, elementwise
from shardfn.movement.values import Spread, Value, joined, sliced, with_rows

MOST_ELEMENTS = 49
"""Elements of a window that are shifted one by one."""


def is_stencil(eqn: Any) -> bool:
    """Whether an equation is a convolution of each feature by itself with a few elements: numbers on a grid, or depthwise."""
    p, (x, kernel) = eqn.params, (v.aval for v in eqn.invars)
    numbers, count = p["dimension_numbers"], p["feature_group_count"]
    features = x.shape[numbers.lhs_spec[1]], kernel.shape[numbers.rhs_spec[0]], p["batch_group_count"]
    is_dense = {*p["window_strides"], *p["lhs_dilation"]} == {1} and numbers.lhs_spec == numbers.out_spec
    is_small = 0 < kernel.size <= MOST_ELEMENTS * count and 0 not in eqn.outvars[0].aval.shape
    return features == (count, count, 1) and is_dense and is_small


def convolution_rule(call: Call) -> Value | None:
    """A convolution of each feature by itself: the sum of shifted values, times the elements of the kernel."""
    if not is_stencil(call.eqn):
        return None
    p, (value, kernel) = call.params, call.operands
    numbers, kernel = p["dimension_numbers"], call.emitter.array(kernel)
    feature, *dims = numbers.lhs_spec[1:]
    for dim, (before, after) in zip(dims, p["padding"], strict=True):
        value = _padded(value, np.zeros((), value.dtype), dim, before, after)
    operands: list[Value] = []
    for place in itertools.product(*(range(kernel.shape[d]) for d in numbers.rhs_spec[2:])):
        own, start, stop = value, [0] * kernel.ndim, [*kernel.shape]
        for dim, of_kernel, at, far in zip(dims, numbers.rhs_spec[2:], place, p["rhs_dilation"], strict=True):
            own = sliced(own, dim, at * far, call.shape[dim])
            start[of_kernel], stop[of_kernel] = at, at + 1
        weights = lax.slice(kernel, start, stop).ravel()
        operands += own, Spread(call.shape, kernel.dtype, weights, (feature,)) if weights.size > 1 else weights[0]
    exact = functools.reduce(jnp.promote_types, [value.dtype, kernel.dtype, call.dtype])
    if jnp.issubdtype(exact, jnp.floating):
        exact = jnp.promote_types(exact, np.float32)

    def bind(arrays: Sequence[Any]) -> Any:
        values, weights = ([lax.convert_element_type(x, exact) for x in arrays[i::2]] for i in (0, 1))
        found = functools.reduce(lax.add, [x * weight for x, weight in zip(values, weights, strict=True)])
        return lax.convert_element_type(found, call.dtype)

    call.emitter.shifted += 1
    return elementwise(bind, operands, call.shape, call.dtype, call.emitter, 0.5)


def pooling_rule(identity: Callable[[Any], Any], combine: Callable[[Any, Any], Any], call: Call) -> Value | None:
    """The sum, the greatest or the least of each window, along one dimension after the other."""
    p, (value,) = call.params, call.operands
    sizes = p["window_dimensions"]
    if {*p["window_strides"], *p["base_dilation"]} != {1} or math.prod(sizes) > MOST_ELEMENTS or 0 in call.shape:
        return None
    for dim in reversed(range(len(sizes))):  # so that of equal elements the first one in the window is taken
        (before, after), far = p["padding"][dim], p["window_dilation"][dim]
        value = _padded(value, np.asarray(identity(value.dtype), value.dtype), dim, before, after)
        if sizes[dim] > 1:
            rows = [sliced(value, dim, at * far, call.shape[dim]) for at in range(sizes[dim])]
            value = combined(combine, rows, call.dtype, call.emitter)
    call.emitter.shifted += 1
    return value


def greater(one: Any, other: Any) -> Any:
    """The greater of two, or a NaN; of equal ones the first, which has the gradient."""
    return lax.select((one >= other) | (one != one), one, other)


def less(one: Any, other: Any) -> Any:
    """The lesser of two, or a NaN; of equal ones the first, which has the gradient."""
    return lax.select((one <= other) | (one != one), one, other)


def _padded(value: Value, fill: np.ndarray, dim: int, before: int, after: int) -> Value:
    """A value with rows of a number around it, or, where their numbers are negative, without some of its own."""
    first, rows = max(-before, 0), value.shape[dim] + min(before, 0) + min(after, 0)
    ends = [Spread(with_rows(value.shape, dim, max(n, 0)), value.dtype, fill, ()) for n in (before, after)]
    return joined([one for one in (ends[0], sliced(value, dim, first, rows), ends[1]) if one.shape[dim]], dim)

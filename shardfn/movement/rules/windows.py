"""Rules of ops on windows of a few elements, which move by one row: they are ops on shifted values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.movement.rules.call import Call, has_infinity
from shardfn.movement.rules.composed import combined, on_elements
from shardfn.movement.rules.rows import padded
from shardfn.movement.values import Elementwise, Op, Spread, Value, ends_and_rows, sliced

LONGEST = 5
"""Elements of a window along a dimension: each is a shift of its own."""


def is_stencil(eqn: Any) -> bool:
    """Whether an equation is a convolution of numbers on a grid, or of each feature of a sequence by itself, with a few
    elements."""
    p, (x, kernel) = eqn.params, (v.aval for v in eqn.invars)
    numbers, count = p["dimension_numbers"], p["feature_group_count"]
    features = x.shape[numbers.lhs_spec[1]], kernel.shape[numbers.rhs_spec[0]], p["batch_group_count"]
    is_dense = {*p["window_strides"], *p["lhs_dilation"]} == {1} and numbers.lhs_spec == numbers.out_spec
    spans = [kernel.shape[d] for d in numbers.rhs_spec[2:]]
    is_small = all(1 <= span <= LONGEST for span in spans) and (count == 1 or len(spans) == 1)
    dtypes = (x.dtype, kernel.dtype, eqn.outvars[0].aval.dtype)
    is_plain = all(n >= 0 for n in itertools.chain(*p["padding"])) and all(map(has_infinity, dtypes))
    return features == (count, count, 1) and is_dense and is_small and is_plain and 0 not in eqn.outvars[0].aval.shape


def convolution_rule(call: Call) -> Value | None:
    """A convolution of each feature by itself: the sum of shifted values, times the elements of the kernel."""
    p, (given, kernel) = call.params, call.operands
    numbers, value = p["dimension_numbers"], given
    feature, *dims = numbers.lhs_spec[1:]
    if not is_stencil(call.eqn) or any(_rows(value, d) > call.shape[d] for d in dims):
        return None
    kernel, exact = (
        call.emitter.array(kernel),
        jnp.promote_types(call.dtype, jnp.promote_types(value.dtype, kernel.dtype)),
    )
    if jnp.issubdtype(exact, jnp.floating):
        exact = jnp.promote_types(exact, np.float32)
    for dim, (before, after) in zip(dims, p["padding"], strict=True):
        value = padded(value, np.zeros((), value.dtype), dim, before, after)
    operands: list[Value] = []
    for place in itertools.product(*(range(kernel.shape[d]) for d in numbers.rhs_spec[2:])):
        own, start, stop = value, [0] * kernel.ndim, [*kernel.shape]
        for dim, of_kernel, at, far in zip(dims, numbers.rhs_spec[2:], place, p["rhs_dilation"], strict=True):
            own = sliced(own, dim, at * far, call.shape[dim])
            start[of_kernel], stop[of_kernel] = at, at + 1
        weights = lax.convert_element_type(lax.slice(kernel, start, stop).ravel(), exact)  # its derivative is a sum
        operands += own, Spread(call.shape, exact, weights, (feature,)) if weights.size > 1 else weights[0]

    def bind(arrays: Sequence[Any]) -> Any:
        found = (
            lax.convert_element_type(x, exact) * weight for x, weight in zip(arrays[::2], arrays[1::2], strict=True)
        )
        return lax.convert_element_type(functools.reduce(lax.add, found), call.dtype)

    found = on_elements(Op(bind, 0.5), operands, call.shape, call.dtype, call.emitter)
    if isinstance(found, Elementwise):
        found.written = lambda: call.bound(call.emitter.array(given), kernel)
    call.emitter.shifted += 1
    return found


def pooling_rule(identity: Callable[[Any], Any], combine: Callable[[Any, Any], Any], call: Call) -> Value | None:
    """The sum, the greatest or the least of each window of a value with ghost cells, along one dimension after the other. XLA
    computes it of an array."""
    p, (value,) = call.params, call.operands
    sizes, dims = p["window_dimensions"], range(len(call.shape))
    has_ghosts = any(ends_and_rows(value, d) for d in dims) and all(_rows(value, d) == call.shape[d] for d in dims)
    is_dense = {*p["window_strides"], *p["base_dilation"]} == {1} and all(
        n >= 0 for n in itertools.chain(*p["padding"])
    )
    if not has_ghosts or not is_dense or max(sizes) > LONGEST or 0 in call.shape or not has_infinity(value.dtype):
        return None
    for dim in reversed(dims):  # so that of equal elements the first one in the window is taken
        (before, after), far = p["padding"][dim], p["window_dilation"][dim]
        value = padded(value, np.asarray(identity(value.dtype), value.dtype), dim, before, after)
        if sizes[dim] > 1:
            rows = [sliced(value, dim, at * far, call.shape[dim]) for at in range(sizes[dim])]
            value = combined(combine, rows, call.dtype, call.emitter)
    call.emitter.shifted += 1
    return value


def _rows(value: Value, dim: int) -> int:
    """The rows of the array of which a value has all rows, and maybe some more."""
    return max((stop - start for start, stop in ends_and_rows(value, dim)), default=value.shape[dim])


def greater(one: Any, other: Any) -> Any:
    """The greater of two, or a NaN; of equal ones the first, which has the gradient."""
    return lax.select((one >= other) | (one != one), one, other)


def less(one: Any, other: Any) -> Any:
    """The lesser of two, or a NaN; of equal ones the first, which has the gradient."""
    return lax.select((one <= other) | (one != one), one, other)

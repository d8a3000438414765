"""Rules of ops on elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from shardfn.ir.rewrite import bind_one
from shardfn.movement.loops import on_stacks
from shardfn.movement.rules.call import Call
from shardfn.movement.rules.composed import has_squeezed, on_elements
from shardfn.movement.values import Lazy, Op, Spread, Stacked, Value, alignments, is_zero

ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "cos", "cosh",
    "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a",
    "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial", "population_count", "pow",
    "pvary", "random_gamma_grad", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient",
    "sub", "tan", "tanh", "xor", "zeta",
})  # fmt: skip
"""Primitives of one result whose elements depend on one element of each operand."""

_FINITE = frozenset(
    {"add", "add_any", "sub", "neg", "abs", "max", "min", "sign", "clamp", "select_n", "convert_element_type", "copy", "real",
     "imag", "conj", "complex", "floor", "ceil", "round", "pvary", "reduce_precision", "stop_gradient"}
)  # fmt: skip
"""Their derivatives are finite for all operands, but that of `abs` for complex ones; so is that of `mul` by a literal. Of
a scalar that is an operand the derivative is a sum over elements, which must be finite."""


def elementwise_rule(call: Call) -> Value | None:
    """An op on elements, if a value that it takes is moved, or none is an array."""
    name = call.eqn.primitive.name
    is_scaled = name == "mul" and any(isinstance(v, core.Literal) for v in call.eqn.invars)
    is_finite = is_scaled or (name in _FINITE and not (name == "abs" and jnp.iscomplexobj(call.operands[0])))
    return _elementwise(call, call.bound, None if is_finite else 2.0 if name == "acosh" else 0.5, name == "add_any")


def custom_jvp_rule(call: Call) -> Value | None:
    """A function with a derivative rule of its own, if it and its derivative are made of ops on elements."""
    function = _with_rule(call.eqn, is_asked=True) if any(map(_is_moved, call.operands)) else None
    if function is None:
        return None

    def bound(*arrays: Any) -> Any:
        return function(np.broadcast_shapes(*map(np.shape, arrays)), arrays)

    return _elementwise(call, bound, 0.5)


def _elementwise(
    call: Call, bound: Callable[..., Any], safe: float | None, adds_gradients: bool = False
) -> Value | None:
    if {len(np.shape(o)) for o in call.operands} - {0} != {len(call.shape)}:
        return None
    operands = [_repeated(o, call.shape) for o in call.operands]

    def bind(arrays: Sequence[Any]) -> Any:
        return bound(*arrays)

    op = Op(bind, safe, adds_gradients)
    if any(isinstance(o, Stacked) for o in operands):
        return on_stacks(call.emitter, op, operands, call.shape, call.dtype)
    is_moved = any(map(_is_moved, operands)) or (adds_gradients and any(map(is_zero, operands)))
    if not is_moved and any(not isinstance(o, Lazy) and np.shape(o) for o in operands):
        return None
    return on_elements(op, operands, call.shape, call.dtype, call.emitter)


def _repeated(value: Value, shape: tuple[int, ...]) -> Value:
    """An operand in the shape of the result: its dimensions of one row are repeated."""
    if np.shape(value) in ((), shape):
        return value
    return Spread(shape, value.dtype, value, tuple(range(len(shape))))


def _is_moved(value: Value) -> bool:
    return has_squeezed(value) or any(alignments(value, d) for d in range(len(np.shape(value))))


Function = Callable[[tuple[int, ...], Sequence[Any]], Any]
"""Takes a shape and arrays of it, or scalars; returns an array of it."""


def of_elements(eqn: Any) -> Function | None:
    """What an equation makes of arrays of any one shape; None if it may combine elements.

    >>> (eqn,) = jax.make_jaxpr(jax.nn.relu)(jnp.zeros(3)).jaxpr.eqns
    >>> of_elements(eqn)((1, 2), [jnp.array([[-1.0, 2.0]])])
    Array([[0., 2.]], dtype=float32)
    """
    name, operands = eqn.primitive.name, eqn.invars
    if len(eqn.outvars) > 1 or not {v.aval.shape for v in operands} <= {(), eqn.outvars[0].aval.shape}:
        return None
    if name in ELEMENTWISE:
        return lambda shape, arrays: bind_one(eqn, arrays)[0]
    if name == "broadcast_in_dim" and operands[0].aval.shape == ():
        return lambda shape, arrays: jnp.broadcast_to(arrays[0], shape)
    if name in ("jit", "pjit"):
        return _program(eqn.params["jaxpr"])
    return _with_rule(eqn) if name == "custom_jvp_call" else None


def _with_rule(eqn: Any, is_asked: bool = False) -> Function | None:
    """The same of a function with a derivative rule. The rule may call the function: but for the first, derivatives are made
    when they are asked for.
    """
    value = _program(eqn.params["call_jaxpr"])
    if value is None or not all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars):
        return None
    own = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    @functools.cache
    def tangent() -> Function | None:
        return _program(jax.make_jaxpr(lambda x, t: jax.jvp(lambda *x: bind_one(eqn, x)[0], x, t)[1])(own, own))

    if is_asked and tangent() is None:
        return None

    def run(shape: tuple[int, ...], arrays: Sequence[Any]) -> Any:
        function = jax.custom_jvp(lambda *xs: value(shape, xs))

        def derivative(xs: Sequence[Any], ts: Sequence[Any]) -> tuple[Any, Any]:
            made = tangent()
            if made is None:
                raise TypeError("a derivative rule inside that of a function of elements combines elements")
            return function(*xs), made(shape, [*xs, *ts])

        function.defjvp(derivative)
        return function(*arrays)

    return run


def _program(closed: Any) -> Function | None:
    """The same of a jaxpr."""
    jaxpr = closed.jaxpr
    functions = [function for eqn in jaxpr.eqns if (function := of_elements(eqn)) is not None]
    if len(functions) < len(jaxpr.eqns) or len(jaxpr.outvars) > 1 or any(map(np.shape, closed.consts)):
        return None

    def run(shape: tuple[int, ...], arrays: Sequence[Any]) -> Any:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arrays], strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else env[v]

        for eqn, function in zip(jaxpr.eqns, functions, strict=True):
            own = shape if eqn.outvars[0].aval.shape else ()
            env[eqn.outvars[0]] = function(own, [read(v) for v in eqn.invars])
        return read(jaxpr.outvars[0])

    return run

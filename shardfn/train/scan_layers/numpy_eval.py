"""Evaluate small functions with NumPy, equation by equation.

XLA needs about a second to compile an optimizer's update of a hundred parameters, for two calls on a few numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.extend import core

from shardfn.train.flat_jaxpr import FlatJaxpr, flatten_jaxpr


def numpy_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` that evaluates with NumPy; it compiles a function with a primitive that has no row in `_BY_NUMPY`.

    >>> import jax.numpy as jnp
    >>> run = numpy_jit(lambda x: {"y": jnp.sqrt(x).sum() + 1})
    >>> print(run(np.array([1.0, 4.0], np.float32))["y"])
    4.0
    """
    traced: list[tuple[FlatJaxpr, Any]] = []

    def run(*args: Any) -> Any:
        if not traced:
            closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
            flat = flatten_jaxpr(closed, 0, lambda eqn: eqn.primitive.name in ("jit", "pjit"))
            traced.append((flat, tree_util.tree_structure(shape)))
        flat, treedef = traced[0]
        if any(one.eqn.primitive.name not in _BY_NUMPY for one in flat.equations):
            return jax.jit(function)(*args)
        env = {**flat.consts, **dict(enumerate(tree_util.tree_leaves(args)))}
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]  # noqa: E731
        with np.errstate(all="ignore"):
            for one in flat.equations:
                result = _BY_NUMPY[one.eqn.primitive.name](one.eqn.params, *(np.asarray(read(v)) for v in one.inputs))
                env[one.outputs[0]] = np.asarray(result, one.eqn.outvars[0].aval.dtype)
        return tree_util.tree_unflatten(treedef, map(read, flat.outputs))

    return run


def _broadcast(params: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for size, dim in zip(x.shape, params["broadcast_dimensions"], strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


_BY_NUMPY: Mapping[str, Callable[..., Any]] = {
    **{name: lambda params, *xs, of=of: of(*xs) for name, of in {
        "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "copy": np.array, "cos": np.cos, "div": np.divide,
        "eq": np.equal, "exp": np.exp, "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite,
        "le": np.less_equal, "log": np.log, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply,
        "ne": np.not_equal, "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "pow": np.power,
        "rsqrt": lambda x: 1 / np.sqrt(x), "sign": np.sign, "sin": np.sin, "sqrt": np.sqrt, "square": np.square,
        "sub": np.subtract, "tanh": np.tanh,
    }.items()},
    "broadcast_in_dim": lambda params, x, *_: _broadcast(params, x),
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "integer_pow": lambda params, x: operator.pow(x, params["y"]) if params["y"] >= 0 else 1 / x ** -params["y"],
    "reduce_max": lambda params, x: x.max(axis=params["axes"]),
    "reduce_sum": lambda params, x: x.sum(axis=params["axes"]),
    "reshape": lambda params, x, *_: x.reshape(params["new_sizes"]),
    "select_n": lambda params, which, *cases: np.choose(which.astype(int), cases),
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
}  # fmt: skip
"""Primitives of optimizers."""

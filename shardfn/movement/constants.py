"""Small integers that are known while tracing: the indices of slices, gathers and scatters, computed by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

LARGEST = 4096
"""Elements of an array that is worth knowing."""


def folded(eqn: Any, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """The result of an equation for known operands; None if it is not known, or not of few integers and bools alone: NumPy
    converts floats in another way than XLA."""
    fold = _FOLDED.get(eqn.primitive.name)
    if fold is None or len(eqn.outvars) != 1:
        return None
    (out,) = eqn.outvars
    dtypes = [v.aval.dtype for v in (*eqn.invars, out)]
    is_whole = all(jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_) for dtype in dtypes)
    if not is_whole or out.aval.size > LARGEST:
        return None
    with np.errstate(all="ignore"):
        found = fold(eqn, *map(np.asarray, arrays, dtypes))
    return None if found is None else np.asarray(found, out.aval.dtype).reshape(out.aval.shape)


def _broadcast(eqn: Any, x: np.ndarray) -> np.ndarray:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    own = [1] * len(shape)
    for dim, size in zip(dims, x.shape, strict=True):
        own[dim] = size
    return np.broadcast_to(x.reshape(own), shape)


def _iota(eqn: Any) -> np.ndarray:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    own = [1] * len(shape)
    own[dim] = shape[dim]
    return np.broadcast_to(np.arange(shape[dim]).reshape(own), shape)


def _slice(eqn: Any, x: np.ndarray) -> np.ndarray:
    p = eqn.params
    steps = p["strides"] or (1,) * x.ndim
    return x[tuple(slice(*one) for one in zip(p["start_indices"], p["limit_indices"], steps, strict=True))]


def _select(eqn: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 else None


def _of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, *arrays: function(*arrays)


_FOLDED: dict[str, Callable[..., Any]] = {
    "add": _of(np.add), "sub": _of(np.subtract), "mul": _of(np.multiply), "neg": _of(np.negative), "max": _of(np.maximum),
    "min": _of(np.minimum), "lt": _of(np.less), "le": _of(np.less_equal), "gt": _of(np.greater), "ge": _of(np.greater_equal),
    "eq": _of(np.equal), "ne": _of(np.not_equal), "and": _of(np.bitwise_and), "or": _of(np.bitwise_or),
    "not": _of(np.invert), "rem": lambda eqn, x, y: np.fmod(x, y) if np.all(y) else None, "sign": _of(np.sign),
    "clamp": lambda eqn, low, x, high: np.clip(x, low, high),
    "select_n": _select,
    "convert_element_type": _of(np.asarray), "copy": _of(np.asarray), "pvary": _of(np.asarray),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "concatenate": lambda eqn, *arrays: np.concatenate(arrays, eqn.params["dimension"]),
    "reshape": lambda eqn, x: x.reshape(eqn.params["new_sizes"]) if eqn.params["dimensions"] is None else None,
    "squeeze": lambda eqn, x: x.reshape(eqn.outvars[0].aval.shape),
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "slice": _slice,
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
}  # fmt: skip

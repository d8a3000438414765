"""NumPy arrays that a call reads and that are none of its arguments: whether they can change, and what JAX makes of them."""

from __future__ import annotations

import jax
import numpy as np
from jax.extend.core import Literal

MAX_BYTES = 1 << 16
"""The largest NumPy array whose content is compared at each call, in bytes."""


def is_writeable(array: np.ndarray) -> bool:
    """Whether a program can change an array, itself or through the array that it is a view of.

    >>> base = np.zeros(2)
    >>> view = base[:]
    >>> view.flags.writeable = False
    >>> is_writeable(view)
    True
    """
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base  # type: ignore[assignment]
    return False


def is_outdated_in_jax(array: np.ndarray) -> bool:
    """Whether JAX would put the earlier content of an array into a program.

    JAX (0.10 to 0.12) converts an array of a dtype that it does not compute in, such as float64, once. It keeps the copy for as
    long as a program holds it. A change of the array in place does not reach the copy.
    """
    try:
        wanted = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        if wanted.dtype == array.dtype:
            return False
        jaxpr = jax.make_jaxpr(lambda x: x == array)(np.zeros((), wanted.dtype))
    except (TypeError, ValueError):  # of a dtype that JAX has nothing for
        return False
    kept = [*jaxpr.consts, *(v.val for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Literal))]
    return not any(np.array_equal(value, wanted, equal_nan=True) for value in kept)

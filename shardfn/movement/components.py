"""Dimensions of components: fields, species, directions. What is computed of one of their rows is an array of its own.

The rows of other dimensions, those of grids, have neighbours, and are computed in the frame of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardfn.ir.rewrite import inner

FEW = 8
"""A dimension of so few rows is one of components, whatever the program does with them."""

MOST = 32
"""One of at most so many is, where the program takes its rows one by one. An op on components is as many ops."""


def grids_of(jaxpr: Any) -> frozenset[int]:
    """The sizes of dimensions along which a program moves several rows together.

    >>> import jax, jax.numpy as jnp
    >>> def moved(f):
    ...     return jnp.stack([jnp.roll(f[k], 1) for k in range(9)])
    >>> sorted(grids_of(jax.make_jaxpr(moved)(jnp.ones((9, 100))).jaxpr))
    [99, 100]
    """
    return frozenset(_sizes(jaxpr))


def _sizes(jaxpr: Any) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in _OF_ROWS:
            arrays = [v.aval.shape for v in (*eqn.invars, *eqn.outvars) if v.aval.shape]
            for sizes in zip(*arrays, strict=True):
                if any(1 < rows < max(sizes) for rows in sizes):
                    yield from (rows for rows in sizes if rows > 1)
        elif name == "rev":
            yield from (eqn.outvars[0].aval.shape[dim] for dim in params["dimensions"])
        elif name.startswith("reduce_window"):
            sizes = zip(eqn.invars[0].aval.shape, params["window_dimensions"], strict=True)
            yield from (size for size, rows in sizes if rows > 1)
        for one in inner(eqn):
            yield from _sizes(one)


_OF_ROWS = frozenset({"slice", "pad", "concatenate", "split", "dynamic_slice", "dynamic_update_slice"})
"""Primitives of which arrays have rows of others."""

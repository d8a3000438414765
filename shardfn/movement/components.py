"""Dimensions of components: fields, species, directions. What is computed of one of their rows is an array of its own.

The rows of other dimensions, those of grids, have neighbours, and are computed in the frame of all.
"""

from __future__ import annotations

import collections
from typing import Any

from shardfn.ir.rewrite import equations

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
    moved, reversed_, alone = set(), set(), collections.defaultdict(set)
    for _, eqn, _ in equations(jaxpr):
        name, params = eqn.primitive.name, eqn.params
        if name in _OF_ROWS:
            arrays = [v.aval.shape for v in (*eqn.invars, *eqn.outvars) if v.aval.shape]
            for sizes in zip(*arrays, strict=True):
                if any(1 < rows < max(sizes) for rows in sizes):
                    moved.update(rows for rows in sizes if rows > 1)
        elif name == "rev":
            reversed_.update(eqn.outvars[0].aval.shape[dim] for dim in params["dimensions"])
        elif name.startswith("reduce_window"):
            sizes = zip(eqn.invars[0].aval.shape, params["window_dimensions"], strict=True)
            moved.update(size for size, rows in sizes if rows > 1)
        if name == "slice":
            limits = zip(eqn.invars[0].aval.shape, params["start_indices"], params["limit_indices"], strict=True)
            for size, first, end in limits:
                if end - first == 1:
                    alone[size].add(first)
    # Components are turned round by `f[::-1]` too: directions of a lattice. Each of their rows is taken alone.
    one_by_one = {size for size, rows in alone.items() if len(rows) == size}
    return frozenset(moved | (reversed_ - one_by_one))


_OF_ROWS = frozenset({"slice", "pad", "concatenate", "split", "dynamic_slice", "dynamic_update_slice"})
"""Primitives of which arrays have rows of others."""

"""A compressible gas on a grid, by sweeps: as written, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

STEPS = 4
REST = np.array([1, 0, 0, 2.5], "float32")[:, None, None]
"""Density, momentum along both dimensions and energy of a gas at rest."""


def flux(q: Any, dim: int) -> tuple[Any, Any, Any]:
    """What a gas carries along a dimension, its speed there, and that of sound."""
    density, along, across = q[0], q[1] / q[0], q[2] / q[0]
    pressure = 0.4 * (q[3] - 0.5 * density * (along**2 + across**2))
    speed = (along, across)[dim - 1]
    pushes = [pressure * (d == dim) for d in (1, 2)]
    carried = [q[0] * speed, q[1] * speed + pushes[0], q[2] * speed + pushes[1], (q[3] + pressure) * speed]
    return jnp.stack(carried), speed, jnp.sqrt(1.4 * pressure / density)


def between(left: Any, right: Any, dim: int) -> Any:
    """The flux of Harten, Lax and van Leer (1983) between neighbouring cells."""
    (f, u, c), (g, v, d) = flux(left, dim), flux(right, dim)
    low = jnp.minimum(jnp.minimum(u - c, v - d), 0.0)
    high = jnp.maximum(jnp.maximum(u + c, v + d), 0.0)
    return (high * f - low * g + low * high * (right - left)) / (high - low)


def written(u: Any) -> Any:
    """Steps of a gas that is disturbed by `u`: a sweep along each dimension, with ghost cells."""

    def step(_: Any, q: Any) -> Any:
        for dim in (1, 2):
            p = jnp.pad(q, [(int(d == dim),) * 2 for d in range(3)], mode="edge")
            cells = p.shape[dim] - 1
            left, right = (lax.slice_in_dim(p, i, i + cells, axis=dim) for i in (0, 1))
            q = q - 0.1 * jnp.diff(between(left, right, dim), axis=dim)
        return q

    return lax.fori_loop(0, STEPS, step, REST + 0.1 * u)


def by_hand(u: Any, beyond: Callable[[Any, int, int], Any]) -> Any:
    """The same, of each cell's neighbours: `beyond` gives them."""

    def step(_: Any, q: Any) -> Any:
        for dim in (1, 2):
            q = q - 0.1 * (between(q, beyond(q, 1, dim), dim) - between(beyond(q, -1, dim), q, dim))
        return q

    return lax.fori_loop(0, STEPS, step, REST + 0.1 * u)

"""The heat equation on a plane: explicit steps with a five-point stencil, edges periodic or held at zero."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def laplacian_periodic(u: jax.Array) -> jax.Array:
    """The five-point Laplacian of u [rows, columns], whose edges meet."""
    return sum(jnp.roll(u, shift, axis) for axis in (0, 1) for shift in (1, -1)) - 4 * u


def laplacian_zero(u: jax.Array) -> jax.Array:
    """The five-point Laplacian of u [rows, columns] with zeros around it."""
    p = jnp.pad(u, 1)
    return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * u


LAPLACIANS = {"periodic": laplacian_periodic, "zero": laplacian_zero}


def heat(u: jax.Array, diffusivity: jax.Array, steps: int, edges: str = "periodic") -> jax.Array:
    """u [rows, columns] after `steps` steps; stable for a diffusivity of at most 1/4."""
    laplacian = LAPLACIANS[edges]
    return jax.lax.fori_loop(0, steps, lambda _, u: u + diffusivity * laplacian(u), u)


def make(rows: int = 64, columns: int = 64, steps: int = 10, edges: str = "periodic"):
    """`heat` on (u, diffusivity), with a hot square in the middle."""
    u = jnp.zeros((rows, columns)).at[rows // 4 : rows // 2, columns // 4 : columns // 2].set(1.0)
    return functools.partial(heat, steps=steps, edges=edges), (u, jnp.float32(0.2))

"""Solving symmetric positive definite systems by their Cholesky factor, one system or a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.models import quick_key


def solve(a: jax.Array, b: jax.Array) -> jax.Array:
    """x of a x = b; a [..., n, n] is symmetric positive definite, b [..., n, m]."""
    lower = jnp.linalg.cholesky(a)
    y = jax.lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)
    return jax.lax.linalg.triangular_solve(lower, y, left_side=True, lower=True, transpose_a=True)


def make(batch: int = 8, n: int = 16, m: int = 8):
    """`solve` on (a, b); `batch=0` gives one system without a batch dim."""
    lead = (batch,) if batch else ()
    ka, kb = jax.random.split(quick_key())
    root = jax.random.normal(ka, (*lead, n, n))
    a = root @ root.mT / n + jnp.eye(n)
    return solve, (a, jax.random.normal(kb, (*lead, n, m)))

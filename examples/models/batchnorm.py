"""A dense layer with batch normalisation: statistics run across the batch, so a cut batch must talk."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.models import quick_key

Arrays = dict[str, jax.Array]


def init(key: jax.Array, d_in: int, d_out: int) -> tuple[Arrays, Arrays]:
    """Parameters, and the running mean and variance."""
    params = {
        "w": jax.random.normal(key, (d_in, d_out)) / d_in**0.5,
        "scale": jnp.ones(d_out),
        "bias": jnp.zeros(d_out),
    }
    return params, {"mean": jnp.zeros(d_out), "variance": jnp.ones(d_out)}


def forward(params: Arrays, stats: Arrays, x: jax.Array, momentum: float = 0.9) -> tuple[jax.Array, Arrays]:
    """x [batch, d_in] to [batch, d_out] with the batch's own statistics, and the running ones moved towards them."""
    y = x @ params["w"]
    mean, variance = jnp.mean(y, axis=0), jnp.var(y, axis=0)
    normal = (y - mean) * jax.lax.rsqrt(variance + 1e-5)
    batch_stats = {"mean": mean, "variance": variance}
    stats = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, stats, batch_stats)
    return jax.nn.relu(normal * params["scale"] + params["bias"]), stats


def make(batch: int = 16, d_in: int = 32, d_out: int = 64):
    """`forward` on (params, stats, x)."""
    key, kx = jax.random.split(quick_key())
    return forward, (*init(key, d_in, d_out), jax.random.normal(kx, (batch, d_in)))

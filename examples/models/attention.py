"""A pre-norm attention block with a residual: heads are a dim of the weights, so they can be cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.models import quick_key

Params = dict[str, jax.Array]


def init(key: jax.Array, d_model: int, heads: int) -> Params:
    """wq, wk, wv [d_model, heads, head_dim], wo [heads, head_dim, d_model], and the norm's scale and bias."""
    head_dim = d_model // heads
    shapes = dict.fromkeys(("wq", "wk", "wv"), (d_model, heads, head_dim)) | {"wo": (heads, head_dim, d_model)}
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: jax.random.normal(k, shape) / d_model**0.5 for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }
    return weights | {"scale": jnp.ones(d_model), "bias": jnp.zeros(d_model)}


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalise the last dim to mean 0 and variance 1, then scale and shift it."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Softmax attention: q [b, t, h, d], k and v [b, s, h, d], mask [t, s] (None: all is seen), to [b, t, h, d]."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def forward(params: Params, x: jax.Array, causal: bool = True) -> jax.Array:
    """x [batch, seq, d_model] plus its self-attention; a causal one sees nothing that comes later."""
    y = layer_norm(x, params["scale"], params["bias"])
    q, k, v = (jnp.einsum("btm,mhd->bthd", y, params[name]) for name in ("wq", "wk", "wv"))
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)) if causal else None
    return x + jnp.einsum("bthd,hdm->btm", attend(q, k, v, mask), params["wo"])


def make(batch: int = 8, seq: int = 16, d_model: int = 32, heads: int = 8):
    """`forward` on (params, x)."""
    key, kx = jax.random.split(quick_key())
    return forward, (init(key, d_model, heads), jax.random.normal(kx, (batch, seq, d_model)))

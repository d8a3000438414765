"""One step of decoding with a key-value cache, and a loop of such steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from examples.models import attention, quick_key

Cache = dict[str, jax.Array]


def init(key: jax.Array, layers: int, d_model: int, heads: int, vocab: int) -> dict[str, Any]:
    """An embedding, used for the output as well, and attention-only layers."""
    ke, *keys = jax.random.split(key, 1 + layers)
    return {
        "embedding": jax.random.normal(ke, (vocab, d_model)),
        "layers": [attention.init(k, d_model, heads) for k in keys],
    }


def init_cache(params: dict[str, Any], batch: int, length: int) -> Cache:
    """Keys and values [layers, batch, length, heads, head_dim], and how many positions are filled."""
    _, heads, head_dim = params["layers"][0]["wk"].shape
    shape = (len(params["layers"]), batch, length, heads, head_dim)
    return {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "filled": jnp.zeros((), jnp.int32)}


def decode_step(params: dict[str, Any], cache: Cache, token: jax.Array) -> tuple[jax.Array, Cache]:
    """Tokens [batch] at the next position to logits [batch, vocab], and the cache with that position in it."""
    at, keys, values = cache["filled"], cache["k"], cache["v"]
    mask = (jnp.arange(keys.shape[2]) <= at)[None]
    x = params["embedding"][token][:, None]
    for i, p in enumerate(params["layers"]):
        y = attention.layer_norm(x, p["scale"], p["bias"])
        q, k, v = (jnp.einsum("btm,mhd->bthd", y, p[name]) for name in ("wq", "wk", "wv"))
        keys = jax.lax.dynamic_update_slice(keys, k[None], (i, 0, at, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v[None], (i, 0, at, 0, 0))
        x = x + jnp.einsum("bthd,hdm->btm", attention.attend(q, keys[i], values[i], mask), p["wo"])
    return x[:, 0] @ params["embedding"].T, {"k": keys, "v": values, "filled": at + 1}


def generate(params: dict[str, Any], cache: Cache, token: jax.Array, steps: int) -> jax.Array:
    """The most likely continuation of tokens [batch], as [batch, steps]."""

    def step(carry, _):
        cache, token = carry
        logits, cache = decode_step(params, cache, token)
        token = jnp.argmax(logits, axis=-1).astype(token.dtype)
        return (cache, token), token

    _, tokens = jax.lax.scan(step, (cache, token), length=steps)
    return tokens.T


def make(batch: int = 8, length: int = 16, layers: int = 2, d_model: int = 32, heads: int = 8, vocab: int = 64):
    """`decode_step` on (params, cache, token)."""
    key, kt = jax.random.split(quick_key())
    params = init(key, layers, d_model, heads, vocab)
    return decode_step, (params, init_cache(params, batch, length), jax.random.randint(kt, (batch,), 0, vocab))

"""Decoding with a cache: one token of Llama 3 70B on 8 TPU v6e.

16 sequences with a cache of 8,192 positions; the model is that of `llama3_70b.py`. The cache is donated, and every layer of the
scan writes its new keys and values into it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from examples.gallery import Program, show
from examples.gallery.llama3_8b import TINY, Config, parameters, rms_norm, rotate

FULL = Config(layers=80, width=8192, heads=64, hidden=28672, context=8192, batch=16)


def attend(q, keys, values, position):
    """q [batch, heads, head] over the first `position + 1` of keys and values [batch, kv_heads, context, head]."""
    batch, heads, head = q.shape
    q = q.reshape(batch, keys.shape[1], -1, head)
    scores = jnp.einsum("bkgd,bksd->bkgs", q, keys) / head**0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(keys.shape[2]) <= position, scores, -1e9).astype(jnp.float32))
    return jnp.einsum("bkgs,bksd->bkgd", weights.astype(q.dtype), values).reshape(batch, heads, head)


def decode_step(params, cache, tokens, position, cfg):
    """Tokens [batch] at a position to the likeliest next ones, and the cache with their keys and values."""

    def layer(carry, indexed):
        x, cache = carry
        i, p = indexed
        y = rms_norm(x, p["attention_norm"])
        q, k, v = (jnp.einsum("bd,dhe->bhe", y, p[name])[:, None] for name in ("wq", "wk", "wv"))
        q, k = rotate(q, position[None]), rotate(k, position[None])
        cache = {
            name: jax.lax.dynamic_update_slice(cache[name], new.swapaxes(1, 2)[None], (i, 0, 0, position, 0))
            for name, new in (("k", k), ("v", v))
        }
        x = x + jnp.einsum("bhe,hed->bd", attend(q[:, 0], cache["k"][i], cache["v"][i], position), p["wo"])
        y = rms_norm(x, p["mlp_norm"])
        return (x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], cache), None

    x = params["embed"][tokens]
    (x, cache), _ = jax.lax.scan(layer, (x, cache), (jnp.arange(cfg.layers), params["layers"]))
    logits = rms_norm(x, params["norm"]) @ params["head"]
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def program(size: str) -> Program:
    cfg = dataclasses.replace(TINY, kv_heads=4, heads=8) if size == "tiny" else FULL
    cache = jax.ShapeDtypeStruct((cfg.layers, cfg.batch, cfg.kv_heads, cfg.context, cfg.width // cfg.heads), cfg.dtype)
    arguments = (
        parameters(cfg),
        {"k": cache, "v": cache},
        jax.ShapeDtypeStruct((cfg.batch,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    options = {"level": "time", "donate_argnums": (1,)}
    step = functools.partial(decode_step, cfg=cfg)
    return Program(step, arguments, None if size == "tiny" else "tpu-v6e:2x4", options)


NOTES = """
libtpu stores the cache in another layout inside the loop, with the batch along the sublanes of a tile in the place of the
positions. It copies the cache to that layout before the loop and back behind it, although the cache is donated. The prediction
counts no copy. With the plan of 2026-11-26 the temporaries were as large as the cache.
"""

if __name__ == "__main__":
    show(program)

"""Gemma 2 27B: a training step on 256 TPU v6e.

Layers alternate between attention to the last 4,096 tokens and to all, so the scan runs over 23 pairs. Scores and logits are
capped by tanh, the hidden layer is a GeGLU, and the table of 256,128 tokens is also the output layer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from examples.gallery import Program, shapes, show, training
from examples.gallery.llama3_8b import rms_norm, rotate


@dataclasses.dataclass(frozen=True)
class Config:
    pairs: int = 23
    width: int = 4608
    heads: int = 32
    kv_heads: int = 16
    head: int = 128
    hidden: int = 36864
    vocab: int = 256128
    window: int = 4096
    context: int = 8192
    batch: int = 256
    dtype: str = "bfloat16"


TINY = Config(pairs=1, width=32, heads=4, kv_heads=2, head=8, hidden=64, vocab=64, window=4, context=8, batch=8,
              dtype="float32")  # fmt: skip


def parameters(cfg):
    d, h, k, e = cfg.width, cfg.heads, cfg.kv_heads, cfg.head
    layer = {
        **{f"{when}_{what}_norm": (d,) for when in ("pre", "post") for what in ("attention", "mlp")},
        **{"wq": (d, h, e), "wk": (d, k, e), "wv": (d, k, e), "wo": (h, e, d)},
        **{"gate": (d, cfg.hidden), "up": (d, cfg.hidden), "down": (cfg.hidden, d)},
    }
    rest = shapes(cfg.dtype, {"embed": (cfg.vocab, d), "norm": (d,)})
    return {**rest, "layers": shapes(cfg.dtype, {"local": layer, "global": layer}, cfg.pairs)}


def cap(x, most):
    return most * jnp.tanh(x / most)


def layer(x, p, window):
    """One layer; each token attends to itself and the `window - 1` before it."""
    positions = jnp.arange(x.shape[1])
    y = rms_norm(x, 1 + p["pre_attention_norm"])
    q, k, v = (jnp.einsum("btd,dhe->bthe", y, p[name]) for name in ("wq", "wk", "wv"))
    q, k = rotate(q, positions, 10_000.0), rotate(k, positions, 10_000.0)
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = cap(jnp.einsum("btkge,bske->bkgts", q, k) / k.shape[-1] ** 0.5, 50.0)
    ago = positions[:, None] - positions
    weights = jax.nn.softmax(jnp.where((ago >= 0) & (ago < window), scores, -1e9), axis=-1)
    y = jnp.einsum("bkgts,bske->btkge", weights, v).reshape(*x.shape[:2], *p["wo"].shape[:2])
    x = x + rms_norm(jnp.einsum("bthe,hed->btd", y, p["wo"]), 1 + p["post_attention_norm"])
    y = rms_norm(x, 1 + p["pre_mlp_norm"])
    y = (jax.nn.gelu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return x + rms_norm(y, 1 + p["post_mlp_norm"])


def loss(params, tokens, cfg):
    def pair(x, p):
        for name, window in (("local", cfg.window), ("global", cfg.context)):
            x = jax.checkpoint(functools.partial(layer, window=window))(x, p[name])
        return x, None

    x = params["embed"][tokens[:, :-1]] * jnp.asarray(cfg.width**0.5, cfg.dtype)
    x, _ = jax.lax.scan(pair, x, params["layers"])
    logits = cap(rms_norm(x, 1 + params["norm"]) @ params["embed"].T, 30.0).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    tokens = jax.ShapeDtypeStruct((cfg.batch, cfg.context + 1), jnp.int32)
    device = None if size == "tiny" else "tpu-v6e:16x16"
    return training(functools.partial(loss, cfg=cfg), parameters(cfg), {"tokens": tokens}, device, level="time")


if __name__ == "__main__":
    show(program)

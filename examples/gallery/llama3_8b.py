"""Llama 3 8B: a training step on 256 TPU v5p.

Grouped-query attention, rotary positions and SwiGLU, in plain JAX. The 32 layers are stacked and scanned, and each is
recomputed in the backward pass. Parameters and optimizer state are bfloat16.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from examples.gallery import Program, shapes, show, training


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocab: int = 128256
    context: int = 8192
    batch: int = 512
    dtype: str = "bfloat16"


TINY = Config(layers=2, width=32, heads=4, kv_heads=2, hidden=64, vocab=64, context=8, batch=8, dtype="float32")


def parameters(cfg):
    d, head = cfg.width, cfg.width // cfg.heads
    layer = {
        "attention_norm": (d,),
        "wq": (d, cfg.heads, head),
        "wk": (d, cfg.kv_heads, head),
        "wv": (d, cfg.kv_heads, head),
        "wo": (cfg.heads, head, d),
        "mlp_norm": (d,),
        "gate": (d, cfg.hidden),
        "up": (d, cfg.hidden),
        "down": (cfg.hidden, d),
    }
    rest = shapes(cfg.dtype, {"embed": (cfg.vocab, d), "norm": (d,), "head": (d, cfg.vocab)})
    return {**rest, "layers": shapes(cfg.dtype, layer, cfg.layers)}


def rms_norm(x, scale):
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-5).astype(x.dtype) * scale


def rotate(x, positions, theta=500_000.0):
    """Rotary embedding of x [batch, seq, heads, head] at positions [seq]: dim i turns with dim i + head / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def layer(x, p):
    positions = jnp.arange(x.shape[1])
    y = rms_norm(x, p["attention_norm"])
    q, k, v = (jnp.einsum("btd,dhe->bthe", y, p[name]) for name in ("wq", "wk", "wv"))
    y = jax.nn.dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
    x = x + jnp.einsum("bthe,hed->btd", y, p["wo"])
    y = rms_norm(x, p["mlp_norm"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None


def loss(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (rms_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def step(cfg: Config, device: str | None) -> Program:
    tokens = jax.ShapeDtypeStruct((cfg.batch, cfg.context + 1), jnp.int32)
    return training(loss, parameters(cfg), {"tokens": tokens}, device, level="time")


def program(size: str) -> Program:
    return step(TINY, None) if size == "tiny" else step(Config(), "tpu-v5p:4x8x8")


NOTES = """
The weights fit on each chip, so that they are gathered once for a step, after the update. libtpu makes an all-reduce of an
all-gather over all chips of a three-dimensional torus, which sends twice the bytes: the prediction counts them. The moments of
`down` stay replicated, as its new weights then need no all-gather.
"""

if __name__ == "__main__":
    show(program)

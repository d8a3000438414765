"""A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; trained with AdamW.

Names and shapes of the parameters are those of Hugging Face's Llama: a `weight` is [out, in].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.models import abstract
from examples.models.layouts import Expert, hint, usual_experts
from examples.models.training import cross_entropy, language_model, normal
from shardfn import tag

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; `heads` query heads share `kv_heads` key and value heads. `scan` stacks the layers and scans over them."""

    layers: int = 2
    d_model: int = 64
    heads: int = 8
    kv_heads: int = 4
    d_hidden: int = 192
    vocab: int = 128
    context: int = 32
    batch: int = 8
    scan: bool = False
    remat: bool = False
    """Recompute each layer in the backward pass."""


TINY = Config(layers=1, d_model=16, heads=4, kv_heads=2, d_hidden=32, vocab=32, context=8)
"""For tests."""


def init(key: jax.Array, cfg: Config) -> Params:
    """The parameters."""
    d, head = cfg.d_model, cfg.d_model // cfg.heads
    ke, kh, *keys = jax.random.split(key, 2 + cfg.layers)

    def linear(key: jax.Array, out: int, into: int) -> Params:
        return {"weight": normal(key, (out, into), into)}

    def layer(key: jax.Array) -> Params:
        k = jax.random.split(key, 7)
        return {
            "input_layernorm": {"weight": jnp.ones(d)},
            "self_attn": {
                "q_proj": linear(k[0], cfg.heads * head, d),
                "k_proj": linear(k[1], cfg.kv_heads * head, d),
                "v_proj": linear(k[2], cfg.kv_heads * head, d),
                "o_proj": linear(k[3], d, cfg.heads * head),
            },
            "post_attention_layernorm": {"weight": jnp.ones(d)},
            "mlp": {
                "gate_proj": linear(k[4], cfg.d_hidden, d),
                "up_proj": linear(k[5], cfg.d_hidden, d),
                "down_proj": linear(k[6], d, cfg.d_hidden),
            },
        }

    layers = jax.vmap(layer)(jnp.stack(keys)) if cfg.scan else [layer(k) for k in keys]
    return {
        "model": {
            "embed_tokens": {"weight": 0.02 * jax.random.normal(ke, (cfg.vocab, d))},
            "layers": layers,
            "norm": {"weight": jnp.ones(d)},
        },
        "lm_head": linear(kh, cfg.vocab, d),
    }


def linear(params: Params, x: jax.Array) -> jax.Array:
    """x [..., in] to [..., out]."""
    return jnp.einsum("...i,oi->...o", x, params["weight"])


def rms_norm(params: Params, x: jax.Array) -> jax.Array:
    """x [..., d_model] at a mean square of 1, then scaled."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * params["weight"]


def rotate(x: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotary position embedding of x [batch, seq, heads, head_dim]: dim i turns with dim i + head_dim / 2."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(params: Params, x: jax.Array, cfg: Config) -> jax.Array:
    """Causal grouped-query attention of x [batch, seq, d_model]."""
    batch, seq, _ = x.shape
    groups, head = cfg.heads // cfg.kv_heads, cfg.d_model // cfg.heads
    q = rotate(linear(params["q_proj"], x).reshape(batch, seq, cfg.heads, head))
    k = rotate(linear(params["k_proj"], x).reshape(batch, seq, cfg.kv_heads, head))
    v = linear(params["v_proj"], x).reshape(batch, seq, cfg.kv_heads, head)
    q = q.reshape(batch, seq, cfg.kv_heads, groups, head)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / head**0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v)
    return linear(params["o_proj"], out.reshape(batch, seq, cfg.heads * head))


def forward(params: Params, tokens: jax.Array, cfg: Config) -> jax.Array:
    """Tokens [batch, seq] to logits [batch, seq, vocab]."""
    model = params["model"]
    x = tag(hint(model["embed_tokens"]["weight"][tokens]), "embedding")

    def layer(x: jax.Array, p: Params) -> jax.Array:
        x = tag(hint(x + attend(p["self_attn"], rms_norm(p["input_layernorm"], x), cfg)), "block")
        y = rms_norm(p["post_attention_layernorm"], x)
        gate, up = linear(p["mlp"]["gate_proj"], y), linear(p["mlp"]["up_proj"], y)
        return tag(hint(x + linear(p["mlp"]["down_proj"], jax.nn.silu(gate) * up)), "block")

    if cfg.remat:
        layer = jax.checkpoint(layer)
    if cfg.scan:
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, model["layers"])
    else:
        for p in model["layers"]:
            x = layer(x, p)
    return linear(params["lm_head"], rms_norm(model["norm"], x))


def loss(params: Params, tokens: jax.Array, *, cfg: Config) -> jax.Array:
    """Mean cross entropy of each next token; tokens [batch, context + 1]."""
    return cross_entropy(forward(params, tokens[:, :-1], cfg), tokens[:, 1:])


def make(cfg: Config = Config()):
    """A training step on (params, state, tokens)."""
    return language_model(cfg, init, functools.partial(loss, cfg=cfg))


def small() -> Config:
    """Compiles on a CPU in seconds."""
    return Config(layers=2, d_model=256, heads=8, kv_heads=4, d_hidden=704, vocab=1024, context=64, batch=16)


def large() -> Config:
    """1.7 billion parameters, the widths of the 7B model, and a batch for 512 devices: for plans on paper."""
    return Config(layers=8, d_model=4096, heads=32, kv_heads=8, d_hidden=11008, vocab=32000, context=512, batch=512)


def llama3_70b(batch: int = 256, context: int = 4096) -> Config:
    """Llama 3 70B: scanned layers, recomputed in the backward pass; a million tokens a step."""
    return Config(layers=80, d_model=8192, heads=64, kv_heads=8, d_hidden=28672, vocab=128256, context=context,
                  batch=batch, scan=True, remat=True)  # fmt: skip


def experts(cfg: Config, devices: int) -> dict[str, Expert]:
    """Layouts of the training step as people write them by hand: keys and values are cut by whole heads."""
    up, down = ("model", None), (None, "model")
    tensor = {
        **dict.fromkeys(("*/q_proj/*", "*/k_proj/*", "*/v_proj/*", "*/gate_proj/*", "*/up_proj/*"), up),
        **dict.fromkeys(("*/o_proj/*", "*/down_proj/*"), down),
    }
    vocabulary = tensor | {"*/embed_tokens/*": up, "*/lm_head/*": up}
    return usual_experts(
        abstract(make, cfg)[1], devices, cfg.batch, cfg.kv_heads, tensor, {"vocabulary cut too": vocabulary}
    )

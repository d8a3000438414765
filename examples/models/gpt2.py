"""GPT-2 with tied embeddings: forward pass, loss and a training step with AdamW, layers unrolled or scanned."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.models import abstract, attention, quick_key
from examples.models.layouts import Expert, hint, usual_experts


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; the ratios are GPT-2's (feed-forward 4 times d_model). `scan` stacks the layers and scans over them."""

    layers: int = 2
    d_model: int = 64
    heads: int = 8
    vocab: int = 128
    context: int = 32
    batch: int = 8
    scan: bool = False
    remat: bool = False


SMALL = Config(layers=12, d_model=768, heads=12, vocab=50304, context=1024)
"""The 124M model; its vocabulary of 50257 is padded to a multiple of 128, as is usual, so that it can be cut."""

TINY = Config(layers=1, d_model=16, heads=4, vocab=32, context=8)
"""For tests."""

TENSOR_CUTS = {
    **dict.fromkeys(("*/wq", "*/wk", "*/wv"), (None, "model", None)),
    "*/wo": ("model", None, None),
    "*/w1": (None, "model"),
    "*/b1": ("model",),
    "*/w2": ("model", None),
}
"""Megatron's: heads and the feed-forward's hidden dim."""

ADAMW = optax.adamw(3e-4, weight_decay=0.1)


def init_block(key: jax.Array, cfg: Config) -> dict[str, Any]:
    """One layer: attention and feed-forward, each with its norm."""
    ka, k1, k2 = jax.random.split(key, 3)
    d, f = cfg.d_model, 4 * cfg.d_model
    return {
        "attention": attention.init(ka, d, cfg.heads),
        "mlp": {
            "scale": jnp.ones(d),
            "bias": jnp.zeros(d),
            "w1": jax.random.normal(k1, (d, f)) * 0.02,
            "b1": jnp.zeros(f),
            "w2": jax.random.normal(k2, (f, d)) * 0.02,
            "b2": jnp.zeros(d),
        },
    }


def init(key: jax.Array, cfg: Config) -> dict[str, Any]:
    """The parameters; `blocks` is a list, or one tree with a leading dim of layers for `scan`."""
    kt, kp, *keys = jax.random.split(key, 2 + cfg.layers)
    blocks: Any = [init_block(k, cfg) for k in keys]
    return {
        "tokens": jax.random.normal(kt, (cfg.vocab, cfg.d_model)) * 0.02,
        "positions": jax.random.normal(kp, (cfg.context, cfg.d_model)) * 0.02,
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks) if cfg.scan else blocks,
        "scale": jnp.ones(cfg.d_model),
        "bias": jnp.zeros(cfg.d_model),
    }


def block(params: dict[str, Any], x: jax.Array, causal: bool = True) -> jax.Array:
    """x [batch, seq, d_model] through one layer."""
    x = hint(attention.forward(params["attention"], x, causal))
    p = params["mlp"]
    h = jax.nn.gelu(attention.layer_norm(x, p["scale"], p["bias"]) @ p["w1"] + p["b1"])
    return hint(x + h @ p["w2"] + p["b2"])


def forward(params: dict[str, Any], tokens: jax.Array, cfg: Config) -> jax.Array:
    """Tokens [batch, seq] to logits [batch, seq, vocab]."""
    layer = jax.checkpoint(block) if cfg.remat else block
    x = hint(params["tokens"][tokens] + params["positions"][: tokens.shape[1]])
    if cfg.scan:
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["blocks"])
    else:
        for p in params["blocks"]:
            x = layer(p, x)
    return attention.layer_norm(x, params["scale"], params["bias"]) @ params["tokens"].T


def loss(params: dict[str, Any], tokens: jax.Array, cfg: Config) -> jax.Array:
    """Mean cross entropy of each next token; tokens [batch, context + 1]."""
    logits = forward(params, tokens[:, :-1], cfg)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def train_step(params: dict[str, Any], state: optax.OptState, tokens: jax.Array, *, cfg: Config):
    """One step of AdamW: new parameters, new optimiser state, and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, tokens, cfg)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def make(cfg: Config = Config(), train: bool = True):
    """`train_step` on (params, state, tokens), or `forward` on (params, tokens)."""
    key, kt = jax.random.split(quick_key())
    params = init(key, cfg)
    tokens = jax.random.randint(kt, (cfg.batch, cfg.context + 1), 0, cfg.vocab)
    if train:
        return functools.partial(train_step, cfg=cfg), (params, ADAMW.init(params), tokens)
    return functools.partial(forward, cfg=cfg), (params, tokens[:, :-1])


def small() -> Config:
    """Compiles on a CPU in seconds; the weights outweigh the activations, as in the full model."""
    return Config(layers=2, d_model=256, heads=8, vocab=1024, context=64, batch=16)


def large() -> Config:
    """1.8 billion parameters and a batch for 512 devices: for plans on paper."""
    return Config(layers=8, d_model=4096, heads=32, vocab=51200, context=512, batch=512)


def experts(cfg: Config, devices: int) -> dict[str, Expert]:
    """Layouts of the training step as people write them by hand."""
    args = abstract(make, cfg)[1]
    vocabulary = TENSOR_CUTS | {"*/tokens": ("model", None)}
    return usual_experts(args, devices, cfg.batch, cfg.heads, TENSOR_CUTS, {"vocabulary cut too": vocabulary})

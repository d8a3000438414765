"""A T5-like encoder and decoder: cross-attention, relative position biases, RMSNorm; trained with AdamW."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.models import abstract, quick_key
from examples.models.layouts import Expert, hint, usual_experts
from examples.models.training import ADAMW, adamw_step, cross_entropy, normal

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; `layers` of the encoder and as many of the decoder; offsets beyond `reach` share a bias."""

    layers: int = 1
    d_model: int = 64
    heads: int = 8
    d_hidden: int = 128
    vocab: int = 128
    source: int = 32
    target: int = 16
    reach: int = 16
    batch: int = 8


TINY = Config(d_model=16, heads=4, d_hidden=32, vocab=32, source=8, target=8, reach=4)
"""For tests."""


def init(key: jax.Array, cfg: Config) -> Params:
    """The parameters; attention's have the heads as a dim."""
    d, h = cfg.d_model, cfg.heads
    keys = iter(jax.random.split(key, 4 + 16 * cfg.layers))

    def attention() -> Params:
        shapes = {**dict.fromkeys(("wq", "wk", "wv"), (d, h, d // h)), "wo": (h, d // h, d)}
        return {"scale": jnp.ones(d)} | {name: normal(next(keys), shape, d) for name, shape in shapes.items()}

    def feed_forward() -> Params:
        f = cfg.d_hidden
        return {"scale": jnp.ones(d), "w1": normal(next(keys), (d, f)), "w2": normal(next(keys), (f, d))}

    def stack(*parts: str) -> Params:
        layers = [{p: feed_forward() if p == "mlp" else attention() for p in parts} for _ in range(cfg.layers)]
        bias = 0.02 * jax.random.normal(next(keys), (2 * cfg.reach + 1, h))
        return {"layers": layers, "bias": bias, "scale": jnp.ones(d)}

    return {
        "tokens": 0.02 * jax.random.normal(next(keys), (cfg.vocab, d)),
        "encoder": stack("self", "mlp"),
        "decoder": stack("self", "cross", "mlp"),
        "head": normal(next(keys), (d, cfg.vocab)),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x [..., d_model] at a mean square of 1, then scaled."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def position_bias(table: jax.Array, length: int) -> jax.Array:
    """Biases [heads, length, length] of how far one position lies from another; table [2 * reach + 1, heads]."""
    reach = table.shape[0] // 2
    offsets = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    return table[jnp.clip(offsets, -reach, reach) + reach].transpose(2, 0, 1)


def attend(p: Params, x: jax.Array, memory: jax.Array | None = None, bias: jax.Array | float = 0.0) -> jax.Array:
    """x [batch, t, d_model] plus its attention to itself or to memory [batch, s, d_model]."""
    y = rms_norm(x, p["scale"])
    seen = y if memory is None else memory
    q = jnp.einsum("btm,mhd->bthd", y, p["wq"])
    k, v = (jnp.einsum("bsm,mhd->bshd", seen, p[name]) for name in ("wk", "wv"))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5 + bias, axis=-1)
    return hint(x + jnp.einsum("bthd,hdm->btm", jnp.einsum("bhts,bshd->bthd", weights, v), p["wo"]))


def feed_forward(p: Params, x: jax.Array) -> jax.Array:
    """x [batch, t, d_model] plus two dense layers of it."""
    return hint(x + jax.nn.relu(rms_norm(x, p["scale"]) @ p["w1"]) @ p["w2"])


def forward(params: Params, source: jax.Array, target: jax.Array) -> jax.Array:
    """Tokens [batch, s] and [batch, t] to logits [batch, t, vocab] of what follows each of the latter."""
    encoder, decoder = params["encoder"], params["decoder"]
    memory = hint(params["tokens"][source])
    bias = position_bias(encoder["bias"], source.shape[1])
    for p in encoder["layers"]:
        memory = feed_forward(p["mlp"], attend(p["self"], memory, bias=bias))
    memory = rms_norm(memory, encoder["scale"])
    x = hint(params["tokens"][target])
    causal = jnp.tril(jnp.ones((target.shape[1], target.shape[1]), bool))
    bias = jnp.where(causal, position_bias(decoder["bias"], target.shape[1]), -1e9)
    for p in decoder["layers"]:
        x = attend(p["self"], x, bias=bias)
        x = feed_forward(p["mlp"], attend(p["cross"], x, memory))
    return rms_norm(x, decoder["scale"]) @ params["head"]


def loss(params: Params, source: jax.Array, target: jax.Array) -> jax.Array:
    """Mean cross entropy of each next token of target [batch, target + 1]."""
    return cross_entropy(forward(params, source, target[:, :-1]), target[:, 1:])


def make(cfg: Config = Config()):
    """A training step on (params, state, source, target)."""
    key, ks, kt = jax.random.split(quick_key(), 3)
    params = init(key, cfg)
    source = jax.random.randint(ks, (cfg.batch, cfg.source), 0, cfg.vocab)
    target = jax.random.randint(kt, (cfg.batch, cfg.target + 1), 0, cfg.vocab)
    return functools.partial(adamw_step, loss=loss), (params, ADAMW.init(params), source, target)


def small() -> Config:
    """Compiles on a CPU in seconds."""
    return Config(layers=1, d_model=256, heads=8, d_hidden=1024, vocab=1024, source=64, target=32, batch=16)


def large() -> Config:
    """0.5 billion parameters and a batch for 512 devices: for plans on paper."""
    return Config(
        layers=4, d_model=2048, heads=32, d_hidden=5120, vocab=32128, source=512, target=512, reach=128, batch=512
    )


def experts(cfg: Config, devices: int) -> dict[str, Expert]:
    """Layouts of the training step as people write them by hand."""
    heads, last = (None, "model", None), (None, "model")
    tensor = {
        **dict.fromkeys(("*/wq", "*/wk", "*/wv"), heads),
        "*/wo": ("model", None, None),
        "*/w1": last,
        "*/w2": ("model", None),
        "*coder/bias": last,
    }
    vocabulary = tensor | {"*/tokens": ("model", None), "*/head": last}
    return usual_experts(
        abstract(make, cfg)[1], devices, cfg.batch, cfg.heads, tensor, {"vocabulary cut too": vocabulary}
    )

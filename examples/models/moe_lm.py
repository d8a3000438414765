"""A language model whose feed-forward layers are mixtures of experts: top-2 routing with capacity, by einsum; AdamW.

Each row of the batch is a group: every expert takes up to `capacity` of its tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.models import abstract, attention, gpt2, moe
from examples.models.layouts import Expert, data_axes, hint, lay_out, mixes, usual_experts
from examples.models.training import cross_entropy, language_model

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; `room` is an expert's capacity as a multiple of its fair share of the choices."""

    layers: int = 2
    d_model: int = 64
    heads: int = 8
    experts: int = 8
    d_hidden: int = 128
    room: float = 1.0
    vocab: int = 128
    context: int = 32
    batch: int = 8

    @property
    def capacity(self) -> int:
        """Tokens of a group that one expert takes."""
        return max(1, round(2 * self.room * self.context / self.experts))


TINY = Config(layers=1, d_model=16, heads=4, d_hidden=16, vocab=32, context=8)
"""For tests."""


def init(key: jax.Array, cfg: Config) -> Params:
    """The parameters; the experts' weights are stacked along their first dim."""
    kt, kp, *keys = jax.random.split(key, 2 + cfg.layers)
    d = cfg.d_model

    def layer(key: jax.Array) -> Params:
        ka, km = jax.random.split(key)
        norm = {"scale": jnp.ones(d), "bias": jnp.zeros(d)}
        return {
            "attention": attention.init(ka, d, cfg.heads),
            "norm": norm,
            "moe": moe.init(km, cfg.experts, d, cfg.d_hidden),
        }

    return {
        "tokens": 0.02 * jax.random.normal(kt, (cfg.vocab, d)),
        "positions": 0.02 * jax.random.normal(kp, (cfg.context, d)),
        "layers": [layer(k) for k in keys],
        "norm": {"scale": jnp.ones(d), "bias": jnp.zeros(d)},
    }


def forward(params: Params, tokens: jax.Array, capacity: int) -> jax.Array:
    """Tokens [batch, seq] to logits [batch, seq, vocab]."""
    x = hint(params["tokens"][tokens] + params["positions"][: tokens.shape[1]])
    for p in params["layers"]:
        x = hint(attention.forward(p["attention"], x))
        x = hint(x + moe.forward(p["moe"], attention.layer_norm(x, **p["norm"]), capacity))
    return attention.layer_norm(x, **params["norm"]) @ params["tokens"].T


def loss(params: Params, tokens: jax.Array, *, capacity: int) -> jax.Array:
    """Mean cross entropy of each next token; tokens [batch, context + 1]."""
    return cross_entropy(forward(params, tokens[:, :-1], capacity), tokens[:, 1:])


def make(cfg: Config = Config()):
    """A training step on (params, state, tokens)."""
    return language_model(cfg, init, functools.partial(loss, capacity=cfg.capacity))


def small() -> Config:
    """Compiles on a CPU in seconds; the experts hold nearly all parameters."""
    return Config(layers=2, d_model=128, heads=8, experts=8, d_hidden=512, vocab=1024, context=64, batch=16)


def large() -> Config:
    """64 experts in each of 4 layers, 8.7 billion parameters, and a batch for 512 devices: for plans on paper."""
    return Config(layers=4, d_model=2048, heads=16, experts=64, d_hidden=8192, vocab=32000, context=1024, batch=512)


def experts(cfg: Config, devices: int) -> dict[str, Expert]:
    """Layouts of the training step as people write them by hand: beside the usual ones, experts on devices of their own."""
    args = abstract(make, cfg)[1]
    hidden = {"*/moe/w1": (None, None, "model"), "*/moe/w2": (None, "model", None)} | gpt2.TENSOR_CUTS
    found = usual_experts(args, devices, cfg.batch, cfg.heads, hidden)
    own = {"*/moe/w1": ("model", None, None), "*/moe/w2": ("model", None, None)}
    shared = {glob: ("data", None, None) for glob in own}
    if cfg.experts % devices == 0:
        found["experts"] = lay_out(args, {"model": devices}, own, experts=("model",))
    alone = data_axes(cfg.batch, devices)
    if cfg.experts % alone["data"] == 0:
        for name, sent in (("", ()), (", tokens sent to them", ("data",))):
            found[f"data and experts on the same devices{name}"] = lay_out(args, alone, shared, experts=sent)
            found[f"FSDP and experts on the same devices{name}"] = lay_out(
                args, alone, shared, pieces="data", experts=sent
            )
    for axes in mixes(devices, cfg.batch, cfg.experts):
        size = f"{axes['data']} x {axes['model']}"
        found[f"data x experts, {size}"] = lay_out(args, axes, own, experts=("model", "data"))
        found[f"FSDP x experts, {size}"] = lay_out(args, axes, own, pieces="data", experts=("model", "data"))
        found[f"data x experts and heads, {size}"] = lay_out(
            args, axes, own | gpt2.TENSOR_CUTS, experts=("model", "data")
        )
    return found

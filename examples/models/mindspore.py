"""The two programs on which MindSpore's searches were timed: four perceptrons in a row, and a 4-layer transformer.

Their dense layers have weights [in, out] and no biases; a step returns the loss, and the gradients where asked for.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from examples.models import abstract, attention, quick_key
from examples.models.layouts import Expert, hint, usual_experts
from examples.models.training import normal

Params = list[dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of either program; the perceptrons have no heads and no sequence."""

    layers: int = 4
    d_model: int = 1024
    heads: int = 0
    d_hidden: int = 4096
    seq: int = 0
    batch: int = 8192
    train: bool = True


MLP = Config()
TRANSFORMER = Config(heads=16, seq=512, batch=16)
TINY_MLP = Config(layers=2, d_model=16, d_hidden=32, batch=16)
TINY_TRANSFORMER = Config(layers=1, d_model=16, heads=4, d_hidden=32, seq=8, batch=8)


def init(key: jax.Array, cfg: Config) -> Params:
    """One dict of weights for each layer."""
    d, f = cfg.d_model, cfg.d_hidden
    shapes = {"up": (d, f), "down": (f, d)}
    if cfg.heads:
        shapes |= dict.fromkeys(("q", "k", "v", "o"), (d, d))
    layers = []
    for key_ in jax.random.split(key, cfg.layers):
        keys = jax.random.split(key_, len(shapes))
        layers.append({name: normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)})
        if cfg.heads:
            layers[-1] |= {"scale1": jnp.ones(d), "bias1": jnp.zeros(d), "scale2": jnp.ones(d), "bias2": jnp.zeros(d)}
    return layers


def forward(params: Params, x: jax.Array, heads: int = 0) -> jax.Array:
    """x [batch, d_model] through the perceptrons, or [batch, seq, d_model] through the transformer."""
    for p in params:
        if heads:
            y = attention.layer_norm(x, p["scale1"], p["bias1"])
            q, k, v = ((y @ p[name]).reshape(*y.shape[:2], heads, -1) for name in ("q", "k", "v"))
            x = hint(x + attention.attend(q, k, v).reshape(y.shape) @ p["o"])
            y = attention.layer_norm(x, p["scale2"], p["bias2"])
            x = hint(x + jax.nn.relu(y @ p["up"]) @ p["down"])
        else:
            x = hint(jax.nn.relu(x @ p["up"]) @ p["down"])
    return x


def loss(params: Params, x: jax.Array, heads: int = 0) -> jax.Array:
    """The mean square of the outputs."""
    return jnp.mean(forward(params, x, heads) ** 2)


def make(cfg: Config = MLP):
    """`forward`, or the loss and its gradients, on (params, x)."""
    key, kx = jax.random.split(quick_key())
    x = jax.random.normal(kx, (cfg.batch, *((cfg.seq,) if cfg.heads else ()), cfg.d_model))
    run = jax.value_and_grad(functools.partial(loss, heads=cfg.heads)) if cfg.train else forward
    if not cfg.train and cfg.heads:
        run = functools.partial(forward, heads=cfg.heads)
    return run, (init(key, cfg), x)


def experts(cfg: Config, devices: int) -> dict[str, Expert]:
    """Layouts as people write them by hand."""
    up, down = (None, "model"), ("model", None)
    tensor = {"*/up": up, "*/down": down, "*/q": up, "*/k": up, "*/v": up, "*/o": down}
    most = cfg.heads or cfg.d_hidden
    return usual_experts(abstract(make, cfg)[1], devices, cfg.batch, most, tensor, trained=1)

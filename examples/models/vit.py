"""A vision transformer that tells classes of images, trained with AdamW; its blocks are GPT-2's without the mask."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.models import abstract, attention, gpt2, quick_key
from examples.models.layouts import Expert, hint, usual_experts
from examples.models.training import ADAMW, adamw_step, cross_entropy, normal

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; images are square, with three channels, and cut into square patches."""

    layers: int = 2
    d_model: int = 64
    heads: int = 8
    image: int = 32
    patch: int = 8
    classes: int = 16
    batch: int = 8


TINY = Config(layers=1, d_model=16, heads=4, image=16)
"""For tests."""


def init(key: jax.Array, cfg: Config) -> Params:
    """The parameters."""
    kp, kt, kc, *keys = jax.random.split(key, 3 + cfg.layers)
    sizes = gpt2.Config(d_model=cfg.d_model, heads=cfg.heads)
    return {
        "patches": normal(kp, (3 * cfg.patch**2, cfg.d_model)),
        "positions": 0.02 * jax.random.normal(kt, ((cfg.image // cfg.patch) ** 2, cfg.d_model)),
        "blocks": [gpt2.init_block(k, sizes) for k in keys],
        "scale": jnp.ones(cfg.d_model),
        "bias": jnp.zeros(cfg.d_model),
        "classes": normal(kc, (cfg.d_model, cfg.classes)),
    }


def forward(params: Params, images: jax.Array, patch: int) -> jax.Array:
    """Images [batch, height, width, 3] to logits [batch, classes], by the mean over all patches."""
    batch, height, width, channels = images.shape
    rows, columns = height // patch, width // patch
    x = images.reshape(batch, rows, patch, columns, patch, channels).swapaxes(2, 3)
    x = x.reshape(batch, rows * columns, patch * patch * channels) @ params["patches"] + params["positions"]
    x = hint(x)
    for p in params["blocks"]:
        x = gpt2.block(p, x, causal=False)
    x = attention.layer_norm(x, params["scale"], params["bias"])
    return jnp.mean(x, axis=1) @ params["classes"]


def loss(params: Params, images: jax.Array, labels: jax.Array, *, patch: int) -> jax.Array:
    """Mean cross entropy; labels [batch] are class numbers."""
    return cross_entropy(forward(params, images, patch), labels)


def make(cfg: Config = Config()):
    """A training step on (params, state, images, labels)."""
    key, kx, ky = jax.random.split(quick_key(), 3)
    params = init(key, cfg)
    images = jax.random.normal(kx, (cfg.batch, cfg.image, cfg.image, 3))
    step = functools.partial(adamw_step, loss=functools.partial(loss, patch=cfg.patch))
    return step, (params, ADAMW.init(params), images, jax.random.randint(ky, (cfg.batch,), 0, cfg.classes))


def small() -> Config:
    """Compiles on a CPU in seconds."""
    return Config(layers=2, d_model=256, heads=8, image=64, patch=8, classes=128, batch=16)


def large() -> Config:
    """8 layers of ViT-H/14's width and a batch for 512 devices: for plans on paper."""
    return Config(layers=8, d_model=1280, heads=16, image=224, patch=14, classes=1024, batch=1024)


def experts(cfg: Config, devices: int) -> dict[str, Expert]:
    """Layouts of the training step as people write them by hand."""
    return usual_experts(abstract(make, cfg)[1], devices, cfg.batch, cfg.heads, gpt2.TENSOR_CUTS)

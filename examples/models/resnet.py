"""A residual network for large images [batch, height, width, channels], trained with AdamW.

Images shrink by 2 x 2 average pooling and no convolution has strides, so height can be cut all the way down. Batch
normalisation uses the statistics of the whole batch; running ones are kept for inference.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.models import abstract, quick_key
from examples.models.layouts import Expert, data_axes, hint, lay_out
from examples.models.training import ADAMW, cross_entropy, normal

Params = dict[str, Any]
TRAINED = 3
"""Leading arguments of the step that are trained or kept: parameters, running statistics, optimiser state."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; each stage halves height and width, and holds `blocks` blocks of two convolutions."""

    channels: tuple[int, ...] = (16, 32)
    blocks: int = 1
    image: int = 32
    classes: int = 16
    batch: int = 8


TINY = Config(channels=(8,), image=16)
"""For tests."""


def init(key: jax.Array, cfg: Config) -> tuple[Params, Params]:
    """Parameters, and running means and variances."""
    params: Params = {"stages": []}
    stats: Params = {"stages": []}
    keys = iter(jax.random.split(key, 2 + 3 * cfg.blocks * len(cfg.channels)))

    def conv(size: int, c_in: int, c_out: int) -> tuple[Params, Params]:
        kernel = 2**0.5 * normal(next(keys), (size, size, c_in, c_out), size * size * c_in)
        moments = {"mean": jnp.zeros(c_out), "variance": jnp.ones(c_out)}
        return {"kernel": kernel, "scale": jnp.ones(c_out), "bias": jnp.zeros(c_out)}, moments

    params["stem"], stats["stem"] = conv(3, 3, cfg.channels[0])
    width = cfg.channels[0]
    for c in cfg.channels:
        stage, kept = [], []
        for _ in range(cfg.blocks):
            layers = {"first": conv(3, width, c), "second": conv(3, c, c)}
            if width != c:
                layers["shortcut"] = conv(1, width, c)
            stage.append({name: made[0] for name, made in layers.items()})
            kept.append({name: made[1] for name, made in layers.items()})
            width = c
        params["stages"].append(stage)
        stats["stages"].append(kept)
    params["classes"] = normal(next(keys), (width, cfg.classes))
    return params, stats


def conv_norm(params: Params, stats: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    """A convolution of x [batch, height, width, in] and batch normalisation; and the running statistics after it."""
    y = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    mean = jnp.mean(y, axis=(0, 1, 2))
    variance = jnp.mean((y - mean) ** 2, axis=(0, 1, 2))
    kept = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, stats, {"mean": mean, "variance": variance})
    return (y - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"], kept


def halve(x: jax.Array) -> jax.Array:
    """2 x 2 average pooling of x [batch, height, width, channels]."""
    batch, height, width, channels = x.shape
    return jnp.mean(x.reshape(batch, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


def block(params: Params, stats: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    """Two convolutions and a shortcut around them."""
    kept = {}
    y, kept["first"] = conv_norm(params["first"], stats["first"], x)
    y, kept["second"] = conv_norm(params["second"], stats["second"], jax.nn.relu(y))
    if "shortcut" in params:
        x, kept["shortcut"] = conv_norm(params["shortcut"], stats["shortcut"], x)
    return hint(jax.nn.relu(x + y)), kept


def forward(params: Params, stats: Params, images: jax.Array) -> tuple[jax.Array, Params]:
    """Images [batch, height, width, 3] to logits [batch, classes]; and the running statistics after them."""
    kept: Params = {"stages": []}
    x, kept["stem"] = conv_norm(params["stem"], stats["stem"], images)
    x = hint(jax.nn.relu(x))
    for stage, old in zip(params["stages"], stats["stages"], strict=True):
        x = hint(halve(x))
        new = []
        for p, s in zip(stage, old, strict=True):
            x, moments = block(p, s, x)
            new.append(moments)
        kept["stages"].append(new)
    return jnp.mean(x, axis=(1, 2)) @ params["classes"], kept


def loss(params: Params, stats: Params, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Params]:
    """Mean cross entropy, and the running statistics; labels [batch] are class numbers."""
    logits, stats = forward(params, stats, images)
    return cross_entropy(logits, labels), stats


def train_step(params: Params, stats: Params, state: optax.OptState, images: jax.Array, labels: jax.Array):
    """One step of AdamW: new parameters, running statistics and optimiser state, and the loss before it."""
    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, images, labels)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), stats, state, value


def make(cfg: Config = Config()):
    """`train_step` on (params, stats, state, images, labels)."""
    key, kx, ky = jax.random.split(quick_key(), 3)
    params, stats = init(key, cfg)
    images = jax.random.normal(kx, (cfg.batch, cfg.image, cfg.image, 3))
    labels = jax.random.randint(ky, (cfg.batch,), 0, cfg.classes)
    return train_step, (params, stats, ADAMW.init(params), images, labels)


def small() -> Config:
    """Compiles on a CPU in seconds; fewer images than one for each of 8 devices."""
    return Config(channels=(32, 64), blocks=1, image=128, classes=128, batch=4)


def large() -> Config:
    """64 images of 2048 x 2048 for 64 and 512 devices: for plans on paper."""
    return Config(channels=(64, 128, 256, 512), blocks=2, image=2048, classes=1024, batch=64)


def experts(cfg: Config, devices: int) -> dict[str, Expert]:
    """Layouts of the training step as people write them by hand; `height` is a dim of the image."""
    args = abstract(make, cfg)[1]
    lay = functools.partial(lay_out, args, trained=TRAINED)
    found = {
        "data parallel": lay(data_axes(cfg.batch, devices)),
        "FSDP": lay(data_axes(cfg.batch, devices), pieces="data"),
    }
    rows = cfg.image >> len(cfg.channels)
    for data in sorted({1, 2, math.gcd(cfg.batch, devices)}):
        height = devices // data
        if cfg.batch % data == 0 and height > 1 and rows % height == 0:
            axes = {"data": data, "height": height} if data > 1 else {"height": height}
            name = f"data {data} x height {height}" if data > 1 else "height"
            found[name] = lay(axes, batch=("data", "height"))
            if data > 1:
                found[f"{name}, ZeRO-1"] = lay(axes, batch=("data", "height"), state_pieces="data")
    channels = {"*/kernel": (None, "model"), "*/scale": ("model",), "*/bias": ("model",), "*/classes": ("model", None)}
    if cfg.batch % (devices // 2) == 0:
        found[f"data {devices // 2} x channels 2"] = lay({"data": devices // 2, "model": 2}, channels)
    return found

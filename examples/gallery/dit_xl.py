"""DiT-XL/2: a training step of a diffusion transformer on 64 TPU v5e.

The layers are Equinox modules, which are written for one image and mapped over the batch. Each block is scaled and shifted by
the time step and the class (Peebles and Xie 2023). The model predicts the noise in latent images of 32 x 32 x 4.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp

from examples.gallery import Program, shapes, show, training


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 28
    width: int = 1152
    heads: int = 16
    size: int = 32
    channels: int = 4
    patch: int = 2
    classes: int = 1001
    batch: int = 2048
    dtype: str = "bfloat16"


TINY = Config(layers=2, width=32, heads=4, size=8, classes=10, batch=8, dtype="float32")


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    modulation: eqx.nn.Linear

    def __init__(self, cfg, key):
        keys, d = jax.random.split(key, 4), cfg.width
        self.norm = eqx.nn.LayerNorm(d, use_weight=False, use_bias=False)
        self.attention = eqx.nn.MultiheadAttention(cfg.heads, d, dtype=cfg.dtype, key=keys[0])
        self.up = eqx.nn.Linear(d, 4 * d, dtype=cfg.dtype, key=keys[1])
        self.down = eqx.nn.Linear(4 * d, d, dtype=cfg.dtype, key=keys[2])
        self.modulation = eqx.nn.Linear(d, 6 * d, dtype=cfg.dtype, key=keys[3])

    def __call__(self, x, condition):
        """x [patches, width] of one image, condition [width]."""
        shift, scale, gate, shift2, scale2, gate2 = jnp.split(self.modulation(jax.nn.silu(condition)), 6)
        y = jax.vmap(self.norm)(x) * (1 + scale) + shift
        x = x + gate * self.attention(y, y, y)
        y = jax.vmap(self.norm)(x) * (1 + scale2) + shift2
        return x + gate2 * jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


def frequencies(times, width):
    """Sines and cosines of times [batch]: [batch, width]."""
    angles = times[:, None] / 10_000.0 ** (jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def patches(x, patch):
    """Images [batch, height, width, channels] to [batch, patches, patch * patch * channels]."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // patch, patch, width // patch, patch, channels).swapaxes(2, 3)
    return x.reshape(batch, -1, patch * patch * channels)


def loss(params, latents, noise, times, classes, static, patch):
    """The mean squared error of the predicted noise; times [batch] are from 0 to 1."""

    def layer(x, p):
        return jax.vmap(eqx.combine(p, static))(x, condition), None

    level = times[:, None, None, None].astype(latents.dtype)
    x = patches((1 - level) * latents + level * noise, patch) @ params["patch"] + params["position"]
    condition = frequencies(1000 * times, x.shape[-1]).astype(x.dtype) @ params["time"] + params["class"][classes]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean((x @ params["out"] - patches(noise, patch)).astype(jnp.float32) ** 2)


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    block = eqx.filter_eval_shape(Block, cfg, jax.random.key(0))
    arrays, static = eqx.partition(block, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    d, inside = cfg.width, cfg.channels * cfg.patch**2
    rest = {
        "patch": (inside, d),
        "position": ((cfg.size // cfg.patch) ** 2, d),
        "time": (d, d),
        "class": (cfg.classes, d),
    }
    params = {
        **shapes(cfg.dtype, {**rest, "out": (d, inside)}),
        "layers": jax.tree.map(lambda x: jax.ShapeDtypeStruct((cfg.layers, *x.shape), x.dtype), arrays),
    }
    image = jax.ShapeDtypeStruct((cfg.batch, cfg.size, cfg.size, cfg.channels), cfg.dtype)
    one = functools.partial(jax.ShapeDtypeStruct, (cfg.batch,))
    batch = {"latents": image, "noise": image, "times": one(jnp.float32), "classes": one(jnp.int32)}
    device = None if size == "tiny" else "tpu-v5e:8x8"
    return training(functools.partial(loss, static=static, patch=cfg.patch), params, batch, device, level="time")


if __name__ == "__main__":
    show(program)

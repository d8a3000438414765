"""ViT-22B: a training step on 1,024 TPU v4.

The layers are Flax NNX modules: attention with normalised queries and keys beside the hidden layer, as Dehghani et al. (2023)
describe it. The arrays of one block, stacked for 48 layers, are the scanned parameters.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.gallery import Program, shapes, show, training


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 48
    width: int = 6144
    heads: int = 48
    hidden: int = 24576
    image: int = 224
    patch: int = 14
    classes: int = 29593
    batch: int = 65536
    dtype: str = "bfloat16"


TINY = Config(layers=2, width=32, heads=4, hidden=64, image=16, patch=8, classes=16, batch=16, dtype="float32")


class Block(nnx.Module):
    def __init__(self, cfg, rngs):
        types = {"dtype": cfg.dtype, "param_dtype": cfg.dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(cfg.width, use_bias=False, **types)
        self.attention = nnx.MultiHeadAttention(
            cfg.heads, cfg.width, normalize_qk=True, use_bias=False, decode=False, **types
        )
        self.up = nnx.Linear(cfg.width, cfg.hidden, **types)
        self.down = nnx.Linear(cfg.hidden, cfg.width, **types)

    def __call__(self, x):
        y = self.norm(x)
        return x + self.attention(y) + self.down(nnx.gelu(self.up(y)))


def patches(images, patch):
    """Images [batch, height, width, 3] to [batch, patches, patch * patch * 3]."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // patch, patch, width // patch, patch, channels).swapaxes(2, 3)
    return x.reshape(batch, -1, patch * patch * channels)


def loss(params, images, labels, block, patch):
    def layer(x, p):
        return nnx.merge(block, p)(x), None

    x = patches(images, patch) @ params["patch"] + params["position"]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    x = x.astype(jnp.float32).mean(axis=1)
    logits = jax.nn.standardize(x) @ params["classes"].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    block, state = nnx.split(nnx.eval_shape(lambda: Block(cfg, nnx.Rngs(0))))
    count, d = (cfg.image // cfg.patch) ** 2, cfg.width
    params = {
        **shapes(cfg.dtype, {"patch": (3 * cfg.patch**2, d), "position": (count, d), "classes": (d, cfg.classes)}),
        "layers": jax.tree.map(lambda x: jax.ShapeDtypeStruct((cfg.layers, *x.shape), x.dtype), state),
    }
    batch = {
        "images": jax.ShapeDtypeStruct((cfg.batch, cfg.image, cfg.image, 3), cfg.dtype),
        "labels": jax.ShapeDtypeStruct((cfg.batch,), jnp.int32),
    }
    device = None if size == "tiny" else "tpu-v4:8x8x16"
    return training(functools.partial(loss, block=block, patch=cfg.patch), params, batch, device, level="time")


NOTES = """
libtpu makes an all-reduce of each all-gather over all chips of a three-dimensional torus, which sends twice the bytes: the
prediction counts them. FSDP of every array over all 1,024 chips sent 245 GiB when it was compiled on 2026-11-25. The plan
shards weights over 128 of the chips, and sends a third less.
"""

if __name__ == "__main__":
    show(program)

"""ResNet-50 with Haiku: a training step on 64 TPU v4.

The network is Haiku's own `hk.nets.ResNet50`, unchanged. A batch has 16,384 images. Batch normalisation is over the images of all
devices, and its running averages are updated too.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from examples.gallery import Program, show

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Config:
    image: int = 224
    classes: int = 1000
    batch: int = 16_384
    dtype: str = "bfloat16"


TINY = Config(image=32, classes=8, batch=16, dtype="float32")


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()

    def network(images):
        if size == "tiny":  # one block of each of the four groups
            options = {"blocks_per_group": (1, 1, 1, 1), "channels_per_group": (16, 16, 32, 32), "bottleneck": False}
            return hk.nets.ResNet(**options, num_classes=cfg.classes)(images, is_training=True)
        return hk.nets.ResNet50(cfg.classes)(images, is_training=True)

    model = hk.without_apply_rng(hk.transform_with_state(network))

    def loss(params, averages, images, labels):
        low = jax.tree.map(lambda p: p.astype(cfg.dtype), params)
        logits, averages = model.apply(low, averages, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean(), averages

    def train_step(params, averages, state, images, labels):
        (value, averages), gradients = jax.value_and_grad(loss, has_aux=True)(params, averages, images, labels)
        updates, state = OPTIMIZER.update(gradients, state)
        return optax.apply_updates(params, updates), averages, state, value

    images = jax.ShapeDtypeStruct((cfg.batch, cfg.image, cfg.image, 3), cfg.dtype)
    labels = jax.ShapeDtypeStruct((cfg.batch,), jnp.int32)
    wide = jax.ShapeDtypeStruct(images.shape, jnp.float32)  # parameters are initialised in float32
    params, averages = jax.eval_shape(model.init, jax.random.key(0), wide)
    arguments = (params, averages, jax.eval_shape(OPTIMIZER.init, params), images, labels)
    options = {"level": "time", "donate_argnums": (0, 1, 2)}
    return Program(train_step, arguments, None if size == "tiny" else "tpu-v4:4x4x4", options, zeros=(2,))


NOTES = """
The plan at full size was not compiled.
"""

if __name__ == "__main__":
    show(program)

"""A vision transformer on sharded images: the rows of each image over two devices, the batch over four.

The images are drawn here: a bright bar on noise, and the class is its direction. A patch never straddles two devices, so the
sharding of the rows becomes one of the patches, and attention gathers keys and values over it.
The integers are all that XLA gets.
"""

import collections
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import train

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

SIZE, PATCH, WIDTH, HEADS, LAYERS, CLASSES, BATCH, STEPS = 32, 8, 32, 2, 2, 4, 32, 40
COUNT = (SIZE // PATCH) ** 2


def draw(rng):
    """Images and their classes: the bar goes across, down, or along one of the diagonals."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    classes = rng.integers(0, CLASSES, BATCH)
    across = np.stack([rows, columns, rows - columns, rows + columns])[classes].astype(np.float32)
    middle = across.mean((1, 2), keepdims=True) + rng.uniform(-6, 6, (BATCH, 1, 1))
    images = (np.abs(across - middle) < 2.5) + 0.5 * rng.normal(size=across.shape)
    return np.repeat(images[..., None], 3, -1).astype(np.float32), classes.astype(np.int32)


def make():
    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 3))
    weight = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[0])  # noqa: E731
    return {
        "patch": weight(PATCH * PATCH * 3, WIDTH),
        "position": 0.1 * weight(COUNT, WIDTH),
        "head": weight(WIDTH, CLASSES),
        "blocks": [
            {
                "qkv": weight(WIDTH, 3 * WIDTH),
                "out": weight(WIDTH, WIDTH),
                "up": weight(WIDTH, 4 * WIDTH),
                "down": weight(4 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ],
    }


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss(params, images, classes):
    side = SIZE // PATCH
    patches = (
        images.reshape(-1, side, PATCH, side, PATCH, 3)
        .transpose(0, 1, 3, 2, 4, 5)
        .reshape(-1, COUNT, PATCH * PATCH * 3)
    )
    x = patches @ params["patch"] + params["position"]
    for block in params["blocks"]:
        heads = (normed(x) @ block["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        mixed = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        x = x + mixed.reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(normed(x) @ block["up"]) @ block["down"]
    scores = normed(x.mean(1)) @ params["head"]
    value = optax.softmax_cross_entropy_with_integer_labels(scores, classes).mean()
    return value, (scores.argmax(-1) == classes).astype(jnp.float32)


def run(**options):
    step = train.step(loss, optax.adam(3e-3), has_aux=True, **options)
    rng = np.random.default_rng(0)
    state, losses = step.init(make, *draw(rng)), []
    for i in range(STEPS):
        images, classes = draw(rng)
        state, (value, right) = step(state, images, classes)
        losses.append(float(value))
        if len(options) > 1 and (i + 1) % 8 == 0:
            print(f"step {i + 1:3}  loss {losses[-1]:.4f}  right {float(right.mean()):.0%}")
    return step, state, (images, classes), losses


# Batch 4 ways, rows of the images 2 ways; the wide matmuls of each block are sharded 2 ways.
step, state, batch, losses = run(mode="semi_auto_parallel", in_strategy=((4, 2, 1, 1), (4,)),
                                 parameter_plan={"blocks/*/up": (1, 2), "blocks/*/down": (2, 1)})  # fmt: skip
plan = step.plan(state, *batch)
image = plan.decision("batch/0")
print(
    f"an image array {image.shape} is sharded {image.strategy}: "
    f"a device holds {image.local_bytes:,} B of {4 * math.prod(image.shape):,}"
)
print(f"blocks/0/up is sharded as {state.params['blocks'][0]['up'].sharding.spec}")
kinds = collections.Counter(row["kind"] for row in step.explain(state, *batch).to_dict()["collectives"])
print("collectives of a step:", ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))

*_, alone = run(mode="stand_alone")
np.testing.assert_allclose(losses, alone, rtol=2e-3)
assert np.mean(losses[-5:]) < 0.6 * losses[0], "it learns"
print(f"the same losses on one device: {losses[0]:.4f} -> {losses[-1]:.4f}, {alone[0]:.4f} -> {alone[-1]:.4f}")

"""Collectives of a training step: in buckets, and once for all scanned layers; and layers rematerialised to save memory."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import train

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

LAYERS, WIDTH = 6, 32
rng = np.random.default_rng(0)
params = {
    "layers": [
        {"b": np.zeros(WIDTH, np.float32), "w": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 6}
        for _ in range(LAYERS)
    ]
}
x, y = rng.normal(size=(2, 16, WIDTH)).astype(np.float32)


def loss(params, x, y):
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - y) ** 2)


def losses(**options):
    step = train.step(loss, optax.adam(1e-2), **options)
    state = step.init(params, x, y)
    found = []
    for _ in range(3):
        state, value = step(state, x, y)
        found.append(float(value))
    return step, state, found


*_, alone = losses(mode="stand_alone")

# Twelve gradients in three all-reduces: the first four, the next four, the rest.
step, state, fused = losses(mode="data_parallel", all_reduce_fusion_config=[3, 7])
for bucket, paths in step.buckets(state, x, y):
    print(f"{bucket.kind} of {bucket.nbytes:,} B: {', '.join(paths)}")
assert len(step.buckets(state, x, y)) == 3
np.testing.assert_allclose(fused, alone, rtol=1e-4)

# Six repeated layers become one, scanned over stacked parameters: two gradients remain to reduce.
step, state, folded = losses(mode="data_parallel", reuse="auto", comm_fusion={"openstate": False})
print(step.scanned_layers.explain())
assert state.params["layers/*/w"].shape == (LAYERS, WIDTH, WIDTH)
assert len(step.buckets(state, x, y)) == 2
assert len(step.model(state)["layers"]) == LAYERS
np.testing.assert_allclose(folded, alone, rtol=1e-4)

# Four of them are recomputed in the backward pass.
step, _, again = losses(mode="data_parallel", recompute=4)
print(step.recomputed)
np.testing.assert_allclose(again, alone, rtol=1e-4)

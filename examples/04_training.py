"""A training loop with optax: one sharded step, losses equal to the unsharded run."""

import os

import jax
import numpy as np
import optax

from shardfn import AUTO, shard

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

optimizer = optax.adamw(3e-3)


def loss(params, x, label):
    hidden = jax.nn.relu(x @ params["w1"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["w2"], label).mean()


def step(params, state, x, label):
    value, grads = jax.value_and_grad(loss)(params, x, label)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


# `*w1` is the parameter and AdamW's two moments of it. The step may reuse the memory of its old state.
sharded_step = shard(
    step,
    in_strategy=(AUTO, AUTO, (2, 1), (2,)),
    parameter_plan={"*w1": (1, 4), "*w2": (4, 1)},
    donate_argnums=(0, 1),
)


def train(step):
    k1, k2, kx, kl = jax.random.split(jax.random.key(0), 4)
    params = {"w1": jax.random.normal(k1, (32, 128)) / 6, "w2": jax.random.normal(k2, (128, 10)) / 11}
    state = optimizer.init(params)
    x, label = jax.random.normal(kx, (64, 32)), jax.random.randint(kl, (64,), 0, 10)
    losses = []
    for _ in range(10):
        params, state, value = step(params, state, x, label)
        losses.append(float(value))
    return losses, params


plain_losses, _ = train(jax.jit(step))
losses, params = train(sharded_step)
for i, (a, b) in enumerate(zip(plain_losses, losses, strict=True)):
    print(f"step {i}  unsharded {a:.6f}  sharded {b:.6f}")
np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
assert params["w1"].sharding.shard_shape((32, 128)) == (32, 32), "new parameters are sharded as the old ones were"

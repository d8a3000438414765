"""A training step in several modes: the same losses, other shardings, other collectives."""

import collections
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import train
from shardfn.compiled import read

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def loss(params, x, y):
    hidden = jax.nn.relu(x @ params["up"])
    return jnp.mean((hidden @ params["down"] - y) ** 2)


def make():
    k1, k2 = jax.random.split(jax.random.key(0))
    return {"up": 0.1 * jax.random.normal(k1, (64, 512)), "down": 0.1 * jax.random.normal(k2, (512, 64))}


x, y = jax.random.normal(jax.random.key(1), (64, 64)), jax.random.normal(jax.random.key(2), (64, 64))
tensor = {"in_strategy": ((2, 1), (2, 1)), "parameter_plan": {"up": (1, 4), "down": (4, 1)}}
runs = {
    "stand_alone": {"mode": "stand_alone"},
    "data_parallel": {"mode": "data_parallel"},
    "... in 4 micro-batches": {"mode": "data_parallel", "micro_batches": 4},
    "... sharded states": {"mode": "data_parallel", "enable_parallel_optimizer": True},
    "... and gradients": {"mode": "data_parallel", "parallel_optimizer_config": {"optimizer_level": "level2"}},
    "... and parameters": {"mode": "data_parallel", "parallel_optimizer_config": {"optimizer_level": "level3"}},
    "semi_auto_parallel": {"mode": "semi_auto_parallel", **tensor},
    "auto_parallel": {"mode": "auto_parallel", "level": 2},
}

print(f"{'':24}{'last loss':>10}{'state B/device':>16}  collectives")
losses = {}
for name, options in runs.items():
    step = train.step(loss, optax.adamw(1e-2), **options)
    state = step.init(make, x, y)
    compiled = step.lower(state, x, y).compile()
    for _ in range(10):
        state, value = step(state, x, y)
    losses[name] = float(value)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    kinds = collections.Counter(c.kind for c in read(compiled).collectives)
    print(
        f"{name:24}{losses[name]:>10.6f}{held:>16,}  {', '.join(f'{n} {kind}' for kind, n in kinds.items()) or 'none'}"
    )

np.testing.assert_allclose(list(losses.values()), losses["stand_alone"], rtol=1e-4)
print("the same losses in every mode")

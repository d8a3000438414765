"""Modules: one block of a Flax NNX model sharded in place, and an Equinox module as a function."""

import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardfn import AUTO, shard
from shardfn.mindspore import Cell

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

x = jax.random.normal(jax.random.key(1), (16, 32))


class Block(Cell, nnx.Module):  # Cell adds `.shard(...)` to the instances
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = Block(rngs), Block(rngs)

    def __call__(self, x):
        return self.second(self.first(x))


@nnx.jit
def step(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def train(model):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return [float(step(model, optimizer)) for _ in range(5)]


# Only the first block is sharded: the batch 2 ways, its hidden dimension 4 ways. The second block does not change.
model = Model(nnx.Rngs(0))
model.first.shard(in_strategy=((2, 1),), parameter_plan={"up/kernel": (1, 4)})
losses, plain_losses = train(model), train(Model(nnx.Rngs(0)))
print("sharded  ", losses)
print("unsharded", plain_losses)
np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
print({d.path: d.strategy for d in model.first.plan(x).inputs})
assert model.first.plan(x).decision("up/kernel").strategy == (1, 4)

# An Equinox module is a pytree: shard a function of its arrays, and close over the rest.
mlp = eqx.nn.MLP(32, 8, 64, depth=1, key=jax.random.key(0))
wanted = jax.vmap(mlp)(x)
arrays, rest = eqx.partition(mlp, eqx.is_array)
forward = shard(lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x), in_strategy=(AUTO, (8, 1)))
np.testing.assert_allclose(forward(arrays, x), wanted, rtol=1e-4, atol=1e-5)

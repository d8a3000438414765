"""Sharded and eager parts side by side, and one sharded function inside another."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from shardfn import shard

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

x = jax.random.normal(jax.random.key(0), (64, 32))
w1 = jax.random.normal(jax.random.key(1), (32, 64)) / 6
w2 = jax.random.normal(jax.random.key(2), (64, 32)) / 8


def expand(x, w):
    return jax.nn.relu(x @ w)


def contract(h, w):
    return h @ w


columns = shard(expand, ((1, 1), (1, 8)))  # columns of w1: the result is sharded 8 ways along its features
rows = shard(contract, ((1, 8), (8, 1)), ((1, 1),))  # rows of w2: needs no resharding


def model(x, w1, w2, expand, contract):
    x = (x - x.mean(0)) / x.std(0)  # eager: each line runs when Python gets there
    h = expand(x, w1)
    print("hidden: each device holds", h.sharding.shard_shape(h.shape))
    h = h * (h > h.mean())  # eager, on the sharded array
    return contract(h, w2)


wanted = model(x, w1, w2, expand, contract)
y = model(x, w1, w2, columns, rows)
np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


# The same two inside a third: its strategy shards the batch, and the inner function keeps its own.
@shard(in_strategy=((2, 1), (1, 1), (1, 1)), out_strategy=((2, 1),))
def whole(x, w1, w2):
    inner = shard(expand, ((2, 1), (1, 4)))
    return contract(inner(x, w1), w2)


np.testing.assert_allclose(whole(x, w1, w2), contract(expand(x, w1), w2), rtol=1e-4, atol=1e-4)


# Derivatives go through both.
def plain(x, w1, w2):
    return contract(expand(x, w1), w2)


def gradients(f):
    return jax.grad(lambda *args: jnp.sum(f(*args) ** 2), argnums=(1, 2))(x, w1, w2)


for a, b in zip(gradients(whole), gradients(plain), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)

"""A decorator on an MLP: call it, differentiate it, map it, and print what it does."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from shardfn import AUTO, shard

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def plain(params, x):
    hidden = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


# The batch 2 ways, columns of w1 4 ways. w2, b1 and b2 are open: the search shards them.
@shard(in_strategy=({"w1": (1, 4), "b1": AUTO, "w2": AUTO, "b2": AUTO}, (2, 1)))
def mlp(params, x):
    return plain(params, x)


k1, k2, kx = jax.random.split(jax.random.key(0), 3)
params = {
    "w1": jax.random.normal(k1, (32, 128)) / 6,
    "b1": jnp.zeros(128),
    "w2": jax.random.normal(k2, (128, 32)) / 11,
    "b2": jnp.zeros(32),
}
x = jax.random.normal(kx, (16, 32))

np.testing.assert_allclose(mlp(params, x), plain(params, x), rtol=1e-4, atol=1e-5)
assert mlp.plan(params, x).decision("params/w2").strategy == (4, 1)


def loss(f):
    return lambda params, x: jnp.mean(f(params, x) ** 2)


def check(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), a, b)


# It is an ordinary JAX function: grad, jit and vmap go through it.
check(jax.grad(loss(mlp))(params, x), jax.grad(loss(plain))(params, x))
check(jax.jit(jax.grad(loss(mlp)))(params, x), jax.grad(loss(plain))(params, x))
many = jnp.stack([x, 2 * x, 3 * x])
check(jax.vmap(mlp, (None, 0))(params, many), jax.vmap(plain, (None, 0))(params, many))

print(mlp.explain(params, x))

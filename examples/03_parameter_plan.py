"""Many parameters, few rules: entries by path, in a pytree of any depth."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from shardfn import AUTO, ShardError, shard

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

D, HEADS, HIDDEN, LAYERS = 32, 4, 128, 3


def init(key):
    shapes = {"wq": (D, HEADS, 8), "wk": (D, HEADS, 8), "wv": (D, HEADS, 8), "wo": (HEADS, 8, D)}
    shapes |= {"up": (D, HIDDEN), "down": (HIDDEN, D)}
    keys = iter(jax.random.split(key, LAYERS * len(shapes)))
    return {
        "layers": [{n: jax.random.normal(next(keys), s) * 0.1 for n, s in shapes.items()} for _ in range(LAYERS)],
        "norm": jnp.ones(D),
    }


def transformer(params, x):
    for layer in params["layers"]:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, layer[n]) for n in ("wq", "wk", "wv"))
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        x = x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, layer["wo"])
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x * params["norm"]


# Heads and hidden dimensions 4 ways in every layer. No rule names `norm`: it is open.
plan = {
    "layers/*/w[qkv]": (1, 4, 1),
    "layers/*/wo": (4, 1, 1),
    "layers/*/up": (1, 4),
    "layers/*/down": (4, 1),
}
sharded = shard(transformer, in_strategy=(AUTO, (2, 1, 1)), parameter_plan=plan)

params, x = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (8, 16, D))
np.testing.assert_allclose(sharded(params, x), transformer(params, x), rtol=1e-3, atol=1e-4)

made = sharded.plan(params, x)
print("mesh:", dict(made.axes))
assert sorted(made.mesh.axis_sizes) == [2, 4], "heads and hidden dims share one axis, the batch has the other"
for decision in made.inputs[-7:]:
    print(f"{decision.path:20} {decision.strategy!s:12} {decision.source}: {decision.reason}")

# A path that does not exist is an error, which suggests the nearest one.
try:
    shard(transformer, (AUTO, (2, 1, 1)), parameter_plan={"layers/*/upp": (1, 4)})(params, x)
except ShardError as error:
    print(error)

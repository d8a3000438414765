"""One operator: a matmul sharded over eight devices, alone and inside a larger function."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from shardfn import shard

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

x = jax.random.normal(jax.random.key(0), (16, 32))
w = jax.random.normal(jax.random.key(1), (32, 64))

# Rows of x 4 ways, columns of w 2 ways: eight shards of the result, and no communication.
rows_and_columns = shard(jnp.matmul, in_strategy=((4, 1), (1, 2)))
y = rows_and_columns(x, w)
np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
print("x:", x.shape, " result:", y.shape, " on each device:", y.sharding.shard_shape(y.shape))
assert y.sharding.shard_shape(y.shape) == (4, 32)
assert rows_and_columns.plan(x, w).collectives == ()

# The contracted dimension sharded 4 ways on both sides: one collective reduces the partial sums.
summed = shard(jnp.matmul, in_strategy=((2, 4), (4, 1)), out_strategy=((2, 1),))
np.testing.assert_allclose(summed(x, w), x @ w, rtol=1e-4, atol=1e-4)
for collective in summed.plan(x, w).collectives:
    print(collective.kind, "of", collective.dtype, list(collective.shape), "over", collective.group_size, "devices,",
          collective.bytes_sent, "bytes sent by each")  # fmt: skip


# A sharded operator is an ordinary function: here inside an eager one, and inside a jitted one.
def attention_scores(q, k):
    return jax.nn.softmax(shard(jnp.matmul, ((2, 4), (4, 1)), ((2, 1),))(q, k))


np.testing.assert_allclose(attention_scores(x, w), jax.nn.softmax(x @ w), rtol=1e-4, atol=1e-6)
np.testing.assert_allclose(jax.jit(attention_scores)(x, w), jax.nn.softmax(x @ w), rtol=1e-4, atol=1e-6)

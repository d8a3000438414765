"""Coming from MindSpore: its names, and what they do here."""

import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import shardfn.mindspore as ms
from shardfn import ShardError

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

x = jax.random.normal(jax.random.key(0), (16, 32))
w = jax.random.normal(jax.random.key(1), (32, 64)) / 6

# Pynative mode is how JAX runs anyway; the context has MindSpore's keys.
ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
ms.set_auto_parallel_context(device_num=8, global_rank=0)


class Dense(ms.Cell):
    def __init__(self, key):
        self.weight = jax.random.normal(key, (32, 32)) / 6

    def construct(self, x):
        return jax.nn.relu(x @ self.weight)


class Net(ms.Cell):
    def __init__(self):
        self.block1, self.block2 = Dense(jax.random.key(2)), Dense(jax.random.key(3))

    def construct(self, x):
        return self.block2(self.block1(x))


# Cell.shard: a block of a net, the rest eager. It returns the cell, and works with any number of cells.
net = Net()
wanted = net(x)
net.block1.shard(in_strategy=((1, 8),), out_strategy=(None,), parameter_plan={"self.block1.weight": (8, 1)})
np.testing.assert_allclose(net(x), wanted, rtol=1e-4, atol=1e-5)
print(ms.layout_of(net.block1.plan(x), "weight").to_dict())

# ops.MatMul().shard(in_strategy, out_strategy): shard the operator's function.
y = ms.shard(jnp.matmul, ((2, 1), (1, 4)))(x, w)
layout = ms.layout_of(ms.shard(jnp.matmul, ((2, 1), (1, 4))).plan(x, w), "result")
print("MatMul result:", layout.device_matrix, layout.tensor_map)
assert (layout.device_matrix, layout.tensor_map) == ((2, 4), (1, 0))

# Layout and reshard, with aliases for the axes.
matrix = ms.Layout((2, 4), ("dp", "mp"))
y = ms.reshard(y, matrix(("dp", "mp"), "None"))
assert y.sharding.shard_shape(y.shape) == (2, 64)
np.testing.assert_allclose(
    ms.shard(jnp.matmul, (matrix("dp", "None"), matrix("None", "mp")))(x, w), x @ w, rtol=1e-4, atol=1e-4
)

# out_strategy is honoured. Under MindSpore's own modes it is overridden with data parallel, and a warning says so.
by_columns = ms.shard(jnp.matmul, ((2, 1), (1, 4)), ((1, 4),))
assert by_columns(x, w).sharding.shard_shape((16, 64)) == (16, 16)
with ms.auto_parallel(parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert by_columns(x, w).sharding.shard_shape((16, 64)) == (2, 64)
    print(caught[0].message)

# Mistakes that MindSpore accepts silently are errors here, and every error ends with a fix.
for call in (
    lambda: ms.shard(jnp.matmul, ((0, 1), (1, 4)))(x, w),
    lambda: ms.shard(jnp.matmul, level=7),
    lambda: ms.shard(net.block2, ((8, 1),), parameter_plan={"wieght": (1, 4)})(x),
    lambda: ms.set_auto_parallel_context(pipeline_result_broadcast=True),
):
    try:
        call()
    except ShardError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("no error")
ms.reset_auto_parallel_context()

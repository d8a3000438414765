"""The same script in every role: one parameter on servers, the other one summed over the workers."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather

import shardfn.mindspore as ms

ms.set_ps_context(enable_ps=True)
ms.init()
X = np.arange(8, dtype="float32").reshape(2, 4) / 8


class Net(ms.Cell):
    def __init__(self):
        self.table, self.scale = jnp.ones((4, 2)), jnp.ones(2)

    def construct(self, x):
        return x @ self.table * self.scale


class Whole(ms.Cell):
    def __init__(self):
        self.first, self.bias = Net(), jnp.zeros(2)

    def construct(self, x):
        return self.first(x) + self.bias


net = Whole()
net.first.set_param_ps()
grad = jax.jit(jax.grad(lambda p, x: jnp.sum((net.with_parameters(p)(x) - 3) ** 2)))
server = ms.parameter_server(net, optax.sgd(0.1), timeout_s=60)
local, rank = {"bias": np.zeros(2, "float32")}, ms.get_rank()
names = list(ms.ps_parameters(net))
for step in range(10):
    found = grad({**local, **server.pull(names, version=step).values}, X[rank : rank + 1])
    server.push({name: found[name] for name in names}, rank, step)
    local["bias"] = local["bias"] - 0.1 * process_allgather(found["bias"]).sum(0)
final = {**local, **server.pull(names, version=10).values}

params = net.parameters_dict()
for _ in range(10):
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grad(params, X))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), final, dict(params))
print(f"{os.environ['MS_ROLE']} {rank} of {ms.get_group_size()}: equal", file=sys.stdout, flush=True)

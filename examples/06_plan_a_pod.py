"""Plan a training step for 256 TPU chips that you do not have: shapes are enough, and nothing is allocated."""

import jax
import jax.numpy as jnp

from shardfn import AUTO, plan

D, HIDDEN, LAYERS, BATCH, SEQ = 4096, 16384, 8, 512, 2048


def forward(params, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x, params)[0]


def train_step(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, x).astype(jnp.float32) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


params = {"up": shape(LAYERS, D, HIDDEN), "down": shape(LAYERS, HIDDEN, D)}
x = shape(BATCH, SEQ, D)


def planned(batch, hidden):
    """The batch sharded `batch` ways, the hidden dimension `hidden` ways."""
    rules = {"up": (1, 1, hidden), "down": (1, hidden, 1)}
    return plan(train_step, params, x, in_strategy=(AUTO, (batch, 1, 1)), parameter_plan=rules, device="tpu-v5e:16x16")


print("batch  hidden  GiB/chip  MiB sent/chip  modelled ms")
plans = {}
for batch, hidden in ((256, 1), (64, 4), (16, 16), (4, 64)):
    made = plans[batch, hidden] = planned(batch, hidden)
    cost = made.cost
    print(f"{batch:5}  {hidden:6}  {cost.memory.peak / 2**30:8.1f}  {cost.bytes_sent / 2**20:13,.0f}"
          f"  {cost.time_s * 1e3:11.1f}")  # fmt: skip

assert plans[16, 16].mesh.axis_sizes == (16, 16)
assert plans[256, 1].cost.memory.arguments > plans[16, 16].cost.memory.arguments, "replicated weights take more memory"
for change in plans[64, 4].diff(plans[16, 16]):
    print(f"{change.what:24} {change.first:36} {change.second}")

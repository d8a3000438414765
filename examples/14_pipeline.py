"""A pipeline: embedding and head on the end stages, a tied weight, stages x data x tensor x optimizer on one mesh."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import train

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

VOCAB, D, LAYERS = 64, 32, 3


def loss(params, tokens, wanted):
    x = params["embed"][tokens]
    for block in params["blocks"]:
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, wanted).mean()


def make(key):
    first, *rest = jax.random.split(key, LAYERS + 1)
    block = lambda k: {"up": jax.random.normal(k, (D, 4 * D)) / 6, "down": jax.random.normal(k, (4 * D, D)) / 12}  # noqa: E731
    return {"embed": jax.random.normal(first, (VOCAB, D)) / 3, "blocks": [block(k) for k in rest]}


params = jax.jit(make)(jax.random.key(0))
tokens = jax.random.randint(jax.random.key(1), (32, 16), 0, VOCAB)
wanted = (tokens * 5 + 3) % VOCAB

# Three layers over two stages, balanced by modelled cost; each layer sharded over 2 devices, the batch over 2.
pipe = train.pipeline(
    loss,
    micro_size=4,
    pipeline_stages=2,
    schedule="1f1b",
    auto_pipeline=True,
    parameter_plan={"blocks/*/up": (1, 2), "blocks/*/down": (2, 1)},
)
print(pipe.describe(params, tokens, wanted))
print(pipe.schedule)

optimizer = optax.adamw(1e-2)
step = train.step(
    pipe, optimizer, enable_parallel_optimizer=True, parallel_optimizer_config={"parallel_optimizer_threshold": 0}
)
state = step.init(pipe.pack(params, tokens, wanted), tokens, wanted)


@jax.jit
def unpiped_step(params, opt_state):
    value, grads = jax.value_and_grad(loss)(params, tokens, wanted)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


plain, opt_state = params, optimizer.init(params)
for i in range(4):
    state, value = step(state, tokens, wanted)
    plain, opt_state, unpiped = unpiped_step(plain, opt_state)
    print(f"step {i}  unpiped {unpiped:.6f}  in stages {value:.6f}")
    np.testing.assert_allclose(value, unpiped, rtol=1e-4)
trained = pipe.unpack(state.params)
np.testing.assert_allclose(trained["blocks"][2]["up"], plain["blocks"][2]["up"], rtol=1e-3, atol=1e-4)

row = state.params.buffers["float32_sharded"]
moment = state.opt_state[0].mu.buffers["float32_sharded"]
share = {name: x.addressable_shards[0].data.size / x.size for name, x in (("parameters", row), ("moments", moment))}
print("part of the blocks on each device:", share)
assert share == {"parameters": 1 / 4, "moments": 1 / 8}

# Without marks or costs: a list of functions, one for each stage, here two stages per device, interleaved.
layers = [lambda w, x: jnp.tanh(x @ w)] * 3 + [lambda w, x, y: jnp.mean((x @ w - y) ** 2)]
weights = [jax.random.normal(k, (D, D)) / 6 for k in jax.random.split(jax.random.key(2), 4)]
x, y = jnp.ones((8, D)), jnp.zeros((8, D))
interleaved = train.pipeline(layers, micro_size=4, schedule="interleaved", pipeline_stages=2, device=jax.devices()[:2])
value, grads = jax.value_and_grad(interleaved)(weights, x, y)
print(f"interleaved: loss {value:.4f}, bubble {interleaved.schedule.bubble:.1%}")

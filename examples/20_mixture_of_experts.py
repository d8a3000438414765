"""A small mixture-of-experts language model on a real text, byte by byte: eight devices hold one expert each.

Attention is data-parallel. In every block a router sends each byte to two of eight experts, by one all-to-all there and one
back. The losses are those of the same model on one device.
Run: python examples/20_mixture_of_experts.py [--steps 30]
"""

import argparse
import functools
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardfn import experts, train

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

TEXT = pathlib.Path(__file__).parent / "text" / "proverbs.txt"
LAYERS, WIDTH, HEADS, CONTEXT, BATCH, EXPERTS = 2, 64, 4, 64, 16, 8


def make(vocabulary):
    keys = iter(jax.random.split(jax.random.key(0), 5 * LAYERS + 2))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])  # noqa: E731
    block = lambda: {  # noqa: E731
        "qkv": draw(3, WIDTH, WIDTH),
        "out": draw(WIDTH, WIDTH),
        "router": draw(WIDTH, EXPERTS),
        "up": draw(EXPERTS, WIDTH, 2 * WIDTH),
        "down": draw(EXPERTS, 2 * WIDTH, WIDTH),
    }
    return {
        "embed": 0.1 * jax.random.normal(next(keys), (vocabulary, WIDTH)),
        "position": 0.1 * jax.random.normal(next(keys), (CONTEXT, WIDTH)),
        "blocks": [block() for _ in range(LAYERS)],
    }


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(x, block):
    b, t, d = x.shape
    q, k, v = (y.reshape(b, t, HEADS, d // HEADS) for y in jnp.einsum("btd,nde->nbte", x, block["qkv"]))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, t, d) @ block["out"]


def mixture(x, block, layout):
    """Two experts for each token; their load, and what the router's losses add."""
    tokens = x.reshape(-1, WIDTH)
    logits = tokens @ block["router"]
    routing = experts.route(logits, k=2, capacity_factor=2.0, groups=8)
    sent = experts.dispatch(tokens, routing, layout=layout)
    y = experts.combine(sent.dot(jax.nn.gelu(sent.dot(sent.rows, block["up"])), block["down"]), sent)
    extra = 0.01 * experts.load_balance(logits, routing) + 0.001 * experts.router_z(logits)
    return y.reshape(x.shape), routing, extra


def forward(params, tokens, layout):
    """The logits, the routing of each block, and the router's losses."""
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    routings, extras = [], 0.0
    for block in params["blocks"]:
        x = x + attention(normed(x), block)
        y, routing, extra = mixture(normed(x), block, layout)
        x, extras = x + y, extras + extra
        routings.append(routing)
    return normed(x) @ params["embed"].T, routings, extras


def loss(params, tokens, layout=None):
    logits, _, extra = forward(params, tokens[:, :-1], layout)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() + extra


def read(path):
    letters, numbers = np.unique(np.frombuffer(path.read_bytes(), np.uint8), return_inverse=True)
    return numbers.astype(np.int32), len(letters)


def batch(numbers, step):
    starts = np.random.default_rng(step).integers(0, len(numbers) - CONTEXT - 1, BATCH)
    return numbers[starts[:, None] + np.arange(CONTEXT + 1)]


def unsharded(numbers, vocabulary, optimizer, count):
    """The first losses of the same run on one device, by optax alone."""
    params, found = jax.jit(make, static_argnums=0)(vocabulary), []
    state = optimizer.init(params)

    @jax.jit
    def one(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for i in range(count):
        params, state, value = one(params, state, batch(numbers, i))
        found.append(float(value))
    return found


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=30)
    given, _ = parser.parse_known_args()
    numbers, vocabulary = read(TEXT)
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    layout = NamedSharding(mesh, PartitionSpec("data"))
    optimizer = optax.adamw(3e-3)
    step = train.step(
        functools.partial(loss, layout=layout), optimizer, mode="semi_auto_parallel", device=mesh,
        in_strategy=((8, 1),), parameter_plan={"blocks/*/up": (8, 1, 1), "blocks/*/down": (8, 1, 1)},
    )  # fmt: skip
    state, losses = step.init(lambda: make(vocabulary), batch(numbers, 0)), []
    for i in range(given.steps):
        state, value = step(state, batch(numbers, i))
        losses.append(float(value))
    print(f"{len(numbers):,} bytes; loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    up = state.params["blocks"][0]["up"]
    print(f"experts: {up.shape} {up.sharding.spec}, on each device {up.addressable_shards[0].data.shape}")
    held = jax.device_put(state.params, jax.devices()[0])
    _, routings, _ = jax.jit(functools.partial(forward, layout=None))(held, batch(numbers, 0)[:, :-1])
    print(experts.load(routings, devices=8))
    same = unsharded(numbers, vocabulary, optimizer, 8)
    np.testing.assert_allclose(losses[:8], same, rtol=1e-3)
    print("the first 8 losses equal those of one device")
    if given.steps >= 30:
        assert np.mean(losses[-5:]) < 0.8 * losses[0], "it learns"


if __name__ == "__main__":
    main()

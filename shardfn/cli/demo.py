"""`python -m shardfn demo`: two small training runs, each beside the same run unsharded, with their reports."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardfn import AUTO, Report, explain, shard
from shardfn.mindspore import Cell
from shardfn.render.text import Shown

STEPS = 8
RATE = 0.1
TOLERANCE = 1e-4
"""Losses may differ by rounding only: sums have another order."""


# ---- 2. MindSpore's network: one block is sharded, the rest is eager


class DenseMatMul(Cell):
    """A dense layer as MindSpore's example writes it: a matrix product, a bias, a ReLU."""

    def __init__(self, key: jax.Array, d_in: int, d_out: int):
        self.weight = jax.random.normal(key, (d_in, d_out)) * (2 / d_in) ** 0.5
        self.bias = jnp.zeros(d_out)

    def construct(self, x: jax.Array) -> jax.Array:
        """x [batch, d_in] to [batch, d_out]."""
        return jax.nn.relu(x @ self.weight + self.bias)


class BasicBlock(Cell):
    """Three dense layers in a row."""

    def __init__(self, key: jax.Array, d: int):
        self.dense1, self.dense2, self.dense3 = (DenseMatMul(k, d, d) for k in jax.random.split(key, 3))

    def construct(self, x: jax.Array) -> jax.Array:
        """x [batch, d] to [batch, d]."""
        return self.dense3(self.dense2(self.dense1(x)))


class Net(Cell):
    """Three blocks; where `sharded`, the first is compiled for all devices, and the others run op by op."""

    def __init__(self, key: jax.Array, d: int, sharded: bool):
        self.block1, self.block2, self.block3 = (BasicBlock(k, d) for k in jax.random.split(key, 3))
        if sharded:
            # The input has 8 shards along its features, the output 8 along the batch.
            self.block1.shard(in_strategy=((1, 8),), out_strategy=(None,))

    def construct(self, x: jax.Array) -> jax.Array:
        """x [batch, d] to [batch, d]."""
        return self.block3(self.block2(self.block1(x)))


def train_net(sharded: bool) -> tuple[list[float], Callable[[], Report]]:
    """Losses of a pynative training loop: gradients of eager code, and a decision in plain Python at every step."""
    key, kx, ky = jax.random.split(jax.random.key(0), 3)
    net = Net(key, d=16, sharded=sharded)
    x, y = jax.random.normal(kx, (8, 16)), jnp.abs(jax.random.normal(ky, (8, 16)))

    def loss(parameters: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((net.with_parameters(parameters)(x) - y) ** 2)

    parameters, losses = net.parameters_dict(), []
    for _ in range(STEPS):
        value, grads = jax.value_and_grad(loss)(parameters)
        norm = float(jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values())))
        rate = RATE if norm < 1 else RATE / norm
        parameters = {name: p - rate * grads[name] for name, p in parameters.items()}
        losses.append(float(value))
    return losses, lambda: net.block1.explain(x, compiled=True)


# ---- 1. a whole training step, sharded by one tuple and two paths


def residual_mlp(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """x [batch, d] plus what each layer adds to it."""
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x @ params["head"]


def train_step(params: Any, momentum: Any, x: jax.Array, label: jax.Array) -> tuple[Any, Any, jax.Array]:
    """One step of gradient descent with momentum: new parameters, new momentum, loss."""

    def loss(params: Any) -> jax.Array:
        scores = jax.nn.log_softmax(residual_mlp(params, x))
        return -jnp.mean(jnp.take_along_axis(scores, label[:, None], axis=1))

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - RATE * m, params, momentum), momentum, value


STRATEGY = (AUTO, AUTO, (2, 1), (2,))
"""Parameters and momentum are left to the search except for `SHARDED`; the batch is sharded 2 ways."""

SHARDED = {"layers/*/up": (1, 4), "layers/*/down": (4, 1)}
"""The hidden dim of each layer is sharded 4 ways, for parameters and momentum alike."""


def make_params(key: jax.Array, d: int, hidden: int, classes: int) -> dict[str, Any]:
    """Two layers, `up` [d, hidden] and `down` [hidden, d], and a `head` [d, classes]."""

    def matrix(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[0] ** 0.5

    head, *layers = jax.random.split(key, 5)
    return {
        "layers": [{"up": matrix(layers[i], d, hidden), "down": matrix(layers[i + 2], hidden, d)} for i in range(2)],
        "head": matrix(head, d, classes),
    }


def train_whole(sharded: bool) -> tuple[list[float], Callable[[], Report]]:
    """Losses of a loop around a step that is compiled as a whole."""
    key, kx, kl = jax.random.split(jax.random.key(1), 3)
    x, label = jax.random.normal(kx, (64, 32)), jax.random.randint(kl, (64,), 0, 16)
    params = make_params(key, d=32, hidden=128, classes=16)
    momentum = jax.tree.map(jnp.zeros_like, params)
    step = shard(train_step, STRATEGY, parameter_plan=SHARDED) if sharded else jax.jit(train_step)
    report = functools.partial(explain, step, params, momentum, x, label, compiled=True)
    losses = []
    for _ in range(STEPS):
        params, momentum, value = step(params, momentum, x, label)
        losses.append(float(value))
    return losses, report


RUNS = (
    (
        "A whole training step, compiled: the batch sharded 2 ways, the hidden dims 4 ways, the rest searched",
        train_whole,
    ),
    (
        "MindSpore's example network: a block of three sharded, its input's features 8 ways; the rest runs op by op",
        train_net,
    ),
)


def short(report: Report) -> Shown:
    """A screen of the report of a compiled plan: predicted beside compiled, why they differ, and the headline."""
    headline, *rest = report.parts
    compared = [part for part in rest if part.title.startswith(("Compiled", "Why they differ"))]
    return Shown([*compared, headline])


def run(show: Callable[[Any], None] = print) -> bool:
    """Run both; return whether the sharded losses equal the unsharded ones.

    Args:
      show: prints a part of a report.
    """
    started, equal = time.perf_counter(), True
    print(f"shardfn on {jax.device_count()} {jax.devices()[0].platform} devices, jax {jax.__version__}")
    print(f"the code: {__file__}")
    for number, (title, train) in enumerate(RUNS, 1):
        print(f"\n{number}. {title}\n")
        plain, _ = train(False)
        sharded, report = train(True)
        print(f"{'step':>4}  {'unsharded':>10}  {'sharded':>10}  difference")
        for i, (a, b) in enumerate(zip(plain, sharded, strict=True)):
            print(f"{i:>4}  {a:>10.6f}  {b:>10.6f}  {b - a:>10.1e}")
        same = all(abs(a - b) <= TOLERANCE * abs(a) for a, b in zip(plain, sharded, strict=True))
        print(f"\nlosses {'are equal' if same else 'DIFFER'} (to {TOLERANCE:g} of their size)\n")
        show(short(report()))
        equal = equal and same
    print(
        "\nThe whole report of a step, with collectives and their lines: print(shardfn.explain(step, *args, compiled=True))"
    )
    print(f"\n{'Both sharded runs give the losses of their unsharded runs' if equal else 'A run DIFFERS'}; "
          f"{time.perf_counter() - started:.0f} s in all.")  # fmt: skip
    return equal

"""A two-layer perceptron: forward pass, and a training step with plain gradient descent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from examples.models import abstract, quick_key
from examples.models.layouts import Expert, hint, usual_experts

Params = dict[str, jax.Array]


def init(key: jax.Array, d_in: int, d_hidden: int, d_out: int) -> Params:
    """Weights of shapes [d_in, d_hidden] and [d_hidden, d_out], biases of zero."""
    k1, k2 = jax.random.split(key)
    return {
        "w1": jax.random.normal(k1, (d_in, d_hidden)) / d_in**0.5,
        "b1": jnp.zeros(d_hidden),
        "w2": jax.random.normal(k2, (d_hidden, d_out)) / d_hidden**0.5,
        "b2": jnp.zeros(d_out),
    }


def forward(params: Params, x: jax.Array) -> jax.Array:
    """x [batch, d_in] to [batch, d_out]."""
    h = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return hint(h @ params["w2"] + params["b2"])


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error."""
    return jnp.mean((forward(params, x) - y) ** 2)


def train_step(params: Params, x: jax.Array, y: jax.Array, rate: float = 0.1) -> tuple[Params, jax.Array]:
    """One step of gradient descent: the new parameters and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


def make(batch: int = 16, d_in: int = 32, d_hidden: int = 64, d_out: int = 16, train: bool = False):
    """`forward` on (params, x), or `train_step` on (params, x, y)."""
    key, kx, ky = jax.random.split(quick_key(), 3)
    params = init(key, d_in, d_hidden, d_out)
    x = jax.random.normal(kx, (batch, d_in))
    if not train:
        return forward, (params, x)
    return train_step, (params, x, jax.random.normal(ky, (batch, d_out)))


SMALL = {"batch": 1024, "d_in": 512, "d_hidden": 2048, "d_out": 512, "train": True}
"""A training step that compiles on a CPU in a second."""

LARGE = {"batch": 16_384, "d_in": 8192, "d_hidden": 32_768, "d_out": 8192, "train": True}
"""0.5 billion parameters and a batch for 512 devices: for plans on paper."""


def experts(devices: int, **sizes: Any) -> dict[str, Expert]:
    """Layouts of the training step with these `sizes` as people write them by hand."""
    args = abstract(make, **sizes)[1]
    tensor = {"*/w1": (None, "model"), "*/b1": ("model",), "*/w2": ("model", None)}
    return usual_experts(args, devices, sizes["batch"], sizes["d_hidden"], tensor, trained=1)

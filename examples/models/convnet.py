"""A small convolution net for images [batch, height, width, channels]: forward pass and a training step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from examples.models import quick_key

Params = dict[str, Any]


def init(key: jax.Array, channels: tuple[int, ...], classes: int) -> Params:
    """Kernels [3, 3, in, out] between successive `channels`, then a dense layer to `classes`."""
    keys = jax.random.split(key, len(channels))
    kernels = [
        jax.random.normal(k, (3, 3, c_in, c_out)) * (2 / (9 * c_in)) ** 0.5
        for k, c_in, c_out in zip(keys, channels[:-1], channels[1:], strict=False)
    ]
    dense = jax.random.normal(keys[-1], (channels[-1], classes)) / channels[-1] ** 0.5
    return {"kernels": kernels, "biases": [jnp.zeros(c) for c in channels[1:]], "dense": dense}


def forward(params: Params, images: jax.Array) -> jax.Array:
    """Images [batch, height, width, channels] to logits [batch, classes]; each layer halves height and width."""
    x = images
    for kernel, bias in zip(params["kernels"], params["biases"], strict=True):
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + bias)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(x, axis=(1, 2)) @ params["dense"]


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy; labels [batch] are class numbers."""
    scores = jax.nn.log_softmax(forward(params, images))
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))


def train_step(params: Params, images: jax.Array, labels: jax.Array, rate: float = 0.01) -> tuple[Params, jax.Array]:
    """One step of gradient descent: the new parameters and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, images, labels)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


def make(
    batch: int = 8, size: int = 16, channels: tuple[int, ...] = (4, 16, 32), classes: int = 8, train: bool = False
):
    """`forward` on (params, images), or `train_step` on (params, images, labels)."""
    key, kx, ky = jax.random.split(quick_key(), 3)
    params = init(key, channels, classes)
    images = jax.random.normal(kx, (batch, size, size, channels[0]))
    if not train:
        return forward, (params, images)
    return train_step, (params, images, jax.random.randint(ky, (batch,), 0, classes))

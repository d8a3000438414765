"""One step of training for any loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.models import quick_key

ADAMW = optax.adamw(3e-4, weight_decay=0.1)


def adamw_step(params: Any, state: optax.OptState, *batch: jax.Array, loss: Callable[..., jax.Array]):
    """One step of AdamW on `loss(params, *batch)`: new parameters, new optimiser state, and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, *batch)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def sgd_step(params: Any, *batch: jax.Array, loss: Callable[..., jax.Array], rate: float = 0.1):
    """One step of gradient descent: new parameters, and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


def language_model(cfg: Any, init: Callable[..., Any], loss: Callable[..., jax.Array]):
    """A training step on (params, state, tokens) with AdamW, tokens [batch, context + 1]: the step, and its arguments."""
    key, kt = jax.random.split(quick_key())
    params = init(key, cfg)
    tokens = jax.random.randint(kt, (cfg.batch, cfg.context + 1), 0, cfg.vocab)
    return functools.partial(adamw_step, loss=loss), (params, ADAMW.init(params), tokens)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all positions; logits [..., classes], labels [...] of class numbers."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int | None = None) -> jax.Array:
    """Normal numbers of variance 1 / fan_in, by default the first dim's size."""
    return jax.random.normal(key, shape) / (fan_in or shape[0]) ** 0.5

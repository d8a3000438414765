"""Auxiliary losses of a router: balanced loads and small logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardfn.experts.routing import Routing


def load_balance(logits: jax.Array, routing: Routing) -> jax.Array:
    """The load-balance loss: 1 where all experts have equal loads or probabilities, more where load meets probability.

    It is `count * sum(f * p)`: f is each expert's share of the choices, dropped ones included, and p its mean
    probability (Fedus et al. 2021, Switch Transformers, equation 4, for k choices). Its gradient flows through p.

    Args:
      logits: [tokens, experts], the router's output.
      routing: what `route` made of them.

    Returns:
      A float32 scalar. Add it to the loss with a factor such as 0.01.

    >>> from shardfn.experts import route
    >>> logits = jnp.array([[9.0, 0.0], [9.0, 0.0]])
    >>> round(float(load_balance(logits, route(logits, k=1))), 2), float(load_balance(0 * logits, route(logits, k=2)))
    (2.0, 1.0)
    """
    share = routing.load / routing.experts.size
    probability = jnp.mean(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), axis=0)
    return routing.count * jnp.sum(share * probability)


def router_z(logits: jax.Array) -> jax.Array:
    """The router z-loss: the mean squared log of the softmax's denominator (Zoph et al. 2022, ST-MoE, equation 5).

    Args:
      logits: [tokens, experts], the router's output.

    Returns:
      A float32 scalar. Add it to the loss with a factor such as 0.001.

    >>> round(float(router_z(jnp.zeros((3, 8)))), 3)  # log(8) squared
    4.324
    """
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) ** 2)

"""Auxiliary losses of a router: balanced loads and small logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardfn.errors import StrategyError, StrategyTypeError, a, fail
from shardfn.experts.routing import Routing


def load_balance(logits: jax.Array, routing: Routing) -> jax.Array:
    """The load-balance loss: 1 where all experts have equal loads or probabilities, more where load meets probability.

    It is `count * sum(f * p)`: f is each expert's share of the choices, dropped ones included, and p its mean
    probability (Fedus et al. 2021, Switch Transformers, equation 4, for k choices). Its gradient flows through p.

    Args:
      logits: [tokens, experts], the router's output.
      routing: what `route` made of them.

    Returns:
      A float32 scalar, 0 without tokens. Add it to the loss with a factor such as 0.01.

    Raises:
      StrategyError, StrategyTypeError: logits and a routing that do not fit each other.

    >>> from shardfn.experts import route
    >>> logits = jnp.array([[9.0, 0.0], [9.0, 0.0]])
    >>> round(float(load_balance(logits, route(logits, k=1))), 2), float(load_balance(0 * logits, route(logits, k=2)))
    (2.0, 1.0)
    """
    if not isinstance(routing, Routing):
        fail(StrategyTypeError, f"the routing is {a(routing)}", where="load_balance(logits, routing)",
             why="it is what `route` makes of the logits", fix="load_balance(logits, route(logits, k))")  # fmt: skip
    _check(logits, (routing.experts.shape[0], routing.count))
    share = routing.load / max(1, routing.experts.size)
    probability = jnp.sum(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), axis=0) / max(1, logits.shape[0])
    return routing.count * jnp.sum(share * probability)


def router_z(logits: jax.Array) -> jax.Array:
    """The router z-loss: the mean squared log of the softmax's denominator (Zoph et al. 2022, ST-MoE, equation 5).

    Args:
      logits: [tokens, experts], the router's output.

    Returns:
      A float32 scalar, 0 without tokens. Add it to the loss with a factor such as 0.001.

    Raises:
      StrategyError: logits of another shape.

    >>> round(float(router_z(jnp.zeros((3, 8)))), 3)  # log(8) squared
    4.324
    """
    _check(logits, None)
    return jnp.sum(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) ** 2) / max(1, logits.shape[0])


def _check(logits: Any, shape: tuple[int, int] | None) -> None:
    found = getattr(logits, "shape", None)
    if found is None or len(found) != 2 or (shape is not None and found != shape):
        fail(StrategyError, f"the logits are {a(logits) if found is None else list(found)}", where="load_balance, router_z",
             why=f"they are the router's output, {'[tokens, experts]' if shape is None else f'{list(shape)} of this routing'}",
             fix="pass those that `route` got")  # fmt: skip

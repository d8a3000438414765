"""A mixture-of-experts layer in einsums: every token goes to its two best experts, as far as these have room.

Tokens come in groups, and each expert takes `capacity` tokens of a group (Lepikhin et al. 2020, GShard).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from examples.models import quick_key
from examples.models.layouts import hint

Params = dict[str, jax.Array]


def init(key: jax.Array, experts: int, d_model: int, d_hidden: int) -> Params:
    """A gate [d_model, experts], and the experts' weights stacked along their first dim."""
    kg, k1, k2 = jax.random.split(key, 3)
    return {
        "gate": jax.random.normal(kg, (d_model, experts)) / d_model**0.5,
        "w1": jax.random.normal(k1, (experts, d_model, d_hidden)) / d_model**0.5,
        "w2": jax.random.normal(k2, (experts, d_hidden, d_model)) / d_hidden**0.5,
    }


def route(probabilities: jax.Array, capacity: int) -> jax.Array:
    """Probabilities [g, t, e] to weights [g, t, e, capacity]: how much of a token lies in which slot of an expert.

    Slots are given to all first choices before any second one; a choice that finds its expert full is dropped.
    """
    experts = probabilities.shape[-1]
    best, choice = jax.lax.top_k(probabilities, 2)
    weight = best / jnp.sum(best, axis=-1, keepdims=True)
    taken = jnp.zeros((probabilities.shape[0], 1, experts), jnp.int32)
    routed = jnp.zeros((*probabilities.shape, capacity))
    for i in range(2):
        chosen = jax.nn.one_hot(choice[..., i], experts, dtype=jnp.int32)
        slot = jnp.cumsum(chosen, axis=1) - chosen + taken
        taken = taken + jnp.sum(chosen, axis=1, keepdims=True)
        place = jax.nn.one_hot(slot, capacity) * chosen[..., None]  # a slot past the capacity is all zero
        routed = routed + weight[..., i, None, None] * place
    return routed


def forward(params: Params, x: jax.Array, capacity: int) -> jax.Array:
    """x [groups, tokens, d_model] to the same shape."""
    probabilities = jax.nn.softmax(jnp.einsum("gtm,me->gte", x, params["gate"]))
    combine = route(probabilities, capacity)
    dispatch = (combine > 0).astype(x.dtype)
    inputs = hint(jnp.einsum("gtec,gtm->egcm", dispatch, x), "experts")
    hidden = jax.nn.gelu(jnp.einsum("egcm,emh->egch", inputs, params["w1"]))
    outputs = hint(jnp.einsum("egch,ehm->egcm", hidden, params["w2"]), "experts")
    return jnp.einsum("gtec,egcm->gtm", combine, outputs)


def make(groups: int = 8, tokens: int = 16, experts: int = 8, d_model: int = 32, d_hidden: int = 64, capacity: int = 8):
    """`forward` on (params, x)."""
    key, kx = jax.random.split(quick_key())
    params = init(key, experts, d_model, d_hidden)
    return functools.partial(forward, capacity=capacity), (params, jax.random.normal(kx, (groups, tokens, d_model)))

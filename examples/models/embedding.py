"""A recommendation model: embedding tables and a dense tower, their pairwise products, and a top tower.

The architecture is DLRM's (Naumov et al. 2019).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from examples.models import mlp, quick_key

Params = dict[str, Any]


def init(key: jax.Array, tables: int, rows: int, d_embed: int, d_dense: int, d_hidden: int) -> Params:
    """Tables [tables, rows, d_embed], and the two towers."""
    kt, kb, ku = jax.random.split(key, 3)
    pairs = (tables + 1) * tables // 2
    return {
        "tables": jax.random.normal(kt, (tables, rows, d_embed)) / d_embed**0.5,
        "bottom": mlp.init(kb, d_dense, d_hidden, d_embed),
        "top": mlp.init(ku, d_embed + pairs, d_hidden, 1),
    }


def forward(params: Params, dense: jax.Array, ids: jax.Array) -> jax.Array:
    """dense [batch, d_dense] and ids [batch, tables] to logits [batch]."""
    bottom = mlp.forward(params["bottom"], dense)
    rows = jax.vmap(lambda table, column: table[column], in_axes=(0, 1), out_axes=1)(params["tables"], ids)
    features = jnp.concatenate([bottom[:, None], rows], axis=1)
    products = jnp.einsum("bid,bjd->bij", features, features)
    upper = jnp.triu_indices(features.shape[1], k=1)
    return mlp.forward(params["top"], jnp.concatenate([bottom, products[:, *upper]], axis=1))[:, 0]


def loss(params: Params, dense: jax.Array, ids: jax.Array, clicked: jax.Array) -> jax.Array:
    """Mean binary cross entropy; clicked [batch] is 0 or 1."""
    logits = forward(params, dense, ids)
    return jnp.mean(jax.nn.softplus(logits) - clicked * logits)


def train_step(params: Params, dense: jax.Array, ids: jax.Array, clicked: jax.Array, rate: float = 0.1):
    """One step of gradient descent: the new parameters and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, dense, ids, clicked)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


def make(
    batch: int = 16,
    tables: int = 4,
    rows: int = 64,
    d_embed: int = 16,
    d_dense: int = 8,
    d_hidden: int = 32,
    train: bool = False,
):
    """`forward` on (params, dense, ids), or `train_step` on (params, dense, ids, clicked)."""
    key, kd, ki, kc = jax.random.split(quick_key(), 4)
    params = init(key, tables, rows, d_embed, d_dense, d_hidden)
    dense = jax.random.normal(kd, (batch, d_dense))
    ids = jax.random.randint(ki, (batch, tables), 0, rows)
    if not train:
        return forward, (params, dense, ids)
    return train_step, (params, dense, ids, jax.random.bernoulli(kc, 0.3, (batch,)).astype(dense.dtype))

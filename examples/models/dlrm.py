"""A recommendation model with large embedding tables of its own sizes each, trained by gradient descent.

The architecture is DLRM's (Naumov et al. 2019): a tower for the dense features, one row of each table, the products of
all pairs of these, and a second tower.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.models import abstract, quick_key
from examples.models.layouts import Expert, data_axes, hint, lay_out, mixes
from examples.models.training import normal, sgd_step

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; `rows` has one entry for each table, `hidden` one for each hidden layer of both towers."""

    rows: tuple[int, ...] = (1024, 256, 64)
    d_embed: int = 16
    d_dense: int = 16
    hidden: tuple[int, ...] = (64, 32)
    batch: int = 16


TINY = Config(rows=(32, 16), d_embed=8, d_dense=8, hidden=(16,))
"""For tests."""


def init_tower(key: jax.Array, widths: tuple[int, ...]) -> list[Params]:
    """Dense layers between successive widths."""
    keys = jax.random.split(key, len(widths) - 1)
    pairs = zip(keys, widths[:-1], widths[1:], strict=True)
    return [{"w": normal(k, (a, b)), "b": jnp.zeros(b)} for k, a, b in pairs]


def init(key: jax.Array, cfg: Config) -> Params:
    """Tables [rows, d_embed], and the two towers."""
    kb, ku, *keys = jax.random.split(key, 2 + len(cfg.rows))
    pairs = len(cfg.rows) * (len(cfg.rows) + 1) // 2
    return {
        "tables": [normal(k, (n, cfg.d_embed), cfg.d_embed) for k, n in zip(keys, cfg.rows, strict=True)],
        "bottom": init_tower(kb, (cfg.d_dense, *cfg.hidden, cfg.d_embed)),
        "top": init_tower(ku, (cfg.d_embed + pairs, *cfg.hidden, 1)),
    }


def tower(layers: list[Params], x: jax.Array) -> jax.Array:
    """x [batch, in] through dense layers, with relu between them."""
    for p in layers[:-1]:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def forward(params: Params, dense: jax.Array, ids: jax.Array) -> jax.Array:
    """dense [batch, d_dense] and ids [batch, tables] to logits [batch]."""
    bottom = hint(tower(params["bottom"], dense))
    rows = [hint(table[ids[:, i]]) for i, table in enumerate(params["tables"])]
    features = jnp.stack([bottom, *rows], axis=1)
    products = jnp.einsum("bid,bjd->bij", features, features)
    upper = jnp.triu_indices(features.shape[1], k=1)
    return tower(params["top"], jnp.concatenate([bottom, products[:, *upper]], axis=1))[:, 0]


def loss(params: Params, dense: jax.Array, ids: jax.Array, clicked: jax.Array) -> jax.Array:
    """Mean binary cross entropy; clicked [batch] is 0 or 1."""
    logits = forward(params, dense, ids)
    return jnp.mean(jax.nn.softplus(logits) - clicked * logits)


def make(cfg: Config = Config()):
    """A training step on (params, dense, ids, clicked)."""
    key, kd, ki, kc = jax.random.split(quick_key(), 4)
    dense = jax.random.normal(kd, (cfg.batch, cfg.d_dense))
    columns = [
        jax.random.randint(k, (cfg.batch,), 0, n) for k, n in zip(jax.random.split(ki, 64), cfg.rows, strict=False)
    ]
    clicked = jax.random.bernoulli(kc, 0.3, (cfg.batch,)).astype(dense.dtype)
    return functools.partial(sgd_step, loss=loss), (init(key, cfg), dense, jnp.stack(columns, axis=1), clicked)


def small() -> Config:
    """Compiles on a CPU in seconds; the tables hold nearly all parameters."""
    return Config(rows=(65536, 16384, 8192, 4096), d_embed=64, d_dense=64, hidden=(256, 128), batch=1024)


def large() -> Config:
    """26 tables, 3.8 billion parameters, and a batch for 512 devices: for plans on paper."""
    rows = (8_388_608,) * 6 + (1_048_576,) * 8 + (65_536,) * 12
    return Config(rows=rows, d_embed=64, d_dense=64, hidden=(1024, 512), batch=65_536)


def experts(cfg: Config, devices: int) -> dict[str, Expert]:
    """Layouts of the training step as people write them by hand: the towers data parallel, tables cut in many ways."""
    args = abstract(make, cfg)[1]
    lay = functools.partial(lay_out, args, trained=1)
    found = {"data parallel": lay({"data": devices}), "FSDP": lay({"data": devices}, pieces="data")}
    tables = {"rows": ("model", None), "columns": (None, "model")}
    for what, cuts in tables.items():
        if cfg.d_embed % devices == 0 or what == "rows":
            found[f"{what} of tables"] = lay({"model": devices}, {"*tables*": cuts}, batch=())
            same = tuple("data" if axis else None for axis in cuts)
            found[f"{what} of tables, data on the same devices"] = lay(
                data_axes(cfg.batch, devices), {"*tables*": same}
            )
        for axes in mixes(devices, cfg.batch, cfg.d_embed):
            size = f"{axes['data']} x {axes['model']}"
            found[f"data x {what} of tables, {size}"] = lay(axes, {"*tables*": cuts})
    return found

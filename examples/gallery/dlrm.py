"""DLRM: a training step of MLPerf's click model on 8 H100.

The 26 categorical fields of Criteo's terabyte of clicks have tables of 3 to 40,000,000 rows (Naumov et al. 2019; sizes of MLPerf
Training). Five of them are 98% of the 97 GiB, which no device holds. The search chooses for each table whether its rows, its
columns or neither are sharded. Stochastic gradient descent updates the rows of a batch alone.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.gallery import Program, shapes, show

LARGEST = 40_000_000
CRITEO = (LARGEST, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, LARGEST, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4,
          976, 14, LARGEST, LARGEST, LARGEST, 590_152, 12_973, 108, 36)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    rows: tuple[int, ...] = CRITEO
    width: int = 128
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512, 256)
    batch: int = 65_536


TINY = Config(rows=(64, 8, 32), width=16, dense=4, bottom=(16,), top=(16,), batch=32)


def parameters(cfg):
    vectors = len(cfg.rows) + 1

    def mlp(*sizes):
        return [{"w": (before, after), "b": (after,)} for before, after in itertools.pairwise(sizes)]

    pairs = vectors * (vectors - 1) // 2
    return {
        "tables": [(rows, cfg.width) for rows in cfg.rows],
        "bottom": mlp(cfg.dense, *cfg.bottom, cfg.width),
        "top": mlp(cfg.width + pairs, *cfg.top, 1),
    }


def mlp(x, layers):
    """Layers with a ReLU between them."""
    for p in layers[:-1]:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def loss(layers, rows, x, clicked):
    """The loss of dense features x [batch, dense] and the rows of the fields, each [batch, width]."""
    dense = mlp(x, layers["bottom"])
    vectors = jnp.stack([dense, *rows], axis=1)
    pairs = jnp.einsum("bnd,bmd->bnm", vectors, vectors)[:, *np.triu_indices(vectors.shape[1], 1)]
    scores = mlp(jnp.concatenate([dense, pairs], axis=-1), layers["top"])[:, 0]
    return optax.sigmoid_binary_cross_entropy(scores, clicked).mean()


def train_step(params, x, ids, clicked, rate):
    """One step of gradient descent; ids [batch, fields] begin at 0 in each field."""
    layers, tables = {name: params[name] for name in ("bottom", "top")}, params["tables"]
    rows = [table[column] for table, column in zip(tables, ids.T, strict=True)]
    value, (changes, row_changes) = jax.value_and_grad(loss, (0, 1))(layers, rows, x, clicked)
    layers = jax.tree.map(lambda p, g: p - rate * g, layers, changes)
    tables = [table.at[column].add(-rate * g) for table, column, g in zip(tables, ids.T, row_changes, strict=True)]
    return {**layers, "tables": tables}, value


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    one = functools.partial(jax.ShapeDtypeStruct, (cfg.batch,))
    arguments = (
        shapes(jnp.float32, parameters(cfg)),
        jax.ShapeDtypeStruct((cfg.batch, cfg.dense), jnp.float32),
        jax.ShapeDtypeStruct((cfg.batch, len(cfg.rows)), jnp.int32),
        one(jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    options = {"level": "time", "donate_argnums": (0,)}
    return Program(train_step, arguments, None if size == "tiny" else "h100:8", options)


NOTES = """
The plan shards the columns of the tables and the batch. A device looks up its columns for all of the batch; one all-to-all for
each field gives it all columns of its own part. `embedding.lookup` splits tables of uneven size by rows instead
([embedding tables](../how-to/embedding-tables.md)).
"""

if __name__ == "__main__":
    show(program)

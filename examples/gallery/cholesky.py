"""Cholesky: the factor of a matrix with 131,072 rows on 8 H100.

The matrix has 64 GiB, so that its factorisation fits on no device. The loop factors a panel of 2,048 columns, then subtracts
its products from the columns behind it. XLA would factor an ordinary `jnp.linalg.cholesky` on each device alone, from a copy
of the whole matrix; here only corners of 2,048 x 2,048 are factored so.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from examples.gallery import Program, show

EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 131_072
    block: int = 2048


TINY = Config(rows=64, block=8)


def cholesky(matrix, block):
    """The lower factor of a symmetric, positive definite matrix [rows, rows], by panels of `block` columns."""
    rows, panels = len(matrix), len(matrix) // block
    row, panel = jnp.arange(rows), jnp.arange(panels)

    def factor_panel(a, i):
        column = jax.lax.dynamic_index_in_dim(a, i, axis=1, keepdims=False)  # [rows, block]
        corner = jnp.where((panel == i)[:, None, None], column.reshape(panels, block, block), 0).sum(axis=0)
        root = jnp.linalg.cholesky(corner)
        inverse = jax.scipy.linalg.solve_triangular(root, jnp.eye(block, dtype=a.dtype), lower=True)
        column = jnp.where((row >= i * block)[:, None], jnp.matmul(column, inverse.T, precision=EXACT), 0)
        behind = jnp.where((panel > i)[:, None, None], column.reshape(panels, block, block), 0)
        a = a - jnp.einsum("rb,pcb->rpc", column, behind, precision=EXACT)
        return jax.lax.dynamic_update_index_in_dim(a, column, i, axis=1), None

    factor, _ = jax.lax.scan(factor_panel, matrix.reshape(rows, panels, block), panel)
    return jnp.tril(factor.reshape(rows, rows))


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    matrix = jax.ShapeDtypeStruct((cfg.rows, cfg.rows), jnp.float32)

    def draw():
        x = np.random.default_rng(0).standard_normal(matrix.shape).astype("float32")
        return (jnp.asarray(x @ x.T / cfg.rows + np.eye(cfg.rows, dtype="float32")),)

    options = {"level": "time", "donate_argnums": (0,)}
    device = None if size == "tiny" else "h100:8"
    return Program(functools.partial(cholesky, block=cfg.block), (matrix,), device, options, draw=draw,
                   unsharded=jnp.linalg.cholesky)  # fmt: skip


NOTES = """
Shapes in a loop are static, so each panel updates all columns and zeros what is already done: 2 n³ FLOPs in place of n³/3. The
corner is a sum of masked blocks. A slice at `i` in a sharded dimension would gather the panel on each device.
"""

if __name__ == "__main__":
    show(program)

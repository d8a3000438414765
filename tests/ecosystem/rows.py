"""One function of another library under `shard`: its value, its gradient, its plan at each objective, and the prediction.

A row is a name and a function without arguments that returns a `Row`, so that a library's model is only built by its own
test. Compiled bytes equal the predicted ones, but for the rows of `deviations.KNOWN`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util

import shardfn
from shardfn.compiled.executable import read
from tests.ecosystem.deviations import KNOWN

OBJECTIVES = ("communication", "memory", "time")
BATCH = "batch"
"""The layout of a row whose `batch` names the arguments with dimension 0 sharded 8 ways: the plan has no choice."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A function and its arguments; `batch` names the positions of the arguments that the layout `batch` shards."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    batch: tuple[int, ...] = (0,)
    gradient: bool = True
    tolerance: float = 2e-4


def table(module: str, rows: Mapping[str, Callable[[], Row]]) -> Any:
    """The parametrisation of the test of a module over rows and layouts."""
    library = module.rpartition("test_")[2]
    return pytest.mark.parametrize(
        ("make", "layout", "known"),
        [
            pytest.param(
                make, layout, KNOWN.get((library, name, layout)), id=f"{name}-{layout}", marks=pytest.mark.ecosystem
            )
            for name, make in rows.items()
            for layout in (*OBJECTIVES, BATCH)
        ],
    )  # fmt: skip


def check(make: Callable[[], Row], layout: str, known: tuple[float, float] | None) -> None:
    """Hold a row under one layout against the same function unsharded, and its prediction against XLA.

    Args:
      make: makes the row.
      layout: an objective of the search, or `BATCH`.
      known: the bounds of compiled over predicted bytes, where these differ.
    """
    row, value, gradient = _unsharded(make)
    if layout == BATCH and not row.batch:
        pytest.skip("the row has no batch")
    strategy = tuple(_batch_entry(arg) if i in row.batch else shardfn.REPLICATED for i, arg in enumerate(row.args))
    function = shardfn.shard(row.fn, strategy) if layout == BATCH else shardfn.shard(row.fn, level=layout)
    _close(function(*row.args), value, row.tolerance)
    if row.gradient:
        _close(_gradient(function, row.args), gradient, 10 * row.tolerance)
    plan = function.plan(*row.args)
    real = read(function.lower(*row.args).compile())
    predicted, compiled = (sum(c.total_bytes for c in side.collectives) for side in (plan, real))
    assert known is None or compiled != predicted, f"{predicted} B as predicted: take the row out of deviations.py"
    least, most = known or (1.0, 1.0)
    assert least * predicted <= compiled <= most * predicted, f"{compiled} B compiled, {predicted} B predicted\n{plan}"


@functools.lru_cache(maxsize=1)  # the layouts of a row follow each other
def _unsharded(make: Callable[[], Row]) -> tuple[Row, Any, Any]:
    """A row, the value of its function without `shard`, and the gradient, if it has one."""
    row = make()
    value = (jax.jit(row.fn) if _is_jittable(row) else row.fn)(*row.args)
    return row, value, _gradient(row.fn, row.args) if row.gradient else None


def _batch_entry(arg: Any) -> Any:
    return tree_util.tree_map(lambda leaf: (8, *(1,) * (leaf.ndim - 1)) if _is_array(leaf) else None, arg)


def _gradient(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The gradient of a sum over the results, with respect to every floating-point array of the arguments."""
    leaves, treedef = tree_util.tree_flatten(args)
    at = [i for i, leaf in enumerate(leaves) if _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)]

    def total(floats: list[Any]) -> Any:
        full = list(leaves)
        for i, value in zip(at, floats, strict=True):
            full[i] = value
        result = fn(*tree_util.tree_unflatten(treedef, full))
        parts = [jnp.sum(jnp.abs(x) ** 2) for x in tree_util.tree_leaves(result) if _is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)]  # fmt: skip
        return sum(parts)

    return jax.grad(total)([leaves[i] for i in at])


def _close(actual: Any, expected: Any, tolerance: float) -> None:
    actual, expected = (
        [
            leaf
            for leaf in tree_util.tree_leaves(tree)
            if _is_array(leaf) or isinstance(leaf, bool | int | float | complex)
        ]
        for tree in (actual, expected)
    )
    assert len(actual) == len(expected) > 0
    for got, wanted in zip(actual, expected, strict=True):
        if jax.dtypes.issubdtype(getattr(got, "dtype", None), jax.dtypes.prng_key):
            got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
        got, wanted = np.asarray(got), np.asarray(wanted)
        scale = max(1.0, float(np.max(np.abs(wanted), initial=0.0))) if wanted.dtype.kind in "fc" else 1.0
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * scale)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Standard normal numbers, float32."""
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32))


def uniform(*shape: int, seed: int = 0) -> jax.Array:
    """Uniform numbers in [0, 1), float32."""
    return jnp.asarray(np.random.default_rng((seed, *shape)).random(shape, np.float32))


def integers(below: int, *shape: int, seed: int = 0) -> jax.Array:
    """Integers in [0, below), int32."""
    return jnp.asarray(np.random.default_rng((seed, *shape)).integers(0, below, shape, np.int32))


def _is_jittable(row: Row) -> bool:
    return all(_is_array(leaf) for leaf in tree_util.tree_leaves(row.args))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")

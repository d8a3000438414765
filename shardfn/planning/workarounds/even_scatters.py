"""Scatters that combine, with updates of even shards.

XLA (JAX 0.10 to 0.12) counts the padding of unevenly sharded updates in a scatter that combines (`.at[i].add(u)`, the gradient
of a lookup, `segment_sum`): it combines the padding with row 0. Here updates and indices get further rows until their
shards are even. These rows are combined with row 0 too, or out of bounds where no row may be there twice, and are the neutral
element.

XLA ends the process where an index of unsigned integers, as in the gradient of a sort, has uneven shards. Here it is signed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.errors import StrategyError, fail
from shardfn.ir.model import Op
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.rewrite import inserted

NEUTRAL = {
    "scatter-add": "zero",
    "scatter-sub": "zero",
    "scatter-mul": "one",
    "scatter-min": "max",
    "scatter-max": "min",
}
"""The neutral element of each scatter that combines, by primitive."""


def rows_multiple(op: Op, partitioned: PartitionedProgram, before: Mapping[int, int]) -> int:
    """Of what the sizes of the dimensions that index and rows share must be multiples for even shards; 1 if they are even.

    Args:
      op: a gather or a scatter; its operand 1 is the index, its rows are its updates or its result.
      partitioned: the program with its shardings.
      before: a value that is resharded, by the value that comes of it.
    """
    if op.rule is None:
        return 1
    has_updates = op.name == "scatter"
    rows = (op.inputs[2], op.rule.operands[2]) if has_updates else (op.outputs[0], op.rule.results[0])
    of_index, of_rows = ({factor for dim in dims for factor in dim} for dims in (op.rule.operands[1], rows[1]))
    shared = of_index & of_rows
    found = [1]
    for value, dims in ((op.inputs[1], op.rule.operands[1]), rows):
        for one in {value, before.get(value, value)}:
            each = zip(dims, partitioned.graph.values[one].shape, partitioned.shards(one), strict=True)
            found += [shards for of, size, shards in each if size % shards and shared.issuperset(of)]
    return math.lcm(*found)


def is_unsigned(op: Op, partitioned: PartitionedProgram) -> bool:
    """Whether a gather or scatter has an index of unsigned integers that has uneven shards."""
    if not partitioned.graph.values[op.inputs[1]].dtype.startswith("ui"):
        return False
    rows = op.inputs[2] if op.name == "scatter" else op.outputs[0]
    each = [zip(partitioned.graph.values[v].shape, partitioned.shards(v), strict=True) for v in (op.inputs[1], rows)]
    return any(size % shards for sizes in each for size, shards in sizes)


def even_scatter(eqn: Any, inputs: Sequence[Any], multiple: int) -> list[Any]:
    """The outputs of a scatter that combines, with updates and indices that are padded to a multiple of rows."""
    operand, index, updates = inputs
    with inserted():
        index, updates, params = _evenly(eqn, operand, index, updates, multiple)
    return [eqn.primitive.bind(operand, index, updates, **params)]


def _evenly(eqn: Any, operand: Any, index: Any, updates: Any, multiple: int) -> tuple[Any, Any, dict[str, Any]]:
    """The padded indices and updates of a scatter, and its parameters for them."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    index = _signed(index, max((operand.shape[d] for d in numbers.scatter_dims_to_operand_dims), default=0))
    rows = _further_rows(index, numbers.scatter_indices_batching_dims, multiple)
    of_updates, added = iter(rows[:-1]), []
    for d in range(updates.ndim):
        added.append(0 if d in numbers.update_window_dims else next(of_updates))
    padded = _with_rows(updates, added, _neutral(NEUTRAL[eqn.primitive.name], updates.dtype))
    if params["unique_indices"] and any(rows):  # without which `scatter-mul` has no gradient
        index = _outside(_in_bounds(index, operand, updates, params), rows, operand)
        return index, padded, {**params, "indices_are_sorted": False, "mode": lax.GatherScatterMode.FILL_OR_DROP}
    return _with_rows(index, rows, 0), padded, _unordered(params, rows)


def _signed(index: Any, rows: int) -> Any:
    """An index into at most so many rows, as signed integers. An unsigned one that is too large becomes the largest, which is
    outside too."""
    if not jnp.issubdtype(index.dtype, jnp.unsignedinteger):
        return index
    dtype = _signed_dtype(rows)
    most = jnp.iinfo(dtype).max
    return (jnp.minimum(index, most) if jnp.iinfo(index.dtype).max > most else index).astype(dtype)


def _signed_dtype(rows: int) -> Any:
    """The dtype of a signed index into so many rows.

    Raises:
      StrategyError: it would be int64, and `jax_enable_x64` is off.

    >>> _signed_dtype(2**31 - 1)
    <class 'numpy.int32'>
    """
    if rows <= np.iinfo(np.int32).max:
        return np.int32
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        fail(StrategyError, f"an index into {rows:,} rows has uneven shards",
             why="XLA ends the process for unsigned indices with uneven shards, and signed ones of 32 bits end at row "
                 "2,147,483,647",
             fix="turn on jax_enable_x64, or use sizes that the number of shards divides")  # fmt: skip
    return np.int64


def _further_rows(index: Any, batching: Sequence[int], multiple: int) -> list[int]:
    """How many rows an index gets along each dimension; none along a batch, and along its coordinates."""
    kept = {*batching, index.ndim - 1}
    return [0 if d in kept else -size % multiple for d, size in enumerate(index.shape)]


def _unordered(params: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The parameters for an index that is neither sorted nor unique with further rows."""
    return {**params, "unique_indices": False, "indices_are_sorted": False} if any(rows) else {**params}


def _in_bounds(index: Any, operand: Any, updates: Any, params: Mapping[str, Any]) -> Any:
    """The index of a scatter, clamped by its mode."""
    if lax.GatherScatterMode.from_any(params["mode"]) != lax.GatherScatterMode.CLIP:
        return index
    numbers = params["dimension_numbers"]
    windows = iter(updates.shape[d] for d in numbers.update_window_dims)
    absent = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    last = [n - (1 if d in absent else next(windows)) for d, n in enumerate(operand.shape)]
    index = _wide(index)
    return jnp.clip(index, 0, np.array([last[d] for d in numbers.scatter_dims_to_operand_dims], index.dtype))


def _wide(index: Any) -> Any:
    """An index of 32 bits or more: one of few bits may not hold the number of all rows."""
    return index.astype(np.promote_types(index.dtype, np.int32))


def _outside(index: Any, rows: Sequence[int], operand: Any) -> Any:
    """An index with further rows, each another place out of bounds."""
    padded = _with_rows(_wide(index), rows, 0)
    *batch, _ = padded.shape
    number = np.arange(math.prod(batch), dtype=padded.dtype).reshape(*batch, 1) + max(operand.shape)
    is_further = np.pad(np.zeros(index.shape, bool), [(0, count) for count in rows], constant_values=True)
    return jnp.where(is_further, number, padded)


def _with_rows(x: Any, rows: Sequence[int], value: Any) -> Any:
    return lax.pad(x, jnp.asarray(value, x.dtype), [(0, count, 0) for count in rows]) if any(rows) else x


def _neutral(name: str, dtype: Any) -> Any:
    if name in ("zero", "one"):
        return np.array(name == "one", dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.array(name == "max")
    if jnp.issubdtype(dtype, jnp.integer):
        return getattr(jnp.iinfo(dtype), name)
    return np.array(np.inf if name == "max" else -np.inf, dtype)

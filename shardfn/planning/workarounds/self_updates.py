"""Updates at a place that are computed from the array they go into.

XLA's CPU backend (JAX 0.10 to 0.12; openxla/xla 49176) may compute such an update in one fusion, in place: it reads what it has
written, on one device too. An update that is written as a select of a shifted array is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.ir.model import Graph, Op
from shardfn.ir.op_traits import CHEAP, EXPENSIVE, SLICES, VIEWS
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.planning.workarounds.uneven_movement import moved_dims


def reads_its_array(op: Op, partitioned: PartitionedProgram) -> bool:
    """Whether a dynamic update slice of several rows, along unsharded dimensions, may be computed in one fusion with a read of
    its operand."""
    if op.name != "dynamic_update_slice" or op.rule is None or not (moved := moved_dims(op, partitioned)):
        return False
    if any(partitioned.shards(v)[d] > 1 for v in (*op.inputs[:2], op.outputs[0]) for d in moved[0]):
        return False
    if all(partitioned.graph.values[op.inputs[1]].shape[d] == 1 for d in moved[0]):
        return False
    size = partitioned.graph.values[op.inputs[0]].elements
    array, update = (_fused(partitioned.graph, v) for v in op.inputs[:2])
    return any(partitioned.graph.values[v].elements == size for v in array & update)


def _fused(graph: Graph, value: int) -> set[int]:
    """A value and those that one fusion may compute it from."""
    found, left = set[int](), [value]
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            maker = graph.maker(value)
            if maker is not None and maker.name in _IN_FUSIONS:
                left += maker.inputs
    return found


def selected(inputs: Sequence[Any]) -> Any:
    """The result of a dynamic update slice, whose place is within the array, as a select of the shifted update.

    >>> selected([jnp.arange(5), jnp.array([7, 8]), 2])
    Array([0, 1, 7, 8, 4], dtype=int32)
    """
    array, update, *starts = inputs
    spare = [n - rows for n, rows in zip(array.shape, update.shape, strict=True)]
    around = jnp.pad(update, [(rows, rows) for rows in spare])
    shifted = lax.dynamic_slice(around, [rows - start for rows, start in zip(spare, starts, strict=True)], array.shape)
    is_inside = jnp.ones((), bool)
    for dim, (rows, start) in enumerate(zip(update.shape, starts, strict=True)):
        if spare[dim]:
            row = lax.broadcasted_iota(np.int32, array.shape, dim) - lax.convert_element_type(start, np.int32)
            is_inside &= (row >= 0) & (row < rows)
    return jnp.where(is_inside, shifted, array)


_IN_FUSIONS = CHEAP | EXPENSIVE | VIEWS | SLICES
"""Ops that XLA may compute in one fusion with what reads them."""

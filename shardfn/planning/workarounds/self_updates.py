"""Updates at a place that are computed from the array they go into.

XLA's CPU backend (JAX 0.10 to 0.12; openxla/xla 49176) may compute such an update in one fusion, in place: it reads what it has
written, on one device too. At a constant place it does so where the array is reshaped before or after: it then does not see
that both are one. An update that is written as a select of a shifted array is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.ir.model import Graph, Op
from shardfn.ir.op_traits import CHEAP, EXPENSIVE, SLICES, VIEWS
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.planning.workarounds.uneven_movement import moved_dims, writes_one_window


def reads_its_array(op: Op, partitioned: PartitionedProgram) -> bool:
    """Whether an update of several rows at one place, along unsharded dimensions, may be computed in one fusion with a read of
    its operand."""
    place = _UPDATES.get(op.name)
    if place is None or op.rule is None or not (moved := moved_dims(op, partitioned)):
        return False
    graph, (in_array, in_update, _) = partitioned.graph, moved
    array, update = op.inputs[0], op.inputs[place]
    if op.name == "scatter" and not writes_one_window(op, graph):
        return False
    if any(partitioned.shards(v)[d] > 1 for v in (array, op.outputs[0]) for d in in_array):
        return False
    if any(partitioned.shards(update)[d] > 1 for d in in_update):
        return False
    if all(graph.values[update].shape[d] == 1 for d in in_update):
        return False
    before = _fused(graph, array)
    is_read = any(graph.values[v].elements == graph.values[array].elements for v in before & _fused(graph, update))
    return is_read and (op.name != "scatter" or _is_reshaped(graph, before, op.outputs[0]))


def _is_reshaped(graph: Graph, before: Iterable[int], result: int) -> bool:
    """Whether one of some values is a reshaped array, or the result is reshaped."""
    after, left = set[int](), {result}
    while left:
        after |= left
        left = {v for op in graph.ops if op.name in VIEWS and left.intersection(op.inputs) for v in op.outputs} - after
    makers = (graph.maker(v) for v in {*before, *after} - {result})
    return any(maker is not None and _reshapes(graph, maker) for maker in makers)


def _reshapes(graph: Graph, op: Op) -> bool:
    """Whether an op gives the elements of an array another shape."""
    if op.name not in ("reshape", "broadcast_in_dim"):
        return False
    own, made = (graph.values[v] for v in (op.inputs[0], op.outputs[0]))
    return own.elements == made.elements and own.shape != made.shape


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


def selected_scatter(eqn: Any, inputs: Sequence[Any]) -> Any:
    """The result of a scatter of one window, as a select of the shifted update."""
    array, index, update = inputs
    numbers, mode = eqn.params["dimension_numbers"], lax.GatherScatterMode.from_any(eqn.params["mode"])
    places = dict(zip(numbers.scatter_dims_to_operand_dims, index.reshape(-1), strict=True))
    windows = iter(update.shape[d] for d in numbers.update_window_dims)
    alone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}  # one window: a batch of one
    rows = [1 if d in alone else next(windows) for d in range(array.ndim)]
    update, last = update.reshape(rows), [n - own for n, own in zip(array.shape, rows, strict=True)]
    starts = [places.get(d, 0) for d in range(array.ndim)]
    clamped = [
        lax.convert_element_type(jnp.clip(start, 0, most), np.int32) for start, most in zip(starts, last, strict=True)
    ]
    is_kept = jnp.ones((), bool)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        for start, own in zip(starts, clamped, strict=True):
            is_kept &= start == own
    if (combine := COMBINED[eqn.primitive.name]) is not None:
        update = combine(lax.dynamic_slice(array, clamped, rows), update)
    return jnp.where(is_kept, selected([array, update, *clamped]), array)


def selected(inputs: Sequence[Any]) -> Any:
    """The result of a dynamic update slice, whose place is within the array, as a select of the shifted update.

    >>> selected([jnp.arange(5), jnp.array([7, 8]), 2])
    Array([0, 1, 7, 8, 4], dtype=int32)
    """
    array, update = inputs[:2]
    starts = [lax.convert_element_type(start, np.int32) for start in inputs[2:]]  # JAX mixes no types of them
    spare = [n - rows for n, rows in zip(array.shape, update.shape, strict=True)]
    around = jnp.pad(update, [(rows, rows) for rows in spare])
    shifted = lax.dynamic_slice(around, [rows - start for rows, start in zip(spare, starts, strict=True)], array.shape)
    is_inside = jnp.ones((), bool)
    for dim, (rows, start) in enumerate(zip(update.shape, starts, strict=True)):
        if spare[dim]:
            row = lax.broadcasted_iota(np.int32, array.shape, dim) - start
            is_inside &= (row >= 0) & (row < rows)
    return jnp.where(is_inside, shifted, array)


COMBINED: dict[str, Callable[[Any, Any], Any] | None] = {
    "scatter": None, "scatter-add": lax.add, "scatter-sub": lax.sub, "scatter-mul": lax.mul, "scatter-min": lax.min,
    "scatter-max": lax.max,
}  # fmt: skip
"""What each scatter does with an element and its update; None where it sets."""
_UPDATES = {"dynamic_update_slice": 1, "scatter": 2}
"""The operand that is the update."""
_IN_FUSIONS = CHEAP | EXPENSIVE | VIEWS | SLICES
"""Ops that XLA may compute in one fusion with what reads them."""

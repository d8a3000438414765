"""What a server holds and how an update changes it: arrays of an optax optimizer, or the rows of a table.

Of arrays, an update sums the gradients of its pushes and changes all rows. Of a table, it changes the touched rows and their
moments alone, or sets values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from shardfn.cluster.parameter_server.ledger import Push
from shardfn.cluster.parameter_server.partition import RowGradient, Rows
from shardfn.embedding.rowwise import RowOptimizer
from shardfn.embedding.store import ROWS, Step, updated
from shardfn.errors import CheckpointError, fail

PARAMS = "params"
COUNT = "count"
"""The array of a table's job with the number of its updates."""


RowStep = tuple[int, float] | None
"""Of an update of rows the number of updates before it and its learning rate; None where values are set."""


class Part(NamedTuple):
    """A message of a push to one server.

    Attributes:
      push: the push.
      number: which of its messages to this server it is.
      total: how many they are.
      rows: the gradient of some of the server's rows; rows in no message have zero gradient.
      row_step: of a table.
    """

    push: Push
    number: int
    total: int
    rows: tuple[Rows, ...]
    row_step: RowStep = None


class Slot(NamedTuple):
    """An array of a server's state: rows of the parameter `name` from `start` on, or a value that all servers share."""

    path: str
    name: str | None
    start: int
    values: np.ndarray


class Arrays:
    """Arrays that an optax optimizer updates, jitted.

    Raises:
      CheckpointError: the state is that of another optimizer.
    """

    def __init__(self, optimizer: Any, slots: Sequence[Slot], folder: Any):
        self._update = update_function(optimizer)
        self._params = {str(slot.name): jnp.asarray(slot.values) for slot in slots if slot.path == PARAMS}
        self._starts = {str(slot.name): slot.start for slot in slots if slot.path == PARAMS}
        by_path = {slot.path: slot.values for slot in slots if slot.path != PARAMS}
        template = jax.eval_shape(optimizer.init, self._params)
        _check_state(template, by_path, folder)
        self._state = tree_util.tree_map_with_path(lambda key, _: jnp.asarray(by_path[tree_util.keystr(key)]), template)
        self._host: dict[str, np.ndarray] = {}

    def read(self, name: str, at: Any) -> np.ndarray:
        """Rows of an array."""
        if name not in self._host:
            self._host[name] = np.asarray(self._params[name])
        return self._host[name][at]

    def apply(self, pushes: Sequence[Sequence[Part]]) -> None:
        """Sum the gradients, and update all rows."""
        gradients = self._sum([rows for push in pushes for part in push for rows in part.rows])
        self._params, self._state = self._update(self._params, self._state, gradients)
        self._host = {}

    def slots(self) -> list[Slot]:
        """The arrays and the optimizer's state, as data."""
        slots = [Slot(PARAMS, name, self._starts[name], np.asarray(rows)) for name, rows in self._params.items()]
        for key, leaf in tree_util.tree_flatten_with_path(self._state)[0]:
            slots.append(_state_slot(key, np.asarray(leaf), self._params, self._starts))
        return slots

    def _sum(self, gradients: Sequence[Rows]) -> dict[str, np.ndarray]:
        total = {
            name: np.zeros(
                rows.shape, np.promote_types(rows.dtype, np.float32) if rows.dtype.itemsize < 4 else rows.dtype
            )
            for name, rows in self._params.items()
        }
        for rows in gradients:
            start, into = self._starts[rows.name], total[rows.name]
            if rows.ids is not None:
                into[rows.ids - start] += rows.values.astype(into.dtype)
            else:
                at = rows.start - start
                into[at : at + len(rows.values)] += rows.values.astype(into.dtype, copy=False)
        return {name: rows.astype(self._params[name].dtype, copy=False) for name, rows in total.items()}


class TableRows:
    """Rows of a table and their moments, which a row-wise optimizer updates with NumPy: as a table in host memory."""

    def __init__(self, optimizer: RowOptimizer, slots: Sequence[Slot]):
        self._optimizer = optimizer
        self._starts = {str(slot.name): slot.start for slot in slots}
        self._arrays = {str(slot.name): np.array(slot.values) for slot in slots}

    def read(self, name: str, at: Any) -> np.ndarray:
        """Rows of an array."""
        rows = self._arrays[name][at]
        return rows.copy() if isinstance(at, slice) else rows

    def apply(self, pushes: Sequence[Sequence[Part]]) -> None:
        """Set values, and update the rows that have a gradient."""
        parts = [part for push in pushes for part in push]
        for rows in (rows for part in parts if part.row_step is None for rows in part.rows):
            at = slice(0, len(rows.values)) if rows.ids is None else rows.ids - self._starts[rows.name]
            self._arrays[rows.name][at] = rows.values
        step = next((part.row_step for part in parts if part.row_step is not None), None)
        if step is None:
            return
        number, rate = step
        if COUNT in self._arrays:
            self._arrays[COUNT][:] = number + 1
        sent = [[rows for part in push if part.row_step is not None for rows in part.rows] for push in pushes]
        by_push = [_joined(rows) for rows in sent if rows]
        if by_push:
            ids, gradients = by_push[0] if len(by_push) == 1 else _joined(by_push).merged()
            at = ids - self._starts[ROWS]
            fields = {name: rows[at] for name, rows in self._arrays.items() if name != COUNT}
            for name, rows in updated(Step(self._optimizer, number, rate), fields, gradients).items():
                self._arrays[name][at] = rows

    def slots(self) -> list[Slot]:
        """The arrays, as data; they change with the next update."""
        return [Slot(PARAMS, name, self._starts[name], rows) for name, rows in self._arrays.items()]


def server_state(optimizer: Any, slots: Sequence[Slot], folder: Any) -> Arrays | TableRows:
    """The state of a server from its slots.

    Args:
      optimizer: an optax optimizer, or one of `embedding` for the rows of a table.
      slots: the slots.
      folder: where they were saved, for messages.

    Raises:
      CheckpointError: they are those of another optimizer.
    """
    return TableRows(optimizer, slots) if isinstance(optimizer, RowOptimizer) else Arrays(optimizer, slots, folder)


def first_slots(optimizer: Any, own: Mapping[str, tuple[int, int]], params: Mapping[str, Any]) -> tuple[Slot, ...]:
    """The slots of a server before the first update.

    Args:
      optimizer: as of `server_state`.
      own: first row and the row after the last of each of its arrays.
      params: all rows of each array; only slices of them are read.
    """
    mine = {name: params[name][start:stop] for name, (start, stop) in own.items()}
    starts = {name: start for name, (start, _) in own.items()}
    slots = [Slot(PARAMS, name, starts[name], rows) for name, rows in mine.items()]
    if not isinstance(optimizer, RowOptimizer):
        state = optimizer.init({name: jnp.asarray(rows) for name, rows in mine.items()})
        for key, leaf in tree_util.tree_flatten_with_path(state)[0]:
            slots.append(_state_slot(key, np.asarray(leaf), mine, starts))
    return tuple(slots)


def _joined(rows: Sequence[Any]) -> RowGradient:
    """The gradients of some rows, one after the other."""
    return RowGradient(np.concatenate([one.ids for one in rows]), np.concatenate([one.values for one in rows]))


@functools.lru_cache(maxsize=16)
def update_function(optimizer: Any) -> Callable[..., Any]:
    """The jitted update of an optimizer: parameters, state and gradients to parameters and state."""

    def update(params: Any, state: Any, gradients: Any) -> Any:
        changes, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, change: p + change.astype(p.dtype), params, changes), state

    return jax.jit(update)


def _state_slot(key: Any, leaf: np.ndarray, params: Mapping[str, Any], starts: Mapping[str, int]) -> Slot:
    name = str(getattr(key[-1], "key", "")) if key else ""
    is_of_rows = name in params and leaf.shape == params[name].shape
    path = tree_util.keystr(key)
    return Slot(path, name, starts[name], leaf) if is_of_rows else Slot(path, None, 0, leaf)


def _check_state(template: Any, found: Mapping[str, np.ndarray], folder: Any) -> None:
    wanted = {tree_util.keystr(key): leaf.shape for key, leaf in tree_util.tree_flatten_with_path(template)[0]}
    if wanted != {path: values.shape for path, values in found.items()}:
        fail(CheckpointError, "the folder holds the state of another optimizer", where=str(folder),
             why=f"it has {', '.join(found) or 'no state'}; this optimizer has {', '.join(wanted) or 'no state'}",
             fix="give the optimizer that the folder was made with")  # fmt: skip

"""Tables among the parameters of a training step, and where the ids of each are in the batch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax import tree_util

from shardfn.errors import Problem, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.paths import join, tidy


class Prepared(Protocol):
    """The different ids of a batch, and the positions of all ids among them, int32."""

    ids: np.ndarray
    positions: np.ndarray


@runtime_checkable
class RowTable(Protocol):
    """What a step asks of a table: `embedding.Table` is one. A pytree without leaves."""

    shape: tuple[int, int]
    dtype: Any

    def capacity(self, ids: int) -> int:
        """The rows that a batch of so many ids is given."""
        ...

    def prepare(self, ids: Any, is_ahead: bool = False) -> Prepared:
        """Find the different ids of a batch; `is_ahead` reads their rows already."""
        ...

    def rows_of(self, prepared: Any, capacity: int) -> jax.Array:
        """The rows of these ids, [capacity, width], with zeros after the last one."""
        ...

    def apply(self, ids: np.ndarray, gradients: Any) -> None:
        """Update the rows of some ids by their gradients, [capacity, width]."""
        ...


Place = tuple[int, tuple[int, ...] | None]
"""Where ids are: an argument of the batch, and the columns of its last dimension; None for all of it."""


def tables_in(params: Any) -> dict[str, RowTable]:
    """The tables among some parameters, by path.

    >>> tables_in({"w": np.ones(3), "layers": [np.ones(2)]})
    {}
    """
    keyed = tree_util.tree_flatten_with_path(params, is_leaf=_is_table)[0]
    return {tidy(join("", key)): leaf for key, leaf in keyed if _is_table(leaf)}


def refuse_tables(params: Any) -> None:
    """Refuse tables in a step without `ids`.

    Raises:
      StrategyError: for each table.
    """
    raise_problems(map(without_ids, tables_in(params)))


def place_of(path: str, at: Any) -> Place:
    """The place of a table's ids, as the user gave it.

    Raises:
      StrategyTypeError: it is no number of an argument, and no pair of one and columns.

    >>> place_of("items", 0), place_of("items", (0, 2)), place_of("items", (0, (2, 3)))
    ((0, None), (0, (2,)), (0, (2, 3)))
    """
    pair: Any = at if isinstance(at, tuple | list) and len(at) == 2 else (at, None)
    try:
        columns = pair[1] if pair[1] is None or isinstance(pair[1], tuple | list) else (pair[1],)
        argument, columns = operator.index(pair[0]), None if columns is None else tuple(map(operator.index, columns))
    except TypeError:
        argument, columns = -1, None
    if argument < 0 or (columns is not None and (not columns or min(columns) < 0 or len({*columns}) < len(columns))):
        fail(StrategyTypeError, f"the place of the ids of `{path}` is no number of an argument",
             where=f"ids[{path!r}] = {at!r:.60}",
             why="it is an argument of the batch, or an argument and different columns, all counted from 0",
             fix=f"ids={{{path!r}: 0}}, or (0, 1) for column 1 of argument 0")  # fmt: skip
    return argument, columns


def ids_problems(ids: Any) -> Iterator[Problem]:
    """What is wrong with the option `ids`, apart from the places."""
    if not isinstance(ids, Mapping) or not all(isinstance(path, str) for path in ids):
        yield Problem(f"`ids` is {a(ids)}, not a dict of places by path", f"ids = {ids!r:.60}",
                      "it says where in the batch the ids of each table are", 'ids={"items": 0}', is_type=True)  # fmt: skip


def replaced(tree: Any, values: Mapping[str, Any]) -> Any:
    """The tree with other leaves at some paths."""
    return tree_util.tree_map_with_path(lambda key, x: values.get(tidy(join("", key)), x), tree, is_leaf=_is_table)


def _is_table(node: Any) -> bool:
    return isinstance(node, RowTable)


def without_ids(path: str) -> Problem:
    """The problem that a step has no `ids` of a table."""
    return Problem(f"the step does not know the ids of the table `{path}`", f"params, at {path}",
                   "it fetches the rows of a batch before it runs",
                   f"say where they are in the batch: train.step(..., ids={{{path!r}: 0}})")  # fmt: skip

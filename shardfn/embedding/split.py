"""Uneven splits of a table's rows, and the padded array that holds them.

JAX shards a dimension evenly. A table whose parts have different numbers of rows is therefore kept as an array
[parts, longest, ...]: part i has its rows first, then zeros. All functions here are pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.paths import array_paths, met, unmet
from shardfn.frontend.value_checks import integer, option_problems
from shardfn.runtime.processes import on_host
from shardfn.units import bytes_text


@dataclasses.dataclass(frozen=True)
class UnevenRows:
    """A split of a table's rows into consecutive parts of any sizes.

    Args:
      rows: the number of rows of each part.
      offsets: the id of the first row of each part. By default ids count the rows of the table. `(0, 0, ...)` lets the
        ids of each part start at 0, as those of a field usually do.

    Raises:
      StrategyError, StrategyTypeError: sizes that are no ints from 1, or not one offset for each part.

    >>> split = UnevenRows((10, 20, 30, 4))
    >>> split.total, split.longest, split.offsets
    (64, 30, (0, 10, 30, 60))
    >>> split.pack(np.ones((64, 16))).shape
    (4, 30, 16)
    """

    rows: tuple[int, ...]
    offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rows, offsets = _ints(self.rows, "rows", 1), _ints(self.offsets, "offsets", None)
        if not rows:
            fail(StrategyError, "a split has no parts", where=f"rows = {self.rows!r}", fix="give each part's rows")
        if offsets and len(offsets) != len(rows):
            fail(StrategyError, f"{len(offsets)} offsets for {len(rows)} parts", where=f"offsets = {self.offsets!r:.80}",
                 why="an offset is the id of a part's first row", fix=f"give {len(rows)} offsets, or none")  # fmt: skip
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "offsets", offsets or _starts(rows))

    @classmethod
    def even(cls, total: int, parts: int) -> UnevenRows:
        """The split into parts of equal size, of which the last ones may be a row shorter.

        Args:
          total: rows of the table, at least `parts`.
          parts: the number of parts.

        >>> UnevenRows.even(10, 4).rows
        (3, 3, 2, 2)
        """
        return cls(tuple(total // parts + (i < total % parts) for i in range(parts)))

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.rows)

    @property
    def total(self) -> int:
        """Rows of the table."""
        return sum(self.rows)

    @property
    def longest(self) -> int:
        """Rows of the longest part, and of each part of the padded array."""
        return max(self.rows)

    @property
    def starts(self) -> tuple[int, ...]:
        """The table's row that each part starts with."""
        return _starts(self.rows)

    @property
    def padding(self) -> int:
        """Rows of zeros in the padded array."""
        return self.parts * self.longest - self.total

    def pack(self, table: Any) -> Any:
        """The padded array [parts, longest, ...] of a table [total, ...]: a NumPy array of one, else a JAX array.

        Args:
          table: the table, or anything with a row for each of its rows, such as an optimizer's moments.

        Raises:
          StrategyError: another number of rows.

        >>> UnevenRows((1, 2)).pack(np.array([1, 2, 3])).tolist()
        [[1, 0], [2, 3]]
        """
        self._check(table, (self.total,), "a table")
        np_ = np if isinstance(table, np.ndarray) else jnp
        at = np.asarray(self.starts)[:, None] + np.arange(self.longest)
        is_row = np.arange(self.longest) < np.asarray(self.rows)[:, None]
        packed = np_.asarray(table)[np.where(is_row, at, 0)]
        return np_.where(is_row.reshape(is_row.shape + (1,) * (packed.ndim - 2)), packed, np_.zeros((), packed.dtype))

    def unpack(self, packed: Any) -> Any:
        """The inverse of `pack`.

        Args:
          packed: the padded array [parts, longest, ...].

        Returns:
          The table [total, ...], without padding.

        Raises:
          StrategyError: an array of another shape.

        >>> UnevenRows((1, 2)).unpack(np.array([[1, 0], [2, 3]])).tolist()
        [1, 2, 3]
        """
        self._check(packed, (self.parts, self.longest), "a padded table")
        at = np.concatenate([np.arange(n) + i * self.longest for i, n in enumerate(self.rows)])
        return packed.reshape((self.parts * self.longest, *packed.shape[2:]))[at]

    def relayout(self, packed: Any, to: UnevenRows) -> Any:
        """A padded array of this split as one of another split of the same table.

        Args:
          packed: the padded array of this split.
          to: the other split.

        Raises:
          StrategyError: a split of another number of rows.

        >>> UnevenRows((1, 3)).relayout(np.array([[1, 0, 0], [2, 3, 4]]), UnevenRows.even(4, 2)).tolist()
        [[1, 2], [3, 4]]
        """
        return to.pack(self.unpack(packed))

    def memory_text(self, width: int, itemsize: int = 4) -> str:
        """What the padding costs in memory, as text.

        Args:
          width: elements of a row.
          itemsize: bytes of an element.

        Raises:
          StrategyError, StrategyTypeError: no ints from 0.

        >>> print(UnevenRows((10, 20, 30, 4)).memory_text(16))
        7.5 KiB for 4 parts of 30 rows, 3.5 KiB (47%) of them padding
        """
        raise_problems(
            [*option_problems(integer(0), "width", width), *option_problems(integer(0), "itemsize", itemsize)]
        )
        row = width * itemsize
        total, share = self.parts * self.longest, self.padding / (self.parts * self.longest)
        padding = f", {bytes_text(self.padding * row)} ({share:.0%}) of them padding" if self.padding else ""
        return f"{bytes_text(total * row)} for {self.parts} parts of {self.longest} rows{padding}"

    def _check(self, array: Any, shape: tuple[int, ...], what: str) -> None:
        if not hasattr(array, "shape"):
            fail(StrategyTypeError, f"{what} is an array, not {a(array)}", where=f"UnevenRows({self.rows!r:.80})",
                 fix="numpy.asarray(table)")  # fmt: skip
        if tuple(array.shape[: len(shape)]) != shape:
            fail(StrategyError, f"{what} of this split starts with the dimensions {list(shape)}, not {list(array.shape)}",
                 where=f"UnevenRows({self.rows!r:.80})", why=f"its {self.parts} parts have {self.total} rows, the longest "
                 f"{self.longest}", fix="give the table itself to `pack`, and its result to `lookup` and `unpack`")  # fmt: skip


def pack(tree: Any, splits: Mapping[str, UnevenRows]) -> Any:
    """A tree with the padded arrays of the tables in it, and of the optimizer's moments of these tables.

    Args:
      tree: a pytree of arrays, such as a `TrainState` read from a checkpoint.
      splits: the split of each table, by its path or a glob. An array counts as a moment if its path ends in the
        table's path and it has as many rows.

    Returns:
      The pytree. Tables become NumPy or JAX arrays as `UnevenRows.pack` says.

    Raises:
      StrategyError: a path that matches no table.
      StrategyTypeError: splits that are no dict of `UnevenRows`.

    >>> pack({"items": np.ones((3, 2))}, {"items": UnevenRows((1, 2))})["items"].shape
    (2, 2, 2)
    """
    return _mapped(tree, splits, lambda split: (split.total,), lambda split, leaf: split.pack(leaf))


def unpack(tree: Any, splits: Mapping[str, UnevenRows]) -> Any:
    """The inverse of `pack`: a tree with the real rows, as a checkpoint should hold them.

    Tables of JAX arrays become NumPy arrays in host memory: their number of rows need not divide by the devices. Shapes
    stay shapes, and traced arrays traced ones. In a job of several processes every process must call it.

    Args:
      tree: a pytree of arrays or shapes.
      splits: as of `pack`.

    Returns:
      The pytree.

    Raises:
      StrategyError: a path that matches no padded table.
      StrategyTypeError: splits that are no dict of `UnevenRows`.

    >>> unpack({"items": np.ones((2, 2, 2))}, {"items": UnevenRows((1, 2))})["items"].shape
    (3, 2)
    """

    def real_rows(split: UnevenRows, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((split.total, *leaf.shape[2:]), leaf.dtype)
        return split.unpack(on_host(leaf))

    return _mapped(tree, splits, lambda split: (split.parts, split.longest), real_rows)


def _mapped(tree: Any, splits: Mapping[str, UnevenRows], shape_of: Any, change: Any) -> Any:
    if not isinstance(splits, Mapping) or not all(isinstance(split, UnevenRows) for split in splits.values()):
        fail(StrategyTypeError, f"`splits` is {a(splits)} and must be a dict of `UnevenRows`", where=f"splits = {splits!r:.60}",
             why="it says the split of each table", fix='splits={"items": UnevenRows((10, 20))}, by path')  # fmt: skip
    leaves, treedef = tree_util.tree_flatten(tree)
    paths = array_paths("", tree)
    raise_problems(unmet("splits", [g for g in splits if not _found(g, paths)], paths))
    for glob, split in splits.items():
        shape = shape_of(split)
        hits = [i for i in _found(glob, paths) if np.shape(leaves[i])[: len(shape)] == shape]
        if not hits:
            fail(StrategyError, f"no array at `{glob}` starts with the dimensions {list(shape)}",
                 where=f"splits[{glob!r}] = {split!r:.80}", why=f"`{paths[_found(glob, paths)[0]]}` has the shape "
                 f"{list(np.shape(leaves[_found(glob, paths)[0]]))}", fix="give the split that the table has")  # fmt: skip
        for i in hits:
            leaves[i] = change(split, leaves[i])
    return treedef.unflatten(leaves)


def _found(glob: str, paths: Sequence[str]) -> list[int]:
    """The arrays at a path or a glob, and those whose paths end so: an optimizer's moments."""
    return sorted({*met(glob, paths)[0], *met(f"*/{glob}", paths)[0]})


def _starts(rows: Sequence[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(rows[:-1]))


def _ints(given: Any, name: str, least: int | None) -> tuple[int, ...]:
    raise_problems(_wrong_ints(given, name, least))
    return tuple(map(operator.index, given))


def _wrong_ints(given: Any, name: str, least: int | None) -> Iterator[Problem]:
    where = f"{name} = {given!r:.80}"
    if not isinstance(given, Iterable) or isinstance(given, str):
        fail(StrategyTypeError, f"`{name}` must be a tuple of ints, but it is {a(given)}", where=where,
             fix=f"{name}=(10, 20, 30, 4)")  # fmt: skip
    for value in given:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            yield Problem(
                f"`{name}` must hold ints, but {value!r:.40} is {a(value)}", where, fix="write ints", is_type=True
            )
        elif least is not None and value < least:
            yield Problem(f"a part has {value} rows", where, "every part has at least one row", "write ints from 1")

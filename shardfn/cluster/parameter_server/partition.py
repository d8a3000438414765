"""Which server holds which rows of which array, and how gradients are split and parameters put together.

The arrays are in the order of their names, one after the other, and each server holds an equal share of the bytes, in complete
rows. So a server holds at most one range of rows of an array, and small arrays stay together.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.core import Tracer

from shardfn.errors import Problem, nearest, raise_problems
from shardfn.frontend.paths import array_paths

CHUNK_BYTES = 8 << 20
"""Bytes of rows that travel in one message, if the caller gives no other number."""

COMPRESSED = "bfloat16"


class Rows(NamedTuple):
    """Some rows of an array: those from `start` on, or those of `ids`.

    Attributes:
      name: the array's name.
      start: the first row, where `ids` is None.
      ids: the rows, each once and ascending, or None.
      values: [rows, ...].
    """

    name: str
    start: int
    ids: np.ndarray | None
    values: np.ndarray

    def between(self, start: int, stop: int) -> Rows | None:
        """Those of a range of rows; None if there are none.

        >>> Rows("w", 4, None, np.arange(3)).between(5, 9), Rows("w", 4, None, np.arange(3)).between(0, 4)
        (Rows(name='w', start=5, ids=None, values=array([1, 2])), None)
        """
        if self.ids is None:
            low, high = max(start - self.start, 0), min(stop - self.start, len(self.values))
            return Rows(self.name, self.start + low, None, self.values[low:high]) if low < high else None
        low, high = np.searchsorted(self.ids, [start, stop])
        return Rows(self.name, 0, self.ids[low:high], self.values[low:high]) if low < high else None


class RowGradient(NamedTuple):
    """The gradient of some rows of an array. The other rows have zero gradient.

    Attributes:
      ids: int[n], rows of the array. Gradients of equal ids are summed.
      values: [n, ...], the gradient of each row.

    >>> RowGradient(np.array([3, 1, 3]), np.ones((3, 1))).merged()
    RowGradient(ids=array([1, 3]), values=array([[1.],
           [2.]]))
    """

    ids: Any
    values: Any

    def merged(self) -> RowGradient:
        """The same gradient with each id once, ascending."""
        ids, at = np.unique(np.asarray(self.ids), return_inverse=True)
        values = np.asarray(self.values)
        if len(ids) == len(at) and (np.diff(at) > 0).all():
            return RowGradient(ids, values)
        total = np.zeros((len(ids), *values.shape[1:]), np.promote_types(values.dtype, np.float32))
        np.add.at(total, at.reshape(-1), values)
        return RowGradient(ids, total)


class Request(NamedTuple):
    """Rows to read: those from `start` to `stop`, or those of `ids`."""

    name: str
    start: int
    stop: int
    ids: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """An array of the parameters.

    Attributes:
      name: its name, which is its path.
      shape: its shape.
      dtype: its dtype's name.
      colocated_with: an array before it with as many rows, each of which is at the same server as this array's; or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    colocated_with: str | None = None

    @property
    def rows(self) -> int:
        """Elements of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.row_shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Partition:
    """The rows of each server.

    >>> partition = Partition((ArraySpec("b", (4,), "float32"), ArraySpec("w", (7, 4), "float32")), 2)
    >>> partition.ranges
    ({'b': (0, 4), 'w': (0, 3)}, {'w': (3, 7)})
    >>> moments = ArraySpec("mean", (7, 4), "float32", colocated_with="w")
    >>> Partition((ArraySpec("w", (7, 4), "float32"), moments), 2).ranges
    ({'w': (0, 4), 'mean': (0, 4)}, {'w': (4, 7), 'mean': (4, 7)})
    """

    arrays: tuple[ArraySpec, ...]
    servers: int

    @functools.cached_property
    def ranges(self) -> tuple[dict[str, tuple[int, int]], ...]:
        """For each server the names of its arrays, with first row and the row after the last."""
        row_bytes_of = collections.Counter[str]()
        for spec in self.arrays:
            row_bytes_of[spec.name if spec.colocated_with is None else spec.colocated_with] += spec.row_bytes
        total = sum(spec.rows * row_bytes_of[spec.name] for spec in self.arrays)
        found: list[dict[str, tuple[int, int]]] = [{} for _ in range(self.servers)]
        offset = 0
        for spec in self.arrays:
            row_bytes = row_bytes_of[spec.name]
            bounds = [
                min(max(round((total * k / self.servers - offset) / max(row_bytes, 1)), 0), spec.rows)
                for k in range(self.servers)
            ] + [spec.rows]
            for own, start, stop in zip(found, bounds, bounds[1:], strict=False):
                if spec.colocated_with in own:
                    own[spec.name] = own[spec.colocated_with]
                elif start < stop and spec.colocated_with is None:
                    own[spec.name] = (start, stop)
            offset += spec.rows * row_bytes
        return tuple(found)

    @functools.cached_property
    def by_name(self) -> dict[str, ArraySpec]:
        """The arrays by name."""
        return {spec.name: spec for spec in self.arrays}

    def owners(self, name: str) -> Iterator[tuple[int, int, int]]:
        """Each server that holds rows of an array, with the first row and the row after the last."""
        for server, own in enumerate(self.ranges):
            if name in own:
                yield (server, *own[name])

    def place(self, rows: Rows) -> Iterator[tuple[int, Rows]]:
        """The part of some rows that each server holds, with the server."""
        for server, start, stop in self.owners(rows.name):
            if (own := rows.between(start, stop)) is not None:
                yield server, own


def specs_of(params: Any) -> tuple[ArraySpec, ...]:
    """The arrays of a pytree.

    Raises:
      StrategyError: a leaf is no array of numbers, has values that JAX's dtype for it has not, or two have one path; all
        problems together.

    >>> specs_of({"w": np.zeros((2, 3), "float32")})
    (ArraySpec(name='w', shape=(2, 3), dtype='float32', colocated_with=None),)
    """
    leaves, names = tree_util.tree_leaves(params), array_paths("", params)
    problems = [Problem(f"`{name}` is a {type(leaf).__name__} and no array of numbers", where="create(params)",
                        why="servers hold arrays of numbers", fix="leave it out, such as by equinox.filter")
                for name, leaf in zip(names, leaves, strict=True) if not _is_number(leaf)]  # fmt: skip
    problems += [Problem(f"two arrays are `{name}`", where="create(params)", why="servers tell them apart by their paths",
                         fix="rename one") for name, count in collections.Counter(names).items() if count > 1]  # fmt: skip
    if not names:
        problems.append(Problem("there are no parameters", where="create(params)", why="servers hold arrays of numbers",
                                fix="give a pytree with arrays"))  # fmt: skip
    raise_problems(problems)
    specs = tuple(ArraySpec(name, tuple(np.shape(leaf)), jnp.result_type(leaf).name)
                  for name, leaf in zip(names, leaves, strict=True))  # fmt: skip
    raise_problems(Problem(f"`{spec.name}` has values that {spec.dtype} has not", where="create(params)",
                           why=f"JAX makes {np.asarray(leaf).dtype} {spec.dtype} while jax_enable_x64 is off",
                           fix="give values that fit, or set jax_enable_x64 in all processes")
                   for spec, leaf in zip(specs, leaves, strict=True) if not _holds(spec.dtype, np.asarray(leaf)))  # fmt: skip
    return specs


def _holds(dtype: Any, values: np.ndarray) -> bool:
    """Whether a dtype has these values: all integers, and of other numbers the range."""
    if values.dtype == jnp.dtype(dtype):
        return True
    if values.dtype.kind in "iu":
        return bool((values.astype(dtype).astype(values.dtype) == values).all())
    return bool((np.isfinite(_as_held(values, dtype)) == np.isfinite(values)).all())


def _is_number(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def as_rows(specs: Sequence[ArraySpec], tree: Any, where: str) -> list[Rows]:
    """The arrays of a pytree, or the arrays and `RowGradient`s of it, as rows.

    Args:
      specs: the arrays that there are.
      tree: a pytree with the structure of the parameters, or with some of its arrays by name.
      where: the call, for messages.

    Raises:
      StrategyError: unknown names, shapes that do not fit, or values that are not finite; all problems together.
    """

    def is_leaf(node: Any) -> bool:
        return isinstance(node, RowGradient)

    if tree is None:
        raise_problems([Problem("the gradients are None", where=where, why="this may be a function without a return",
                                fix="give a pytree of gradients; {} where all are zero")])  # fmt: skip
    known = {spec.name: spec for spec in specs}
    leaves = tree_util.tree_leaves(tree, is_leaf=is_leaf)
    names = array_paths(
        "", tree_util.tree_unflatten(tree_util.tree_structure(tree, is_leaf=is_leaf), [0] * len(leaves))
    )
    found, problems = [], []
    for name, leaf in zip(names, leaves, strict=True):
        if name not in known:
            what = f"there is no array `{name}`" if name else "the gradients are one array without a name"
            problems.append(Problem(what, where=where, why="the servers do not hold it",
                                    fix=nearest(name, known)))  # fmt: skip
        elif (fault := _fault(known[name], leaf)) is not None:
            problems.append(dataclasses.replace(fault, where=where))
        elif isinstance(leaf, RowGradient):
            ids, values = leaf.merged()
            found.append(Rows(name, 0, ids, values))
        elif (values := np.asarray(leaf)).dtype != jax.dtypes.float0:
            found.append(Rows(name, 0, None, values.reshape((known[name].rows, *known[name].row_shape))))
    raise_problems(problems)
    return found


def _fault(spec: ArraySpec, leaf: Any) -> Problem | None:
    if isinstance(leaf, Tracer) or isinstance(getattr(leaf, "values", None), Tracer):
        return Problem(f"the gradient of `{spec.name}` is traced", why="inside jit and grad there are no values to send",
                       fix="push what a jitted function returns")  # fmt: skip
    if isinstance(leaf, RowGradient):
        ids, shape = np.asarray(leaf.ids), np.shape(leaf.values)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or shape != (len(ids), *spec.row_shape):
            return Problem(f"the row gradient of `{spec.name}` does not fit",
                           fix=f"give ids int[n] and values [{', '.join(['n', *map(str, spec.row_shape)])}]",
                           why=f"its ids are {ids.dtype}{list(ids.shape)} and its values {list(shape)}")  # fmt: skip
        if len(ids) and not 0 <= ids.min() <= ids.max() < spec.rows:
            return Problem(f"the row gradient of `{spec.name}` has ids outside the array",
                           why=f"they are from {ids.min()} to {ids.max()}", fix=f"give 0 to {spec.rows - 1}")  # fmt: skip
    elif np.shape(leaf) != spec.shape:
        return Problem(
            f"`{spec.name}` has another shape", why=f"it is {list(np.shape(leaf))}", fix=f"give {list(spec.shape)}"
        )
    elif getattr(leaf, "dtype", None) == jax.dtypes.float0:  # JAX's gradient of an array of ints: none
        return None
    values = np.asarray(leaf.values if isinstance(leaf, RowGradient) else leaf)
    if not _sums(values.dtype, spec.dtype):
        return Problem(f"the gradient of `{spec.name}` cannot be added to it",
                       why=f"it is {values.dtype}, and the array {spec.dtype}",
                       fix="give real numbers")  # fmt: skip
    if bad := values.size - np.count_nonzero(np.isfinite(_as_held(values, spec.dtype))):
        return Problem(f"the gradient of `{spec.name}` is not finite",
                       why=f"{bad} of {values.size} values are NaN or infinite as {spec.dtype}, and would stay in the parameters",
                       fix="push zeros for this batch, or numpy.nan_to_num of the gradient")  # fmt: skip
    return None


def _as_held(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values in the dtype in which a server adds them to an array."""
    if not jnp.issubdtype(dtype, np.inexact):
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype, copy=False)


def _sums(dtype: Any, into: Any) -> bool:
    """Whether gradients of a dtype can be added to an array: a log that holds others could not be applied any more."""
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    return is_number and (jnp.issubdtype(into, np.complexfloating) or not jnp.issubdtype(dtype, np.complexfloating))


def split(partition: Partition, rows: Iterable[Rows], chunk_bytes: int, compress: bool) -> list[list[tuple[Rows, ...]]]:
    """The messages that bring rows to their servers.

    Args:
      partition: the servers' rows.
      rows: what to send.
      chunk_bytes: the most bytes of a message, unless one row has more.
      compress: whether float32 travels as bfloat16.

    Returns:
      For each server its messages, at least one.

    >>> partition = Partition((ArraySpec("w", (6, 4), "float32"),), 2)
    >>> messages = split(partition, [Rows("w", 0, None, np.ones((6, 4), "float32"))], 32, False)
    >>> [[len(message) for message in own] for own in messages]
    [[1, 1], [1, 1]]
    """
    messages: list[list[tuple[Rows, ...]]] = [[] for _ in range(partition.servers)]
    open_: list[list[Rows]] = [[] for _ in range(partition.servers)]
    left = [chunk_bytes] * partition.servers
    for item in rows:
        for server, part in partition.place(item):
            values = compressed(part.values) if compress else part.values
            row_bytes = max(values[:1].nbytes, 1)
            at = 0
            while at < len(values):
                count = min(max(left[server] // row_bytes, 0 if open_[server] else 1), len(values) - at)
                if count:
                    ids = None if part.ids is None else part.ids[at : at + count]
                    open_[server].append(Rows(part.name, part.start + at, ids, values[at : at + count]))
                    left[server] -= count * row_bytes
                    at += count
                if at < len(values):
                    messages[server].append(tuple(open_[server]))
                    open_[server], left[server] = [], chunk_bytes
    for own, rest in zip(messages, open_, strict=True):
        if rest or not own:
            own.append(tuple(rest))
    return messages


def compressed(values: np.ndarray) -> np.ndarray:
    """Float32 values as bfloat16; others as they are."""
    return values.astype(COMPRESSED) if values.dtype == np.float32 else values


def requests(
    partition: Partition, names: Iterable[str], ids: Mapping[str, np.ndarray], chunk_bytes: int
) -> list[tuple[int, tuple[Request, ...]]]:
    """The messages that ask for arrays, each with its server.

    Args:
      partition: the servers' rows.
      names: the arrays.
      ids: the rows of some of them, ascending; all rows of the others.
      chunk_bytes: the most bytes of an answer, unless one row has more.
    """
    # An array without data stands for what will be sent, so that questions are split as the answers would be.
    wanted = []
    for name in names:
        spec = partition.by_name[name]
        count = len(ids[name]) if name in ids else spec.rows
        empty = np.broadcast_to(np.zeros((), spec.dtype), (count, *spec.row_shape))
        wanted.append(Rows(name, 0, ids.get(name), empty))
    return [
        (server, tuple(Request(r.name, r.start, r.start + len(r.values), r.ids) for r in message))
        for server, own in enumerate(split(partition, wanted, chunk_bytes, False))
        for message in own
        if message
    ]


def gather(
    partition: Partition, names: Iterable[str], ids: Mapping[str, np.ndarray], answers: Iterable[Rows]
) -> dict[str, np.ndarray]:
    """The arrays of answers, in the dtype of the parameters.

    Args:
      partition: the servers' rows.
      names: as `requests` takes them.
      ids: as `requests` takes them.
      answers: what the servers sent, in any order.
    """
    specs = {name: partition.by_name[name] for name in names}
    found = {
        name: np.empty((len(ids[name]) if name in ids else spec.rows, *spec.row_shape), spec.dtype)
        for name, spec in specs.items()
    }
    for rows in answers:
        at = rows.start if rows.ids is None else int(np.searchsorted(ids[rows.name], rows.ids[0]))
        found[rows.name][at : at + len(rows.values)] = rows.values
    return {name: array if specs[name].shape else array.reshape(()) for name, array in found.items()}

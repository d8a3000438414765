"""Where the rows of a table and their moments are: in host memory, in memory-mapped files, or on devices.

Every store has the same methods: `stage` (what can be read ahead, in another thread), `read`, `apply` (an optimizer on some
rows), `dump` and `load` (rows with their moments, for saves). Ids are sorted and different from each other.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardfn.embedding.rowwise import RowOptimizer
from shardfn.errors import CheckpointFileError, fail
from shardfn.units import bytes_text

Fields = dict[str, Any]
"""Rows under `ROWS` and moments by name, each [ids, width]."""

ROWS = "rows"
BLOCK = 4096
"""Rows that are initialised together, and with one counter of the random generator."""


class Step(NamedTuple):
    """One update: the optimizer, the number of updates before it, and its learning rate."""

    optimizer: RowOptimizer
    number: int
    rate: float


class Staged(NamedTuple):
    """Rows that were read ahead, and the version of the store at that time."""

    version: int
    ids: np.ndarray
    fields: Fields


class Prepared(NamedTuple):
    """The different ids of a batch, the position of each id among them, and what was read ahead."""

    ids: np.ndarray
    positions: np.ndarray
    staged: Staged | None


class Store(Protocol):
    """What a `Table` asks of a store."""

    def stage(self, ids: np.ndarray) -> Staged | None:
        """Read rows and moments ahead, in another thread."""
        ...

    def read(self, ids: np.ndarray, staged: Staged | None = None) -> Any:
        """The rows."""
        ...

    def apply(self, step: Step, ids: np.ndarray, gradients: Any) -> None:
        """Update rows and their moments."""
        ...

    def dump(self, ids: np.ndarray) -> Fields:
        """Rows and moments, on the host."""
        ...

    def load(self, ids: np.ndarray, fields: Fields) -> None:
        """Set rows and moments."""
        ...


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """What a `StoreMaker` is told of a table.

    Attributes:
      shape: rows and width.
      dtype: that of the rows; moments are float32.
      first: the first rows.
      optimizer: the optimizer of rows.
      kind: what the table is, as JSON values; two tables of one kind begin alike.
      cache_rows: rows that a cache on the device holds before them.
    """

    shape: tuple[int, int]
    dtype: Any
    first: Normal | np.ndarray
    optimizer: RowOptimizer
    kind: dict[str, Any]
    cache_rows: int = 0


@dataclasses.dataclass(frozen=True)
class Opened:
    """Rows somewhere else.

    Attributes:
      store: their store.
      count: the number of updates so far.
      is_new: whether they are the first rows of the table; False if somebody trained them before.
      is_shared: whether others update them too.
      set_count: sets the number of updates.
    """

    store: BackingStore
    count: int
    is_new: bool
    is_shared: bool
    set_count: Callable[[int], None]


class StoreMaker(Protocol):
    """Where a table's rows are kept, if that is none of the stores here: `shardfn.cluster.TableServers` is one."""

    def open(self, table: TableSpec) -> Opened:
        """Make the rows, or find them."""
        ...


@dataclasses.dataclass(frozen=True)
class Normal:
    """Rows drawn from a normal distribution. A row depends on its id and the seed alone, so it need not be saved.

    >>> rows = Normal(0.1, 0, 2)
    >>> bool((rows(np.array([5, 9000])) == [rows(np.array([5]))[0], rows(np.array([9000]))[0]]).all())
    True
    """

    scale: float
    seed: int
    width: int

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """The rows of some ids, float32."""
        rows = np.empty((len(ids), self.width), np.float32)
        blocks = ids // BLOCK
        starts = [0, *(np.flatnonzero(np.diff(blocks)) + 1)] if len(ids) else []
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            block = int(blocks[start])
            rows[start:stop] = self.block(block)[ids[start:stop] - block * BLOCK]
        return rows

    def block(self, number: int) -> np.ndarray:
        """The rows of a block."""
        random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, number]))
        return random.standard_normal((BLOCK, self.width), np.float32) * np.float32(self.scale)


class BackingStore(Store, Protocol):
    """What a cache on the device asks of the store of all rows."""

    def stage_all(self, ids: np.ndarray) -> Staged | None:
        """Read rows with their moments ahead, in another thread."""
        ...

    def fields(self, ids: np.ndarray, staged: Staged | None = None) -> Fields:
        """Rows and moments, or what was read ahead of them as far as it is still right."""
        ...


class Written:
    """When each row was written last, so that what was read ahead can be told from what was written since."""

    def __init__(self, rows: int):
        self.version = 0
        self._last = np.zeros(rows, np.uint32)

    def mark(self, ids: np.ndarray) -> None:
        """Rows were written. Call it after the write: a read that met only some of them has an earlier version."""
        self.version += 1
        self._last[ids] = self.version

    def up_to_date(
        self, ids: np.ndarray, staged: Staged, read: Callable[[np.ndarray, Iterable[str]], Fields]
    ) -> Fields:
        """The fields that were read ahead, of which those of other ids, and rows that were written since, are read now.

        Args:
          ids: the ids that are needed.
          staged: what was read ahead; its arrays may change.
          read: the fields of some ids by name.
        """
        if not len(staged.ids):
            return read(ids, staged.fields)
        is_same = len(ids) == len(staged.ids) and (ids == staged.ids).all()
        at = np.arange(len(ids)) if is_same else np.minimum(np.searchsorted(staged.ids, ids), len(staged.ids) - 1)
        is_late = (staged.ids[at] != ids) | (self._last[ids] > staged.version)
        fields = staged.fields if is_same else {name: rows[at] for name, rows in staged.fields.items()}
        if is_late.any():
            for name, rows in read(ids[is_late], fields).items():
                fields[name][is_late] = rows
        return fields


class ReadsOfAll(abc.ABC):
    """The reads of a `BackingStore`, ahead or not, over one method that reads fields."""

    def __init__(self, rows: int, names: Sequence[str]):
        self._names, self._written = tuple(names), Written(rows)

    @abc.abstractmethod
    def _fields(self, ids: np.ndarray, names: Iterable[str], is_ahead: bool = False) -> Fields:
        """Some fields of rows; in another thread if they are read ahead."""

    def stage(self, ids: np.ndarray) -> Staged | None:
        """Read rows ahead."""
        return self._staged(ids, (ROWS,))

    def stage_all(self, ids: np.ndarray) -> Staged | None:
        """Read rows and moments ahead."""
        return self._staged(ids, self._names)

    def read(self, ids: np.ndarray, staged: Staged | None = None) -> np.ndarray:
        """The rows [ids, width]."""
        return (self._fields(ids, (ROWS,)) if staged is None else self.fields(ids, staged))[ROWS]

    def fields(self, ids: np.ndarray, staged: Staged | None = None) -> Fields:
        """Rows and moments, or what was read ahead of them; rows that were written since are read again."""
        return self.dump(ids) if staged is None else self._written.up_to_date(ids, staged, self._fields)

    def dump(self, ids: np.ndarray) -> Fields:
        """Rows and moments."""
        return self._fields(ids, self._names)

    def _staged(self, ids: np.ndarray, names: Iterable[str]) -> Staged | None:
        version = self._written.version  # before the rows: what is written meanwhile counts as later
        return Staged(version, ids, self._fields(ids, names, is_ahead=True))


class HostStore(ReadsOfAll):
    """Rows and moments as NumPy arrays, in memory or memory-mapped.

    Args:
      arrays: rows and moments, [rows, width]; the store owns them.
    """

    def __init__(self, arrays: dict[str, np.ndarray]):
        super().__init__(len(arrays[ROWS]), list(arrays))
        self.arrays = arrays

    def apply(self, step: Step, ids: np.ndarray, gradients: Any) -> None:
        """Update rows and their moments."""
        self.load(ids, updated(step, self.dump(ids), np.asarray(gradients)[: len(ids)]))

    def load(self, ids: np.ndarray, fields: Fields) -> None:
        """Set rows and moments."""
        for name, rows in fields.items():
            self.arrays[name][ids] = rows
        self._written.mark(ids)

    def _fields(self, ids: np.ndarray, names: Iterable[str], is_ahead: bool = False) -> Fields:
        return {name: self.arrays[name][ids] for name in names}


class DeviceStore:
    """Rows and moments as JAX arrays, on one device or sharded.

    Args:
      arrays: rows and moments, [rows, width]; the store owns them.
    """

    def __init__(self, arrays: dict[str, jax.Array]):
        self.arrays = arrays
        self.count = arrays[ROWS].shape[0]

    def stage(self, ids: np.ndarray) -> None:
        """Nothing: the rows are there."""

    def read(self, ids: np.ndarray, staged: Staged | None = None) -> jax.Array:
        """The rows [bucket(ids), width], with zeros after the last id."""
        return _gather(self.arrays[ROWS], self._padded(ids))

    def apply(self, step: Step, ids: np.ndarray, gradients: Any) -> None:
        """Update rows and their moments."""
        at = self._padded(ids)
        gradients = fitted(jnp.asarray(gradients), len(at))
        gradients = jax.device_put(gradients, _replicated(self.arrays[ROWS]))
        rate = np.float32(step.rate)
        self.arrays = _apply(self.arrays, at, gradients, np.float32(step.number), rate, step.optimizer)

    def dump(self, ids: np.ndarray) -> Fields:
        """Rows and moments, on the host."""
        found = _gather(self.arrays, self._padded(ids))
        return {name: np.asarray(rows)[: len(ids)] for name, rows in found.items()}

    def load(self, ids: np.ndarray, fields: Fields) -> None:
        """Set rows and moments."""
        at = self._padded(ids)
        padded = {name: fitted(np.asarray(rows), len(at)) for name, rows in fields.items()}
        self.arrays = _scatter(self.arrays, at, padded)

    def _padded(self, ids: np.ndarray) -> np.ndarray:
        """The ids up to a full bucket; those after the last one are outside the table."""
        return np.concatenate([ids, np.full(bucket(len(ids)) - len(ids), self.count)]).astype(np.int32)


def updated(step: Step, fields: Fields, gradients: Any) -> Fields:
    """Rows and moments after an update; computed in float32 where the rows have fewer bits."""
    rows = fields[ROWS]
    wide = np.promote_types(rows.dtype, np.float32)
    moments = {name: value for name, value in fields.items() if name != ROWS}
    new, moments = step.optimizer.update(rows.astype(wide), moments, gradients.astype(wide), step.number, step.rate)
    return {ROWS: new.astype(rows.dtype), **moments}


def bucket(count: int) -> int:
    """The length to which `count` rows are padded, a power of two: few lengths are compiled.

    >>> bucket(0), bucket(9), bucket(1024)
    (8, 16, 1024)
    """
    return max(8, 1 << (count - 1).bit_length())


def fitted(rows: Any, length: int) -> Any:
    """Rows with zeros after them, or without the last of them, so that there are `length`."""
    xp = np if isinstance(rows, np.ndarray) else jnp
    missing = length - rows.shape[0]
    return rows[:length] if missing <= 0 else xp.concatenate([rows, xp.zeros((missing, *rows.shape[1:]), rows.dtype)])


@jax.jit
def _gather(arrays: Any, at: Any) -> Any:
    return jax.tree.map(lambda rows: rows.at[at].get(mode="fill", fill_value=0), arrays)


@partial(jax.jit, donate_argnums=0)
def _scatter(arrays: Any, at: Any, fields: Any) -> Any:
    return {name: rows.at[at].set(fields[name], mode="drop") for name, rows in arrays.items()}


@partial(jax.jit, donate_argnums=0, static_argnums=5)
def _apply(arrays: Any, at: Any, gradients: Any, count: Any, rate: Any, optimizer: RowOptimizer) -> Any:
    return _scatter(arrays, at, updated(Step(optimizer, count, rate), _gather(arrays, at), gradients))


def _replicated(like: jax.Array) -> Any:
    sharding = like.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


# ---- new arrays


def blocks(first: Normal | np.ndarray, count: int) -> Iterator[tuple[slice, np.ndarray]]:
    """The first rows of a table, block by block."""
    for number, start in enumerate(range(0, count, BLOCK)):
        part = slice(start, min(start + BLOCK, count))
        yield part, first[part] if isinstance(first, np.ndarray) else first.block(number)[: part.stop - part.start]


def host_arrays(
    shape: tuple[int, int], dtype: Any, first: Normal | np.ndarray, moments: Sequence[tuple[str, float]], path: Any
) -> dict[str, np.ndarray]:
    """Rows and moments of a new table, in memory or in files.

    Args:
      shape: rows and width.
      dtype: that of the rows; moments are float32.
      first: the first rows.
      moments: name and first value of each moment.
      path: a folder for memory-mapped files; None for memory.

    Raises:
      CheckpointFileError: the disk is too small for the files, or the folder cannot be written.
    """
    make: Callable[[Any], np.ndarray] = partial(np.zeros, shape) if path is None else partial(_mapped_file, path, shape)
    arrays = {ROWS: make(np.dtype(dtype)), **{name: make(np.dtype(np.float32)) for name, _ in moments}}
    for part, rows in blocks(first, shape[0]):
        arrays[ROWS][part] = rows
        for name, value in moments:
            if value:
                arrays[name][part] = value
    return arrays


def _mapped_file(path: Any, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """An array in a file without a name, which ends with the process. Its blocks are reserved: a full disk is told now."""
    size = shape[0] * shape[1] * dtype.itemsize
    try:
        folder = pathlib.Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        fail(CheckpointFileError, f"a table of {bytes_text(size)} cannot be created in {path}", where=f"path = {path!r}",
             why=str(error), fix="free space, choose another folder, or leave `path` out for host memory")  # fmt: skip


def device_arrays(
    shape: tuple[int, int], dtype: Any, first: Normal | np.ndarray | None, moments: Sequence[tuple[str, float]], sharding: Any
) -> dict[str, jax.Array]:  # fmt: skip
    """Rows and moments of a new table on devices; each device's shard is made alone. Without `first` all are zero."""

    def make(value: float | Normal | np.ndarray, dtype: Any) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            if isinstance(value, float | int):
                rows = np.full((stop - start, shape[1]), value, dtype)
            else:
                rows = value[start:stop] if isinstance(value, np.ndarray) else value(np.arange(start, stop))
            return np.asarray(rows[:, index[1]], dtype)

        if sharding is None:
            return jnp.asarray(shard((slice(None), slice(None))))
        return jax.make_array_from_callback(shape, sharding, shard)

    with jax.ensure_compile_time_eval():  # a function that makes a model may make tables too
        rows = make(0.0 if first is None else first, dtype)
        return {ROWS: rows, **{name: make(0.0 if first is None else value, np.float32) for name, value in moments}}

"""Tables of embeddings, of which a step sees only the rows that its batch needs."""

from __future__ import annotations

import collections
import dataclasses
import operator
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from shardfn.embedding import rowwise, saves
from shardfn.embedding.cache import CacheCounts, CachedStore
from shardfn.embedding.checks import check_gradients, checked_ids, folder_of, table_problems, too_large
from shardfn.embedding.devices import sharding_of
from shardfn.embedding.processes import ProcessStore, check_same_ids, check_same_saves, from_first, own_share
from shardfn.embedding.store import (
    BLOCK,
    ROWS,
    BackingStore,
    DeviceStore,
    Fields,
    HostStore,
    Normal,
    Opened,
    Prepared,
    Step,
    Store,
    StoreMaker,
    TableSpec,
    bucket,
    device_arrays,
    fitted,
    host_arrays,
)
from shardfn.errors import CheckpointError, StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.value_checks import integer, option_problems
from shardfn.runtime.processes import on_host, spans_processes
from shardfn.runtime.read_ahead import read_ahead

CHUNK = 16 * BLOCK
"""Rows that a save reads at once."""


@dataclasses.dataclass(frozen=True)
class Fetched:
    """The rows of a table that a batch needs.

    Attributes:
      values: [n, width], the rows of the different ids in ascending order; n is a power of two, and the rest is zeros.
      positions: int32 of the shape of the batch's ids, where each id's row is in `values`.
      ids: the different ids.
    """

    values: jax.Array
    positions: np.ndarray
    ids: np.ndarray
    table: Any = dataclasses.field(default=None, repr=False, compare=False)
    """The table."""


class Table:
    """A table of embeddings that need not fit a device.

    `train.step` takes tables among its parameters. A step gets the rows of its batch and the positions of its ids in them:
    `values[positions]` is the lookup, and the gradient of `values` has one row for each different id. `update` applies the
    optimizer to these rows alone. A table is a pytree without leaves.

    In a job of several processes each of them makes the table and calls its methods with the same ids. With "host", each
    has a share of the rows, and they exchange those of a batch. With "device", each has all rows on devices of its own.

    Args:
      rows: the number of rows.
      width: elements of a row.
      store: "device" keeps rows and moments on devices, "host" in host memory. `shardfn.cluster.TableServers(...)` keeps
        them on parameter servers.
      path: with "host", a folder for memory-mapped files instead of memory, which then has 6 bytes for each row, 14 with a
        cache. The files end with the process; `save` keeps.
      cache_rows: with "host" or servers, rows that a cache on the device holds, the most frequently used ones. It must
        have room for the rows of a batch. 0 is no cache.
      optimizer: one of `embedding.sgd`, `adagrad`, `adam`, `lamb`; None is `adagrad(0.01)`.
      init: the standard deviation of the first rows, or the rows themselves [rows, width].
      seed: of the first rows.
      dtype: of the rows; moments are float32.
      strategy: the numbers of shards of rows and columns of the table on devices, or of the cache: `(8, 1)`. None is the
        default device.
      device: the devices of `strategy`, as of `shard`.

    Raises:
      StrategyError, StrategyTypeError: options that do not fit each other.
      CheckpointFileError: the files of `path` do not fit the disk.

    >>> table = Table(1000, 4, optimizer=rowwise.sgd(0.5), init=0.0)
    >>> batch = table.fetch([[7, 7], [999, 0]])
    >>> batch.positions.tolist(), batch.ids.tolist()
    ([[1, 1], [2, 0]], [0, 7, 999])
    >>> loss = lambda values, positions: values[positions].sum()
    >>> table.update(batch, jax.grad(loss)(batch.values, batch.positions))
    >>> table.lookup([7]).tolist()
    [[-1.0, -1.0, -1.0, -1.0]]
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        store: str | StoreMaker = "host",
        path: str | os.PathLike[str] | None = None,
        cache_rows: int = 0,
        optimizer: rowwise.RowOptimizer | None = None,
        init: Any = 0.01,
        seed: int = 0,
        dtype: Any = "float32",
        strategy: tuple[int, int] | None = None,
        device: Any = None,
    ):
        optimizer = rowwise.adagrad(0.01) if optimizer is None else optimizer
        raise_problems(table_problems(rows=rows, width=width, store=store, path=path, cache_rows=cache_rows, optimizer=optimizer,
                                      init=init, seed=seed, dtype=dtype, strategy=strategy, device=device))  # fmt: skip
        rows, width, cache_rows, seed = map(operator.index, (rows, width, cache_rows, seed))
        self.shape, self.dtype = (rows, width), jax.dtypes.canonicalize_dtype(dtype)
        self.optimizer, self.count = optimizer, 0
        is_given = not isinstance(init, int | float)
        self._first = np.asarray(init) if is_given else Normal(float(init), seed, width)
        self._saved: dict[pathlib.Path, saves.Saves] = {}  # the last save of each folder, the newest last
        first = "given" if is_given else ["normal", float(init), seed]
        self._kind = {
            "rows": rows,
            "width": width,
            "dtype": self.dtype.name,
            "optimizer": optimizer.name,
            "init": first,
        }
        self._opened: Opened | None = None  # rows on servers
        held = rows if store == "device" else cache_rows
        sharding = None if strategy is None or not held else sharding_of(strategy, (held, width), device)
        try:
            self._is_changed = np.full(rows, is_given)  # since the last save
            self._is_touched = np.full(rows, is_given)  # ever
            self._store = self._new_store(store, path, cache_rows, sharding)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            too_large(self.shape, self.dtype.itemsize + 4 * len(optimizer.moments), store, path is not None, error)

    def _new_store(self, store: Any, path: Any, cache_rows: int, sharding: Any) -> Store:
        moments, share = self.optimizer.moments, own_share()
        if store == "device":
            return DeviceStore(device_arrays(self.shape, self.dtype, self._first, moments, sharding))
        (rows, width), first = self.shape, self._first
        if store != "host":
            own, share = self._open(store, cache_rows), None
        else:
            if share is not None:
                rows, first = share.rows(rows), share.first(first)
            own = HostStore(host_arrays((rows, width), self.dtype, first, moments, path))
        if cache_rows:
            own = CachedStore(own, (rows, width), self.dtype, cache_rows, moments, sharding)
        return own if share is None else ProcessStore(own, share)

    def _open(self, maker: StoreMaker, cache_rows: int) -> BackingStore:
        """Rows on servers, where they may have been trained before."""
        opened = maker.open(TableSpec(self.shape, self.dtype, self._first, self.optimizer, self._kind, cache_rows))
        self._opened, self.count = opened, opened.count
        if opened.is_shared or not opened.is_new:  # rows that changed elsewhere are not known one by one
            self._is_changed[:] = self._is_touched[:] = True
        return opened.store

    def __repr__(self) -> str:
        return f"Table({self.shape[0]}, {self.shape[1]}, optimizer={self.optimizer.name!r})"

    @property
    def cache(self) -> CacheCounts:
        """Hits, misses and write-backs of the cache; all 0 without one."""
        own = self._own_store
        return own.counts if isinstance(own, CachedStore) else CacheCounts()

    @property
    def device_bytes(self) -> int:
        """Bytes of rows and moments on devices between steps, those of all devices together."""
        own = self._own_store
        on = own.cache if isinstance(own, CachedStore) else own
        return sum(x.nbytes for x in on.arrays.values()) if isinstance(on, DeviceStore) else 0

    def fetch(self, ids: Any, capacity: int | None = None) -> Fetched:
        """The rows that a batch needs.

        Args:
          ids: integers of any shape, from 0 to below the number of rows; duplicates share a row.
          capacity: the number of rows of `values`. By default the next power of two, so that few lengths are compiled.

        Returns:
          The rows, on the device.

        Raises:
          StrategyError: ids that are negative or beyond the table; more different ids than `capacity` or the cache holds;
            other ids in another process.
          StrategyTypeError: ids that are no integers, or traced.
          ClusterError: servers do not answer. Call it again.

        >>> Table(10, 2).fetch([3, 3, 1]).values.shape
        (8, 2)
        """
        return self._fetched(self.prepare(ids), capacity)

    def prefetch(self, batches: Iterable[Any], ahead: int = 1, capacity: int | None = None) -> Iterator[Fetched]:
        """Fetch the rows of batch after batch; those of the next ones are read on the host while a step runs.

        Rows that an update changes after they were read are read again: the result is that of `fetch`.

        Args:
          batches: the ids of each batch.
          ahead: how many batches are read ahead.
          capacity: as of `fetch`.

        Yields:
          The rows of each batch.

        Raises:
          StrategyError, StrategyTypeError: as `fetch`.

        >>> [batch.ids.tolist() for batch in Table(10, 2).prefetch([[1, 2], [2, 3]])]
        [[1, 2], [2, 3]]
        """
        raise_problems(option_problems(integer(0), "ahead", ahead))
        if not isinstance(batches, Iterable):
            fail(StrategyTypeError, f"`batches` is {a(batches)}", where=f"prefetch({batches!r:.40})",
                 why="it gives the ids of batch after batch", fix="prefetch([ids, ...]), or fetch(ids)")  # fmt: skip
        for prepared in read_ahead(lambda ids: self.prepare(ids, True), map(on_host, batches), ahead):
            yield self._fetched(prepared, capacity)

    def update(self, fetched: Fetched, gradients: Any) -> None:
        """Apply the optimizer to the rows of a batch.

        Args:
          fetched: the rows, as fetched.
          gradients: the gradient of `fetched.values`.

        Raises:
          StrategyError: a gradient of another shape.
          StrategyTypeError: a gradient that is traced; a batch of another table.
          ClusterError: servers do not answer. Call it again with the same: they take no update twice.
        """
        if not isinstance(fetched, Fetched) or fetched.table is not self:
            given = "a batch of another table" if isinstance(fetched, Fetched) else a(fetched)
            fail(StrategyTypeError, f"`update` is given {given}", where=f"update({fetched!r:.40}, ...)",
                 why="it updates the rows that this table's `fetch` gave", fix="table.update(table.fetch(ids), g)")  # fmt: skip
        check_gradients(fetched.values.shape, gradients)
        self.apply(fetched.ids, gradients)

    def lookup(self, ids: Any) -> jax.Array:
        """The rows at ids, outside a step.

        Args:
          ids: as of `fetch`.

        Returns:
          The rows [..., width].

        Raises:
          StrategyError, StrategyTypeError: as `fetch`.

        >>> Table(10, 2).lookup([[3, 4]]).shape
        (1, 2, 2)
        """
        fetched = self.fetch(ids)
        return fetched.values[fetched.positions]

    def values(self) -> np.ndarray:
        """All rows, in host memory.

        Returns:
          The array [rows, width].

        >>> Table(10, 2).values().shape
        (10, 2)
        """
        return np.concatenate([fields[ROWS] for _, fields in self._dumped(np.arange(self.shape[0]))])

    def moments(self) -> dict[str, np.ndarray]:
        """All moments of the optimizer, in host memory.

        Returns:
          The arrays [rows, width] by name.

        >>> sorted(Table(10, 2, optimizer=rowwise.adam(0.1)).moments())
        ['mean', 'mean_of_squares']
        """
        chunks = [fields for _, fields in self._dumped(np.arange(self.shape[0]))]
        return {name: np.concatenate([c[name] for c in chunks]) for name, _ in self.optimizer.moments}

    def save(self, folder: str | os.PathLike[str]) -> int:
        """Save what changed since the last save if that was in the same folder, else all rows that ever changed.

        A save is complete or absent, also if the process is killed in it. Earlier saves are rewritten as one when they hold
        more than twice the rows that ever changed, or when a file of them is gone or truncated.

        Args:
          folder: the folder of the saves of this table. Of several processes the first writes it.

        Returns:
          The number of rows that were written.

        Raises:
          CheckpointError: the folder holds the saves of another table or run.
          CheckpointFileError: the disk is full, or the folder cannot be written. Earlier saves are complete.
          ClusterError: another process saves there.
        """
        path = folder_of(folder, "save")
        there = from_first(lambda: self._own_save(path))
        is_newest = there is not None and path == next(reversed(self._saved))
        is_changed = self._is_changed if is_newest else self._is_touched
        before = there or saves.Saves(self._kind)
        is_full = before.rows + int(is_changed.sum()) > 2 * int(self._is_touched.sum())
        is_full = is_full or from_first(lambda: not saves.are_there(path))
        ids = np.flatnonzero(self._is_touched if is_full else is_changed)
        chunks = self._dumped(ids)

        def rest() -> None:  # every process sends its rows, whether or not they are written
            collections.deque(chunks, maxlen=0)

        def write() -> saves.Saves:
            try:
                return saves.append(path, before, chunks, self.count, replace=is_full)
            finally:
                rest()

        after = from_first(write, rest)
        self._saved = {other: saved for other, saved in self._saved.items() if other != path} | {path: after}
        self._is_changed = np.full(self.shape[0], self._is_shared)
        return len(ids)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Read the last save of a folder into this table, whatever it held before and wherever its rows are.

        Args:
          folder: the folder of the saves; of several processes each reads it.

        Raises:
          CheckpointError: there is no save, or it is of another table: rows, width, dtype, optimizer or first rows differ;
            processes that do not find the same saves.
          CheckpointFileError: files that are missing, truncated or changed, by name. The table is as it was then.
        """
        path = folder_of(folder, "restore")
        saved = saves.read_saves(path)
        check_same_saves(path, *((saved.saves, saved.count) if saved else (0, 0)))
        if saved is None:
            fail(CheckpointError, f"{path} holds no saved table", where=f"restore({str(folder)!r})",
                 why=f"there is no save in a {saves.FILE}", fix="give the folder that `save` was called with")  # fmt: skip
        saves.same_table(path, saved, self._kind)
        chunks = saves.replay(path)
        first = next(chunks, None)  # what was saved is checked here, before anything changes
        if isinstance(self._first, Normal):
            touched = np.flatnonzero(self._is_touched)
            for ids in np.split(touched, range(CHUNK, len(touched), CHUNK)) if len(touched) else ():
                moments = {n: np.full((len(ids), self.shape[1]), v, np.float32) for n, v in self.optimizer.moments}
                self._store.load(ids, {ROWS: self._first(ids).astype(self.dtype), **moments})
        self._is_touched[:] = self._is_changed[:] = self._is_shared
        while first is not None:
            ids, fields = first
            self._store.load(ids, {**fields, ROWS: fields[ROWS].view(self.dtype)})
            self._is_touched[ids] = True
            first = next(chunks, None)
        self.count, self._saved = saved.count, {path: saved}
        if self._opened is not None:
            self._opened.set_count(self.count)

    def flush(self) -> int:
        """Write the rows that changed in the cache to the store behind it: the servers have them then.

        Returns:
          The number of rows that were written; 0 without a cache.

        Raises:
          ClusterError: the servers do not answer. Call it again.

        >>> table = Table(10, 2, cache_rows=8)
        >>> table.update(batch := table.fetch([1, 2]), np.ones(batch.values.shape))
        >>> table.flush()
        2
        """
        own = self._own_store
        count = own.flush() if isinstance(own, CachedStore) else 0
        if self._opened is not None:
            self._opened.set_count(self.count)
        return count

    # ---- for `train.step`

    def capacity(self, ids: int) -> int:
        """The rows that a batch of so many ids is given, a power of two.

        Args:
          ids: the number of ids, duplicates counted.

        >>> Table(10, 2).capacity(1000)
        16
        """
        return bucket(min(ids, self.shape[0]))

    def prepare(self, ids: Any, is_ahead: bool = False) -> Prepared:
        """The different ids of a batch, and the position of each id among them.

        Args:
          ids: as of `fetch`.
          is_ahead: whether their rows are read already, as far as the host has them.

        Raises:
          StrategyError, StrategyTypeError: as `fetch`.

        >>> Table(10, 2).prepare([[3, 3], [1, 2]]).positions.tolist()
        [[2, 2], [0, 1]]
        """
        flat = checked_ids(on_host(ids), self.shape[0])
        unique, inverse = np.unique(flat, return_inverse=True)
        positions = inverse.reshape(flat.shape).astype(np.int32)
        return Prepared(unique, positions, self._store.stage(unique) if is_ahead else None)

    def rows_of(self, prepared: Prepared, capacity: int) -> jax.Array:
        """The rows of a batch, on the device.

        Args:
          prepared: what `prepare` returned.
          capacity: the number of rows; those after the last id are zeros.

        Returns:
          The rows [capacity, width].

        Raises:
          StrategyError: more different ids than `capacity` or the cache holds; other ids in another process.

        >>> table = Table(10, 2)
        >>> table.rows_of(table.prepare([1, 2]), 4).shape
        (4, 2)
        """
        check_same_ids(prepared.ids)  # first: what follows then fails in all processes or in none
        count = len(prepared.ids)
        if count > capacity:
            fail(StrategyError, f"a batch touches {count:,} rows, and `capacity` is {capacity:,}",
                 where=f"capacity = {capacity}", fix=f"capacity={bucket(count)}")  # fmt: skip
        return jnp.asarray(fitted(self._store.read(prepared.ids, prepared.staged), capacity))

    def apply(self, ids: np.ndarray, gradients: Any) -> None:
        """Apply the optimizer to some rows, as `update` does.

        Args:
          ids: different ids, in ascending order.
          gradients: the gradients of their rows, [ids or more, width].

        >>> table = Table(10, 1, optimizer=rowwise.sgd(1.0), init=0.0)
        >>> table.apply(np.array([3]), np.ones((1, 1), "float32"))
        >>> table.lookup(3).tolist()
        [-1.0]
        """
        step = Step(self.optimizer, self.count, self.optimizer.rate(self.count))
        self._store.apply(step, ids, on_host(gradients) if spans_processes(gradients) else gradients)
        self.count += 1
        self._is_changed[ids] = self._is_touched[ids] = True

    # ---- inside

    @property
    def _is_shared(self) -> bool:
        """Whether others update the rows too."""
        return self._opened is not None and self._opened.is_shared

    @property
    def _own_store(self) -> Store:
        """That of this process."""
        return self._store.own if isinstance(self._store, ProcessStore) else self._store

    def _fetched(self, prepared: Prepared, capacity: int | None) -> Fetched:
        raise_problems(option_problems(integer(1), "capacity", capacity) if capacity is not None else ())
        count = bucket(len(prepared.ids)) if capacity is None else capacity
        return Fetched(self.rows_of(prepared, count), prepared.positions, prepared.ids, self)

    def _own_save(self, path: pathlib.Path) -> saves.Saves | None:
        """The last save in a folder, which must be of this table."""
        there = saves.read_saves(path)
        if there is not None and there != self._saved.get(path):
            fail(CheckpointError, f"{path} holds saves that this table did not make", where=f"save({str(path)!r})",
                 why=f"it was saved {there.saves} times, last after {there.count} updates",
                 fix="restore from it first, or save in another folder")  # fmt: skip
        return there

    def _dumped(self, ids: np.ndarray) -> Iterator[tuple[np.ndarray, Fields]]:
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            yield part, self._store.dump(part)


tree_util.register_pytree_node(Table, lambda table: ((), table), lambda table, _: table)

"""A table of several processes: process p of P has the rows p, p + P, p + 2 P, ... on its host.

Every process calls with the ids of the whole batch. Each reads its own rows, and all exchange them; each updates its own.
"""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardfn.embedding.cache import CachedStore
from shardfn.embedding.store import BLOCK, ROWS, Fields, Normal, Staged, Step, Store, bucket, fitted
from shardfn.errors import CheckpointError, ShardError, StrategyError, fail

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of a table a process has.

    Attributes:
      rank: the number of the process.
      size: the number of processes.

    >>> share = Share(1, 3)
    >>> share.rows(8), share.own(np.array([1, 3, 7])).tolist(), share.place(np.array([1, 7])).tolist()
    (3, [True, False, True], [0, 2])
    """

    rank: int
    size: int

    def rows(self, total: int) -> int:
        """The number of its rows, of a table of `total`."""
        return len(range(self.rank, total, self.size))

    def own(self, ids: np.ndarray) -> np.ndarray:
        """Which ids are of its rows."""
        return ids % self.size == self.rank

    def place(self, ids: np.ndarray) -> np.ndarray:
        """Where its rows with these ids are among them."""
        return ids // self.size

    def first(self, rows: Normal | np.ndarray) -> Any:
        """Its part of a table's first rows."""
        return rows[self.rank :: self.size] if isinstance(rows, np.ndarray) else _FirstRows(rows, self)


@dataclasses.dataclass(frozen=True)
class _FirstRows:
    """The rows of one process, drawn as those of the table."""

    rows: Normal
    share: Share

    def __call__(self, places: np.ndarray) -> np.ndarray:
        return self.rows(places * self.share.size + self.share.rank)

    def block(self, number: int) -> np.ndarray:
        return self(np.arange(number * BLOCK, (number + 1) * BLOCK))


class ProcessStore:
    """The rows of all processes. Every process calls each method with the same ids."""

    def __init__(self, own: Store, share: Share):
        self.own, self.share = own, share

    def stage(self, ids: np.ndarray) -> Staged | None:
        """Read this process's rows ahead; nothing is sent."""
        return self.own.stage(self._places(ids))

    def read(self, ids: np.ndarray, staged: Staged | None = None) -> np.ndarray:
        """The rows, in every process."""
        if isinstance(self.own, CachedStore):  # in every process the same: none waits for one that refuses
            self.own.check_room(int(np.bincount(ids % self.share.size).max(initial=0)))
        return self._exchanged(ids, {ROWS: self.own.read(self._places(ids), staged)})[ROWS]

    def apply(self, step: Step, ids: np.ndarray, gradients: Any) -> None:
        """Update this process's rows."""
        is_own = self.share.own(ids)
        self.own.apply(step, self.share.place(ids[is_own]), np.asarray(gradients)[: len(ids)][is_own])

    def dump(self, ids: np.ndarray) -> Fields:
        """Rows and moments, in every process."""
        return self._exchanged(ids, self.own.dump(self._places(ids)))

    def load(self, ids: np.ndarray, fields: Fields) -> None:
        """Set this process's rows and moments."""
        is_own = self.share.own(ids)
        self.own.load(self.share.place(ids[is_own]), {name: rows[is_own] for name, rows in fields.items()})

    def _places(self, ids: np.ndarray) -> np.ndarray:
        return self.share.place(ids[self.share.own(ids)])

    def _exchanged(self, ids: np.ndarray, own: Fields) -> Fields:
        owners = ids % self.share.size
        counts = np.bincount(owners, minlength=self.share.size)
        length, found = bucket(int(counts.max(initial=0))), Fields()
        for name, rows in own.items():
            rows = np.asarray(rows)[: counts[self.share.rank]]
            padded = fitted(rows, length)
            every = np.asarray(multihost_utils.process_allgather(padded))
            found[name] = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
            for process, count in enumerate(counts):
                found[name][owners == process] = every[process, :count]
        return found


def own_share() -> Share | None:
    """The share of this process; None where it is the only one."""
    return Share(jax.process_index(), jax.process_count()) if jax.process_count() > 1 else None


def from_first(make: Callable[[], _T], meanwhile: Callable[[], Any] = lambda: None) -> _T:
    """What process 0 makes, in every process; an error of it is raised in every process.

    Args:
      make: what process 0 calls.
      meanwhile: what the others call.
    """
    if jax.process_count() == 1:
        return make()
    found: Any = None
    if jax.process_index() == 0:
        try:
            found = make()
        except ShardError as error:
            found = error
    else:
        meanwhile()
    data = np.frombuffer(pickle.dumps(found), np.uint8)  # between the processes of one job
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = data[:size]
    found = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
    if isinstance(found, ShardError):
        raise found
    return found


def first_other(own: np.ndarray) -> tuple[int, np.ndarray, np.ndarray] | None:
    """The first process with other numbers than process 0, its numbers and those of process 0; None where all agree.

    Every process calls it, and none returns before all did.

    Args:
      own: the numbers of this process, of one shape in all.

    >>> first_other(np.array([3]))
    """
    if jax.process_count() == 1:
        return None
    every = np.asarray(multihost_utils.process_allgather(own))
    differ = np.flatnonzero((every != every[0]).reshape(len(every), -1).any(1))
    return (int(differ[0]), every[differ[0]], every[0]) if len(differ) else None


def check_same_ids(ids: np.ndarray) -> None:
    """Refuse processes that look up other ids than process 0.

    Raises:
      StrategyError: in every process.
    """
    if jax.process_count() == 1:
        return
    if other := first_other(np.array([len(ids), zlib.crc32(ids.tobytes())], np.uint32)):
        process, theirs, first = other
        fail(StrategyError, f"process {process} looks up other ids than process 0",
             where=f"{theirs[0]} different ids, and {first[0]}", why="a table gives the rows of the whole batch to all processes",
             fix="give every process the ids of the whole batch, or one array that spans the processes: "
                 "jax.make_array_from_process_local_data")  # fmt: skip


def check_same_saves(folder: pathlib.Path, saves: int, updates: int) -> None:
    """Refuse processes that find other saves in a folder than process 0.

    Args:
      folder: the folder.
      saves: how many this process finds there.
      updates: after how many updates the last of them was made.

    Raises:
      CheckpointError: in every process.
    """
    if other := first_other(np.array([saves, updates])):
        process, theirs, first = other
        fail(CheckpointError, f"process {process} finds {theirs[0]} saves, and process 0 {first[0]}",
             where=f"restore({str(folder)!r})", why="every process reads the saves of all",
             fix="give a folder that all processes see")  # fmt: skip

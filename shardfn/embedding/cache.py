"""A cache of a table's hot rows on the device, in front of a store on the host or on servers.

Rows with their moments are loaded when a batch needs them, updated on the device, and written back when the least
frequently used of them make room. What a batch needs is never evicted by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardfn.embedding.store import BackingStore, DeviceStore, Fields, Staged, Step, device_arrays
from shardfn.errors import StrategyError, fail


class Placed(NamedTuple):
    """The slots of some ids: `slots` of all, `missing` ids that must be loaded, `evicted` ids and their slots."""

    slots: np.ndarray
    missing: np.ndarray
    evicted: np.ndarray
    evicted_slots: np.ndarray


class LfuIndex:
    """Which row is in which slot, and how many batches used each row.

    Args:
      rows: rows of the table.
      slots: rows that the cache has room for.

    >>> index = LfuIndex(rows=100, slots=2)
    >>> index.place(np.array([7, 9])).missing.tolist()
    [7, 9]
    >>> _ = index.place(np.array([9]))
    >>> index.place(np.array([50])).evicted.tolist()
    [7]
    """

    def __init__(self, rows: int, slots: int):
        self.slot_of = np.full(rows, -1, np.int32)
        self.id_of = np.full(slots, -1, np.int64)
        self.uses = np.zeros(rows, np.uint32)

    def place(self, ids: np.ndarray, count: bool = True) -> Placed:
        """Give every id a slot, those of the least used other rows last.

        Args:
          ids: different ids, at most as many as there are slots.
          count: whether this is a use of them.

        Returns:
          What must be loaded and written back.
        """
        self.uses[ids] += np.uint32(count)
        missing = ids[self.slot_of[ids] < 0]
        free = np.flatnonzero(self.id_of < 0)[: len(missing)] if len(missing) else np.empty(0, np.int64)
        lacking = len(missing) - len(free)
        evicted = evicted_slots = np.empty(0, np.int64)
        if lacking:
            is_other = self.id_of >= 0
            is_other[self.slot_of[ids[self.slot_of[ids] >= 0]]] = False
            others = np.flatnonzero(is_other)
            least = np.argpartition(self.uses[self.id_of[others]], lacking - 1)[:lacking]
            evicted_slots = np.sort(others[least])
            evicted = self.id_of[evicted_slots]
            self.slot_of[evicted] = -1
        slots = np.concatenate([free, evicted_slots])
        self.slot_of[missing], self.id_of[slots] = slots, missing
        return Placed(self.slot_of[ids], missing, evicted, evicted_slots)

    def take_back(self, ids: np.ndarray, placed: Placed, count: bool = True) -> None:
        """Undo `place(ids, count)`, which gave `placed`, for rows that could not be loaded."""
        self.uses[ids] -= np.uint32(count)
        self.id_of[self.slot_of[placed.missing]] = -1
        self.slot_of[placed.missing] = -1
        self.slot_of[placed.evicted], self.id_of[placed.evicted_slots] = placed.evicted_slots, placed.evicted


@dataclasses.dataclass
class CacheCounts:
    """What a cache did.

    Attributes:
      hits: rows that a batch found in the cache.
      misses: rows that it loaded.
      written_back: rows that were evicted and had changed.
    """

    hits: int = 0
    misses: int = 0
    written_back: int = 0


class CachedStore:
    """A store of all rows behind a cache of `slots` rows on the device.

    Args:
      host: the store of all rows, on the host or on servers.
      shape: its rows and width.
      dtype: that of the rows.
      slots: rows that the cache holds.
      moments: name and first value of each moment.
      sharding: of the cache; None for the default device.
    """

    def __init__(
        self,
        host: BackingStore,
        shape: tuple[int, int],
        dtype: Any,
        slots: int,
        moments: Sequence[tuple[str, float]],
        sharding: Any = None,
    ):
        rows, width = shape
        self.host, self.counts = host, CacheCounts()
        self.cache = DeviceStore(device_arrays((slots, width), dtype, None, moments, sharding))
        self.index = LfuIndex(rows, slots)
        self.is_changed = np.zeros(slots, bool)

    def stage(self, ids: np.ndarray) -> Staged | None:
        """Read ahead what is not in the cache now."""
        return self.host.stage_all(ids[self.index.slot_of[ids] < 0])

    def read(self, ids: np.ndarray, staged: Staged | None = None) -> jax.Array:
        """The rows, of which the missing ones are loaded into the cache."""
        return self.cache.read(self._slots(ids, staged))

    def apply(self, step: Step, ids: np.ndarray, gradients: Any) -> None:
        """Update rows in the cache."""
        slots = self._slots(ids, None, count=False)
        self.cache.apply(step, slots, gradients)
        self.is_changed[slots] = True

    def flush(self) -> int:
        """Write back the rows that changed in the cache, which keeps them.

        Returns:
          How many they are.
        """
        slots = np.flatnonzero(self.is_changed)
        self._write_back(self.index.id_of[slots], slots)
        self.is_changed[slots] = False
        return len(slots)

    def dump(self, ids: np.ndarray) -> Fields:
        """Rows and moments, from the cache where it has them."""
        fields = self.host.dump(ids)
        slots = self.index.slot_of[ids]
        if (slots >= 0).any():
            for name, rows in self.cache.dump(slots[slots >= 0]).items():
                fields[name][slots >= 0] = rows
        return fields

    def load(self, ids: np.ndarray, fields: Fields) -> None:
        """Set rows and moments on the host, and in the cache where it has them."""
        self.host.load(ids, fields)
        slots = self.index.slot_of[ids]
        if (is_in := slots >= 0).any():
            self.cache.load(slots[is_in], {name: rows[is_in] for name, rows in fields.items()})
            self.is_changed[slots[is_in]] = False

    def check_room(self, count: int) -> None:
        """Refuse a batch of more rows than the cache holds.

        Raises:
          StrategyError: it has more.
        """
        slots = len(self.index.id_of)
        if count > slots:
            fail(StrategyError, f"a batch touches {count:,} rows, and the cache has room for {slots:,}",
                 where=f"cache_rows = {slots}", why="all rows of a batch are in the cache at once",
                 fix=f"cache_rows={2 * count} or more, or smaller batches")  # fmt: skip

    def _slots(self, ids: np.ndarray, staged: Staged | None, count: bool = True) -> np.ndarray:
        self.check_room(len(ids))
        placed = self.index.place(ids, count)
        is_changed = self.is_changed[placed.evicted_slots]
        try:
            self._write_back(placed.evicted[is_changed], placed.evicted_slots[is_changed])
            loaded = self.host.fields(placed.missing, staged) if len(placed.missing) else {}
        except BaseException:  # servers may not answer
            self.index.take_back(ids, placed, count)
            raise
        self.counts.misses += len(placed.missing)
        self.counts.hits += (len(ids) - len(placed.missing)) * count
        self.counts.written_back += int(is_changed.sum())
        if len(placed.missing):
            slots = self.index.slot_of[placed.missing]
            self.cache.load(slots, loaded)
            self.is_changed[slots] = False
        return placed.slots

    def _write_back(self, ids: np.ndarray, slots: np.ndarray) -> None:
        if len(ids):
            order = np.argsort(ids)  # slots are in any order, and a store takes sorted ids
            self.host.load(ids[order], self.cache.dump(slots[order]))

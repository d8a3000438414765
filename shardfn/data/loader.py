"""Batches of a source as global, sharded arrays; each process reads only what its devices hold."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.data import order
from shardfn.data.dataset_strategy import input_shardings
from shardfn.data.shards import assemble_array, mesh_positions, windows_by_device
from shardfn.data.sources import PADDING, ArrayColumn, Read, RecordsColumn, Window, columns, names_of
from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.called import answered
from shardfn.frontend.paths import join
from shardfn.frontend.strategy import short
from shardfn.frontend.value_checks import boolean, integer, one_of, option_problems
from shardfn.planning.plan import Plan
from shardfn.runtime.extras import need


@dataclasses.dataclass(frozen=True)
class BatchArray:
    """One array of a batch: its global shape and its sharding."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding

    @functools.cached_property
    def windows(self) -> dict[Window, list[Any]]:
        """The windows that this process reads, with the devices that hold each."""
        return windows_by_device(self.sharding, self.shape)


@dataclasses.dataclass(frozen=True)
class Loader:
    """An iterable of batches, from `load`. Print it for a table of what each device reads; each `iter` starts anew.

    Attributes:
      arrays: the arrays of a batch, with their shardings and windows.
      records: the number of records of the source.
      batch_size: records per batch, over all devices.
      seed: the seed of the order; None without shuffling.
      epochs: the number of passes; None for no end.
      last: "drop", "pad" or "error".
      prefetch: batches that are read ahead.
    """

    arrays: tuple[BatchArray, ...]
    columns: tuple[ArrayColumn | RecordsColumn, ...]
    treedef: Any
    records: int
    batch_size: int
    seed: int | None
    epochs: int | None
    last: str
    prefetch: int

    @property
    def shapes(self) -> Any:
        """A pytree like a batch, of shapes with shardings, for `plan`, `explain` and `lower`."""
        return self._tree([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in self.arrays])

    @property
    def shardings(self) -> Any:
        """A pytree like a batch, of each array's `NamedSharding`."""
        return self._tree([x.sharding for x in self.arrays])

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of one pass over the records."""
        full, rest = divmod(self.records, self.batch_size)
        return full + (rest > 0 and self.last == "pad")

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("a loader with epochs=None has no end, and so no length")
        return self.batches_per_epoch * self.epochs

    def __iter__(self) -> Batches:
        return Batches(self)

    def _tree(self, leaves: Sequence[Any]) -> Any:
        tree = tree_util.tree_unflatten(self.treedef, leaves[: self.treedef.num_leaves])
        return (tree, leaves[-1]) if self.last == "pad" else tree

    def bytes_per_device(self) -> dict[int, int]:
        """Bytes of one full batch that each device reads.

        Returns:
          The bytes by the device's position in the mesh.
        """
        found: dict[int, int] = {}
        for x in self.arrays[: self.treedef.num_leaves]:
            for window, devices in windows_by_device(x.sharding, x.shape, everywhere=True).items():
                for place in mesh_positions(x.sharding, devices):
                    found[place] = found.get(place, 0) + _bytes(window, x.dtype)
        return dict(sorted(found.items()))

    def __str__(self) -> str:
        rows = [("array", "shape", "strategy", "shard", "B/device", "of")]
        for x in self.arrays:
            shard, item = x.sharding.shard_shape(x.shape), np.dtype(x.dtype).itemsize
            strategy = tuple(n // s if s else 1 for n, s in zip(x.shape, shard, strict=True))
            rows.append((x.path, f"{x.dtype}{list(x.shape)}", str(strategy), str(list(shard)),
                         f"{math.prod(shard) * item:,}", f"{math.prod(x.shape) * item:,}"))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        much = "no end" if self.epochs is None else f"{len(self):,} batches"
        table = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([f"{self.records:,} records, {self.batch_size} to a batch, {much}", *table])


class Batches(Iterator[Any]):
    """An iterator over the batches of a loader. Its state is plain data, valid for any number of processes.

    Attributes:
      loader: the loader.
    """

    def __init__(self, loader: Loader):
        self.loader = loader
        self._rows: np.ndarray | None = None  # the record numbers of the last batch
        options = need("grain", "data").ReadOptions(num_threads=loader.prefetch, prefetch_buffer_size=loader.prefetch)
        # Grain's iterator, whose state is the number of the next batch.
        self._ahead = iter(_batch_rows(loader).map(self._read).to_iter_dataset(options))

    def __next__(self) -> Any:
        shards, self._rows = next(self._ahead)
        arrays = [assemble_array(x.shape, x.sharding, found, x.windows)
                  for x, found in zip(self.loader.arrays, shards, strict=True)]  # fmt: skip
        return self.loader._tree(arrays)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The reads of this process for the last batch; none before the first."""
        return () if self._rows is None else tuple(_reads(self.loader, self._rows))

    def _read(self, rows: np.ndarray) -> tuple[list[list[np.ndarray]], np.ndarray]:
        """The windows of a batch that this process's devices hold; runs in Grain's threads."""
        loader, found = self.loader, []
        for column, mine in _arrays_of_columns(loader):
            found += column.read(rows, [list(x.windows) for x in mine])
        if loader.last == "pad":
            mask = rows != PADDING
            found.append([mask[first:last] for ((first, last),) in loader.arrays[-1].windows])
        return found, rows

    def get_state(self) -> dict[str, Any]:
        """The position of the iterator.

        Returns:
          A dict that JSON can hold.
        """
        place = self._ahead.get_state()
        return {"version": 1, "next_index": int(place["next_index"]), **_identity(self.loader)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to the position where `get_state` was called, on any number of processes and devices.

        Args:
          state: what `get_state` returned.

        Raises:
          StrategyError: the state is of other data, another order or another batch size.
          StrategyTypeError: it is not a state.
        """
        if not isinstance(state, Mapping) or type(state.get("next_index")) is not int:
            fail(StrategyTypeError, f"the state of a data iterator is a dict, but this is {a(state)}"
                 if not isinstance(state, Mapping) else "this dict is not the state of a data iterator",
                 where=f"state = {short(state)}", why="it holds the number of the next batch",
                 fix="pass what get_state() returned")  # fmt: skip
        raise_problems([
            Problem(f"the state is of a loader with {key} = {state.get(key)!r}",
                    f"set_state: this loader has {key} = {value!r}",
                    "its batches differ, so its position has no meaning here",
                    _STATE_FIXES.get(key, f"load with {key}={state.get(key)!r}"))
            for key, value in _identity(self.loader).items() if state.get(key) != value
        ])  # fmt: skip
        end = None if self.loader.epochs is None else len(self.loader)
        if state["next_index"] < 0 or (end is not None and state["next_index"] > end):
            fail(StrategyError, f"the state is at batch {state['next_index']}, and there are {end}",
                 where=f"epochs = {self.loader.epochs}", why="it was saved in a later epoch",
                 fix="load with as many epochs as before, or epochs=None")  # fmt: skip
        self._ahead.set_state({"next_index": state["next_index"]})
        self._rows = None


def _arrays_of_columns(loader: Loader) -> Iterator[tuple[ArrayColumn | RecordsColumn, tuple[BatchArray, ...]]]:
    """Each column with the arrays of a batch that it fills."""
    place = 0
    for column in loader.columns:
        count = len(tree_util.tree_leaves(column.record))
        yield column, loader.arrays[place : place + count]
        place += count


def _reads(loader: Loader, rows: np.ndarray) -> Iterator[Read]:
    """The reads of this process for the batch of these records."""
    for column, mine in _arrays_of_columns(loader):
        for leaf, x in enumerate(mine):
            for ((first, last), *inner), devices in x.windows.items():
                kept = [row for row in rows[first:last].tolist() if row != PADDING]
                yield Read(x.path, ((first, last), *inner), mesh_positions(x.sharding, devices),
                           len(kept) * _bytes(tuple(inner), x.dtype),
                           column.stored(leaf, kept, tuple(inner)) if kept else 0)  # fmt: skip


def _batch_rows(loader: Loader) -> Any:
    """The record numbers of each batch, as a Grain dataset of int arrays.

    The order is over record numbers and equal on every process. Each process computes it and reads what its devices hold,
    so that one number is the position in the data, for any number of processes.
    """
    numbers = need("grain", "data").MapDataset.range(loader.batches_per_epoch)
    numbers = numbers if loader.epochs == 1 else numbers.repeat(loader.epochs)
    return numbers.map_with_index(lambda index, _: batch_rows(loader, index))


def batch_rows(loader: Loader, index: int) -> np.ndarray:
    """The record numbers of a batch, counted over all epochs; an incomplete one has `PADDING` at the end.

    >>> loader = load(np.arange(5), "full_batch", batch_size=4, last="pad", epochs=2)
    >>> batch_rows(loader, 0).tolist(), batch_rows(loader, 3).tolist()
    ([0, 1, 2, 3], [4, -1, -1, -1])
    """
    epoch, batch = divmod(index, loader.batches_per_epoch)
    numbers = np.arange(batch * loader.batch_size, min((batch + 1) * loader.batch_size, loader.records))
    if loader.seed is not None:
        numbers = order.permuted(numbers, loader.records, (loader.seed, epoch))
    return np.pad(numbers, (0, loader.batch_size - len(numbers)), constant_values=PADDING)


def _identity(loader: Loader) -> dict[str, Any]:
    """What two loaders with the same batches have in common."""
    shuffled = {} if loader.seed is None else {"order": order.VERSION}
    return {
        "records": loader.records,
        "batch_size": loader.batch_size,
        "seed": loader.seed,
        "last": loader.last,
        **shuffled,
    }


_STATE_FIXES = {
    "records": "load the same records",
    "order": "go on with the release of shardfn that saved the state: this one shuffles otherwise",
}


def _bytes(window: Window, dtype: Any) -> int:
    return math.prod(last - first for first, last in window) * np.dtype(dtype).itemsize


_OTHERS = {
    **dict.fromkeys(("num_shards", "shard_id"), ("each process reads only the part of its devices", "leave it out")),
    **dict.fromkeys(("drop_remainder", "drop_last"),
                    ("`last` says what becomes of an incomplete batch", 'use last: "drop", the default, "pad" or "error"')),
    **dict.fromkeys(("num_parallel_workers", "num_workers", "prefetch_size"),
                    ("each batch that is read ahead has a thread", "use prefetch, the number of these batches")),
    **dict.fromkeys(("num_epochs", "repeat", "count"), ("`epochs` says how often the source is read", "use epochs")),
    **dict.fromkeys(("dataset_strategy", "in_strategy"), ("`strategy` is the second argument", "use strategy")),
}  # fmt: skip
"""What other loaders' options are here."""


@answered("data.load", _OTHERS)
def load(
    source: Any,
    strategy: Any = None,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    epochs: int | None = 1,
    last: str = "drop",
    plan: Plan | None = None,
    arguments: Sequence[str] | None = None,
    device: Any = None,
    prefetch: int = 2,
) -> Loader:
    """Batches of a source as global arrays with the shardings of a strategy; each process reads only its devices' part.

    Args:
      source: arrays with their records along dim 0, or sequences of records; alone, or in a tuple or dict of inputs. A
        batch has the same structure.
      strategy: "full_batch" (replicated), "data_parallel", a tuple or a dict with an entry for each input, or None: the
        shardings of the plan's `arguments`, or without a plan the context's `dataset_strategy`.
      batch_size: records per batch, over all devices.
      shuffle: whether each epoch has an order of its own, from `seed`.
      seed: from 0 to 2**32 - 1.
      epochs: the number of passes over the records; None for no end.
      last: what to do with an incomplete last batch: "drop" it; "pad" it with zeros, where every batch is a pair
        `(batch, mask)` and the mask is False for padding; "error" refuses the source.
      plan: a plan whose mesh is used.
      arguments: with a plan and no strategy, the plan's argument for each input; by default the inputs' names.
      device: as in `shard`.
      prefetch: batches that are read ahead, each by a thread; 0 reads on demand.

    Returns:
      The loader, an iterable of batches.

    Raises:
      ExtraError: Grain is not installed.
      StrategyError, StrategyTypeError: all that is wrong with the call.
      DeviceError: the devices are not here.

    >>> images, labels = np.zeros((32, 16, 16, 3), "float32"), np.arange(32)
    >>> loader = load((images, labels), ((2, 2, 2, 1), (2,)), batch_size=8)
    >>> for image, label in loader:
    ...     pass
    >>> len(loader), image.sharding.shard_shape(image.shape), label.tolist()
    (4, (4, 8, 8, 3), [24, 25, 26, 27, 28, 29, 30, 31])
    """
    options = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "last": last, "prefetch": prefetch}
    options |= {} if epochs is None else {"epochs": epochs}
    raise_problems([p for name, value in options.items() for p in option_problems(_CHECKS[name], name, value)])
    need("grain", "data")
    found = columns(source)
    flat = tree_util.tree_leaves(found)
    records = flat[0].length
    raise_problems(list(_count_problems(records, batch_size, last)))
    of_batch = lambda s: jax.ShapeDtypeStruct((batch_size, *s.shape), s.dtype)  # noqa: E731
    batch = tree_util.tree_map(lambda column: tree_util.tree_map(of_batch, column.record), found)
    names = names_of(source) if isinstance(source, tuple | dict) else flat[0].names
    several = isinstance(batch, tuple | dict)
    parts = batch.values() if isinstance(batch, dict) else batch if several else (batch,)
    by_name = dict(zip(names_of(batch), parts, strict=True))
    inputs = input_shardings(
        {name: by_name[name] for name in names}, strategy, plan=plan, arguments=arguments, device=device
    )
    placed = {leaf.path: (leaf, sharding) for leaf, sharding in zip(inputs.leaves, inputs.shardings, strict=True)}
    arrays = []
    for key, struct in tree_util.tree_leaves_with_path(batch):
        leaf, sharding = placed[join("" if several else "source", key)]
        arrays.append(BatchArray(leaf.path, leaf.shape, struct.dtype, sharding))
    if last == "pad":  # a mask of the real records, sharded as the batch dimension of the first array
        first = arrays[0].sharding
        sharding = NamedSharding(first.mesh, PartitionSpec(*first.spec[:1]))
        arrays.append(BatchArray("mask", (batch_size,), np.dtype(bool), sharding))
    return Loader(tuple(arrays), tuple(flat), tree_util.tree_structure(batch), records, batch_size,
                  seed if shuffle else None, epochs, last, prefetch)  # fmt: skip


def _count_problems(records: int, batch_size: int, last: str) -> Iterator[Problem]:
    """The problems of a batch size for so many records."""
    where = f"batch_size = {batch_size}, last = {last!r}"
    if batch_size > records and last != "pad":
        yield Problem(f"a batch of {batch_size} is more than the {records} records", where,
                      "there would be no batch", f'choose a batch_size up to {records}, or last="pad"')  # fmt: skip
    elif last == "error" and records % batch_size:
        yield Problem(f"{records} records do not divide into batches of {batch_size}", where,
                      f"the last batch would have {records % batch_size}",
                      'last="drop" leaves it out, last="pad" fills it up, or choose another batch_size')  # fmt: skip


_CHECKS = {
    "batch_size": integer(1), "shuffle": boolean, "seed": integer(0, 2**32 - 1), "epochs": integer(1),
    "last": one_of("drop", "pad", "error"), "prefetch": integer(0),
}  # fmt: skip

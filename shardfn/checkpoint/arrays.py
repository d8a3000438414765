"""Reads the arrays of an Orbax checkpoint with TensorStore, each box once, into JAX arrays under any sharding.

What was written with a checksum for every chunk, as `save` does, is read as it was, or raises an error that names the array.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from shardfn.checkpoint.chunks import Box, box_shape, boxes, closed_box, covering_volume, full_box, volume
from shardfn.checkpoint.contents import StoredArray
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, ShardError, fail, raise_problems
from shardfn.files import check_regular
from shardfn.runtime.extras import need

NODES = "cache_pool#nodes"
CACHE_BYTES = 100 << 20
"""Bytes of decoded nodes of a database that are kept while arrays are read."""

ENTRY_BYTES = 1 << 20
"""Bytes that a cache of chunks has for what TensorStore counts beside their values."""

READ_BYTES = 1 << 30
"""Most bytes that a process is reading at any time; its shards of a single array may be larger."""

WORKERS = 4
"""Threads that copy arrays to devices."""

COUNTERS = "/tensorstore/kvstore/file/"


def cache(chunk_bytes: int = 0) -> Any:
    """What arrays share while they are read: a cache of the database's nodes, and one of `chunk_bytes` of decoded chunks."""
    ts = need("tensorstore", "checkpoint")
    limit = chunk_bytes + ENTRY_BYTES if chunk_bytes else 0
    return ts.Context({NODES: {"total_bytes_limit": CACHE_BYTES}, "cache_pool": {"total_bytes_limit": limit}})


def open_arrays(folder: pathlib.Path, entries: Sequence[StoredArray], context: Any = None) -> list[Any]:
    """The futures of the arrays' `tensorstore.TensorStore`s; `context` is a `cache` that they share with other arrays."""
    ts = need("tensorstore", "checkpoint")
    context = context or cache()
    return [ts.open(_spec(folder, entry), context=context, open=True) for entry in entries]


def cached_bytes(entry: StoredArray, read: Iterable[Box]) -> int:
    """Bytes of the chunks that are to be kept decoded while boxes are read, so that none is decoded for each box again.

    Args:
      entry: the array as it is stored.
      read: the boxes, those of a chunk after each other.
    """
    chunk = math.prod(max(n, 1) for n in entry.chunks.chunk)
    touched = (covering_volume(box, entry.chunks.chunk, entry.shape) for box in read if volume(box) < chunk)
    return math.ceil(max(touched, default=0) * entry.itemsize)


def has_dtype(dtype: Any) -> bool:
    """Whether TensorStore has a dtype."""
    try:
        need("tensorstore", "checkpoint").dtype(jnp.dtype(dtype).name)
    except (TypeError, ValueError):
        return False
    return True


def check_files(folder: pathlib.Path) -> None:
    """Refuse pipes and devices among the files of a checkpoint: TensorStore would wait for them.

    Raises:
      OSError: one of them is not a regular file.
    """
    for file in folder.rglob("*"):
        if not file.is_dir():
            check_regular(file)


def _spec(folder: pathlib.Path, entry: StoredArray) -> dict[str, Any]:
    files = {"driver": "file", "path": f"{os.fspath(folder)}/"}
    kvstore = {"driver": "ocdbt", "base": files, "cache_pool": NODES} if entry.is_ocdbt else files
    path = f"{kvstore.get('path', '')}{entry.name}/"
    return {
        "driver": entry.driver,
        "kvstore": {**kvstore, "path": path},
        "fill_missing_data_reads": False,  # otherwise a lost chunk would read as zeros
        "recheck_cached_data": "open",  # no file of a step changes
    }


def bytes_read() -> int:
    """Bytes that this process has read from array files, as TensorStore counts them."""
    rows = need("tensorstore", "checkpoint").experimental_collect_matching_metrics(COUNTERS + "bytes_read")
    return sum(int(value["value"]) for row in rows for value in row["values"])


def own_shards(value: jax.Array) -> list[Any]:
    """The shards of an array that this process writes: each once over all processes."""
    if jax.process_index() > 0 and value.is_fully_addressable:  # every process has it
        return []
    return [shard for shard in value.addressable_shards if shard.replica_id == 0]


def local_shards(value: Any) -> list[tuple[Box, np.ndarray]]:
    """The shards of an array that this process writes, in host memory."""
    if isinstance(value, np.ndarray):
        return [(full_box(value.shape), value.copy())] if jax.process_index() == 0 else []
    return [(closed_box(shard.index, value.shape), np.asarray(shard.data)) for shard in own_shards(value)]


@dataclasses.dataclass(frozen=True)
class ArrayRead:
    """An array to read, its target sharding, and the dtype it is cast to."""

    entry: StoredArray
    sharding: Sharding
    dtype: Any

    @property
    def on_host(self) -> bool:
        """Whether it stays a NumPy array: 64 bits would be truncated while `jax_enable_x64` is off."""
        return jax.dtypes.canonicalize_dtype(self.dtype) != jnp.dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that this process reads, uncompressed."""
        return int(sum(volume(box) for box, _ in self.boxes) * self.entry.itemsize)

    @functools.cached_property
    def boxes(self) -> tuple[tuple[Box, list[Any]], ...]:
        """The boxes of the array that this process holds, each with its devices."""
        if self.on_host:
            return ((full_box(self.entry.shape), jax.local_devices()[:1]),)
        found: dict[str, tuple[Box, list[Any]]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.entry.shape).items():
            box = closed_box(index or (), self.entry.shape)
            found.setdefault(repr(box), (box, []))[1].append(device)  # before Python 3.12, slices have no hash
        return tuple(found.values())


def read_arrays(folder: pathlib.Path, wanted: Sequence[ArrayRead]) -> list[Any]:
    """Read the shards of arrays that this process's devices hold, each once.

    Raises:
      CheckpointFileError: arrays that are missing or damaged; all of them, by name.
    """
    limit = _ByteLimit(READ_BYTES)

    def finish(want: ArrayRead, store: Any) -> Any:
        try:
            values = _read(folder, want, store)
            return values if isinstance(values, Problem) else assemble(want, values)
        finally:
            limit.release(want.nbytes)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        tasks = []
        for want, store in zip(wanted, open_arrays(folder, [want.entry for want in wanted]), strict=True):
            limit.acquire(want.nbytes)
            tasks.append(pool.submit(finish, want, store))
        done = [task.result() for task in tasks]
    raise_problems([value for value in done if isinstance(value, Problem)], CheckpointFileError)
    return done


def _read(folder: pathlib.Path, want: ArrayRead, store: Any) -> list[np.ndarray] | Problem:
    """The values of `want.boxes`, of the future of a TensorStore; the problem of an array that is missing or damaged."""
    try:
        opened = store.result()
        reads = [np.zeros(box_shape(box), want.dtype) if 0 in want.entry.shape else opened[box].read()
                 for box, _ in want.boxes]  # fmt: skip
        values = [x if isinstance(x, np.ndarray) else np.asarray(x.result()) for x in reads]
    except (ValueError, OSError) as error:
        return damage(folder, want.entry, error)
    is_narrowed = not _holds(want.dtype, want.entry.numpy_dtype)
    return [_narrowed(want, x) if is_narrowed else as_dtype(x, want.dtype) for x in values]


def as_dtype(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values as another dtype. TensorStore's own casts between `float8_e8m0fnu` and other floats are wrong.

    >>> made = as_dtype(np.ones(1, jnp.float8_e8m0fnu), jnp.float8_e4m3fn)
    >>> made.dtype.name, made.tolist()
    ('float8_e4m3fn', [1.0])
    """
    try:
        return values.astype(dtype, copy=False)
    except TypeError:  # NumPy has no cast between these two
        return values.astype(np.float32).astype(dtype)


def _holds(dtype: Any, of: np.dtype) -> bool:
    """Whether a dtype of integers has all values of another one; True for other dtypes."""
    integers = jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(of, jnp.integer)
    return not integers or (jnp.iinfo(dtype).min <= jnp.iinfo(of).min and jnp.iinfo(dtype).max >= jnp.iinfo(of).max)


def _narrowed(want: ArrayRead, value: np.ndarray) -> np.ndarray:
    """Integers as a dtype that does not have all of their values.

    Raises:
      CheckpointError: it has not these.
    """
    cast = value.astype(want.dtype)
    if (cast.astype(value.dtype) != value).any():
        fail(CheckpointError, f"`{want.entry.path}` has integers that {jnp.dtype(want.dtype).name} has not",
             where=want.entry.text, why=f"they go from {value.min()} to {value.max()}",
             fix=f"give it the dtype {want.entry.dtype} in `like`")  # fmt: skip
    return cast


class _ByteLimit:
    """A bound on bytes in flight. A request above the bound waits until it is alone."""

    def __init__(self, size: int):
        self.size, self.taken = size, 0
        self.changed = threading.Condition()

    def acquire(self, size: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.taken or self.taken + size <= self.size)
            self.taken += size

    def release(self, size: int) -> None:
        with self.changed:
            self.taken -= size
            self.changed.notify_all()


def assemble(want: ArrayRead, shards: Sequence[np.ndarray]) -> Any:
    """An array from the values of `want.boxes`, each copied to the devices that hold it."""
    if want.on_host:
        return shards[0]
    shape = want.entry.shape
    values = {repr(box): shard for shard, (box, _) in zip(shards, want.boxes, strict=True)}
    return jax.make_array_from_callback(
        shape, want.sharding, lambda index: values[repr(closed_box(index or (), shape))]
    )


def damage(folder: pathlib.Path, entry: StoredArray, error: Exception) -> Problem:
    """The problem of an array that TensorStore cannot read."""
    is_missing = "NOT_FOUND" in str(error)
    return Problem(
        f"`{entry.path}` is {'missing' if is_missing else 'damaged'} in {folder}",
        where=entry.text,
        why=re.sub(r"^[A-Z_]+: ", "", _reason(error)).strip()[:300],
        fix="restore another step: checkpoint.steps(path) lists them, checkpoint.verify(path, step) checks all arrays of one",
    )


def verify_arrays(folder: pathlib.Path, entries: Sequence[StoredArray]) -> list[Problem]:
    """Read every chunk of every array, a file at a time, and return the damaged arrays."""
    problems = []
    for entry, opening in zip(entries, open_arrays(folder, entries), strict=True):
        try:
            store = opening.result()
            for box in boxes(entry.shape, entry.chunks.file) if 0 not in entry.shape else ():
                store[box].read().result()
        except (ValueError, OSError) as error:
            problems.append(damage(folder, entry, error))
    return problems


def bytes_by_device(want: ArrayRead) -> tuple[dict[Any, int], dict[Any, int]]:
    """Bytes of an array that each device holds, and bytes of the chunks that it reads for them; both uncompressed."""
    entry, held, touched = want.entry, {}, {}
    for box, devices in want.boxes:
        for device in devices:
            held[device] = int(volume(box) * entry.itemsize)
            touched[device] = int(covering_volume(box, entry.chunks.chunk, entry.shape) * entry.itemsize)
    return held, touched


@contextlib.contextmanager
def write_errors(path: pathlib.Path, kinds: Any = OSError) -> Iterator[None]:
    """Raise failed writes, errors of these `kinds` (a class or a tuple of them), as errors with a fix."""
    try:
        yield
    except kinds as error:
        if isinstance(error, ShardError | MemoryError):
            raise
        text = f"{type(error).__name__}: {error}"
        full = any(word in text for word in ("No space left", "File too large", "ENOSPC", "EFBIG", "Disk quota"))
        fix = "free disk space, or keep fewer steps with keep=" if full else "check that the folder is writable"
        is_full = f"{path} is full: the checkpoint could not be written"
        fail(CheckpointFileError, is_full if full else f"the checkpoint could not be written to {path}",
             why=f"{type(error).__name__}: {_reason(error)}"[:400], fix=f"{fix}; earlier steps are complete")  # fmt: skip


def _reason(error: Exception) -> str:
    """The text of an error, without the number of the operating system's and the specification that ends TensorStore's."""
    return re.sub(r"\[Errno \d+\] ", "", re.split(r" \[[a-z_ ]+='", str(error))[0])

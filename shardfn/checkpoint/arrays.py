"""Arrays on disk: TensorStore's zarr 3, with a checksum for every chunk and every index of chunks.

The only user of `tensorstore`. An array is a folder with `zarr.json`, and a file for each shard under `c/`. A read returns
what was written, or raises an error that names the file.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from shardfn.checkpoint.chunks import Box, closed_box, covering_volume, volume
from shardfn.checkpoint.contents import StoredArray
from shardfn.checkpoint.state_tree import array_folder
from shardfn.errors import CheckpointFileError, Problem, fail
from shardfn.runtime.extras import need

READ_BYTES = 1 << 30
"""Most bytes of arrays that are being read at any time; a single array may be larger."""

WORKERS = 4
"""Threads that copy arrays to devices."""

COUNTERS = "/tensorstore/kvstore/file/"


def open_array(directory: pathlib.Path, entry: StoredArray, write: bool = False) -> Any:
    """A future of the `tensorstore.TensorStore` of an array; its metadata must agree with `entry`."""
    chunk_codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 1}},
        {"name": "crc32c"},
    ]
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": entry.chunks.chunk,
        "codecs": chunk_codecs,
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    metadata = {
        "shape": entry.shape,
        "data_type": entry.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": entry.chunks.file}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": os.fspath(directory / array_folder(entry.path))},
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,  # otherwise a lost chunk would read as zeros
        "fill_missing_data_reads": False,
        "open": True,
        "create": write,
    }
    return need("tensorstore", "checkpoint").open(spec)


def bytes_read() -> int:
    """Bytes that this process has read from array files, as TensorStore counts them."""
    rows = need("tensorstore", "checkpoint").experimental_collect_matching_metrics(COUNTERS + "bytes_read")
    return sum(int(value["value"]) for row in rows for value in row["values"])


def write_shards(
    directory: pathlib.Path, entry: StoredArray, shards: Iterable[tuple[Box, np.ndarray]]
) -> Iterator[Any]:
    """Begin to write shards of an array. The futures are done when their files are on disk."""
    store = open_array(directory, entry, write=True).result()
    for box, value in shards:
        yield store[box].write(value, can_reference_source_data_indefinitely=True)


def local_shards(value: Any) -> list[tuple[Box, np.ndarray]]:
    """The shards of an array that this process writes, in host memory: each once, over all processes."""
    if isinstance(value, np.ndarray):
        return (
            [(closed_box((slice(None),) * value.ndim, value.shape), value.copy())] if jax.process_index() == 0 else []
        )
    shards = [s for s in value.addressable_shards if s.replica_id == 0]
    for shard in shards:
        shard.data.copy_to_host_async()
    return [(closed_box(shard.index, value.shape), np.asarray(shard.data)) for shard in shards]


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
    def boxes(self) -> dict[tuple[tuple[int, int], ...], list[Any]]:
        """The devices of this process by the box that they hold, as (start, stop) pairs."""
        if self.on_host:
            return {tuple((0, n) for n in self.entry.shape): jax.local_devices()[:1]}
        found: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.entry.shape).items():
            box = closed_box(index or (), self.entry.shape)
            found.setdefault(tuple((s.start, s.stop) for s in box), []).append(device)
        return found


def read_arrays(directory: pathlib.Path, wanted: Sequence[ArrayRead]) -> list[Any]:
    """Read the shards of arrays that this process's devices hold, each once.

    Raises:
      CheckpointFileError: files that are missing, truncated or changed; all of them, by name.
    """
    limit = _ByteLimit(READ_BYTES)

    def finish(want: ArrayRead, futures: dict[Any, Any]) -> Any:
        try:
            return assemble(want, {key: future.result() for key, future in futures.items()})
        except (ValueError, OSError) as error:
            return damage(directory, want.entry, error)
        finally:
            limit.release(want.entry.nbytes)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        tasks = []
        for want in wanted:
            limit.acquire(want.entry.nbytes)
            tasks.append(pool.submit(finish, want, _reads(directory, want)))
        done = [task.result() for task in tasks]
    problems = {value.what: value for value in done if isinstance(value, Problem)}
    if problems:
        raise CheckpointFileError(list(problems.values()))
    return done


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


def _reads(directory: pathlib.Path, want: ArrayRead) -> dict[Any, Any]:
    entry = want.entry
    if 0 in entry.shape:  # an empty array has no chunks
        return {key: ReadyValue(np.zeros([b - a for a, b in key], want.dtype)) for key in want.boxes}
    try:
        store = open_array(directory, entry).result()
        if jnp.dtype(want.dtype) != entry.numpy_dtype:
            store = need("tensorstore", "checkpoint").cast(store, jnp.dtype(want.dtype).name)
    except (ValueError, OSError) as error:
        return {(): FailedRead(error)}
    return {key: store[tuple(slice(*ends) for ends in key)].read() for key in want.boxes}


@dataclasses.dataclass(frozen=True)
class ReadyValue:
    """A future of a known value."""

    value: np.ndarray

    def result(self) -> np.ndarray:
        """The value."""
        return self.value


@dataclasses.dataclass(frozen=True)
class FailedRead:
    """A future of a read that could not begin."""

    error: Exception

    def result(self) -> Any:
        """Raise the error."""
        raise self.error


def assemble(want: ArrayRead, shards: Mapping[Any, np.ndarray]) -> Any:
    """An array from the shards of `want.boxes`, each copied to the devices that hold it."""
    if want.on_host:
        return next(iter(shards.values()))
    kind = want.sharding.memory_kind
    parts = [
        jax.device_put(shards[key], SingleDeviceSharding(device, memory_kind=kind))
        for key, devices in want.boxes.items()
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(want.entry.shape, want.sharding, parts)


def damage(directory: pathlib.Path, entry: StoredArray, error: Exception) -> Problem:
    """The problem of a file that TensorStore cannot read."""
    text = str(error)
    named = re.search(r'local file "([^"]+)"', text) or re.search(r'Error (?:reading|opening) "([^"]+)"', text)
    where = directory / array_folder(entry.path)
    file = named.group(1) if named and named.group(1) != "zarr3" else f"{where}{os.sep}zarr.json"
    reason = re.sub(r' in local file "[^"]+"|^[A-Z_]+: ', "", text.split(" [")[0]).strip()
    missing = not os.path.exists(file)
    return Problem(
        f"{file} is missing" if missing else f"{file} is damaged",
        where=entry.text,
        why=reason[:300],
        fix="restore another step: checkpoint.steps(path) lists them, checkpoint.verify(path, step) checks all files of one",
    )


def verify_arrays(directory: pathlib.Path, entries: Sequence[StoredArray]) -> list[Problem]:
    """Read every chunk of every array, a file at a time, and return the damaged files."""
    problems: dict[str, Problem] = {}

    def check(future: Any, entry: StoredArray) -> Any:
        try:
            return future().result()
        except (ValueError, OSError) as error:
            found = damage(directory, entry, error)
            problems[found.what] = found
            return None

    for entry in entries:
        if 0 not in entry.shape and (store := check(lambda e=entry: open_array(directory, e), entry)) is not None:
            for box in file_boxes(entry):
                check(lambda s=store, b=box: s[b].read(), entry)
    return list(problems.values())


def file_boxes(entry: StoredArray) -> Iterator[Box]:
    """The box of the array that each of its files holds."""
    ranges = (range(0, n, size) for n, size in zip(entry.shape, entry.chunks.file, strict=True))
    for starts in itertools.product(*ranges):
        yield tuple(slice(start, start + size) for start, size in zip(starts, entry.chunks.file, strict=True))


def bytes_by_device(want: ArrayRead) -> tuple[dict[Any, int], dict[Any, int]]:
    """Bytes of an array that each device holds, and bytes of the chunks that it reads for them; both uncompressed."""
    entry, held, touched = want.entry, {}, {}
    for key, devices in want.boxes.items():
        box = tuple(slice(*ends) for ends in key)
        for device in devices:
            held[device] = int(volume(box) * entry.itemsize)
            touched[device] = int(covering_volume(box, entry.chunks.chunk, entry.shape) * entry.itemsize)
    return held, touched


def raise_write_error(error: BaseException, path: pathlib.Path) -> None:
    """Raise a failed write as an error with a fix; return if `error` is a lack of memory."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        return
    full = any(word in text for word in ("No space left", "File too large", "ENOSPC", "EFBIG", "Disk quota"))
    why = text.split(" [")[0][:400]
    fix = "free disk space, or keep fewer steps with keep=" if full else "check that the folder is writable"
    what = (
        f"{path} is full: the checkpoint could not be written"
        if full
        else f"the checkpoint could not be written to {path}"
    )
    fail(CheckpointFileError, what, why=why, fix=f"{fix}; earlier steps are complete")

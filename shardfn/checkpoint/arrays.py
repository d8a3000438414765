"""Arrays in files: TensorStore's zarr 3, every chunk and every index of chunks with a checksum that reading checks.

The only user of `tensorstore`. An array is a folder: `zarr.json`, and a file for each piece under `c/`. What is read is
what was written, or an error that names the file.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Bytes of arrays that are on their way from disk at any time; a single array may be larger."""

WORKERS = 4
"""Threads that put what was read onto devices."""

COUNTERS = "/tensorstore/kvstore/file/"


def open_array(directory: pathlib.Path, entry: StoredArray, write: bool = False) -> Any:
    """The `tensorstore.TensorStore` of an array in a checkpoint's folder. Its metadata must be what `entry` says."""
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
        "store_data_equal_to_fill_value": True,  # else a chunk of zeros is no chunk, and a lost one is zeros
        "fill_missing_data_reads": False,
        "open": True,
        "create": write,
    }
    return need("tensorstore", "checkpoint").open(spec)


def bytes_read() -> int:
    """Bytes that this process has read from files of arrays since it started, as TensorStore counts them."""
    rows = need("tensorstore", "checkpoint").experimental_collect_matching_metrics(COUNTERS + "bytes_read")
    return sum(int(value["value"]) for row in rows for value in row["values"])


def write_shards(
    directory: pathlib.Path, entry: StoredArray, pieces: Iterable[tuple[Box, np.ndarray]]
) -> Iterator[Any]:
    """Begin to write pieces of an array; the futures are done when their files are on disk."""
    store = open_array(directory, entry, write=True).result()
    for box, value in pieces:
        yield store[box].write(value, can_reference_source_data_indefinitely=True)


def local_shards(value: Any) -> list[tuple[Box, np.ndarray]]:
    """What this process has to write of an array: each piece once, over all processes, in this process's memory."""
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
    """An array to read: its entry, where its pieces go, and the dtype it has then."""

    entry: StoredArray
    sharding: Sharding
    dtype: Any

    @property
    def on_host(self) -> bool:
        """Whether it stays a NumPy array: of 64 bits, while JAX has none, it would lose digits unseen."""
        return jax.dtypes.canonicalize_dtype(self.dtype) != jnp.dtype(self.dtype)

    @property
    def boxes(self) -> dict[tuple[tuple[int, int], ...], list[Any]]:
        """The devices of this process by the piece that they hold, as pairs of start and stop."""
        if self.on_host:
            return {tuple((0, n) for n in self.entry.shape): jax.local_devices()[:1]}
        found: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.entry.shape).items():
            box = closed_box(index or (), self.entry.shape)
            found.setdefault(tuple((s.start, s.stop) for s in box), []).append(device)
        return found


def read_arrays(directory: pathlib.Path, wanted: Sequence[ArrayRead]) -> list[Any]:
    """Read arrays, of each the pieces that this process's devices hold, a piece once.

    Raises:
      CheckpointFileError: files that are missing, cut short or changed; all of them, by name.
    """
    room = _ByteLimit(READ_BYTES)

    def finish(want: ArrayRead, futures: dict[Any, Any]) -> Any:
        try:
            return assemble(want, {key: future.result() for key, future in futures.items()})
        except (ValueError, OSError) as error:
            return damage(directory, want.entry, error)
        finally:
            room.give(want.entry.nbytes)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        tasks = []
        for want in wanted:
            room.take(want.entry.nbytes)
            tasks.append(pool.submit(finish, want, _reads(directory, want)))
        done = [task.result() for task in tasks]
    problems = {value.what: value for value in done if isinstance(value, Problem)}
    if problems:
        raise CheckpointFileError(list(problems.values()))
    return done


class _ByteLimit:
    """Bytes that may be on their way at once. One that asks for more than all has to be alone."""

    def __init__(self, size: int):
        self.size, self.taken = size, 0
        self.changed = threading.Condition()

    def take(self, size: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.taken or self.taken + size <= self.size)
            self.taken += size

    def give(self, size: int) -> None:
        with self.changed:
            self.taken -= size
            self.changed.notify_all()


def _reads(directory: pathlib.Path, want: ArrayRead) -> dict[Any, Any]:
    entry = want.entry
    if 0 in entry.shape:  # nothing of it is on disk
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
    """A value that is here already, as a future."""

    value: np.ndarray

    def result(self) -> np.ndarray:
        return self.value


@dataclasses.dataclass(frozen=True)
class FailedRead:
    """A read that could not begin, as a future."""

    error: Exception

    def result(self) -> Any:
        raise self.error


def assemble(want: ArrayRead, pieces: Mapping[Any, np.ndarray]) -> Any:
    """An array from the pieces of `want.boxes`, each put onto the devices that hold it."""
    if want.on_host:
        return next(iter(pieces.values()))
    kind = want.sharding.memory_kind
    parts = [
        jax.device_put(pieces[key], SingleDeviceSharding(device, memory_kind=kind))
        for key, devices in want.boxes.items()
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(want.entry.shape, want.sharding, parts)


def damage(directory: pathlib.Path, entry: StoredArray, error: Exception) -> Problem:
    """What TensorStore says of a file, with the file's name."""
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
        fix="restore another step: checkpoint.steps(path) lists them, checkpoint.verify(path, step) reads one through",
    )


def verify_arrays(
    directory: pathlib.Path, entries: Sequence[StoredArray], progress: Callable[[], None] | None = None
) -> list[Problem]:
    """Read every chunk of every array, a file at a time, and say what is damaged."""
    problems: dict[str, Problem] = {}
    for entry in entries:
        if 0 not in entry.shape:
            try:
                store = open_array(directory, entry).result()
            except (ValueError, OSError) as error:
                found = damage(directory, entry, error)
                problems[found.what] = found
                continue
            for box in file_boxes(entry):
                try:
                    store[box].read().result()
                except (ValueError, OSError) as error:
                    found = damage(directory, entry, error)
                    problems[found.what] = found
        if progress is not None:
            progress()
    return list(problems.values())


def file_boxes(entry: StoredArray) -> Iterator[Box]:
    """The box of the array that each of its files holds."""
    ranges = (range(0, n, size) for n, size in zip(entry.shape, entry.chunks.file, strict=True))
    for starts in itertools.product(*ranges):
        yield tuple(slice(start, start + size) for start, size in zip(starts, entry.chunks.file, strict=True))


def bytes_by_device(want: ArrayRead) -> tuple[dict[Any, int], dict[Any, int]]:
    """By device, bytes it holds of an array, and bytes of the chunks that hold them, both unpacked."""
    entry, held, touched = want.entry, {}, {}
    for key, devices in want.boxes.items():
        box = tuple(slice(*ends) for ends in key)
        for device in devices:
            held[device] = int(volume(box) * entry.itemsize)
            touched[device] = int(covering_volume(box, entry.chunks.chunk, entry.shape) * entry.itemsize)
    return held, touched


def raise_write_error(error: BaseException, path: pathlib.Path) -> None:
    """Raise what a failed write means to a user; return where it is no failed write."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        return
    full = any(word in text for word in ("No space left", "File too large", "ENOSPC", "EFBIG", "Disk quota"))
    why = text.split(" [")[0][:400]
    fix = "make room, or keep fewer steps with keep=; what was saved before is whole" if full else (
        "see that the folder can be written to; what was saved before is whole")  # fmt: skip
    what = (
        f"{path} is full: the checkpoint could not be written"
        if full
        else f"the checkpoint could not be written to {path}"
    )
    fail(CheckpointFileError, what, why=why, fix=fix)

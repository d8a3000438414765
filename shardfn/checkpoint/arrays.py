"""Arrays on disk: TensorStore's zarr 3, with a checksum for every chunk and every index of chunks.

The only user of `tensorstore`. An array is a folder with `zarr.json`, and a file for each shard under `c/`. A read returns
what was written, or raises an error that names the file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from shardfn.checkpoint.chunks import Box, box_shape, boxes, closed_box, covering_volume, full_box, volume
from shardfn.checkpoint.contents import StoredArray
from shardfn.checkpoint.fingerprints import METADATA, files_of_boxes
from shardfn.checkpoint.state_tree import array_folder
from shardfn.errors import CheckpointFileError, Problem, ShardError, fail
from shardfn.regular_files import check_regular
from shardfn.runtime.extras import need

READ_BYTES = 1 << 30
"""Most bytes of arrays that are being read at any time; a single array may be larger."""

WORKERS = 4
"""Threads that copy arrays to devices."""

COUNTERS = "/tensorstore/kvstore/file/"


def open_array(directory: pathlib.Path, entry: StoredArray, *, write: bool = False, dtype: Any = None) -> Any:
    """The `tensorstore.TensorStore` of an array, which casts to `dtype`; its metadata must agree with `entry`."""
    if not write:
        check_regular(directory / array_folder(entry.path) / METADATA)
    store = _opening(directory, entry, write).result()
    if dtype is None or jnp.dtype(dtype) == entry.numpy_dtype:
        return store
    return need("tensorstore", "checkpoint").cast(store, jnp.dtype(dtype).name)


def begin_read(store: Any, directory: pathlib.Path, entry: StoredArray, box: Box) -> Any:
    """The future of the values of a box of an open array.

    Raises:
      OSError: a file that it needs is a pipe or a device: TensorStore would wait for it.
    """
    for name in files_of_boxes(entry, [box]):
        check_regular(directory / name)
    return store[box].read()


def _opening(directory: pathlib.Path, entry: StoredArray, write: bool) -> Any:
    """The future of an array's `TensorStore`."""
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": entry.chunks.chunk,
        "codecs": [index_codecs[0], {"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}],
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


def write_arrays(
    directory: pathlib.Path, wanted: Iterable[tuple[StoredArray, Iterable[tuple[Box, np.ndarray]]]]
) -> None:
    """Write shards of arrays, all at once: each file waits for the disk. They are on disk when this returns.

    Raises:
      ValueError, OSError: the first error; no file is being written any more.
    """
    opening = [(_opening(directory, entry, True), shards) for entry, shards in wanted]
    writing = [
        store.result()[box].write(value, can_reference_source_data_indefinitely=True)
        for store, shards in opening
        if store.exception() is None
        for box, value in shards
    ]
    futures = [*(store for store, _ in opening), *writing]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def local_shards(value: Any) -> list[tuple[Box, np.ndarray]]:
    """The shards of an array that this process writes, in host memory: each once, over all processes."""
    if isinstance(value, np.ndarray):
        return [(full_box(value.shape), value.copy())] if jax.process_index() == 0 else []
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


def read_arrays(directory: pathlib.Path, wanted: Sequence[ArrayRead]) -> list[Any]:
    """Read the shards of arrays that this process's devices hold, each once.

    Raises:
      CheckpointFileError: files that are missing, truncated or changed; all of them, by name.
    """
    limit = _ByteLimit(READ_BYTES)

    def finish(want: ArrayRead, reads: Sequence[Callable[[], np.ndarray]] | Exception) -> Any:
        try:
            if isinstance(reads, Exception):
                raise reads
            return assemble(want, [read() for read in reads])
        except (ValueError, OSError) as error:
            return damage(directory, want.entry, error)
        finally:
            limit.release(want.entry.nbytes)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        tasks = []
        for want in wanted:
            limit.acquire(want.entry.nbytes)
            tasks.append(pool.submit(finish, want, _begin(directory, want)))
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


def _begin(directory: pathlib.Path, want: ArrayRead) -> list[Callable[[], np.ndarray]] | Exception:
    """Begin to read the boxes of an array: for each a function that waits for its values; the error where none can begin."""
    if 0 in want.entry.shape:  # an empty array has no chunks
        return [functools.partial(np.zeros, box_shape(box), want.dtype) for box, _ in want.boxes]
    try:
        store = open_array(directory, want.entry, dtype=want.dtype)
        return [begin_read(store, directory, want.entry, box).result for box, _ in want.boxes]
    except (ValueError, OSError) as error:
        return error


def assemble(want: ArrayRead, shards: Sequence[np.ndarray]) -> Any:
    """An array from the values of `want.boxes`, each copied to the devices that hold it."""
    if want.on_host:
        return shards[0]
    kind = want.sharding.memory_kind
    parts = [
        jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind))
        for shard, (_, devices) in zip(shards, want.boxes, strict=True)
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(want.entry.shape, want.sharding, parts)


def damage(directory: pathlib.Path, entry: StoredArray, error: Exception) -> Problem:
    """The problem of a file that TensorStore cannot read."""
    text = str(error)
    named = re.match(r"(.+) is a (?:folder|pipe)", text) or re.search(r'local file "([^"]+)"', text)
    named = named or re.search(r'Error (?:reading|opening) "([^"]+)"', text)
    where = directory / array_folder(entry.path)
    file = named.group(1) if named and named.group(1) != "zarr3" else f"{where}{os.sep}zarr.json"
    reason = re.sub(r' in local file "[^"]+"|^[A-Z_]+: ', "", text.split(" [")[0]).strip()
    return Problem(
        f"{file} is {'damaged' if os.path.exists(file) else 'missing'}",
        where=entry.text,
        why=reason[:300],
        fix="restore another step: checkpoint.steps(path) lists them, checkpoint.verify(path, step) checks all files of one",
    )


def verify_arrays(directory: pathlib.Path, entries: Sequence[StoredArray]) -> list[Problem]:
    """Read every chunk of every array, a file at a time, and return the damaged files."""
    problems: dict[str, Problem] = {}

    @contextlib.contextmanager
    def noting(entry: StoredArray) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            found = damage(directory, entry, error)
            problems[found.what] = found

    for entry in entries:
        if 0 not in entry.shape:
            with noting(entry):
                store = open_array(directory, entry)
                for box in boxes(entry.shape, entry.chunks.file):
                    with noting(entry):
                        begin_read(store, directory, entry, box).result()
    return list(problems.values())


def bytes_by_device(want: ArrayRead) -> tuple[dict[Any, int], dict[Any, int]]:
    """Bytes of an array that each device holds, and bytes of the chunks that it reads for them; both uncompressed."""
    entry, held, touched = want.entry, {}, {}
    for box, devices in want.boxes:
        for device in devices:
            held[device] = int(volume(box) * entry.itemsize)
            touched[device] = int(covering_volume(box, entry.chunks.chunk, entry.shape) * entry.itemsize)
    return held, touched


@contextlib.contextmanager
def read_errors(directory: pathlib.Path, entry: StoredArray) -> Iterator[None]:
    """Raise TensorStore's errors about an array in `directory` as errors that name the damaged file."""
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, ShardError) or os.fspath(directory) not in str(error):
            raise
        raise CheckpointFileError(damage(directory, entry, error)) from None


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
             why=text.split(" [")[0][:400], fix=f"{fix}; earlier steps are complete")  # fmt: skip

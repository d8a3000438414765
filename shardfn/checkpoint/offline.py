"""Copy and verify checkpoints without their devices, in bounded memory: `relayout`, `merge`, `verify`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from shardfn import layoutfile
from shardfn.checkpoint import arrays, reader, targets
from shardfn.checkpoint.chunks import Box, boxes, choose_chunks, volume
from shardfn.checkpoint.contents import FILE, Contents, StoredArray, contents_to_json
from shardfn.checkpoint.fingerprints import changed_files, file_fingerprints
from shardfn.checkpoint.step_folders import ITEM, StrPath, absolute_path, open_step, steps, write_text
from shardfn.checkpoint.writer import LAYOUT, stored_sharding
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, fail, raise_problems
from shardfn.frontend.byte_sizes import bytes_of
from shardfn.layoutfile.files import sync_folder
from shardfn.layoutfile.toml import to_toml
from shardfn.planning.layout_rules import LayoutFile

MEMORY = 512 << 20
"""The default bound on the memory of a copy, beyond what the process holds when it starts."""

SHARE = 16
"""A box has at most this fraction of the bound: it is in memory as read, as written and compressed, twice over."""

ORBAX = "_CHECKPOINT_METADATA"
"""Orbax stores its metadata there, and warns about steps without it."""

BoxReader = Callable[[Box], np.ndarray]
"""From a box of an array to its values."""


@dataclasses.dataclass(frozen=True)
class CopyResult:
    """A finished copy.

    Attributes:
      path: the folder of the new step.
      step: its number.
      arrays: the number of arrays.
      nbytes: their bytes, uncompressed.
      devices: the device count of the new sharding.
    """

    path: pathlib.Path
    step: int
    arrays: int
    nbytes: int
    devices: int

    def __str__(self) -> str:
        return (f"{self.path}: step {self.step}, {self.arrays} arrays, {self.nbytes:,} B, "
                f"sharded for {self.devices} device{'s'[: self.devices != 1]}")  # fmt: skip


def relayout(
    source: StrPath,
    target: StrPath,
    layout: Any,
    *,
    devices: int | None = None,
    step: int | None = None,
    only: reader.Globs = None,
    name_map: reader.Names = None,
    dtype: Any = None,
    memory: int | str = MEMORY,
) -> CopyResult:
    """Copy a checkpoint with the shardings of a layout, in bounded memory and without its devices.

    `restore` reads a checkpoint under any sharding. A copy whose files match the shards of the devices is read fastest,
    and `restore` then needs no target.

    Args:
      source: the folder of a checkpoint.
      target: another folder; the step keeps its number.
      layout: a plan, a layout file or the name of a recipe.
      devices: the device count, where the layout leaves the size of an axis open.
      step: which step; the last if None.
      only: as in `restore`.
      name_map: as in `restore`.
      dtype: as in `restore`.
      memory: most bytes in memory at once, as a number or as "256MiB".

    Returns:
      What was written.

    Raises:
      CheckpointError: there is no such step, or the target has it already.
      CheckpointFileError: damaged files, by name; a full disk. The target gets no partial step.
      ShardError: the layout does not fit the arrays.

    >>> import os, shardfn, tempfile, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> plan = shardfn.plan(jnp.tanh, jnp.ones((8, 4)), in_strategy=((2, 1),), device="cpu:2")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run, pod, layout = (os.path.join(folder, name) for name in ("run", "pod", "layout.toml"))
    ...     plan.save(layout)
    ...     _ = checkpoint.save(run, {"x": jnp.ones((8, 4))})
    ...     checkpoint.relayout(run, pod, layout).arrays
    1
    """
    return _copy(source, target, step, only, name_map, dtype, memory, layoutfile.read_layout(layout), devices)


def merge(
    source: StrPath, target: StrPath, *, step: int | None = None, only: reader.Globs = None, name_map: reader.Names = None,
    dtype: Any = None, memory: int | str = MEMORY,
) -> CopyResult:  # fmt: skip
    """Copy a checkpoint with every array unsharded, for one device.

    Args:
      source: the folder of a checkpoint.
      target: another folder; the step keeps its number.
      step: which step; the last if None.
      only: globs of the arrays to copy, as in `restore`.
      name_map: new paths by stored ones, as in `restore`.
      dtype: what floating-point arrays are cast to, as in `restore`.
      memory: most bytes in memory at once, as in `relayout`.

    Returns:
      What was written.

    Raises:
      CheckpointError, CheckpointFileError: as `relayout`.

    >>> import os, tempfile, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.save(os.path.join(folder, "run"), {"w": jnp.ones((8, 4)), "b": jnp.ones(4)})
    ...     checkpoint.merge(os.path.join(folder, "run"), os.path.join(folder, "one"), only="w").arrays
    1
    """
    return _copy(source, target, step, only, name_map, dtype, memory, None, None)


def _copy(
    source: Any, target: Any, step: int | None, only: Any, name_map: Any, dtype: Any, memory: int | str,
    layout: LayoutFile | None, devices: int | None,
) -> CopyResult:  # fmt: skip
    bound = memory_bytes(memory)
    folder, step, contents = open_step(source, step)
    chosen = reader.choose_arrays(contents, None, only, name_map, dtype)
    readers = (box_reader(folder, row) for row in chosen)
    return write_copy(target, step, [new for _, new in chosen], readers, layout, devices, bound)


def box_reader(folder: pathlib.Path, row: reader.Renamed) -> BoxReader:
    """Reads boxes of a stored array in its new dtype; the array is opened with the first."""
    store = functools.cache(lambda: arrays.open_array(folder, row.stored, dtype=row.new.dtype))

    def read(box: Box) -> np.ndarray:
        with arrays.read_errors(folder, row.stored):
            return arrays.begin_read(store(), folder, row.stored, box).result()

    return read


def write_copy(
    target: Any, step: int, entries: Sequence[StoredArray], readers: Iterable[BoxReader],
    layout: LayoutFile | None, devices: int | None, bound: int,
) -> CopyResult:  # fmt: skip
    """Write arrays as a new step.

    Args:
      target: the folder of the steps.
      step: its number.
      entries: the arrays, under their new paths.
      readers: the reader of each.
      layout: the shardings; None leaves every array unsharded.
      devices: the device count; None is that of the layout's mesh.
      bound: most bytes in memory.

    Raises:
      CheckpointError: the layout leaves the size of an axis open, and `devices` is None.
    """
    count = 1 if layout is None else _device_count(layout) if devices is None else devices
    described = _described(entries, layout, count, bound)
    with new_step(target, step) as (out, commit):
        for entry, read in zip(described.entries, readers, strict=True):
            if 0 not in entry.shape:
                _copy_array(out, entry, read, bound)
        commit(described)
    return CopyResult(absolute_path(target), step, len(described.entries), described.nbytes, count)


def _device_count(layout: LayoutFile) -> int:
    for name, size in layout.mesh:
        if size is None:
            fail(CheckpointError, f"the layout leaves the size of its axis `{name}` open", where=layout.name,
                 why="its size is what the device count leaves, which is unknown here",
                 fix="give the device count: devices=8, --devices 8")  # fmt: skip
    return math.prod(size or 1 for _, size in layout.mesh)


def _described(entries: Sequence[StoredArray], layout: LayoutFile | None, devices: int, bound: int) -> Contents:
    """The description of arrays under the shardings of a layout file, unsharded if it is None; `bound` in bytes."""
    shown = [entry.without_key_data for entry in entries]
    found = targets.layout_targets(shown, layout, None, devices) if layout is not None else {}
    most, rows = bound // SHARE, []
    for entry in entries:
        order = None if layout is None else layout.order
        mesh, strategy, spec = stored_sharding(entry.shape, found.get(entry.path), order)
        chunks = choose_chunks(entry.shape, strategy, entry.itemsize, max(most, 1 << 16), most)
        rows.append(dataclasses.replace(entry, strategy=strategy, spec=spec, mesh=mesh, chunks=chunks))
    return Contents(tuple(rows), devices)


def memory_bytes(memory: int | str) -> int:
    """The bytes of a memory bound, given as a number or as text.

    Raises:
      CheckpointError: it is not a size, or below 1 MiB.

    >>> memory_bytes("256MiB")
    268435456
    """
    found = bytes_of(memory, "memory")
    if isinstance(found, Problem):
        raise CheckpointError(found)
    if found < 1 << 20:
        fail(CheckpointError, f"`memory` is {memory!r:.40}", why="a copy needs a few chunks of a MiB at once",
             fix='write bytes, 1 MiB or more: memory="256MiB"')  # fmt: skip
    return int(found)


def _copy_array(out: pathlib.Path, entry: StoredArray, read: BoxReader, bound: int) -> None:
    """Write one array, a file at a time. Boxes that are still being written hold at most a fraction of `bound` together."""
    store = arrays.open_array(out, entry, write=True)
    waiting: collections.deque[tuple[Any, int]] = collections.deque()
    held = 0
    for box in boxes(entry.shape, entry.chunks.file):
        size = int(volume(box) * entry.itemsize) + 1
        while waiting and held + size > bound // SHARE:
            future, done = waiting.popleft()
            future.result()
            held -= done
        waiting.append((store[box].write(read(box), can_reference_source_data_indefinitely=True), size))
        held += size
    for future, _ in waiting:
        future.result()


Commit = Callable[[Contents], None]


@contextlib.contextmanager
def new_step(path: Any, step: int) -> Iterator[tuple[pathlib.Path, Commit]]:
    """A new folder for a step, and a function that commits it. Without a commit the folder is deleted.

    Raises:
      CheckpointError: the step exists already.
    """
    parent = absolute_path(path)
    if step in steps(parent):
        fail(CheckpointError, f"step {step} exists already", where=f"{parent}", why="steps are never overwritten",
             fix="write to another folder")  # fmt: skip
    part = parent / f"{step}.part.{os.getpid()}"

    def commit(contents: Contents) -> None:
        layout = targets.stored_layout(contents)
        if layout is not None:
            write_text(part / ITEM / LAYOUT, to_toml(layout))
        files = file_fingerprints(part / ITEM, contents.entries, () if layout is None else (LAYOUT,))
        write_text(part / ITEM / FILE, contents_to_json(dataclasses.replace(contents, files=files)))
        (part / ORBAX).write_text("{}\n")
        os.rename(part, parent / str(step))
        with contextlib.suppress(OSError):  # the new name must reach the disk, too
            sync_folder(parent)

    try:
        with arrays.write_errors(parent, (OSError, ValueError)):
            (part / ITEM).mkdir(parents=True)
            yield part / ITEM, commit
    finally:
        shutil.rmtree(part, ignore_errors=True)


def verify(path: StrPath, step: int | None = None) -> None:
    """Read and check every byte of a checkpoint, a file at a time.

    Each file must be the one that was saved: an intact file of another step or shard is an error too.

    Args:
      path: the folder that `save` was called with.
      step: which step; the last if None.

    Raises:
      CheckpointError: there is no such step.
      CheckpointFileError: files that are missing, truncated or changed, all of them, by name.

    >>> import tempfile, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.save(folder, {"w": jnp.ones((8, 4))})
    ...     checkpoint.verify(folder)  # every byte is right
    """
    folder, _, contents = open_step(path, step)
    problems = arrays.verify_arrays(folder, contents.entries)
    problems += changed_files(folder, contents, [problem.what for problem in problems])
    raise_problems(problems, CheckpointFileError)

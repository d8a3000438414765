"""Copy and verify checkpoints without their devices, in bounded memory: `relayout`, `merge`, `verify`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from shardfn import layoutfile
from shardfn.checkpoint import arrays, reader, state_tree, targets
from shardfn.checkpoint.catalogue import SUMS
from shardfn.checkpoint.chunks import Box, boxes, by_chunk, choose_chunks
from shardfn.checkpoint.contents import StoredArray
from shardfn.checkpoint.step_folders import (
    StrPath,
    absolute_path,
    check_free,
    folder_for_writing,
    open_step,
    read_stored_layout,
    steps,
)
from shardfn.checkpoint.writer import stored_sharding
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, fail, raise_problems
from shardfn.frontend.byte_sizes import bytes_of
from shardfn.planning.layout_rules import LayoutFile
from shardfn.runtime.extras import need

MEMORY = 512 << 20
"""The default bound on the memory of a copy, beyond what the process holds when it starts."""

SHARE = 24
"""A box has at most this fraction of the bound: it is in memory as read, as written and compressed, twice over."""

SMALL_FILE = 1 << 16
"""Bytes below which more files of a copy would cost more than they save."""

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
      layout: a plan, a layout file or the name of a recipe; every array unsharded if None.
      devices: the device count, where the layout leaves the size of an axis open.
      step: which step; the last if None.
      only: as in `restore`.
      name_map: as in `restore`.
      dtype: as in `restore`.
      memory: most bytes in memory at once, as a number or as "256MiB". A chunk that is larger, of a checkpoint that Orbax wrote
        by itself, is decoded as a whole: it takes what it needs.

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
    bound = memory_bytes(memory)
    read = None if layout is None else layoutfile.read_layout(layout)
    folder, step, contents = open_step(source, step)
    chosen = reader.choose_arrays(contents, None, only, name_map, dtype)
    empty = reader.empty_nodes(contents, chosen, name_map)
    readers = functools.partial(box_readers, folder, chosen)
    return write_copy(target, step, [new for _, new in chosen], readers, read, devices, bound, empty)


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
    return relayout(source, target, None, step=step, only=only, name_map=name_map, dtype=dtype, memory=memory)


def box_readers(
    folder: pathlib.Path, rows: Sequence[reader.Renamed], parts: Sequence[Sequence[Box]]
) -> list[BoxReader]:
    """The readers of stored arrays, for some boxes of each. They keep decoded the chunks that the next box needs again."""
    kept = (arrays.cached_bytes(row.stored, boxes_of) for row, boxes_of in zip(rows, parts, strict=True))
    context = arrays.cache(max(kept, default=0))
    return [_box_reader(folder, row, context) for row in rows]


def _box_reader(folder: pathlib.Path, row: reader.Renamed, context: Any) -> BoxReader:
    """Reads boxes of a stored array in its new dtype; the array is opened with the first."""
    store = functools.cache(lambda: arrays.open_arrays(folder, [row.stored], context)[0].result())

    def read(box: Box) -> np.ndarray:
        try:
            return arrays.as_dtype(np.asarray(store()[box].read().result()), row.new.numpy_dtype)
        except (ValueError, OSError) as error:
            raise CheckpointFileError(arrays.damage(folder, row.stored, error)) from None

    return read


def write_copy(
    target: Any, step: int, entries: Sequence[StoredArray], readers: Callable[[Sequence[Sequence[Box]]], Sequence[BoxReader]],
    layout: LayoutFile | None, devices: int | None, bound: int, empty: Mapping[state_tree.Keys, Any] = MappingProxyType({}),
) -> CopyResult:  # fmt: skip
    """Write arrays as a new step.

    Args:
      target: the folder of the steps.
      step: its number.
      entries: the arrays, under their new paths, with the chunks that they are read from.
      readers: from the boxes of each array that will be read to its reader.
      layout: the shardings; None leaves every array unsharded.
      devices: the device count; None is that of the layout's mesh.
      bound: most bytes in memory.
      empty: the nodes without arrays, by their places.

    Raises:
      CheckpointError: the layout leaves the size of an axis open, and `devices` is None; a job of several processes.
    """
    state_tree.check_stored({entry.path: entry.dtype for entry in entries}, "the copy")
    count = 1 if layout is None else _device_count(layout) if devices is None else devices
    need("orbax.checkpoint", "checkpoint")
    if jax.process_count() > 1:
        fail(CheckpointError, f"this job has {jax.process_count()} processes, and a copy is written by one",
             why="the processes of a job save together",
             fix="copy in a program of its own, such as `shardfn checkpoint relayout`")  # fmt: skip
    from shardfn.checkpoint import orbax_arrays, orbax_store

    described = _described(entries, layout, count, bound)
    sources, parts = {}, [by_chunk(boxes(new.shape, new.chunks.file), old.chunks.chunk)
                          for old, new in zip(entries, described, strict=True)]  # fmt: skip
    for entry, part, read in zip(described, parts, readers(parts), strict=True):
        boxes_of = [(box, functools.partial(read, box)) for box in part]
        sources[entry.keys] = orbax_arrays.source_of(entry, boxes_of, orbax_arrays.stored_text(entry.mesh, entry.spec))
    folder = folder_for_writing(target)
    if step in steps(folder):
        fail(CheckpointError, f"step {step} exists already", where=f"{folder}", why="steps are never overwritten",
             fix="write to another folder")  # fmt: skip
    check_free(folder / str(step))
    kept = targets.stored_layout(described)
    saved = orbax_store.Saved(state_tree.nested({**sources, **empty}), kept, count, in_flight=bound // SHARE)
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        with arrays.write_errors(folder, (OSError, ValueError)):
            folder.mkdir(parents=True, exist_ok=True)
            orbax_store.begin(folder, step, saved, None, None).wait()
    except BaseException:
        for parent in new:
            with contextlib.suppress(OSError):  # it is not empty, or never was made
                parent.rmdir()
        raise
    return CopyResult(folder, step, len(described), sum(entry.nbytes for entry in described), count)


def _device_count(layout: LayoutFile) -> int:
    for name, size in layout.mesh:
        if size is None:
            fail(CheckpointError, f"the layout leaves the size of its axis `{name}` open", where=layout.name,
                 why="its size is what the device count leaves, which is unknown here",
                 fix="give the device count: devices=8, --devices 8")  # fmt: skip
    return math.prod(size or 1 for _, size in layout.mesh)


def _described(
    entries: Sequence[StoredArray], layout: LayoutFile | None, devices: int, bound: int
) -> list[StoredArray]:
    """The description of arrays under the shardings of a layout file, unsharded if it is None; `bound` in bytes."""
    shown = [entry.without_key_data for entry in entries]
    found = targets.layout_targets(shown, layout, None, devices) if layout is not None else {}
    most, rows = bound // SHARE, []
    for entry in entries:
        order = None if layout is None else layout.order
        mesh, strategy, spec = stored_sharding(entry.shape, found.get(entry.path), order)
        files = _within_chunks(entry, strategy, most)
        chunks = choose_chunks(entry.shape, files, entry.itemsize, max(most, SMALL_FILE), most)
        rows.append(dataclasses.replace(entry, strategy=strategy, spec=spec, mesh=mesh, chunks=chunks))
    return rows


def _within_chunks(entry: StoredArray, strategy: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The number of blocks of each dimension such that none is in two shards, nor in two chunks that the array is read from.

    Chunks of up to `most` bytes do not count: they may be read twice.
    """
    if math.prod(entry.chunks.chunk) * entry.itemsize <= most:
        return strategy
    sizes = (
        math.gcd(n // parts, chunk) for n, parts, chunk in zip(entry.shape, strategy, entry.chunks.chunk, strict=True)
    )
    blocks = tuple(n // size if size else 1 for n, size in zip(entry.shape, sizes, strict=True))
    return blocks if entry.nbytes / math.prod(blocks) >= min(most, SMALL_FILE) else strategy


def memory_bytes(
    memory: int | str, name: str = "memory", why: str = "a copy needs a few chunks of a MiB at once"
) -> int:
    """The bytes of a bound, given as a number or as text; `why` it may not be smaller than 1 MiB.

    Raises:
      CheckpointError: it is not a size, or below 1 MiB.

    >>> memory_bytes("256MiB")
    268435456
    """
    found = bytes_of(memory, name)
    if isinstance(found, Problem):
        raise CheckpointError(found)
    if found < 1 << 20:
        fail(
            CheckpointError, f"`{name}` is {memory!r:.40}", why=why, fix=f'write bytes, 1 MiB or more: {name}="256MiB"'
        )
    return int(found)


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """A checkpoint that could be read completely.

    Attributes:
      path: the folder that `save` was called with.
      step: the step.
      arrays: the number of arrays.
      has_checksums: whether checksums of all bytes were compared. Orbax by itself writes none of most arrays: a changed value is
        not noticed there.
    """

    path: pathlib.Path
    step: int
    arrays: int
    has_checksums: bool

    def __str__(self) -> str:
        found = "every checksum is right" if self.has_checksums else "all arrays could be read; shardfn did not write it, " \
                "so it has no checksums that would show changed values"  # fmt: skip
        return f"{self.path}: step {self.step}, complete, {found}"


def verify(path: StrPath, step: int | None = None) -> VerifyResult:
    """Read and check every array of a checkpoint, a file at a time, and its layout file.

    Args:
      path: the folder that `save` was called with.
      step: which step; the last if None.

    Returns:
      What was read, and whether it has checksums.

    Raises:
      CheckpointError: there is no such step.
      CheckpointFileError: arrays that are missing or damaged, all of them, by name; a missing or damaged layout file.

    >>> import tempfile, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.save(folder, {"w": jnp.ones((8, 4))})
    ...     checkpoint.verify(folder).has_checksums  # every byte is right
    True
    """
    folder, step, contents = open_step(path, step)
    problems = arrays.verify_arrays(folder, contents.entries)
    if contents.layout is not None:
        try:
            read_stored_layout(contents.layout)
        except CheckpointFileError as error:
            problems += error.problems
    raise_problems(problems, CheckpointFileError)
    return VerifyResult(absolute_path(path), step, len(contents.entries), (folder / SUMS).is_file())

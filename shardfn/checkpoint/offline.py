"""Checkpoints copied without devices, a box at a time: into another layout, onto one device, under other names."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from shardfn import layoutfile
from shardfn.checkpoint import arrays, reader, targets
from shardfn.checkpoint.chunks import Box, choose_chunks, volume
from shardfn.checkpoint.contents import FILE, Contents, StoredArray, StoredMesh, contents_to_json
from shardfn.checkpoint.fingerprints import changed_files, file_fingerprints
from shardfn.checkpoint.step_folders import ITEM, absolute_path, open_step, steps
from shardfn.checkpoint.writer import LAYOUT
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, ShardError, fail
from shardfn.frontend.byte_sizes import bytes_of
from shardfn.frontend.meshes import spec_of
from shardfn.layoutfile.toml import to_toml
from shardfn.planning.layout_rules import LayoutFile
from shardfn.planning.plan import Plan
from shardfn.runtime.extras import need

MEMORY = 512 << 20
"""The default bound on what a copy holds in memory, beyond what the process has when it starts."""

SHARE = 16
"""A box is at most this part of the bound: it is in memory as it is read, as it is written, and packed, twice over."""

ORBAX = "_CHECKPOINT_METADATA"
"""Orbax keeps notes of its own on a step there, and speaks up where a later save finds a step without any."""

BoxReader = Callable[[Box], Any]
"""A box of an array to a future of its values."""


@dataclasses.dataclass(frozen=True)
class CopyResult:
    """What a copy has done: the step that it wrote, its arrays and bytes, and on how many devices it would lie."""

    path: pathlib.Path
    step: int
    arrays: int
    nbytes: int
    devices: int

    def __str__(self) -> str:
        return (f"{self.path}: step {self.step}, {self.arrays} arrays, {self.nbytes:,} B, "
                f"laid out for {self.devices} device{'s'[: self.devices != 1]}")  # fmt: skip


def relayout(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    layout: Any,
    *,
    devices: int | None = None,
    step: int | None = None,
    only: reader.Globs = None,
    name_map: Mapping[str, str] | None = None,
    dtype: Any = None,
    memory: int | str = MEMORY,
) -> CopyResult:
    """Copy a checkpoint into another layout, without its devices and without all of it in memory.

    A checkpoint can be restored into any layout as it is. A copy whose files are cut as the devices want them is read
    fastest, and `restore` without a target needs no layout then.

    Args:
      source: the folder of a checkpoint.
      target: another folder; the step keeps its number there.
      layout: a plan, a layout file or the name of a recipe.
      devices: how many devices it is for, where the layout leaves the size of an axis open.
      step: which step; the last if None.
      only, name_map, dtype: as in `restore`.
      memory: bytes, or as "256MiB", that the copy may hold at once.

    Raises:
      CheckpointError: no such step, or one that is in the target already.
      CheckpointFileError: damaged files, by name; a full disk. Nothing is left in the target then.
      ShardError: a layout that does not fit the arrays.
    """
    grid = as_layout_file(layout)
    count = devices if devices is not None else device_count(grid)
    return _copied(source, target, step, only, name_map, dtype, memory, grid, count)


def merge(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    only: reader.Globs = None,
    name_map: Mapping[str, str] | None = None,
    dtype: Any = None,
    memory: int | str = MEMORY,
) -> CopyResult:
    """Copy a checkpoint onto one device: every array whole. Arguments and errors as of `relayout`."""
    return _copied(source, target, step, only, name_map, dtype, memory, None, 1)


def as_layout_file(layout: Any) -> LayoutFile:
    """The layout file that a plan, a path or a name stands for."""
    return targets.plan_layout(layout) if isinstance(layout, Plan) else layoutfile.read_layout(layout)


def device_count(layout: LayoutFile) -> int:
    """How many devices a layout is for, by its grid."""
    total = 1
    for name, size in layout.mesh:
        if size is None:
            fail(
                CheckpointError,
                f"the layout leaves the size of its axis `{name}` open",
                where=layout.name,
                why="it is what is left of the devices, and none are asked here",
                fix="say how many: devices=8, --devices 8",
            )
        total *= size
    return total


def _copied(
    source: Any, target: Any, step: int | None, only: Any, name_map: Any, dtype: Any, memory: int | str, layout: Any, count: int
) -> CopyResult:  # fmt: skip
    need("tensorstore", "checkpoint")
    bound = memory_bytes(memory)
    folder, step, contents = open_step(source, step)
    one = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    chosen = reader.choose_arrays(contents, one, None, only, name_map, dtype)
    renamed = [dataclasses.replace(row.entry, path=row.path, keys=row.keys, dtype=str(row.dtype)) for row in chosen]
    laid = copy_contents(renamed, layout, count, bound)

    def read_with(row: reader.RestoredArray) -> BoxReader:
        store = arrays.open_array(folder, row.entry).result()
        if str(row.dtype) != row.entry.dtype:
            store = need("tensorstore", "checkpoint").cast(store, str(row.dtype))
        return lambda box: store[box].read()

    with new_step(target, step) as (out, commit):
        for row, entry in zip(chosen, laid.entries, strict=True):
            with _named(folder, row.entry):
                copy_array(out, entry, read_with(row) if 0 not in entry.shape else None, bound)
        commit(laid)
    return CopyResult(absolute_path(target), step, len(laid.entries), laid.nbytes, count)


@contextlib.contextmanager
def _named(folder: pathlib.Path, entry: StoredArray) -> Iterator[None]:
    """An error of the store, with the file it speaks of."""
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, CheckpointFileError):
            raise
        if os.fspath(folder) not in str(error):  # then it is of the copy, not of the original
            arrays.raise_write_error(error, folder)
        raise CheckpointFileError(arrays.damage(folder, entry, error)) from None


def copy_contents(entries: Sequence[StoredArray], layout: Any, devices: int, bound: int) -> Contents:
    """The description of arrays as a layout file lays them out, whole where it is None."""
    grids: dict[StoredMesh, int] = {}
    seen = [entry.seen for entry in entries]
    found = targets.layout_targets(seen, layout, None, devices) if layout is not None else {}
    rows = []
    for entry in entries:
        sharding, ndim = found.get(entry.path), len(entry.shape)
        grid, cuts, spec = StoredMesh(()), (1,) * ndim, ((),) * ndim
        if layout is not None and sharding is not None and devices > 1:
            grid = StoredMesh(tuple(sharding.mesh.shape.items()), layout.order)
            spec = spec_of(sharding.spec, ndim)
            piece = sharding.shard_shape(entry.shape)
            cuts = tuple(n // p if p else 1 for n, p in zip(entry.shape, piece, strict=True))
        cut = choose_chunks(entry.shape, cuts, entry.itemsize, max(bound // SHARE, 1 << 16), bound // SHARE) if (
            0 not in entry.shape) else entry.chunks  # fmt: skip
        number = grids.setdefault(grid, len(grids))
        rows.append(dataclasses.replace(entry, cuts=cuts, spec=spec, grid=number, chunks=cut))
    return Contents(tuple(rows), tuple(grids) or (StoredMesh(()),), devices, 1)


def memory_bytes(memory: int | str) -> int:
    """Bytes of a bound, from a number or as people write it.

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


def copy_array(out: pathlib.Path, entry: StoredArray, read: BoxReader | None, bound: int) -> None:
    """Write one array, a file of it after the other, reading boxes as they are wanted.

    Boxes that are on their way hold a part of the bound together; of small arrays there are several.
    """
    if read is None:
        return
    store = arrays.open_array(out, entry, write=True).result()
    waiting: collections.deque[tuple[Any, int]] = collections.deque()
    held = 0
    for box in arrays.file_boxes(entry):
        size = int(volume(box) * entry.itemsize) + 1
        while waiting and held + size > bound // SHARE:
            future, done = waiting.popleft()
            future.result()
            held -= done
        waiting.append((store[box].write(read(box).result(), can_reference_source_data_indefinitely=True), size))
        held += size
    for future, _ in waiting:
        future.result()


Commit = Callable[[Contents], None]


@contextlib.contextmanager
def new_step(path: Any, step: int, layout: Any = None) -> Iterator[tuple[pathlib.Path, Commit]]:
    """A folder to write a step into, and what makes it the step when it is whole. Without that it is removed.

    Raises:
      CheckpointError: the step is there already.
    """
    parent = absolute_path(path)
    if step in steps(parent):
        fail(CheckpointError, f"step {step} is there already", where=f"{parent}", why="a step is never overwritten",
             fix="write to another folder")  # fmt: skip
    part = parent / f"{step}.part.{os.getpid()}"

    def put(name: str, text: str) -> None:
        with open(part / ITEM / name, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def commit(contents: Contents) -> None:
        layout = targets.stored_layout(contents)
        if layout is not None:
            put(LAYOUT, to_toml(layout))
        files = file_fingerprints(part / ITEM, contents.entries, () if layout is None else (LAYOUT,))
        put(FILE, contents_to_json(dataclasses.replace(contents, files=files)))
        (part / ORBAX).write_text("{}\n")
        os.rename(part, parent / str(step))
        with contextlib.suppress(OSError):  # so that the name, too, is on disk
            handle = os.open(parent, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    try:
        (part / ITEM).mkdir(parents=True)
        yield part / ITEM, commit
    except (OSError, ValueError) as error:
        if not isinstance(error, ShardError):
            shutil.rmtree(part, ignore_errors=True)
            arrays.raise_write_error(error, parent)
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def verify(path: str | os.PathLike[str], step: int | None = None) -> None:
    """BoxReader every byte of a checkpoint and check it, a file at a time, whatever it is laid out for.

    Each file must be the one that was saved: a whole file of another step, or of another piece, is an error too.

    Raises:
      CheckpointError: there is no such step.
      CheckpointFileError: files that are missing, cut short or changed, all of them, by name.
    """
    need("tensorstore", "checkpoint")
    folder, _, contents = open_step(path, step)
    problems = arrays.verify_arrays(folder, contents.entries)
    problems += changed_files(folder, contents, [problem.what for problem in problems])
    if problems:
        raise CheckpointFileError(problems)

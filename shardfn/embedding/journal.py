"""Incremental saves of a table: each appends the rows that changed, and is complete or absent.

A save writes one file of rows, then a new manifest, which names all files. Both get their names when they are on disk.
A process that is killed in between leaves the earlier manifest and the files that it names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from shardfn.embedding.store import Fields
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, fail, raise_problems
from shardfn.layoutfile.files import atomic_file, make_folder, sync_folder
from shardfn.regular_files import open_regular, read_bytes

FORMAT, VERSION, MANIFEST = "shardfn-embedding", 1, "manifest.json"
MAX_MANIFEST_BYTES = 1 << 30
"""More than any manifest has."""

Chunks = Iterable[tuple[np.ndarray, Fields]]
"""Ids, and their rows and moments."""


@dataclasses.dataclass(frozen=True)
class RowsFile:
    """A file of a save: its name, how many chunks and rows it has, its size in bytes and its CRC-32."""

    name: str
    chunks: int
    rows: int
    size: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder of saves holds.

    Attributes:
      table: what the table is: rows, width, dtype, optimizer, first rows.
      count: the number of updates of the last save.
      saves: how many saves there were.
      files: the files, the earliest first; a later one takes precedence.
    """

    table: dict[str, Any]
    count: int = 0
    saves: int = 0
    files: tuple[RowsFile, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in all files, those that changed twice counted twice."""
        return sum(file.rows for file in self.files)


def read_manifest(folder: pathlib.Path) -> Manifest | None:
    """The manifest of a folder; None if it has none.

    Args:
      folder: the folder of saves.

    Raises:
      CheckpointFileError: it cannot be read, or is no manifest.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(read_bytes(path, MAX_MANIFEST_BYTES))
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(f"its format is {data['format']!r}, version {data['version']!r}")
        files = tuple(RowsFile(**file) for file in data["files"])
        return Manifest(dict(data["table"]), int(data["count"]), int(data["saves"]), files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(CheckpointFileError, f"{path} is no manifest of an embedding table", where=str(path), why=f"{error!r:.200}",
             fix="restore from another folder, or from a copy of this one")  # fmt: skip


def append(folder: pathlib.Path, before: Manifest, chunks: Chunks, count: int, *, replace: bool = False) -> Manifest:
    """Add a save to a folder.

    Args:
      folder: the folder, created if it is not there.
      before: the manifest as it is there now.
      chunks: what to write.
      count: the number of updates of the table.
      replace: whether the new file holds all rows, so that the earlier ones are deleted.

    Returns:
      The new manifest.

    Raises:
      CheckpointFileError: the disk is full, or the folder cannot be written. The earlier saves are complete.
    """
    name = _name(before.saves + 1)
    try:
        make_folder(folder)
        with atomic_file(folder / name) as opened:
            file = _Counting(opened)
            sizes = [_write_chunk(file, ids, fields) for ids, fields in chunks]
        written = RowsFile(name, len(sizes), sum(sizes), file.size, file.crc)
        files = (*(() if replace else before.files), *([written] if sizes or replace else []))
        after = Manifest(before.table, count, before.saves + 1, files)
        sync_folder(folder)  # a manifest on disk names files on disk
        _write_manifest(folder, after)
        sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError, CheckpointFileError):
            _take_back(folder, before, name)
        fail(CheckpointFileError, f"the table cannot be saved in {folder}", where=f"save({str(folder)!r})", why=str(error),
             fix="free space or choose another folder; what was saved before is complete")  # fmt: skip
    _delete_others(folder, after)
    return after


def _name(save: int) -> str:
    return f"{save:06}.rows"


def _write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
    data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    with atomic_file(folder / MANIFEST) as opened:
        opened.write(json.dumps(data, indent=1).encode())


def _take_back(folder: pathlib.Path, before: Manifest, name: str) -> None:
    """Undo a save that failed: a manifest that names its file may be there already, if it could not be synced."""
    there = read_manifest(folder)
    if there is not None and there.saves > before.saves:
        if before.saves:
            _write_manifest(folder, before)
        else:
            (folder / MANIFEST).unlink()
    (folder / name).unlink(missing_ok=True)


def are_there(folder: pathlib.Path, manifest: Manifest) -> bool:
    """Whether all files of a manifest have their size; `replay` checks what is in them."""
    try:
        return all((folder / file.name).stat().st_size == file.size for file in manifest.files)
    except OSError:
        return False


def later_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The rows in a folder that a first save did not write; one that was killed may have left rows without a manifest."""
    return sorted(path for path in folder.glob("[0-9]*.rows") if path.name != _name(1))


def replay(folder: pathlib.Path, manifest: Manifest) -> Iterator[tuple[np.ndarray, Fields]]:
    """The rows of all saves, the earliest first. All files are checked before the first row is given.

    Args:
      folder: the folder of saves.
      manifest: its manifest.

    Raises:
      CheckpointFileError: files that are missing, truncated or changed, by name.
    """
    raise_problems([p for file in manifest.files for p in _faults(folder, file)], CheckpointFileError)
    for file in manifest.files:
        with open_regular(folder / file.name) as opened:
            for _ in range(file.chunks):
                yield _read_chunk(opened)


def same_table(folder: pathlib.Path, saved: Manifest, table: dict[str, Any]) -> None:
    """Refuse the saves of another table.

    Args:
      folder: the folder of saves.
      saved: its manifest.
      table: what the table is.

    Raises:
      CheckpointError: everything that differs.
    """
    raise_problems([
        Problem(f"the saved table has another {key}", where=f"{folder}: {key} = {saved.table.get(key)!r}",
                why=f"this table has {value!r}", fix=f"make the table with {key} = {saved.table.get(key)!r}")
        for key, value in table.items() if saved.table.get(key) != value
    ], CheckpointError)  # fmt: skip


class _Counting:
    """A file that counts and sums what is written."""

    def __init__(self, file: BinaryIO):
        self.file, self.size, self.crc = file, 0, 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return self.file.write(data)


def _write_chunk(file: _Counting, ids: np.ndarray, fields: Fields) -> int:
    names = json.dumps(list(fields)).encode()
    file.write(len(names).to_bytes(4, "little") + names)
    for array in (ids, *fields.values()):
        buffer = io.BytesIO()
        is_plain = array.dtype.kind in "iuf" and array.dtype.isnative and array.dtype.type.__module__ == "numpy"
        np.save(buffer, array if is_plain else array.view(f"u{array.dtype.itemsize}"), allow_pickle=False)
        file.write(buffer.getbuffer())
    return len(ids)


def _read_chunk(file: BinaryIO) -> tuple[np.ndarray, Fields]:
    names = json.loads(file.read(int.from_bytes(file.read(4), "little")))
    ids = np.load(file, allow_pickle=False)
    return ids, {name: np.load(file, allow_pickle=False) for name in names}


def _faults(folder: pathlib.Path, file: RowsFile) -> Iterator[Problem]:
    path, crc = folder / file.name, 0
    fix = "restore from another folder, or from a copy of this one"
    try:
        with open_regular(path) as opened:
            size = os.fstat(opened.fileno()).st_size
            while size == file.size and (data := opened.read(1 << 22)):
                crc = zlib.crc32(data, crc)
    except OSError as error:
        yield Problem(f"{path} cannot be read", str(path), str(error), fix)
        return
    if size != file.size:
        yield Problem(f"{path} is truncated" if size < file.size else f"{path} is too long", str(path),
                      f"it has {size:,} bytes, and {file.size:,} were saved", fix)  # fmt: skip
    elif crc != file.crc:
        yield Problem(f"{path} is damaged", str(path), "its checksum is another one", fix)


def _delete_others(folder: pathlib.Path, manifest: Manifest) -> None:
    """Delete files of earlier saves, and of saves that were killed."""
    named = {file.name for file in manifest.files}
    with contextlib.suppress(OSError):
        for path in [*folder.glob("[0-9]*.rows"), *folder.glob(".*.part")]:
            if path.name not in named:
                path.unlink(missing_ok=True)

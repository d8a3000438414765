"""Fingerprints of a checkpoint's files, which detect an intact file of another step or shard.

A chunk's checksum shows that the chunk is intact, not that it belongs to the step. A fingerprint covers a file's size, its
index of chunks and their checksums, so that computing it reads few bytes.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from shardfn.checkpoint.contents import Contents, StoredArray
from shardfn.checkpoint.state_tree import array_folder
from shardfn.errors import Problem

CHECKSUM = 4
"""Bytes of the checksum that ends each chunk, and the index."""
ROW = 16
"""Bytes of a chunk's row in the index: its offset and its length."""


def file_fingerprints(
    directory: pathlib.Path, entries: Iterable[StoredArray], others: Iterable[str] = ()
) -> tuple[tuple[str, str], ...]:
    """The fingerprint of each file of the arrays and of `others`, by its name in the checkpoint's folder.

    Raises:
      OSError: a file is missing.
    """
    names = [(name, 0) for name in others]
    for entry in entries:
        names += [(name, count) for name, count in _files(entry)]
    return tuple((name, fingerprint(directory / name, count)) for name, count in names)


def _files(entry: StoredArray) -> Iterator[tuple[str, int]]:
    """The files of an array, and the number of chunks of each; 0 for a file without chunks."""
    if 0 in entry.shape:
        return
    yield f"{array_folder(entry.path)}/zarr.json", 0
    chunks = entry.chunks
    count = math.prod(file // chunk for file, chunk in zip(chunks.file, chunks.chunk, strict=True))
    numbers = (range(n // size) for n, size in zip(entry.shape, chunks.file, strict=True))
    for place in itertools.product(*numbers):
        yield "/".join([array_folder(entry.path), "c", *map(str, place)]), count


def fingerprint(file: pathlib.Path, count: int) -> str:
    """A file's size and a CRC-32 of its index and its chunks' checksums; of all bytes where it has no chunks.

    Raises:
      OSError: the file is missing.
    """
    size = file.stat().st_size
    if not count:
        return f"{size}-{zlib.crc32(file.read_bytes()):08x}"
    begin = size - CHECKSUM - ROW * count
    if begin < 0:
        return f"{size}-short"
    data = np.memmap(file, np.uint8, "r")
    index = data[begin:].tobytes()
    rows = np.frombuffer(index[: ROW * count], "<u8").reshape(count, 2)
    ends = rows[:, 0] + rows[:, 1]
    ends = ends[(ends >= CHECKSUM) & (ends <= begin)].astype(np.int64)  # reading reports the others as damaged
    checksums = data[ends[:, None] - np.arange(CHECKSUM, 0, -1)].tobytes()
    return f"{size}-{zlib.crc32(checksums, zlib.crc32(index)):08x}"


def files_of_boxes(entry: StoredArray, boxes: Iterable[Sequence[tuple[int, int]]]) -> set[str]:
    """The files of an array that hold parts of the boxes, given as (start, stop) pairs, and its metadata file.

    >>> from shardfn.checkpoint.chunks import Chunks
    >>> entry = StoredArray("w", (8, 4), "int8", (("key", "w"),), (2, 1), Chunks((4, 4), (2, 2)))
    >>> sorted(files_of_boxes(entry, [[(4, 6), (0, 2)]]))
    ['w/c/1/0', 'w/zarr.json']
    """
    if 0 in entry.shape:
        return set()
    found = {f"{array_folder(entry.path)}/zarr.json"}
    for box in boxes:
        numbers = (range(a // size, -(-b // size)) for (a, b), size in zip(box, entry.chunks.file, strict=True))
        found |= {"/".join([array_folder(entry.path), "c", *map(str, place)]) for place in itertools.product(*numbers)}
    return found


def changed_files(
    directory: pathlib.Path, contents: Contents, reported: Sequence[str] = (), only: Collection[str] | None = None
) -> list[Problem]:
    """Problems of files that are missing, or not those that were saved.

    Args:
      directory: the checkpoint's folder.
      contents: its description.
      reported: messages about files, each of which begins with its file; these files are skipped.
      only: the names to check; all if None.
    """
    counts = {name: count for entry in contents.entries for name, count in _files(entry)}
    problems = []
    for name, stated in contents.files:
        file = directory / name
        if (only is not None and name not in only) or any(text.startswith(f"{file} ") for text in reported):
            continue
        try:
            found = fingerprint(file, counts.get(name, 0))
        except OSError as error:
            found, why = "", error.strerror or str(error)
            what = f"{file} is missing" if isinstance(error, FileNotFoundError) else f"{file} cannot be read"
        else:
            what, why = (
                f"{file} is not the file that was saved",
                "it was changed, or belongs to another step or shard",
            )
        if found != stated:
            fix = "restore another step: checkpoint.steps(path) lists them"
            problems.append(Problem(what, where=f"step {directory.parent.name}", why=why, fix=fix))
    return problems

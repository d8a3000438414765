"""Which files belong to a checkpoint: a fingerprint of each in its description, so that a whole file of another is found.

A chunk's checksum says that the chunk is whole, not that it is this step's. A fingerprint is of a file's size, its
index of chunks and their checksums, so that taking it reads few bytes of the file.
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
"""Bytes of the index for a chunk: where it begins and how long it is."""


def file_fingerprints(
    directory: pathlib.Path, entries: Iterable[StoredArray], others: Iterable[str] = ()
) -> tuple[tuple[str, str], ...]:
    """The fingerprint of each file of the arrays, and of other small files, by its name in the checkpoint's folder.

    Raises:
      OSError: one is not there.
    """
    names = [(name, 0) for name in others]
    for entry in entries:
        names += [(name, count) for name, count in _files(entry)]
    return tuple((name, fingerprint(directory / name, count)) for name, count in names)


def _files(entry: StoredArray) -> Iterator[tuple[str, int]]:
    """The files of an array, and how many chunks each holds."""
    if 0 in entry.shape:
        return
    yield f"{array_folder(entry.path)}/zarr.json", 0
    layout = entry.chunks
    count = math.prod(file // chunk for file, chunk in zip(layout.file, layout.chunk, strict=True))
    numbers = (range(n // size) for n, size in zip(entry.shape, layout.file, strict=True))
    for place in itertools.product(*numbers):
        yield "/".join([array_folder(entry.path), "c", *map(str, place)]), count


def fingerprint(file: pathlib.Path, count: int) -> str:
    """A file's size and a CRC-32: of its index and its chunks' checksums, or of all of it where it has no chunks.

    Raises:
      OSError: it is not there.
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
    ends = ends[(ends >= CHECKSUM) & (ends <= begin)].astype(np.int64)  # others are damage, which reading finds
    checksums = data[ends[:, None] - np.arange(CHECKSUM, 0, -1)].tobytes()
    return f"{size}-{zlib.crc32(checksums, zlib.crc32(index)):08x}"


def files_of_boxes(entry: StoredArray, boxes: Iterable[Sequence[tuple[int, int]]]) -> set[str]:
    """The files of an array that hold some boxes of it, given as pairs of start and stop, and what describes them.

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
    directory: pathlib.Path, contents: Contents, told: Sequence[str] = (), only: Collection[str] | None = None
) -> list[Problem]:
    """The files that are missing, or not what was there when the checkpoint was made, among `only` or all of them.

    `told` is what was said of files already, each beginning with its file.
    """
    counts = {name: count for entry in contents.entries for name, count in _files(entry)}
    problems = []
    for name, stated in contents.files:
        file = directory / name
        if (only is not None and name not in only) or any(text.startswith(f"{file} ") for text in told):
            continue
        try:
            found = fingerprint(file, counts.get(name, 0))
        except OSError as error:
            found, why = "", error.strerror or str(error)
            what = f"{file} is missing" if isinstance(error, FileNotFoundError) else f"{file} cannot be read"
        else:
            what, why = (
                f"{file} is not the file that was saved",
                "it was changed, or is of another step or another piece",
            )
        if found != stated:
            fix = "restore another step: checkpoint.steps(path) lists them"
            problems.append(Problem(what, where=f"step {directory.parent.name}", why=why, fix=fix))
    return problems

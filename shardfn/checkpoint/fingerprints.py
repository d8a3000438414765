"""Fingerprints of a checkpoint's files, which detect an intact file of another step or shard.

A chunk's checksum shows that the chunk is intact, not that it belongs to the step. A fingerprint covers a file's size, its
index of chunks and their checksums, so that computing it reads few bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import pathlib
import zlib
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from shardfn.checkpoint.chunks import Box, full_box
from shardfn.checkpoint.contents import Contents, StoredArray
from shardfn.checkpoint.state_tree import array_folder
from shardfn.errors import Problem
from shardfn.regular_files import open_regular

CHECKSUM = 4
"""Bytes of the checksum that ends each chunk, and the index."""
ROW = 16
"""Bytes of a chunk's row in the index: its offset and its length."""
METADATA = "zarr.json"


def file_fingerprints(
    directory: pathlib.Path, entries: Iterable[StoredArray], others: Iterable[str] = ()
) -> tuple[tuple[str, str], ...]:
    """The fingerprint of each file of the arrays and of `others`, by its name in the checkpoint's folder.

    Raises:
      OSError: a file is missing.
    """
    counts = dict.fromkeys(others, 0) | _chunk_counts(entries)
    return tuple((name, fingerprint(directory / name, count)) for name, count in counts.items())


def _chunk_counts(entries: Iterable[StoredArray]) -> dict[str, int]:
    """The files of arrays, and the number of chunks of each; 0 for a file without chunks."""
    return {
        name: 0 if name.endswith(METADATA) else math.prod(entry.chunks.file) // math.prod(entry.chunks.chunk)
        for entry in entries
        for name in files_of_boxes(entry, [full_box(entry.shape)])
    }


def fingerprint(file: pathlib.Path, count: int) -> str:
    """A file's size and a CRC-32 of its index and its chunks' checksums; of all bytes where it has no chunks.

    Raises:
      OSError: the file is missing, or is not a regular file.
    """
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        if not count:
            crc = functools.reduce(lambda crc, data: zlib.crc32(data, crc), iter(lambda: opened.read(1 << 22), b""), 0)
            return f"{size}-{crc:08x}"
        begin = size - CHECKSUM - ROW * count
        if begin < 0:
            return f"{size}-short"
        data = np.memmap(opened, np.uint8, "r")
    index = data[begin:].tobytes()
    rows = np.frombuffer(index[: ROW * count], "<u8").reshape(count, 2)
    ends = rows[:, 0] + rows[:, 1]
    ends = ends[(ends >= CHECKSUM) & (ends <= begin)].astype(np.int64)  # reading reports the others as damaged
    checksums = data[ends[:, None] - np.arange(CHECKSUM, 0, -1)].tobytes()
    return f"{size}-{zlib.crc32(checksums, zlib.crc32(index)):08x}"


def files_of_boxes(entry: StoredArray, boxes: Iterable[Box]) -> list[str]:
    """The metadata file of an array, and the files that hold parts of the boxes.

    >>> from shardfn.checkpoint.chunks import Chunks
    >>> entry = StoredArray("w", (8, 4), "int8", (("key", "w"),), (2, 1), Chunks((4, 4), (2, 2)))
    >>> files_of_boxes(entry, [(slice(4, 6), slice(0, 2))])
    ['w/zarr.json', 'w/c/1/0']
    """
    if 0 in entry.shape:
        return []
    folder = array_folder(entry.path)
    found = [f"{folder}/{METADATA}"]
    for box in boxes:
        numbers = (range(s.start // n, -(-s.stop // n)) for s, n in zip(box, entry.chunks.file, strict=True))
        found += ["/".join([folder, "c", *map(str, place)]) for place in itertools.product(*numbers)]
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
    counts = _chunk_counts(contents.entries)
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
            what, why = f"{file} is not the file that was saved", "it was changed, or belongs to another step or shard"
        if found != stated:
            fix = "restore another step: checkpoint.steps(path) lists them"
            problems.append(Problem(what, where=f"step {directory.parent.name}", why=why, fix=fix))
    return problems

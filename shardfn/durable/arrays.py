"""Arrays of a database: small ones in its rows, large ones in files that its rows name.

SQLite writes what it is given twice, to its log and to its pages. A file is written once.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from shardfn.durable.store_errors import cannot_read, cannot_write, damaged, told
from shardfn.files import open_regular, sync_folder

INLINE_BYTES = 1 << 19
"""Arrays that together have fewer bytes are in the database: there a second write costs less than an `fsync` of a file."""

ARRAY_COLUMNS = "dtype TEXT, shape TEXT, data BLOB, file TEXT, offset INTEGER, file_crc32 INTEGER"
"""What a table has for an array: the data, or where they are in a file."""


class Arrays:
    """Arrays on their way into a database: large ones are in a file of their own already, which is not on disk yet."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder / secrets.token_hex(8)
        self._file: BinaryIO | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return self._path.name

    def add(self, arrays: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Write arrays.

        Returns:
          For each array the `ARRAY_COLUMNS`.

        Raises:
          CheckpointFileError: the disk is full. `discard` is to follow.
        """
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
        specs = [{"dtype": jnp.dtype(x.dtype).name, "shape": json.dumps(list(x.shape))} for x in arrays]
        if sum(map(len, flat)) < INLINE_BYTES:
            return [{**spec, "data": bytes(data)} for spec, data in zip(specs, flat, strict=True)]
        with told(self._path, cannot_write):
            if self._file is None:
                self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115
            for spec, data in zip(specs, flat, strict=True):
                spec |= {"file": self.name, "offset": self._file.tell(), "file_crc32": zlib.crc32(data)}
                _write(self._file, data)
        return specs

    def sync(self) -> None:
        """Wait until the file is on disk.

        Raises:
          CheckpointFileError: it may not be on disk.
        """
        if self._file is not None:
            with told(self._path, cannot_write):
                with self._file:
                    _sync(self._file)
                sync_folder(self._path.parent)
            self._file = None

    def discard(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.close()
        self._path.unlink(missing_ok=True)


def read_array(folder: pathlib.Path, row: Mapping[str, Any]) -> np.ndarray:
    """The array of a row, which cannot be written to.

    Args:
      folder: that of the files.
      row: its `ARRAY_COLUMNS`, without those that are NULL.

    Raises:
      CheckpointFileError: its file is missing, truncated or damaged.
    """
    dtype, shape = _spec(row)
    data = row["data"] if "data" in row else _file_data(folder / row["file"], row)
    return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)


def is_array_there(folder: pathlib.Path, row: Mapping[str, Any]) -> bool:
    """Whether the file of an array is there and not truncated."""
    try:
        return "data" in row or (folder / row["file"]).stat().st_size >= row["offset"] + _bytes(row)
    except OSError:
        return False


def _spec(row: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
    return jnp.dtype(row["dtype"]), tuple(json.loads(row["shape"]))


def _bytes(row: Mapping[str, Any]) -> int:
    dtype, shape = _spec(row)
    return math.prod(shape) * dtype.itemsize


def _file_data(path: pathlib.Path, row: Mapping[str, Any]) -> bytes:
    size = _bytes(row)
    with told(path, cannot_read), open_regular(path) as file:
        file.seek(row["offset"])
        data = file.read(size)
    if len(data) < size:
        damaged(path, "it is truncated")
    if zlib.crc32(data) != row["file_crc32"]:
        damaged(path, f"the {size:,} bytes from {row['offset']:,} on do not have their checksum")
    return data


def _write(file: BinaryIO, data: memoryview) -> None:
    while data.nbytes:
        data = data[file.write(data) :]


def _sync(file: BinaryIO) -> None:
    os.fsync(file.fileno())

"""Reads of files that others give, which neither wait for a writer nor fill the memory; writes that are all or nothing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for bytes.

    Args:
      path: the file. Of a pipe or a device one would read for ever.

    Raises:
      OSError: there is no such file, or it is a folder, a pipe, a device or a socket.
    """
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_kind(os.fstat(opened).st_mode, path)
    except OSError:
        os.close(opened)
        raise
    return os.fdopen(opened, "rb")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse a file that a library would wait for when it opens it.

    Args:
      path: the file. One that is missing is left to the library, which says so.

    Raises:
      OSError: it is a folder, a pipe, a device or a socket.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_kind(os.stat(path).st_mode, path)


def _check_kind(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{os.fspath(path)} is a folder")
    if not stat.S_ISREG(mode):
        raise OSError(f"{os.fspath(path)} is a pipe, a device or a socket, not a regular file")


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
      OSError: as `open_regular`, or it cannot be read.
      ValueError: it is larger.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     size = file.write(b"12345678"), file.flush()
    ...     read_bytes(file.name, 8)
    b'12345678'
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


@contextlib.contextmanager
def atomic_path(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path beside `target`; the file that is written there is put on disk, then takes the name of `target`."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("ab") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(target: pathlib.Path) -> Iterator[BinaryIO]:
    """A file, open for bytes, that gets its name when it is complete and on disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "state")
    ...     with atomic_file(path) as file:
    ...         size = file.write(b"whole"), path.exists()
    ...     size, path.read_bytes()
    ((5, False), b'whole')
    """
    with atomic_path(target) as part, part.open("wb") as file:
        yield file


def sync_folder(folder: pathlib.Path) -> None:
    """Write the names of a folder's files to disk."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def make_folder(folder: pathlib.Path) -> None:
    """Make a folder and those above it, with their names on disk.

    Raises:
      OSError: the disk is full, or it cannot be made.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)

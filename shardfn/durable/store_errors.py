"""What a database and its files tell: the file, why, and the fix."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import NoReturn

from shardfn.errors import CheckpointFileError, ClusterError, ShardError, fail


class FolderInUse(ClusterError):
    """Another process has the folder open; it may be about to end, as on a node that counts as dead."""


class DatabaseClosed(ClusterError):
    """The database was closed. Whoever opened it again, or took its place, answers the same call."""


@contextlib.contextmanager
def told(path: pathlib.Path, otherwise: Callable[[pathlib.Path, Exception], NoReturn]) -> Iterator[None]:
    """Errors of SQLite and of files as ours."""
    try:
        yield
    except ShardError:
        raise
    except (sqlite3.Error, OSError) as error:
        kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if kind == sqlite3.SQLITE_BUSY:
            fail(FolderInUse, f"{path.parent} is in use", where=str(path),
                 why="another process, or another parameter server of this one, has it open",
                 fix="close that one, end that process, or choose another folder")  # fmt: skip
        if kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            damaged(path, f"SQLite says: {error}")
        otherwise(path, error)


def damaged(path: pathlib.Path, why: str) -> NoReturn:
    """Something is not as it was written."""
    fail(CheckpointFileError, f"{path} is damaged", where=str(path), why=why, fix="restore the folder from a copy")


def cannot_open(path: pathlib.Path, error: Exception) -> NoReturn:
    """A database that is not there, or that this user cannot write."""
    fail(CheckpointFileError, f"{path.parent} cannot be opened", where=str(path), why=str(error),
         fix="let this user write there; restore what is missing from a copy, or choose another folder")  # fmt: skip


def cannot_read(path: pathlib.Path, error: Exception) -> NoReturn:
    """A file of arrays that is not there."""
    fail(
        CheckpointFileError,
        f"{path} cannot be read",
        where=str(path),
        why=str(error),
        fix="restore the folder from a copy",
    )


def cannot_write(path: pathlib.Path, error: Exception) -> NoReturn:
    """The disk is full, or fails."""
    fail(CheckpointFileError, f"{path} cannot be written", where=str(path), why=str(error),
         fix="free space; what was saved before is complete, and what was not acknowledged is sent again")  # fmt: skip

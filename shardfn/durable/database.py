"""Durable state: a folder with one SQLite database, and files for arrays that are too large for it.

A change is a transaction, which is on disk when `Database.write` returns: the database has a write-ahead log and
`synchronous=FULL`. Changes that wait meanwhile share the next transaction, and with it one `fsync`. Each row has a CRC-32 of
its columns. SQLite itself checks the structure of its pages and the frames of its log, but no values; `log_damage` tells damage
of the log from a write that was interrupted. Large arrays are in files of the folder `arrays`; a file without a row is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sqlite3
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from shardfn.durable.arrays import Arrays, is_array_there, read_array
from shardfn.durable.sqlite_log import log_damage
from shardfn.durable.store_errors import DatabaseClosed, cannot_open, cannot_write, damaged, told
from shardfn.errors import CheckpointFileError, ShardError, fail
from shardfn.files import atomic_path, check_regular, make_folder, sync_folder

LOCK_WAIT_S = 5
"""Seconds to wait for a process that has the folder open, and may be about to end."""

SHARED_WAIT_S = 30
"""Seconds to wait for processes that read or write a database without a log, which several may have open."""

VERSION = 1
"""`PRAGMA user_version` of the databases."""

EARLIER = ("snapshot-[0-9]*", "log-[0-9]*", "manifest.json", "[0-9]*.rows")
"""Files of versions of shardfn that had formats of their own."""

_T = TypeVar("_T")


class Database:
    """A database that one process has open, with the arrays beside it.

    Args:
      path: its file.
      log: whether it has a write-ahead log, for many small transactions. Otherwise several processes may read it at once.
      tables: of a new one, as `new_database` takes them.

    Attributes:
      path: its file.
      commits: transactions that changed something, since it was opened.
      committed, undone: called when a transaction is on disk, or is not; no other transaction runs meanwhile.

    Methods raise `DatabaseClosed` after `close`.

    Raises:
      FolderInUse: another process has the folder open.
      CheckpointFileError: the database is not there, cannot be opened, or is damaged; or the folder holds files of an earlier
        version of shardfn.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "sums.db")
    ...     with new_database(path, {"sums": "name TEXT PRIMARY KEY, value INTEGER"}) as sums:
    ...         sums.write(lambda: sums.put("sums", name="a", value=3))
    ...     with contextlib.closing(Database(path)) as sums:
    ...         sums.rows("sums")
    [{'name': 'a', 'value': 3}]
    """

    def __init__(self, path: pathlib.Path, *, log: bool = True, tables: Mapping[str, str] | None = None):
        self.path, self.commits = path, 0
        self._folder = path.parent / "arrays"
        self.committed = self.undone = lambda: None
        self._waiting: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._queueing, self._writing = threading.Lock(), threading.Lock()
        self._on_their_way: set[str] = set()  # files of arrays that are in no row yet
        refuse_earlier(path)
        with told(path, cannot_open):
            for file in (path, _log_of(path), path.with_name(f"{path.name}-journal")):
                check_regular(file)
            mode = "rw" if tables is None else "rwc"
            self._db: sqlite3.Connection | None = _connect(
                f"{path.absolute().as_uri()}?mode={mode}", LOCK_WAIT_S if log else SHARED_WAIT_S
            )
        weakref.finalize(self, self._db.close)  # a connection refers to itself, so it would outlive this one
        try:
            with told(path, cannot_open):
                self._start(log, tables)
        except BaseException:
            self.close()
            raise

    def _start(self, log: bool, tables: Mapping[str, str] | None) -> None:
        db = self._open
        if log:  # so that no other process has it open, and there is no memory that processes share
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute(f"PRAGMA synchronous = {'FULL' if tables is None else 'OFF'}")
        db.execute("PRAGMA secure_delete = OFF")
        if tables is not None:
            db.execute(f"PRAGMA journal_mode = {'WAL' if log else 'DELETE'}")
            for table, columns in tables.items():  # without row ids a row is written in one place, not in an index too
                db.execute(f"CREATE TABLE {table} (crc32 INTEGER NOT NULL, {columns}) WITHOUT ROWID")
            db.execute(f"PRAGMA user_version = {VERSION}")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            fail(CheckpointFileError, f"{self.path} is of another version of shardfn", where=str(self.path),
                 why=f"its `PRAGMA user_version` is {version}, not {VERSION}",
                 fix="use the version that wrote it, or another folder")  # fmt: skip
        if log and (why := log_damage(_log_of(self.path))):
            self._close_without_log()
            damaged(_log_of(self.path), why)
        with contextlib.closing(db.execute("PRAGMA integrity_check(3)")) as cursor:
            faults = [row[0] for row in cursor.fetchall()]
        if faults != ["ok"]:
            damaged(self.path, f"`PRAGMA integrity_check` says: {'; '.join(faults):.300}")

    def _close_without_log(self) -> None:
        """Close the database, and leave its log as it is: SQLite would delete it, and with it the signs of damage."""
        log = _log_of(self.path)
        aside = log.with_name(f".{log.name}.part")
        os.replace(log, aside)
        try:
            self.close()
        finally:
            os.replace(aside, log)

    @property
    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            fail(DatabaseClosed, f"{self.path} was closed", where=str(self.path),
                 why="its server was stopped or started again", fix="call again")  # fmt: skip
        return self._db

    # ---- writing

    def write(self, change: Callable[[], _T], arrays: Arrays | None = None) -> _T:
        """Run a change in a transaction, together with those that wait at the same time.

        Args:
          change: calls `put` and `delete`. A `ShardError` of it is raised before it calls them.
          arrays: the arrays of its rows, whose file is synced before.

        Returns:
          What `change` returned, when it is on disk.

        Raises:
          CheckpointFileError: the disk is full, or fails. The database is as it was; if a sync failed, a restart decides.
        """
        own: Future[_T] = Future()
        if arrays is not None:
            arrays.sync()
        with self._queueing:
            self._waiting.append((change, own))
        with self._writing:
            with self._queueing:
                batch, self._waiting = self._waiting, []
            if batch:  # else another one took this change along
                self._commit(batch)
            if arrays is not None:
                self._on_their_way.discard(arrays.name)
        return own.result()

    def _commit(self, batch: Sequence[tuple[Callable[[], Any], Future[Any]]]) -> None:
        results = []
        try:
            db = self._open
            with told(self.path, cannot_write):
                db.execute("BEGIN IMMEDIATE")
                before = db.total_changes
                for change, future in batch:
                    try:
                        results.append((future, change()))
                    except ShardError as error:
                        future.set_exception(error)
                has_changed = db.total_changes != before
                db.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if self._db is not None and self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            self.undone()
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        self.commits += has_changed
        self.committed()
        for future, result in results:
            future.set_result(result)

    def put(self, table: str, **columns: Any) -> None:
        """Write a row, in the place of one with the same key. Within a change.

        Args:
          table: the table.
          columns: all its columns that are not NULL.
        """
        columns = {name: int(value) if isinstance(value, bool) else value for name, value in columns.items()}
        columns["crc32"] = _checksum(columns)
        marks = ", ".join("?" * len(columns))
        self._open.execute(
            f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})", [*columns.values()]
        )

    def delete(self, table: str, where: str = "1", *values: Any) -> None:
        """Delete the rows of a condition. Within a change."""
        self._open.execute(f"DELETE FROM {table} WHERE {where}", values)

    def arrays(self) -> Arrays:
        """For new arrays, to be given to `write`."""
        with told(self._folder, cannot_write):
            make_folder(self._folder)
        found = Arrays(self._folder)
        self._on_their_way.add(found.name)
        return found

    def discard(self, arrays: Arrays) -> None:
        """Delete arrays that are in no row, and will never be."""
        arrays.discard()
        self._on_their_way.discard(arrays.name)

    def sweep(self) -> None:
        """Delete the files of arrays that no row names."""
        folder = self._folder
        with self._writing, told(self.path, cannot_open):
            there = set(os.listdir(folder)) if folder.is_dir() else set()
            tables = [
                table for (table,) in self._open.execute("SELECT name FROM pragma_table_list WHERE type = 'table'")
            ]
            for table in tables if there else ():
                columns = {column for (column,) in self._open.execute("SELECT name FROM pragma_table_info(?)", [table])}
                if "file" in columns:
                    there -= {file for (file,) in self._open.execute(f"SELECT DISTINCT file FROM {table}")}
            for name in there - self._on_their_way:
                (folder / name).unlink(missing_ok=True)

    # ---- reading

    def rows(self, table: str, end: str = "", *values: Any) -> list[dict[str, Any]]:
        """Rows, without columns that are NULL.

        Args:
          table: the table.
          end: the rest of the query: `WHERE ...`, `ORDER BY ...`.
          values: those of its parameters.

        Raises:
          CheckpointFileError: a row is damaged.
        """
        found = []
        with told(self.path, cannot_open):
            # Closed at once: a cursor that an error keeps would keep the database locked.
            with contextlib.closing(self._open.execute(f"SELECT * FROM {table} {end}", values)) as cursor:
                names, rows = [name for name, *_ in cursor.description], cursor.fetchall()
            for row in rows:
                columns = {name: value for name, value in zip(names, row, strict=True) if value is not None}
                if columns.pop("crc32", None) != _checksum(columns):
                    shown = ", ".join(f"{name} = {value!r:.20}" for name, value in list(columns.items())[:3])
                    damaged(self.path, f"a row of `{table}` does not have its checksum: {shown}")
                found.append(columns)
        return found

    def array(self, row: Mapping[str, Any]) -> np.ndarray:
        """The array of a row, as `rows` gave it; it cannot be written to.

        Raises:
          CheckpointFileError: its file is missing, truncated or damaged.
        """
        return read_array(self._folder, row)

    def has_array(self, row: Mapping[str, Any]) -> bool:
        """Whether the file of an array is there and not truncated; `array` checks what is in it."""
        return is_array_there(self._folder, row)

    def close(self) -> None:
        """Close the database, and let another process open it."""
        with self._writing:
            if self._db is not None:
                with contextlib.suppress(sqlite3.Error):  # all that was told is in the log, if not in the pages
                    self._db.close()
                self._db = None


@contextlib.contextmanager
def new_database(path: pathlib.Path, tables: Mapping[str, str], *, log: bool = True) -> Iterator[Database]:
    """A new database to be filled, which gets its name when it is closed and on disk; until then nothing is synced.

    Args:
      path: its file. Its folder is made as `make_folder` does.
      tables: the columns of each table, as SQL, with a primary key.
      log: as of `Database`.

    Raises:
      CheckpointFileError: the disk is full, or the folder cannot be written; or it holds files of an earlier version of shardfn,
        or arrays of a database that is gone.
    """
    refuse_earlier(path)
    if any((path.parent / "arrays").glob("*")):
        fail(CheckpointFileError, f"{path.parent} holds arrays, and no {path.name}", where=str(path.parent),
             why="they are of a database that is gone, and a new one would delete them",
             fix="put it back from a copy, or choose another folder")  # fmt: skip
    with told(path, cannot_write):
        make_folder(path.parent)
        with atomic_path(path) as part:
            part.unlink(missing_ok=True)
            with contextlib.closing(Database(part, log=log, tables=tables)) as db:
                yield db
        sync_folder(path.parent)


def refuse_earlier(path: pathlib.Path) -> None:
    """Refuse a folder without the database whose files an earlier version of shardfn wrote.

    Raises:
      CheckpointFileError: there are such files.
    """
    folder = path.parent
    earlier = [] if path.exists() else sorted(file.name for glob in EARLIER for file in folder.glob(glob))
    if earlier:
        fail(CheckpointFileError, f"{folder} was written by an earlier version of shardfn", where=str(folder),
             why=f"it holds {earlier[0]}, and no {path.name}",
             fix="choose another folder, or go on with the version that wrote it; nothing was changed here")  # fmt: skip


def _connect(uri: str, wait_s: float) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False)


def _log_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}-wal")


def _checksum(columns: Mapping[str, Any]) -> int:
    """The CRC-32 of the columns of a row that are not NULL."""
    blobs = {name: value for name, value in columns.items() if isinstance(value, bytes)}
    crc = zlib.crc32(json.dumps({k: v for k, v in columns.items() if k not in blobs}, sort_keys=True).encode())
    for name in sorted(blobs):
        crc = zlib.crc32(blobs[name], crc)
    return crc

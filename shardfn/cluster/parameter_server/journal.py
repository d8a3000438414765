"""Durable state: a log of records with group commit, and snapshots that start the log anew.

A folder holds generations. Generation 7 is `snapshot-000007`, which is complete or absent, and `log-000007` with what
happened since. The last two snapshots are kept, with all logs since the older one, so a damaged snapshot costs nothing. Both
files are sequences of records:
the length and the CRC-32 of a body, the CRC-32 of these two, then the body, which is a JSON header and the bytes of arrays,
and a last byte. The files hold no pickles.

A record counts when `sync` returned. Records that wait together share one `fsync`. A write that was interrupted leaves the
beginning of a record, and zeros where the file grew before its sectors were on disk. Nobody was told of this record, and it is
cut off. Anything else that is not as it was written is damage, and an error: also zeros that begin inside a sector.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from shardfn.errors import CheckpointFileError, ClusterError, fail
from shardfn.layoutfile.files import atomic_file, make_folder, sync_folder
from shardfn.regular_files import check_regular, open_regular

LOCK_WAIT_S = 30
"""Seconds to wait for a process that has the folder open, and may be about to end."""

_HEAD, _HEAD_CRC, _LAST = struct.Struct("<QI"), struct.Struct("<I"), b"\n"
"""Bytes after the head, and the CRC-32 of the body; that of the head; the last byte of a record, which is never zero, so that
zeros at the end of a body do not look like sectors that were not written."""

SECTOR = 512
"""Bytes that a disk writes together or not at all."""


class FolderInUse(ClusterError):
    """Another process has the folder open; it may be about to end, as on a node that counts as dead."""


class JournalClosed(ClusterError):
    """The journal was closed. Whoever opened it again, or took its place, answers the same call."""


@dataclasses.dataclass(frozen=True)
class Record:
    """An entry of a log or of a snapshot.

    Attributes:
      kind: what it is.
      fields: JSON values by name.
      arrays: arrays that belong to it.

    >>> body = b"".join(Record("sum", {"of": 2}, [np.arange(2.0)]).encode())[16:-1]
    >>> Record.decode(body)
    Record(kind='sum', fields={'of': 2}, arrays=[array([0., 1.])])
    """

    kind: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()

    def encode(self) -> list[Any]:
        """The buffers of the record, in the order in which they are written."""
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in self.arrays]
        specs = [[jnp.dtype(array.dtype).name, list(array.shape)] for array in self.arrays]
        header = json.dumps([self.kind, self.fields, specs]).encode()
        body = [struct.pack("<I", len(header)), header, *(array.data for array in flat)]
        crc = 0
        for part in body:
            crc = zlib.crc32(part, crc)
        head = _HEAD.pack(sum(map(len, body)) + len(_LAST), crc)
        return [head + _HEAD_CRC.pack(zlib.crc32(head)), *body, _LAST]

    @classmethod
    def decode(cls, body: bytes) -> Record:
        """The record of a body. Its arrays are views of the body, and cannot be written to."""
        at = 4 + struct.unpack_from("<I", body)[0]
        kind, fields, specs = json.loads(body[4:at])
        arrays = []
        for name, shape in specs:
            dtype = jnp.dtype(name)
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(body, np.uint8, count * dtype.itemsize, at).view(dtype).reshape(shape))
            at += count * dtype.itemsize
        return cls(kind, fields, arrays)


END = Record("end")
"""The last record of a snapshot."""


class FileRecords(NamedTuple):
    """The records of a file.

    Attributes:
      records: those before its end, or before the first that is incomplete or damaged.
      end: the position after them.
      size: the size of the file.
      is_damaged: whether what follows is not merely a write that was interrupted.
    """

    records: list[Record]
    end: int
    size: int
    is_damaged: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether these are all."""
        return self.end == self.size


def read_records(file: BinaryIO) -> FileRecords:
    """The records of a file up to the first that is incomplete or damaged.

    Args:
      file: the file, open for bytes.

    >>> import io
    >>> data = b"".join(END.encode())
    >>> [read_records(io.BytesIO(x)).is_damaged for x in (data, data[:-1], data + bytes(9), data.replace(b"end", b"and"))]
    [False, False, False, True]
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    records: list[Record] = []
    end, length = 0, _HEAD.size + _HEAD_CRC.size
    while len(head := file.read(length)) == length:
        count, crc = _HEAD.unpack_from(head)
        if _HEAD_CRC.unpack_from(head, _HEAD.size)[0] != zlib.crc32(head[: _HEAD.size]):
            return FileRecords(records, end, size, not _is_unwritten(file, end))
        if count > size - end - length:
            return FileRecords(records, end, size)
        body = memoryview(file.read(count))
        if zlib.crc32(body[:-1]) != crc:
            return FileRecords(records, end, size, not _is_unwritten(file, end))
        end += length + count
        records.append(Record.decode(bytes(body[:-1])))
    return FileRecords(records, end, size)


def _is_unwritten(file: BinaryIO, start: int) -> bool:
    """Whether a write was interrupted: all is zero from where a record starts, or from a sector that was read of it.

    Args:
      file: the file, at the place up to which the record was read.
      start: where the record starts.
    """
    stop = file.tell()
    at = written = file.seek(start)
    while data := file.read(1 << 20):
        if kept := len(data.rstrip(b"\0")):
            written = at + kept
        at += len(data)
    return written == start or -(-written // SECTOR) * SECTOR < stop


def write_snapshot(folder: pathlib.Path, generation: int, records: Iterable[Record]) -> None:
    """Write the snapshot of a generation: it is complete and on disk, or absent.

    Args:
      folder: the folder.
      generation: its number.
      records: what it holds.

    Raises:
      OSError: the disk is full, or the folder cannot be written.
    """
    with atomic_file(folder / f"snapshot-{generation:06}") as file:
        for record in itertools.chain(records, [END]):
            for buffer in record.encode():
                _write(file, buffer)
    sync_folder(folder)


def write_first(folder: pathlib.Path, records: Iterable[Record]) -> None:
    """Write the first generation: an empty log and a snapshot.

    Args:
      folder: the folder, made as `make_folder` does.
      records: what the snapshot holds.

    Raises:
      OSError: the disk is full, or the folder cannot be written.
    """
    make_folder(folder)
    (folder / "log-000001").touch()
    write_snapshot(folder, 1, records)


class Journal:
    """The durable state of one process.

    Args:
      folder: its folder, which holds a snapshot. No other process may have it open.

    Attributes:
      records: what was read: the newest complete snapshot and what happened since.
      bytes: bytes of the newest log.
      syncs: the number of `fsync` calls, for reports.

    Methods raise `JournalClosed` after `close`.

    Raises:
      FolderInUse: another process has the folder open.
      CheckpointFileError: the folder cannot be opened, there is no complete snapshot, or a log is damaged: nothing that
        was acknowledged is dropped in silence.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.syncs = 0
        self._is_closed = False
        self._writing, self._syncing = threading.Lock(), threading.Lock()
        self._lock = _locked(folder)
        try:
            self._snapshot, self.generation, self.records, length = _recover(folder)
            self._log = self._open(self.generation, length)
            for part in folder.glob(".*.part"):  # of a snapshot that was killed
                part.unlink(missing_ok=True)
        except BaseException as error:
            self._lock.close()
            if isinstance(error, OSError) and not isinstance(error, CheckpointFileError):
                _cannot_open(folder, error)
            raise

    @property
    def bytes(self) -> int:
        """Bytes of the newest log."""
        return self._log.end

    def append(self, record: Record) -> None:
        """Add a record to the log.

        Args:
          record: the record.

        Raises:
          CheckpointFileError: the disk is full. The log is as it was before.
        """
        with self._writing:
            self._check_open()
            self._log.append(record)

    def sync(self, position: tuple[_Log, int]) -> None:
        """Wait until all records before a position are on disk. Calls that wait at the same time share one `fsync`.

        Args:
          position: as `position` returned it.

        Raises:
          CheckpointFileError: they may not be on disk.
        """
        log, end = position
        if log.synced >= end:
            return
        with self._syncing:
            if log.synced < end:
                self._check_open()
                self.syncs += 1
                log.sync()

    def position(self) -> tuple[_Log, int]:
        """What `sync` takes for everything that was added so far."""
        with self._writing:
            return self._log, self._log.end

    def rotate(self, records: Iterable[Record]) -> None:
        """Start a new generation with a snapshot that includes all that was added so far.

        Args:
          records: what the snapshot holds.

        Raises:
          CheckpointFileError: the disk is full. The earlier generation goes on.
        """
        with self._writing, self._syncing:
            self._check_open()
            old, new = self._log, self.generation + 1
            old.sync()
            try:
                log = self._open(new, 0)
                try:
                    write_snapshot(self.folder, new, records)
                except BaseException:
                    log.close()
                    (self.folder / f"snapshot-{new:06}").unlink(missing_ok=True)  # first: without its log it is damage
                    log.path.unlink()
                    raise
            except OSError as error:
                _cannot_write(self.folder, error)
            old.close()
            for path in self.folder.glob("*-[0-9]*"):
                if int(path.name.rpartition("-")[2]) < self._snapshot:
                    path.unlink(missing_ok=True)
            self._log, self.generation, self._snapshot = log, new, new

    def close(self) -> None:
        """Close the files, and let another process open them."""
        with self._writing, self._syncing:
            if not self._is_closed:
                with contextlib.suppress(CheckpointFileError):  # calls that wait for this sync raise it
                    self._log.sync()
                self._release()

    def lose_power(self) -> None:
        """End as with the machine: what no `fsync` wrote is gone. For drills."""
        with self._writing, self._syncing:
            if not self._is_closed:
                os.truncate(self._log.path, self._log.synced)
                self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._log.file.close()
        self._lock.close()

    def _check_open(self) -> None:
        if self._is_closed:
            fail(JournalClosed, f"{self.folder} was closed", where=str(self.folder),
                 why="its server was stopped or started again", fix="call again")  # fmt: skip

    def _open(self, generation: int, length: int) -> _Log:
        log = _Log(self.folder / f"log-{generation:06}", length)
        sync_folder(self.folder)
        return log


class _Log:
    """A file to which records are added."""

    def __init__(self, path: pathlib.Path, length: int):
        self.path = path
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.file.truncate(length)
        os.fsync(self.file.fileno())
        self.end = self.synced = length
        self.fault: OSError | None = None

    def append(self, record: Record) -> None:
        if self.fault is not None:
            _cannot_write(self.path, self.fault)
        try:
            _write(self.file, b"".join(record.encode()))  # at once, so that a sector has all of its bytes or none
        except OSError as error:
            try:
                self.file.truncate(self.end)
            except OSError as second:
                self.fault = second
            _cannot_write(self.path, error)
        self.end = self.file.tell()

    def sync(self) -> None:
        end = self.end
        if self.fault is None:
            try:
                _sync(self.file)
            except OSError as error:
                self.fault = error  # what is on disk is not known any more: only a new start can tell
        if self.fault is not None:
            _cannot_write(self.path, self.fault)
        self.synced = end

    def close(self) -> None:
        self.file.close()
        self.synced = self.end  # it is in the snapshot that came after


def _write(file: Any, data: Any) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[file.write(view) :]


def _sync(file: Any) -> None:
    os.fsync(file.fileno())


def _locked(folder: pathlib.Path) -> Any:
    try:
        check_regular(folder / "lock")
        file = open(folder / "lock", "ab")  # noqa: SIM115
    except OSError as error:
        _cannot_open(folder, error)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            pass
        except OSError as error:
            file.close()
            _cannot_open(folder, error)
        if time.monotonic() > deadline:
            file.close()
            fail(FolderInUse, f"{folder} is in use", where=str(folder),
                 why="another process, or another parameter server of this one, has it open",
                 fix="close that one, end that process, or choose another folder")  # fmt: skip
        time.sleep(0.05)


def _recover(folder: pathlib.Path) -> tuple[int, int, list[Record], int]:
    """The newest complete snapshot, the newest generation, the records since the snapshot, and the length of the last log."""
    numbers = sorted({int(p.name[-6:]) for p in folder.iterdir() if re.fullmatch(r"(snapshot|log)-\d{6}", p.name)})
    for first in reversed(numbers):
        found = _read(folder / f"snapshot-{first:06}")
        if found is None or not found.is_complete or not found.records or found.records[-1].kind != END.kind:
            continue
        records, length = found.records[:-1], 0
        for number in range(first, numbers[-1] + 1):
            path = folder / f"log-{number:06}"
            found = _read(path)
            if found is None:
                _damaged(path, "it is missing")
            if found.is_damaged or (number < numbers[-1] and not found.is_complete):
                _damaged(path, f"a record at byte {found.end:,} of {found.size:,} is not as it was written")
            records, length = records + found.records, found.end
        return first, numbers[-1], records, length
    fail(CheckpointFileError, f"{folder} holds no complete snapshot", where=str(folder),
         why=f"{len(numbers)} generations were looked at", fix="restore the folder from a copy")  # fmt: skip


def _read(path: pathlib.Path) -> FileRecords | None:
    """The records of a file; None if it is not there."""
    try:
        with open_regular(path) as file:
            return read_records(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        fail(CheckpointFileError, f"{path} cannot be read", where=str(path), why=str(error),
             fix="restore the folder from a copy")  # fmt: skip


def _damaged(path: pathlib.Path, why: str) -> NoReturn:
    fail(CheckpointFileError, f"{path} is damaged", where=str(path), why=why, fix="restore the folder from a copy")


def _cannot_open(folder: pathlib.Path, error: OSError) -> NoReturn:
    fail(CheckpointFileError, f"{folder} cannot be opened", where=str(folder), why=str(error),
         fix="let this user write there; restore what is missing from a copy, or choose another folder")  # fmt: skip


def _cannot_write(path: pathlib.Path, error: OSError) -> NoReturn:
    fail(CheckpointFileError, f"{path} cannot be written", where=str(path), why=str(error),
         fix="free space; what was acknowledged before is kept, and what was not is sent again")  # fmt: skip

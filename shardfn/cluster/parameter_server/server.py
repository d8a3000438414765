"""One server: its rows of the parameters, their optimizer state, and the parts of pushes that it was sent.

A server applies updates in the order of their numbers. It learns them from whoever asks it for something, so it calls
nobody. What it must not lose is in its journal: each part of a push before it is acknowledged, and now and then a snapshot
of everything. After a restart it is the server of the last snapshot, with the parts; the updates since then are applied
again.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardfn.cluster.parameter_server.held import PARAMS, Part, Slot, first_slots, held
from shardfn.cluster.parameter_server.journal import Journal, Record, write_first
from shardfn.cluster.parameter_server.ledger import Push, Update
from shardfn.cluster.parameter_server.partition import Partition, Request, Rows, compressed
from shardfn.errors import CheckpointFileError, fail

LOG_RATIO, MIN_LOG_BYTES = 4, 1 << 20
"""A snapshot is made when the log has so many times the bytes of the state, so snapshots add a quarter to what is written;
but of a tiny state not before the log has a mebibyte."""


class Saved(NamedTuple):
    """A server as data.

    Attributes:
      version: its version.
      previous: the version of the snapshot before.
      closed: the last step of each worker whose parts are not needed any more.
      slots: the arrays.
      parts: the parts of pushes that are in none of its updates.
    """

    version: int
    previous: int
    closed: Mapping[str, int]
    slots: tuple[Slot, ...]
    parts: tuple[Part, ...] = ()


class Answer(NamedTuple):
    """Rows, and the version that they have."""

    version: int
    rows: tuple[Rows, ...]


class Behind(NamedTuple):
    """The server lacks updates after `version`."""

    version: int


class Server:
    """A server, with its journal.

    Args:
      folder: the folder of its journal, which has a snapshot.
      optimizer: an optax optimizer, or one of `embedding` for the rows of a table.
      is_synchronous: whether training is synchronous.
      log_bytes: the length of a log that makes it start anew with a snapshot; by default after the size of the state.

    Raises:
      ClusterError, CheckpointFileError: as `Journal`.
    """

    def __init__(self, folder: pathlib.Path, optimizer: Any, is_synchronous: bool, log_bytes: int | None = None):
        self._journal = Journal(pathlib.Path(folder))
        saved = _from_records(self._journal.records)
        self._journal.records = []
        self._is_synchronous = is_synchronous
        self._starts = {str(slot.name): slot.start for slot in saved.slots if slot.path == PARAMS}
        try:
            self._held = held(optimizer, saved.slots, folder)
        except BaseException:
            self._journal.close()
            raise
        self._version, self._snapshots = saved.version, (saved.previous, saved.version)
        self._closed = dict(saved.closed)
        self._parts: dict[str, dict[int, Part]] = {}
        for part in saved.parts:
            if not self._is_closed(part.push):
                self._parts.setdefault(part.push.token, {})[part.number] = part
        size = sum(slot.values.nbytes for slot in saved.slots)
        self._log_bytes = max(LOG_RATIO * size, MIN_LOG_BYTES) if log_bytes is None else log_bytes
        self._lock = threading.RLock()

    def prepare(self, part: Part) -> bool:
        """Keep a message of a push. The same message again changes nothing.

        Args:
          part: the message.

        Returns:
          Whether all messages of the push to this server are here, and on disk.

        Raises:
          CheckpointFileError: the disk is full.
        """
        with self._lock:
            if self._is_closed(part.push):
                return True
            if part.number not in self._parts.get(part.push.token, {}):
                self._journal.append(_part_record(part))
                self._parts.setdefault(part.push.token, {})[part.number] = part
            if len(self._parts[part.push.token]) < part.total:
                return False
            position = self._journal.position()
        self._journal.sync(position)
        return True

    def pull(self, requests: Sequence[Request], updates: Sequence[Update], compress: bool = False) -> Answer | Behind:
        """Read rows.

        Args:
          requests: the rows.
          updates: updates to apply before, as far as they are new.
          compress: whether float32 is answered as bfloat16.

        Returns:
          The rows; or `Behind`, if updates before the given ones are missing.

        Raises:
          CheckpointFileError: a part of an update is not here.
        """
        with self._lock:
            if not self._advance(updates):
                return Behind(self._version)
            version, found = self._version, [self._read(request) for request in requests]
        return Answer(version, tuple(r._replace(values=compressed(r.values)) if compress else r for r in found))

    def advance(self, updates: Sequence[Update]) -> int:
        """Apply updates, as far as they are new and none before them is missing.

        Args:
          updates: the updates.

        Returns:
          The version.

        Raises:
          CheckpointFileError: a part of an update is not here.
        """
        with self._lock:
            self._advance(updates)
            return self._version

    def snapshot(self) -> int:
        """Write the state to disk, and start the log anew.

        Returns:
          The oldest version that the server may fall back to.

        Raises:
          CheckpointFileError: the disk is full.
        """
        with self._lock:
            if self._journal.bytes:  # without a part the last snapshot says the same
                self._rotate()
            return self._snapshots[0]

    def oldest(self) -> int:
        """The oldest version that the server may fall back to, and whose later updates it may need again."""
        return self._snapshots[0]

    def dump(self) -> Saved:
        """The server as data."""
        with self._lock:
            saved = self._saved()
            own = [
                slot._replace(values=slot.values.copy() if slot.values.flags.writeable else slot.values)
                for slot in saved.slots
            ]
            return saved._replace(slots=tuple(own))

    def close(self) -> None:
        """Close the journal, for another process to open it."""
        with self._lock:
            self._journal.close()

    def lose_power(self) -> None:
        """End as with the machine, for drills."""
        self._journal.lose_power()

    def _is_closed(self, push: Push) -> bool:
        return push.step < self._version if self._is_synchronous else push.step <= self._closed.get(push.worker, -1)

    def _read(self, request: Request) -> Rows:
        name, start = request.name, self._starts[request.name]
        if request.ids is not None:
            return Rows(name, 0, request.ids, self._held.read(name, request.ids - start))
        return Rows(
            name, request.start, None, self._held.read(name, slice(request.start - start, request.stop - start))
        )

    def _advance(self, updates: Sequence[Update]) -> bool:
        for update in updates:
            if update.number > self._version + 1:
                return False
            if update.number == self._version + 1:
                self._held.apply(self._messages(update))
                self._version = update.number
                self._closed |= {push.worker: push.step for push in update.pushes}
                self._parts = {token: messages for token, messages in self._parts.items()
                               if not self._is_closed(next(iter(messages.values())).push)}  # fmt: skip
                if self._journal.bytes > self._log_bytes:
                    with contextlib.suppress(CheckpointFileError):  # the log goes on, and the next update tries again
                        self._rotate()
        return True

    def _messages(self, update: Update) -> list[list[Part]]:
        """The messages of each push of an update."""
        found = []
        for push in update.pushes:
            messages = self._parts.get(push.token, {})
            if not messages or len(messages) < next(iter(messages.values())).total:
                fail(CheckpointFileError, f"a part of step {push.step} of worker {push.worker} is missing",
                     where=str(self._journal.folder),
                     why="it was acknowledged, so the log is damaged", fix="restore the folder from a copy")  # fmt: skip
            found.append([part for _, part in sorted(messages.items())])
        return found

    def _saved(self) -> Saved:
        parts = tuple(part for messages in self._parts.values() for part in messages.values())
        return Saved(self._version, self._snapshots[1], self._closed, tuple(self._held.slots()), parts)

    def _rotate(self) -> None:
        self._journal.rotate(_to_records(self._saved()))
        self._snapshots = (self._snapshots[1], self._version)


def new_servers(partition: Partition, params: Mapping[str, Any], optimizer: Any) -> Iterator[Saved]:
    """The servers before the first update, one after the other.

    Args:
      partition: their rows.
      params: the parameters by name, each [rows, ...]; only slices of them are read.
      optimizer: an optax optimizer, or one of `embedding` for a table.
    """
    for own in partition.ranges:
        yield Saved(0, 0, {}, first_slots(optimizer, own, params))


def regroup(partition: Partition, servers: Sequence[Saved], tokens: Iterable[str]) -> list[Saved]:
    """The servers of another partition with the same state.

    Args:
      partition: the rows of the new servers.
      servers: the servers so far, all of one version.
      tokens: the attempts whose parts are needed.

    >>> from shardfn.cluster.parameter_server.partition import ArraySpec
    >>> saved = Saved(3, 0, {}, (Slot("params", "w", 0, np.arange(4.0)),))
    >>> [slot.values.tolist()
    ...  for new in regroup(Partition((ArraySpec("w", (4,), "float32"),), 2), [saved], []) for slot in new.slots]
    [[0.0, 1.0], [2.0, 3.0]]
    """
    pieces: list[dict[tuple[str, str], list[Rows]]] = [{} for _ in range(partition.servers)]
    shared: dict[str, Slot] = {}
    for slot in (slot for saved in servers for slot in saved.slots):
        if slot.name is None:
            shared[slot.path] = slot
            continue
        for server, rows in partition.place(Rows(slot.name, slot.start, None, slot.values)):
            pieces[server].setdefault((slot.path, slot.name), []).append(rows)
    slots = [
        (*(Slot(path, name, min(r.start for r in rows), np.concatenate([r.values for r in sorted(rows, key=lambda r: r.start)]))
           for (path, name), rows in own.items()), *shared.values())
        for own in pieces
    ]  # fmt: skip
    kept = {token: [part for saved in servers for part in saved.parts if part.push.token == token] for token in tokens}
    moved: list[list[Part]] = [[] for _ in range(partition.servers)]
    for parts in kept.values():
        placed: list[list[Rows]] = [[] for _ in range(partition.servers)]
        for server, found in (each for part in parts for rows in part.rows for each in partition.place(rows)):
            placed[server].append(found)
        for own, rows in zip(moved, placed, strict=True):
            own.append(Part(parts[0].push, 0, 1, tuple(rows), parts[0].row_step))
    first = servers[0]
    return [
        Saved(first.version, first.version, first.closed, own, tuple(parts))
        for own, parts in zip(slots, moved, strict=True)
    ]


def write_server(folder: pathlib.Path, saved: Saved) -> None:
    """Write the first snapshot of a server.

    Raises:
      OSError: the disk is full.
    """
    write_first(folder, _to_records(saved))


# ---- a server as records


def _to_records(saved: Saved) -> Iterator[Record]:
    yield Record("server", {"version": saved.version, "previous": saved.previous, "closed": dict(saved.closed)})
    for slot in saved.slots:
        yield Record("slot", {"path": slot.path, "name": slot.name, "start": slot.start}, [slot.values])
    yield from map(_part_record, saved.parts)


def _part_record(part: Part) -> Record:
    rows = [[r.name, r.start, r.ids is not None] for r in part.rows]
    arrays = [array for r in part.rows for array in (r.ids, r.values) if array is not None]
    return Record("part", {"push": part.push, "number": part.number, "total": part.total, "rows": rows,
                           "row_step": part.row_step}, arrays)  # fmt: skip


def _from_records(records: Sequence[Record]) -> Saved:
    slots, parts = [], []
    for record in records:
        fields = record.fields
        if record.kind == "slot":
            slots.append(Slot(**fields, values=record.arrays[0]))
        elif record.kind == "part":
            arrays = iter(record.arrays)
            rows = tuple(
                Rows(name, start, next(arrays) if has_ids else None, next(arrays))
                for name, start, has_ids in fields["rows"]
            )
            step = fields["row_step"]
            parts.append(Part(Push(*fields["push"]), fields["number"], fields["total"], rows, step and tuple(step)))
    return Saved(**records[0].fields, slots=tuple(slots), parts=tuple(parts))

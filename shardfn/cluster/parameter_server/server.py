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
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardfn.cluster.parameter_server.journal import Journal, Record, write_first
from shardfn.cluster.parameter_server.ledger import Push, Update
from shardfn.cluster.parameter_server.partition import Partition, Request, Rows, compressed
from shardfn.cluster.parameter_server.server_state import PARAMS, Part, Slot, first_slots, server_state
from shardfn.errors import CheckpointFileError, fail

LOG_RATIO, MIN_LOG_BYTES = 4, 1 << 20
"""A snapshot is made when the log has so many times the bytes of the state, so snapshots add a quarter to what is written;
but of a tiny state not before the log has a mebibyte."""


class ServerData(NamedTuple):
    """A server as data.

    Attributes:
      version: its version.
      previous: the version of the snapshot before.
      retired_steps: the last step of each worker whose parts are not needed any more.
      slots: the arrays.
      parts: the parts of pushes that are in none of its updates.
    """

    version: int
    previous: int
    retired_steps: Mapping[str, int]
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
            self._state = server_state(optimizer, saved.slots, folder)
        except BaseException:
            self._journal.close()
            raise
        self._version, self._snapshots = saved.version, (saved.previous, saved.version)
        self._retired_steps = dict(saved.retired_steps)
        self._parts: dict[str, dict[int, Part]] = {}
        for part in saved.parts:
            if not self._is_retired(part.push):
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
            if self._is_retired(part.push):
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

    def portion(self, ranges: Mapping[str, tuple[int, int]], tokens: Container[str]) -> ServerData:
        """A part of the server as data, for another server.

        Args:
          ranges: the rows of the other one: first row and the row after the last, by array.
          tokens: the attempts whose messages are needed.
        """
        with self._lock:
            found = portion(self._data(), ranges, tokens)
            # Of arrays that the next update changes, the rows as they are now.
            slots = (s._replace(values=s.values.copy() if s.values.flags.writeable else s.values) for s in found.slots)
            return found._replace(slots=tuple(slots))

    def close(self) -> None:
        """Close the journal, for another process to open it."""
        with self._lock:
            self._journal.close()

    def lose_power(self) -> None:
        """End as with the machine, for drills."""
        self._journal.lose_power()

    def _is_retired(self, push: Push) -> bool:
        return (
            push.step < self._version if self._is_synchronous else push.step <= self._retired_steps.get(push.worker, -1)
        )

    def _read(self, request: Request) -> Rows:
        name, start = request.name, self._starts[request.name]
        if request.ids is not None:
            return Rows(name, 0, request.ids, self._state.read(name, request.ids - start))
        return Rows(
            name, request.start, None, self._state.read(name, slice(request.start - start, request.stop - start))
        )

    def _advance(self, updates: Sequence[Update]) -> bool:
        for update in updates:
            if update.number > self._version + 1:
                return False
            if update.number == self._version + 1:
                self._state.apply(self._messages(update))
                self._version = update.number
                self._retired_steps |= {push.worker: push.step for push in update.pushes}
                self._parts = {token: messages for token, messages in self._parts.items()
                               if not self._is_retired(next(iter(messages.values())).push)}  # fmt: skip
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

    def _data(self) -> ServerData:
        parts = tuple(part for messages in self._parts.values() for part in messages.values())
        return ServerData(self._version, self._snapshots[1], self._retired_steps, tuple(self._state.slots()), parts)

    def _rotate(self) -> None:
        self._journal.rotate(_to_records(self._data()))
        self._snapshots = (self._snapshots[1], self._version)


def new_servers(partition: Partition, params: Mapping[str, Any], optimizer: Any) -> Iterator[ServerData]:
    """The servers before the first update, one after the other.

    Args:
      partition: their rows.
      params: the parameters by name, each [rows, ...]; only slices of them are read.
      optimizer: an optax optimizer, or one of `embedding` for a table.
    """
    for own in partition.ranges:
        yield ServerData(0, 0, {}, first_slots(optimizer, own, params))


def portion(saved: ServerData, ranges: Mapping[str, tuple[int, int]], tokens: Container[str]) -> ServerData:
    """What a server has of the rows of another one.

    Args:
      saved: the server.
      ranges: the rows of the other one: first row and the row after the last, by array.
      tokens: the attempts whose messages are needed.

    >>> saved = ServerData(3, 0, {}, (Slot("params", "w", 0, np.arange(4.0)),))
    >>> [slot.values.tolist() for slot in portion(saved, {"w": (2, 9)}, ()).slots]
    [[2.0, 3.0]]
    """

    def own(rows: Rows) -> Rows | None:
        return rows.between(*ranges.get(rows.name, (0, 0)))

    slots: list[Slot] = []
    for slot in saved.slots:
        if slot.name is None:
            slots.append(slot)
        elif (rows := own(Rows(slot.name, slot.start, None, slot.values))) is not None:
            slots.append(Slot(slot.path, slot.name, rows.start, rows.values))
    parts = tuple(
        part._replace(rows=tuple(rows for each in part.rows if (rows := own(each)) is not None))
        for part in saved.parts
        if part.push.token in tokens
    )
    return saved._replace(slots=tuple(slots), parts=parts)


def joined(portions: Sequence[ServerData]) -> ServerData:
    """The server of all portions of its rows.

    Args:
      portions: what each server has of them, all of one version.

    >>> halves = [ServerData(3, 0, {}, (Slot("params", "w", at, np.arange(2.0)),)) for at in (2, 0)]
    >>> joined(halves).slots
    (Slot(path='params', name='w', start=0, values=array([0., 1., 0., 1.])),)
    """
    shared = {slot.path: slot for each in portions for slot in each.slots if slot.name is None}
    rows: dict[tuple[str, str], list[Slot]] = {}
    parts: dict[str, list[Part]] = {}
    for each in portions:
        for slot in each.slots:
            if slot.name is not None:
                rows.setdefault((slot.path, slot.name), []).append(slot)
        for part in each.parts:
            parts.setdefault(part.push.token, []).append(part)
    slots = []
    for (path, name), own in rows.items():
        own.sort(key=lambda slot: slot.start)
        slots.append(Slot(path, name, own[0].start, np.concatenate([slot.values for slot in own])))
    messages = (
        own[0]._replace(number=0, total=1, rows=tuple(r for part in own for r in part.rows)) for own in parts.values()
    )
    first = portions[0]
    return ServerData(first.version, first.version, first.retired_steps, (*slots, *shared.values()), tuple(messages))


def write_server(folder: pathlib.Path, saved: ServerData) -> None:
    """Write the first snapshot of a server.

    Raises:
      OSError: the disk is full.
    """
    write_first(folder, _to_records(saved))


# ---- a server as records


def _to_records(saved: ServerData) -> Iterator[Record]:
    yield Record(
        "server", {"version": saved.version, "previous": saved.previous, "retired_steps": dict(saved.retired_steps)}
    )
    for slot in saved.slots:
        yield Record("slot", {"path": slot.path, "name": slot.name, "start": slot.start}, [slot.values])
    yield from map(_part_record, saved.parts)


def _part_record(part: Part) -> Record:
    rows = [[r.name, r.start, r.ids is not None] for r in part.rows]
    arrays = [array for r in part.rows for array in (r.ids, r.values) if array is not None]
    return Record("part", {"push": part.push, "number": part.number, "total": part.total, "rows": rows,
                           "row_step": part.row_step}, arrays)  # fmt: skip


def _from_records(records: Sequence[Record]) -> ServerData:
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
    return ServerData(**records[0].fields, slots=tuple(slots), parts=tuple(parts))

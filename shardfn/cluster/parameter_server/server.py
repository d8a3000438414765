"""One server: its rows of the parameters, their optimizer state, and the parts of pushes that it was sent.

A server applies updates in the order of their numbers. It learns them from whoever asks it for something, so it calls
nobody. What it must not lose is in its database (`server_rows`): each part of a push before it is acknowledged, and now and
then a snapshot of its arrays. After a restart it is the server of the snapshot, with the parts; the updates since then are
applied again.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardfn.cluster.parameter_server import server_rows
from shardfn.cluster.parameter_server.ledger import Push, Update
from shardfn.cluster.parameter_server.partition import Partition, Request, Rows, compressed
from shardfn.cluster.parameter_server.server_rows import ServerData
from shardfn.cluster.parameter_server.server_state import PARAMS, Part, Slot, first_slots, server_state
from shardfn.durable import Arrays, Database
from shardfn.errors import CheckpointFileError, fail

LOG_RATIO, MIN_LOG_BYTES = 4, 1 << 20
"""A snapshot is made when the parts since the last one have so many times the bytes of the state, so snapshots add a quarter to
what is written; but of a tiny state not before they have a mebibyte."""

PART_BYTES = 200
"""What a part has in the database beside its arrays."""


class Answer(NamedTuple):
    """Rows, and the version that they have."""

    version: int
    rows: tuple[Rows, ...]


class Behind(NamedTuple):
    """The server lacks updates after `version`."""

    version: int


class _Incoming(NamedTuple):
    """The messages of a push by their numbers, and their rows, where they are not in the database yet."""

    parts: dict[int, Part]
    rows: list[Callable[[], None]]
    arrays: Arrays


class Server:
    """A server, with its database.

    Args:
      folder: the folder of its database.
      optimizer: an optax optimizer, or one of `embedding` for the rows of a table.
      is_synchronous: whether training is synchronous.
      log_bytes: the bytes of parts after which it makes a snapshot; by default after the size of the state.

    Raises:
      ClusterError, CheckpointFileError: as `Database`.
    """

    def __init__(self, folder: pathlib.Path, optimizer: Any, is_synchronous: bool, log_bytes: int | None = None):
        self._db = Database(pathlib.Path(folder) / server_rows.FILE)
        try:
            self._db.sweep()
            saved = server_rows.read_server(self._db)
            self._state = server_state(optimizer, saved.slots, folder)
        except BaseException:
            self._db.close()
            raise
        self._is_synchronous = is_synchronous
        self._starts = {str(slot.name): slot.start for slot in saved.slots if slot.path == PARAMS}
        self._version = self._snapshot = saved.version
        self._retired_steps = dict(saved.retired_steps)
        self._incoming: dict[str, _Incoming] = {}
        self._parts: dict[str, dict[int, Part]] = {}  # on disk
        for part in saved.parts:
            if not self._is_retired(part.push):
                self._parts.setdefault(part.push.token, {})[part.number] = part
        self._bytes = sum(map(_bytes, saved.parts))
        size = sum(slot.values.nbytes for slot in saved.slots)
        self._log_bytes = max(LOG_RATIO * size, MIN_LOG_BYTES) if log_bytes is None else log_bytes
        self._lock = threading.RLock()

    def prepare(self, part: Part) -> bool:
        """Keep a message of a push. The same message again changes nothing.

        Returns:
          Whether all messages of the push to this server are here, and on disk.

        Raises:
          CheckpointFileError: the disk is full.
        """
        token = part.push.token
        with self._lock:
            if self._is_retired(part.push) or token in self._parts:
                return True
            if token not in self._incoming:
                self._incoming[token] = _Incoming({}, [], self._db.arrays())
            own = self._incoming[token]
            try:
                if part.number not in own.parts:
                    own.rows.append(server_rows.part_rows(self._db, part, own.arrays))
                    own.parts[part.number] = part
                if len(own.parts) < part.total:
                    return False
            except BaseException:
                self._drop(token)
                raise
        try:
            self._db.write(lambda: [put() for put in own.rows], own.arrays)
        except BaseException:
            with self._lock:
                self._drop(token)
            raise
        with self._lock:
            if self._incoming.pop(token, None) is not None and not self._is_retired(part.push):
                self._parts[token] = own.parts
                self._bytes += sum(map(_bytes, own.parts.values()))
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

        Returns:
          The version.

        Raises:
          CheckpointFileError: a part of an update is not here.
        """
        with self._lock:
            self._advance(updates)
            return self._version

    def snapshot(self) -> int:
        """Write the state to disk, so that a restart has no part to apply.

        Returns:
          The version that the server falls back to.

        Raises:
          CheckpointFileError: the disk is full.
        """
        with self._lock:
            if self._snapshot != self._version:
                self._save()
            return self._snapshot

    def oldest(self) -> int:
        """The version that the server falls back to, and whose later updates it may need again."""
        return self._snapshot

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
        """Close the database, for another process to open it."""
        with self._lock:
            self._db.close()

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
                for token, own in list(self._incoming.items()):
                    if own.parts and self._is_retired(next(iter(own.parts.values())).push):
                        self._drop(token)
                if self._bytes > self._log_bytes:
                    with contextlib.suppress(
                        CheckpointFileError
                    ):  # the parts are kept, and the next update tries again
                        self._save()
        return True

    def _messages(self, update: Update) -> list[list[Part]]:
        """The messages of each push of an update."""
        found = []
        for push in update.pushes:
            messages = self._parts.get(push.token, {})
            if not messages or len(messages) < next(iter(messages.values())).total:
                fail(CheckpointFileError, f"a part of step {push.step} of worker {push.worker} is missing",
                     where=str(self._db.path),
                     why="it was acknowledged, so the database is damaged", fix="restore the folder from a copy")  # fmt: skip
            found.append([part for _, part in sorted(messages.items())])
        return found

    def _data(self) -> ServerData:
        parts = tuple(part for messages in self._parts.values() for part in messages.values())
        return ServerData(self._version, self._retired_steps, tuple(self._state.slots()), parts)

    def _save(self) -> None:
        server_rows.write_server(self._db, self._data())
        self._snapshot, self._bytes = (
            self._version,
            sum(_bytes(p) for own in self._parts.values() for p in own.values()),
        )

    def _drop(self, token: str) -> None:
        """Forget messages that are not on disk."""
        if (own := self._incoming.pop(token, None)) is not None:
            self._db.discard(own.arrays)


def _bytes(part: Part) -> int:
    return PART_BYTES + sum(rows.values.nbytes + (0 if rows.ids is None else rows.ids.nbytes) for rows in part.rows)


def new_servers(partition: Partition, params: Mapping[str, Any], optimizer: Any) -> Iterator[ServerData]:
    """The servers before the first update, one after the other.

    Args:
      partition: their rows.
      params: the parameters by name, each [rows, ...]; only slices of them are read.
      optimizer: an optax optimizer, or one of `embedding` for a table.
    """
    for own in partition.ranges:
        yield ServerData(0, {}, first_slots(optimizer, own, params))


def portion(saved: ServerData, ranges: Mapping[str, tuple[int, int]], tokens: Container[str]) -> ServerData:
    """What a server has of the rows of another one.

    Args:
      saved: the server.
      ranges: the rows of the other one: first row and the row after the last, by array.
      tokens: the attempts whose messages are needed.

    >>> saved = ServerData(3, {}, (Slot("params", "w", 0, np.arange(4.0)),))
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

    >>> halves = [ServerData(3, {}, (Slot("params", "w", at, np.arange(2.0)),)) for at in (2, 0)]
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
    return ServerData(first.version, first.retired_steps, (*slots, *shared.values()), tuple(messages))

"""The coordinator: the one database that says which pushes count, and which servers are live. It holds no gradients.

A push counts from the moment that its row is on disk (`ledger_rows`). Answers tell what is on disk, so no client learns of a
push before.

A change of servers holds a lease, which keeps pushes back. Whatever changes the ledger ends the lease: so the client that still
has it knows that nothing changed since it began. Calls that had to wait stand in line (`Line`): a lease is given when nobody
waits that came before, so changes without pause hold up nobody for ever.
"""

from __future__ import annotations

import pathlib
import secrets
import threading
import time
from typing import Any, NamedTuple

from shardfn.cluster.parameter_server import ledger as ledgers
from shardfn.cluster.parameter_server import ledger_rows
from shardfn.cluster.parameter_server.ledger import STALE, WAITING, Ledger, Place, Push, Update
from shardfn.cluster.parameter_server.ledger_rows import Holder, Job
from shardfn.cluster.parameter_server.line import Line
from shardfn.durable import Database
from shardfn.errors import CheckpointFileError, fail

MOVED, BUSY = "moved", "busy"
"""What becomes of a push while the servers change: to be sent to the new servers; to be sent again in a moment."""

LEASE_S = 10
"""Seconds for which a client that died, or stalls, keeps back pushes and other changes of the servers."""


class LedgerStatus(NamedTuple):
    """What a client needs to know of the ledger.

    Attributes:
      version: the number of the last update.
      place: which servers are live.
      workers: the number of workers.
      waiting: the accepted pushes that are in no update yet.
      updates: updates after the one that was asked for.
    """

    version: int
    place: Place
    workers: int
    waiting: tuple[Push, ...]
    updates: tuple[Update, ...] = ()


class Lease(NamedTuple):
    """The right to change the servers.

    Attributes:
      token: names the lease, and the folder of the new servers.
      status: the ledger, which does not change while the lease is held.
    """

    token: str
    status: LedgerStatus


class Pulled(NamedTuple):
    """Parameters, and the number of the last update that is in all of them."""

    values: Any
    version: int


class Receipt(NamedTuple):
    """What became of a push.

    Attributes:
      status: "applied", or "waiting" for the other workers; it is kept in both cases. "late" if the step's update was made
        without it, "stale" if it came from too old parameters; both are dropped.
      version: the number of the last update.
      staleness: updates between the parameters of the push and the last update.
    """

    status: str
    version: int
    staleness: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether the push is, or will be, in an update."""
        return self.status in (WAITING, ledgers.APPLIED)


class Report(NamedTuple):
    """What happened so far.

    Attributes:
      updates: the number of updates.
      accepted: the number of pushes that count.
      late: pushes that came after their step's update, since the coordinator started.
      stale: pushes that were refused as too old, since the coordinator started.
      staleness: how many pushes had which staleness.
      syncs: transactions of the coordinator since it started.
      servers: the number of servers.
      workers: the number of workers.
    """

    updates: int
    accepted: int
    late: int
    stale: int
    staleness: dict[int, int]
    syncs: int
    servers: int
    workers: int

    @property
    def largest_staleness(self) -> int:
        """The largest staleness of an accepted push; 0 if there is none."""
        return max(self.staleness, default=0)


class _State:
    """What is on disk, and what the transaction that runs makes of it: `next`, `next_lease` and the updates `made`.

    Changes, of which one runs at a time, read and set the latter. `changed` guards the former.
    """

    def __init__(self, ledger: Ledger, history: list[Update], lease: Holder | None):
        self.changed = threading.Condition()
        self.ledger, self.history, self.lease, self.free_since = ledger, history, lease, 0.0
        self.undone()

    def committed(self) -> None:
        """The transaction is on disk."""
        with self.changed:
            if self.lease is not None and self.next_lease is None:
                self.free_since = time.time()
            self.history += self.made
            self.ledger, self.lease = self.next, self.next_lease
            self.made.clear()
            self.changed.notify_all()

    def undone(self) -> None:
        """There is no transaction."""
        self.next, self.next_lease, self.made = self.ledger, self.lease, list[Update]()


class Coordinator:
    """The coordinator, with its database.

    Raises:
      ClusterError, CheckpointFileError: as `Database`.
    """

    def __init__(self, folder: pathlib.Path):
        self._db = Database(pathlib.Path(folder) / ledger_rows.FILE)
        try:
            self.job = ledger_rows.read_job(self._db)
            self._state = _State(*ledger_rows.read_ledger(self._db))
        except BaseException:
            self._db.close()
            raise
        self._refused = {ledgers.LATE: 0, STALE: 0}
        self._line, self._ended = Line(), ""
        self._db.committed, self._db.undone = self._state.committed, self._state.undone

    def job_of(self) -> Job:
        """The arrays and the rules."""
        return self.job

    def folder(self) -> pathlib.Path:
        """That of the database."""
        return self._db.path.parent

    def commit(self, push: Push, epoch: int) -> tuple[Receipt, Update | None]:
        """Accept a push whose parts all servers hold. The same push again gets the same answer.

        Returns:
          What became of it, and the update that it made.

        Raises:
          ClusterError: a push of this worker is missing before it.
          CheckpointFileError: the disk is full, and the push does not count; or it could not be synced, and a restart decides
            whether it counts.
        """

        def change() -> tuple[Receipt, Update | None]:
            update = None
            if epoch != self._state.next.epoch:
                return Receipt(MOVED, self._state.next.version), None
            if ledgers.is_new(self._state.next, self.job.rules, push):
                if self._is_leased():
                    return Receipt(BUSY, self._state.next.version), None
                ledger, update = ledgers.accept(self._state.next, self.job.rules, push)
                self._set(ledger, update, push)
            staleness = self._state.next.version - (update is not None) - push.version
            status = ledgers.APPLIED if update else ledgers.status_of(self._state.next, self.job.rules, push)
            return Receipt(status, self._state.next.version, staleness), update

        receipt, update = self._db.write(change)
        with self._state.changed:
            if receipt.status in self._refused:
                self._refused[receipt.status] += 1
        return receipt, update

    def status(self, since: int | None = None, version: int | None = None, timeout_s: float = 0) -> LedgerStatus:
        """The status of the ledger.

        Args:
          since: the number of an update, to get those after it that are not forgotten.
          version: the number of an update to wait for.
          timeout_s: how long to wait, in seconds.

        Returns:
          The status, whether or not the update came.

        Raises:
          CheckpointFileError: there never was an update `since`.
        """
        with self._state.changed:
            if version is not None:
                self._state.changed.wait_for(lambda: self._state.ledger.version >= version, timeout_s)
            found = _status(self._state.ledger)
            first = found.version - len(self._state.history)
            if since is not None and since > found.version:
                fail(CheckpointFileError, f"update {since} is not in the ledger", where=str(self._db.path),
                     why=f"a server has applied it, and the ledger ends with {found.version}, so it is damaged",
                     fix="restore the folder from a copy")  # fmt: skip
            return found._replace(updates=() if since is None else tuple(self._state.history[max(since - first, 0) :]))

    def next_step(self, worker: str) -> int:
        """The step that a worker pushes next, also after it was restarted."""
        with self._state.changed:
            return self._state.ledger.next_step(self.job.rules, worker)

    def set_workers(self, workers: int) -> Update | None:
        """Change the number of workers.

        Returns:
          The update for which now enough workers pushed.

        Raises:
          CheckpointFileError: the disk is full, and the number is the former one; or it could not be synced, and a restart
            decides which number it is.
        """

        def change() -> Update | None:
            ledger, update = ledgers.resize_workers(self._state.next, self.job.rules, workers)
            self._set(ledger, update)
            return update

        return self._db.write(change)

    def join_line(self, name: str) -> None:
        """Stand in line for a turn between two changes of the servers."""
        with self._state.changed:
            self._line.join(name, time.time())

    def leave_line(self, name: str) -> None:
        """Leave the line."""
        with self._state.changed:
            self._line.leave(name)

    def lease(self, client: str, epoch: int) -> Lease | None:
        """Give a client the right to change the servers, and keep pushes back while it has it. A former lease of it ends.

        Args:
          client: names the client, also in the line.
          epoch: the epoch of the servers that it wants to change.

        Returns:
          The lease, for `LEASE_S`; None while another client has one, or somebody waits that came before, or where the epoch
          is another.
        """

        def change() -> Lease | None:
            held = self._state.next_lease
            is_taken = held is not None and held.client != client and self._is_leased()
            ended = held.until if held is not None else 0.0  # unless it is taken
            with self._state.changed:
                is_first = self._line.is_first(client, time.time(), max(ended, self._state.free_since))
            if is_taken or not is_first or epoch != self._state.next.epoch:
                return None
            lease = Holder(client, secrets.token_hex(8), time.time() + LEASE_S)
            self._set_lease(lease)
            return Lease(lease.token, _status(self._state.next))

        return self._db.write(change)

    def renew(self, token: str) -> bool:
        """Extend a lease to `LEASE_S` from now.

        Returns:
          Whether the client has it; False if it ran out, and something changed since.
        """

        def change() -> bool:
            if (lease := self._lease_of(token)) is None:
                return False
            self._set_lease(lease._replace(until=time.time() + LEASE_S))
            return True

        return self._db.write(change)

    def release(self, token: str) -> bool:
        """End a lease.

        Returns:
          Whether the servers of this change will never be live: they are not, and there is no such lease any more.
        """

        def change() -> bool:
            lease = self._state.next_lease
            if lease is not None and lease.token == token:
                self._set_lease(None)
            return self._state.next.token != token

        self._ended = token  # also where the disk is full, and it stays in the table
        return self._db.write(change)

    def switch(self, token: str, servers: int) -> bool:
        """Make the servers of a change live, whose first state is on disk.

        Returns:
          Whether they are live; False if the client has no lease any more.

        Raises:
          CheckpointFileError: the disk is full, and the servers are the former ones; or it could not be synced, and a restart
            decides which are live.
        """

        def change() -> bool:
            if self._lease_of(token) is not None:
                self._set(ledgers.resize_servers(self._state.next, servers, token))
            return self._state.next.token == token

        return self._db.write(change)

    def compact(self, oldest: int, epoch: int) -> None:
        """Forget updates that no server needs any more.

        Args:
          oldest: the oldest version that a server may fall back to.
          epoch: the epoch of the servers; those of a later one may need other updates, so nothing is forgotten.

        Raises:
          CheckpointFileError: the disk is full.
        """

        def change() -> bool:
            if is_same := epoch == self._state.next.epoch:
                self._db.delete("pushes", "in_update <= ?", oldest)
            return is_same

        if self._db.write(change):
            with self._state.changed:
                self._state.history = [update for update in self._state.history if update.number > oldest]

    def report(self) -> Report:
        """What happened so far."""
        with self._state.changed:
            found, refused = self._state.ledger, self._refused
            return Report(found.version, found.accepted, refused[ledgers.LATE], refused[STALE], dict(found.staleness),
                          self._db.commits, found.servers, found.workers)  # fmt: skip

    def close(self) -> None:
        """Close the database, for another process to open it."""
        self._db.close()

    # ---- within a change

    def _set(self, ledger: Ledger, update: Update | None = None, push: Push | None = None) -> None:
        if push is not None:
            ledger_rows.put_push(self._db, ledger, push)
        if update is not None:
            ledger_rows.put_update(self._db, update)
            self._state.made.append(update)
        ledger_rows.put_ledger(self._db, ledger)
        self._state.next = ledger
        if self._state.next_lease is not None:
            self._set_lease(None)

    def _set_lease(self, lease: Holder | None) -> None:
        ledger_rows.put_lease(self._db, lease)
        self._state.next_lease = lease

    def _lease_of(self, token: str) -> Holder | None:
        lease = self._state.next_lease
        return lease if lease is not None and lease.token == token != self._ended else None

    def _is_leased(self) -> bool:
        lease = self._state.next_lease
        # A lease that is longer than any is of a clock that was wrong.
        return lease is not None and lease.token != self._ended and 0 < lease.until - time.time() <= LEASE_S


def _status(ledger: Ledger) -> LedgerStatus:
    return LedgerStatus(ledger.version, ledger.place, ledger.workers, ledger.waiting)

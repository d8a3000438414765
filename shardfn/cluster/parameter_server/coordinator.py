"""The coordinator: the one log that says which pushes count, and which servers are live. It holds no gradients.

A push counts from the moment that its record is on disk. All answers wait for the log, so no client learns of a record before.

A change of servers holds a lease, which keeps pushes back. Any record ends the lease: so the client that still has it knows
that nothing changed since it began.
"""

from __future__ import annotations

import dataclasses
import pathlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardfn.cluster.parameter_server import ledger as ledgers
from shardfn.cluster.parameter_server.journal import Journal, Record, write_first
from shardfn.cluster.parameter_server.ledger import STALE, WAITING, Ledger, Place, Push, Rules, Update
from shardfn.cluster.parameter_server.partition import ArraySpec
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, fail, raise_problems

MOVED, BUSY = "moved", "busy"
"""What becomes of a push while the servers change: to be sent to the new servers; to be sent again in a moment."""

LEASE_S = 10
"""Seconds for which a client that died, or stalls, keeps back pushes and other changes of the servers."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What does not change.

    Attributes:
      arrays: the arrays of the parameters.
      rules: the rules.
      about: of a table, what it is, as JSON values.
    """

    arrays: tuple[ArraySpec, ...]
    rules: Rules
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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


class _Holder(NamedTuple):
    client: str
    token: str
    until: float  # of time.monotonic


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
      syncs: `fsync` calls of the coordinator since it started.
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


class Coordinator:
    """The coordinator, with its journal.

    Args:
      folder: the folder of its journal, which has a snapshot.

    Raises:
      ClusterError, CheckpointFileError: as `Journal`.
    """

    def __init__(self, folder: pathlib.Path):
        self._journal = Journal(pathlib.Path(folder))
        self.job, self._ledger, self._history = _replayed(self._journal.records)
        self._journal.records = []
        self._refused = {ledgers.LATE: 0, STALE: 0}
        self._lease: _Holder | None = None
        self._changed = threading.Condition()

    def job_of(self) -> Job:
        """The arrays and the rules."""
        return self.job

    def folder(self) -> pathlib.Path:
        """That of the journal."""
        return self._journal.folder

    def commit(self, push: Push, epoch: int) -> tuple[Receipt, Update | None]:
        """Accept a push whose parts all servers hold. The same push again gets the same answer.

        Args:
          push: the push.
          epoch: the epoch of the servers that hold its parts.

        Returns:
          What became of it, and the update that it made.

        Raises:
          ClusterError: a push of this worker is missing before it.
          CheckpointFileError: the log could not be written, and the push does not count; or it could not be synced, and a
            restart decides whether it counts.
        """
        update = None
        with self._changed:
            if epoch != self._ledger.epoch:
                return Receipt(MOVED, self._ledger.version), None
            if ledgers.is_new(self._ledger, self.job.rules, push):
                if self._is_leased():
                    return Receipt(BUSY, self._ledger.version), None
                update = self._add("push", {"push": push})
            staleness = self._ledger.version - (update is not None) - push.version
            status = ledgers.APPLIED if update else ledgers.status_of(self._ledger, self.job.rules, push)
            if status in self._refused:
                self._refused[status] += 1
            receipt = Receipt(status, self._ledger.version, staleness)
        self._flush()
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
        with self._changed:
            if version is not None:
                self._changed.wait_for(lambda: self._ledger.version >= version, timeout_s)
            found = self._status()
            first = found.version - len(self._history)
            if since is not None and since > found.version:
                fail(CheckpointFileError, f"update {since} is not in the ledger", where=str(self._journal.folder),
                     why=f"a server has applied it, and the ledger ends with {found.version}, so its log is damaged",
                     fix="restore the folder from a copy")  # fmt: skip
            updates = () if since is None else tuple(self._history[max(since - first, 0) :])
        self._flush()
        return found._replace(updates=updates)

    def next_step(self, worker: str) -> int:
        """The step that a worker pushes next, also after it was restarted.

        Args:
          worker: the worker.
        """
        with self._changed:
            step = self._ledger.next_step(self.job.rules, worker)
        self._flush()
        return step

    def set_workers(self, workers: int) -> Update | None:
        """Change the number of workers.

        Args:
          workers: the number.

        Returns:
          The update for which now enough workers pushed.

        Raises:
          CheckpointFileError: the log could not be written, and the number is the former one; or it could not be synced, and
            a restart decides which number it is.
        """
        with self._changed:
            update = self._add("workers", {"workers": workers})
        self._flush()
        return update

    def lease(self, client: str, epoch: int) -> Lease | None:
        """Give a client the right to change the servers, and keep pushes back while it has it. A former lease of it ends.

        Args:
          client: names the client.
          epoch: the epoch of the servers that it wants to change.

        Returns:
          The lease, for `LEASE_S`; None while another client has one, or where the epoch is another.
        """
        with self._changed:
            is_taken = self._lease is not None and self._lease.client != client and self._is_leased()
            if is_taken or epoch != self._ledger.epoch:
                return None
            self._lease = _Holder(client, secrets.token_hex(8), time.monotonic() + LEASE_S)
            lease = Lease(self._lease.token, self._status())
        self._flush()
        return lease

    def renew(self, token: str) -> bool:
        """Extend a lease to `LEASE_S` from now.

        Returns:
          Whether the client has it; False if it ran out, and something changed since.
        """
        with self._changed:
            if self._lease is None or self._lease.token != token:
                return False
            self._lease = self._lease._replace(until=time.monotonic() + LEASE_S)
            return True

    def release(self, token: str) -> bool:
        """End a lease.

        Returns:
          Whether the servers of this change will never be live: they are not, and there is no such lease any more.
        """
        with self._changed:
            if self._lease is not None and self._lease.token == token:
                self._lease = None
            is_unused = self._ledger.token != token
        self._flush()
        return is_unused

    def switch(self, token: str, servers: int) -> bool:
        """Make the servers of a change live, whose first snapshots are on disk.

        Args:
          token: that of the lease.
          servers: their number.

        Returns:
          Whether they are live; False if the client has no lease any more.

        Raises:
          CheckpointFileError: the log could not be written, and the servers are the former ones; or it could not be synced,
            and a restart decides which are live.
        """
        with self._changed:
            if self._lease is not None and self._lease.token == token:
                self._add("servers", {"servers": servers, "token": token})
            is_live = self._ledger.token == token
        self._flush()
        return is_live

    def compact(self, oldest: int, epoch: int) -> None:
        """Forget updates that no server needs any more, and start the log anew.

        Args:
          oldest: the oldest version that a server may fall back to.
          epoch: the epoch of the servers; those of a later one may need other updates, so nothing is forgotten.

        Raises:
          CheckpointFileError: the disk is full.
        """
        with self._changed:
            if self._journal.bytes and epoch == self._ledger.epoch:
                self._history = [update for update in self._history if update.number > oldest]
                self._journal.rotate([_ledger_record(self.job, self._ledger, self._history)])

    def report(self) -> Report:
        """What happened so far."""
        with self._changed:
            found, refused = self._ledger, self._refused
            return Report(found.version, found.accepted, refused[ledgers.LATE], refused[STALE], dict(found.staleness),
                          self._journal.syncs, found.servers, found.workers)  # fmt: skip

    def close(self) -> None:
        """Close the journal, for another process to open it."""
        self._journal.close()

    def lose_power(self) -> None:
        """End as with the machine, for drills."""
        self._journal.lose_power()

    def _add(self, kind: str, fields: dict[str, Any]) -> Update | None:
        self._journal.append(Record(kind, fields))
        self._lease = None
        self._ledger, update = _CHANGES[kind](self._ledger, self.job.rules, fields)
        if update is not None:
            self._history.append(update)
        self._changed.notify_all()
        return update

    def _status(self) -> LedgerStatus:
        found = self._ledger
        return LedgerStatus(found.version, found.place, found.workers, found.waiting)

    def _is_leased(self) -> bool:
        return self._lease is not None and time.monotonic() < self._lease.until

    def _flush(self) -> None:
        """Wait until all that was decided so far is on disk."""
        self._journal.sync(self._journal.position())


_CHANGES = {
    "push": lambda ledger, rules, fields: ledgers.accept(ledger, rules, Push(*fields["push"])),
    "workers": lambda ledger, rules, fields: ledgers.resize_workers(ledger, rules, fields["workers"]),
    "servers": lambda ledger, rules, fields: (ledgers.resize_servers(ledger, **fields), None),
}
"""What a record of the log does."""


def write_coordinator(folder: pathlib.Path, job: Job, servers: int, workers: int) -> None:
    """Write the first snapshot of a coordinator.

    Raises:
      OSError: the disk is full.
    """
    write_first(folder, [_ledger_record(job, Ledger(servers, workers), [])])


def check_job(job: Job, given: Job, where: str) -> None:
    """Refuse to resume with a folder of another job.

    Args:
      job: that of the folder.
      given: that of the caller.
      where: the call, for messages.

    Raises:
      CheckpointError: what differs.
    """
    if job.arrays != given.arrays:
        fail(CheckpointError, "the folder holds other parameters", where=where, why=f"it has {_names(job)}, not {_names(given)}",
             fix="choose another folder")  # fmt: skip
    if job.rules != given.rules:
        fail(CheckpointError, "the folder holds a job with other rules", where=where, why=f"it has {job.rules}",
             fix="create it with the same rules, or choose another folder")  # fmt: skip
    raise_problems([
        Problem(f"the folder holds a table with another {key}", where=where, why=f"it has {job.about.get(key)!r}, not {value!r}",
                fix="make the table in the same way, or choose another folder")
        for key, value in given.about.items() if job.about.get(key) != value
    ], CheckpointError)  # fmt: skip


def _names(job: Job) -> str:
    shown = [f"{spec.name}: {spec.dtype}{list(spec.shape)}" for spec in job.arrays[:5]]
    return ", ".join(shown) + (f" and {len(job.arrays) - 5} more" if len(job.arrays) > 5 else "")


def _ledger_record(job: Job, ledger: Ledger, history: Sequence[Update]) -> Record:
    fields = {
        "arrays": [dataclasses.astuple(spec) for spec in job.arrays],
        "rules": dataclasses.asdict(job.rules),
        "about": dict(job.about),
        "ledger": ledgers.to_json(ledger),
        "history": list(history),
    }
    return Record("ledger", fields)


def _replayed(records: Sequence[Record]) -> tuple[Job, Ledger, list[Update]]:
    first, *rest = records
    arrays = tuple(ArraySpec(name, tuple(shape), *more) for name, shape, *more in first.fields["arrays"])
    job = Job(arrays, Rules(**first.fields["rules"]), first.fields["about"])
    ledger = ledgers.from_json(first.fields["ledger"])
    history = [Update(number, tuple(Push(*push) for push in pushes)) for number, pushes in first.fields["history"]]
    for record in rest:
        ledger, update = _CHANGES[record.kind](ledger, job.rules, record.fields)
        if update is not None:
            history.append(update)
    return job, ledger, history

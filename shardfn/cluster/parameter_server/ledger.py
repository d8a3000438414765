"""Which pushes count, and which updates they make: pure functions of the sequence of accepted pushes.

A push is named by its worker and step. The ledger accepts each name once. An update is a set of accepted pushes whose
gradients are summed: in synchronous training those of one step, as soon as enough workers pushed it; in asynchronous training
each one alone. Updates are numbered from 1, and the version is the number of the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from shardfn.errors import ClusterError, fail

WAITING, APPLIED, LATE, STALE = "waiting", "applied", "late", "stale"
"""What becomes of a push: kept for its step's update; in an update; after its step's update; computed from too old parameters."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """How pushes become updates.

    Attributes:
      synchronous: whether an update sums the gradients of all workers for one step.
      backup: in synchronous training, workers that an update does not wait for.
      staleness: in asynchronous training, the most updates between the parameters that a gradient was computed from
        and the update that it makes.
    """

    synchronous: bool = True
    backup: int = 0
    staleness: int = 0


class Push(NamedTuple):
    """A gradient that all servers hold.

    Attributes:
      worker: the worker's name.
      step: the worker's step, from 0.
      token: names this attempt. Another attempt of the same worker and step may hold another gradient.
      version: the version of the parameters that it was computed from.
    """

    worker: str
    step: int
    token: str
    version: int


class Update(NamedTuple):
    """The pushes whose gradients are summed, by worker. `number` is the version after it."""

    number: int
    pushes: tuple[Push, ...]


class Place(NamedTuple):
    """Which servers are live: those that the ledger names.

    Attributes:
      epoch: how many times the servers changed.
      servers: the number of servers.
      token: names the change that made them; "" for the first ones.
    """

    epoch: int
    servers: int
    token: str = ""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What the accepted pushes amount to.

    Attributes:
      version: the number of the last update.
      epoch: how many times the servers changed.
      servers: the number of servers.
      workers: the number of workers.
      accepted: the number of accepted pushes.
      steps: the last accepted step of each worker.
      waiting: accepted pushes that are in no update yet.
      staleness: how many pushes had which staleness, in asynchronous training.
      token: as of `Place`.
    """

    servers: int
    workers: int
    version: int = 0
    epoch: int = 0
    accepted: int = 0
    steps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    waiting: tuple[Push, ...] = ()
    staleness: Mapping[int, int] = dataclasses.field(default_factory=dict)
    token: str = ""

    @property
    def place(self) -> Place:
        """Which servers are live."""
        return Place(self.epoch, self.servers, self.token)

    def next_step(self, rules: Rules, worker: str) -> int:
        """The step that a worker pushes next."""
        own = self.steps.get(worker, -1) + 1
        return max(own, self.version) if rules.synchronous else own


def status_of(ledger: Ledger, rules: Rules, push: Push) -> str:
    """What becomes of a push that arrives: WAITING for one to accept, or why it counts already or not at all.

    Raises:
      ClusterError: the worker is ahead, so that one of its pushes is missing.

    >>> ledger, rules = Ledger(servers=1, workers=2), Rules()
    >>> ledger, _ = accept(ledger, rules, Push("a", 0, "x", 0))
    >>> status_of(ledger, rules, Push("b", 0, "y", 0)), status_of(ledger, rules, Push("a", 0, "z", 0)), ledger.version
    ('waiting', 'waiting', 0)
    >>> ledger, update = accept(ledger, rules, Push("b", 0, "y", 0))
    >>> ledger.version, [push.worker for push in update.pushes], status_of(ledger, rules, Push("a", 0, "z", 0))
    (1, ['a', 'b'], 'applied')
    """
    if push.step <= ledger.steps.get(push.worker, -1):
        is_waiting = any(p.worker == push.worker and p.step == push.step for p in ledger.waiting)
        return WAITING if is_waiting else APPLIED
    wanted = ledger.next_step(rules, push.worker)
    if push.step > wanted or push.version > ledger.version:
        fail(ClusterError, f"worker {push.worker} is ahead of the servers",
             where=f"push(step={push.step}, version={push.version})",
             why=f"the next step is {wanted}, the version {ledger.version}",
             fix=f"push step {wanted}; if it was pushed before, restore the folder from a copy")  # fmt: skip
    if rules.synchronous:
        return WAITING if push.step == ledger.version else LATE
    return WAITING if ledger.version - push.version <= rules.staleness else STALE


def is_new(ledger: Ledger, rules: Rules, push: Push) -> bool:
    """Whether a push is to be accepted.

    Raises:
      ClusterError: as `status_of`.
    """
    return push.step > ledger.steps.get(push.worker, -1) and status_of(ledger, rules, push) == WAITING


def accept(ledger: Ledger, rules: Rules, push: Push) -> tuple[Ledger, Update | None]:
    """The ledger with one more push, one that `is_new`, and the update that it makes, if it makes one."""
    staleness = dict(ledger.staleness)
    if not rules.synchronous:
        staleness[ledger.version - push.version] = staleness.get(ledger.version - push.version, 0) + 1
    return _with_update(
        dataclasses.replace(ledger, accepted=ledger.accepted + 1, steps={**ledger.steps, push.worker: push.step},
                            waiting=(*ledger.waiting, push), staleness=staleness), rules)  # fmt: skip


def resize_workers(ledger: Ledger, rules: Rules, workers: int) -> tuple[Ledger, Update | None]:
    """The ledger with another number of workers, and the update for which now enough workers pushed."""
    return _with_update(dataclasses.replace(ledger, workers=workers), rules)


def resize_servers(ledger: Ledger, servers: int, token: str) -> Ledger:
    """The ledger with other servers, in a new epoch. The token names the change that made them."""
    return dataclasses.replace(ledger, servers=servers, epoch=ledger.epoch + 1, token=token)


def _with_update(ledger: Ledger, rules: Rules) -> tuple[Ledger, Update | None]:
    wanted = max(ledger.workers - rules.backup, 1) if rules.synchronous else 1
    if len(ledger.waiting) < wanted:
        return ledger, None
    # Summed in the order of the names, so that the sum does not depend on who was first.
    update = Update(ledger.version + 1, tuple(sorted(ledger.waiting)))
    return dataclasses.replace(ledger, version=update.number, waiting=()), update

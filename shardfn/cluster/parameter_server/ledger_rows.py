"""The ledger as tables, which hold what the accepted pushes amount to, the updates that servers may still need, and the lease.

A push is accepted by the rows that `push_rows` writes in one transaction: its own, and the new state of the ledger.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shardfn.cluster.parameter_server.ledger import Ledger, Push, Rules, Update
from shardfn.cluster.parameter_server.partition import ArraySpec
from shardfn.durable import Database, new_database
from shardfn.durable.store_errors import damaged
from shardfn.errors import CheckpointError, Problem, fail, raise_problems

FILE = "ledger.db"

TABLES = {
    "arrays": "place INTEGER PRIMARY KEY, name TEXT, shape TEXT, dtype TEXT, colocated_with TEXT",
    "rules": "id INTEGER PRIMARY KEY, synchronous INTEGER, backup INTEGER, staleness INTEGER, about TEXT",
    "ledger": "id INTEGER PRIMARY KEY, version INTEGER, epoch INTEGER, servers INTEGER, workers INTEGER, accepted INTEGER, "
              "token TEXT",
    "steps": "worker TEXT PRIMARY KEY, step INTEGER",
    "staleness": "staleness INTEGER PRIMARY KEY, pushes INTEGER",
    "pushes": "token TEXT PRIMARY KEY, worker TEXT, step INTEGER, version INTEGER, in_update INTEGER",
    "lease": "id INTEGER PRIMARY KEY, client TEXT, token TEXT, until REAL",
}  # fmt: skip
"""`steps` has the last accepted step of each worker. A push whose `in_update` is NULL waits for other workers."""


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


class Holder(NamedTuple):
    """Who has the lease.

    Attributes:
      client: names the client.
      token: names the lease.
      until: when it ends, in seconds since 1970.
    """

    client: str
    token: str
    until: float


def write_coordinator(folder: pathlib.Path, job: Job, servers: int, workers: int) -> None:
    """Write the ledger of a new job.

    Raises:
      CheckpointFileError: the disk is full.
    """

    def first() -> None:
        for place, spec in enumerate(job.arrays):
            columns = dataclasses.asdict(spec) | {"shape": json.dumps(spec.shape)}
            db.put("arrays", place=place, **{name: value for name, value in columns.items() if value is not None})
        db.put("rules", id=0, about=json.dumps(dict(job.about)), **dataclasses.asdict(job.rules))
        put_ledger(db, Ledger(servers, workers))

    with new_database(folder / FILE, TABLES) as db:
        db.write(first)


def put_ledger(db: Database, ledger: Ledger) -> None:
    """Write the numbers of the ledger, within a change."""
    db.put("ledger", id=0, version=ledger.version, epoch=ledger.epoch, servers=ledger.servers, workers=ledger.workers,
           accepted=ledger.accepted, token=ledger.token)  # fmt: skip


def put_push(db: Database, ledger: Ledger, push: Push) -> None:
    """Write an accepted push and what else it changes but an update, within a change; the ledger is that with the push."""
    db.put("pushes", **push._asdict())
    db.put("steps", worker=push.worker, step=push.step)
    for staleness in {ledger.version - 1 - push.version} & ledger.staleness.keys():
        db.put("staleness", staleness=staleness, pushes=ledger.staleness[staleness])


def put_update(db: Database, update: Update) -> None:
    """Write which pushes an update sums, within a change."""
    for push in update.pushes:
        db.put("pushes", **push._asdict(), in_update=update.number)


def put_lease(db: Database, lease: Holder | None) -> None:
    """Write who has the lease, within a change."""
    if lease is None:
        db.delete("lease")
    else:
        db.put("lease", id=0, **lease._asdict())


def read_job(db: Database) -> Job:
    """The job.

    Raises:
      CheckpointFileError: it is not there, or damaged.
    """
    arrays = tuple(
        ArraySpec(row["name"], tuple(json.loads(row["shape"])), row["dtype"], row.get("colocated_with"))
        for row in db.rows("arrays", "ORDER BY place")
    )
    (rules,) = _complete(db, "rules", db.rows("rules"), 1)
    return Job(
        arrays, Rules(bool(rules["synchronous"]), rules["backup"], rules["staleness"]), json.loads(rules["about"])
    )


def read_ledger(db: Database) -> tuple[Ledger, list[Update], Holder | None]:
    """The ledger, the updates that are not forgotten, and who has the lease.

    Raises:
      CheckpointFileError: a row is damaged, or missing.
    """
    (row,) = _complete(db, "ledger", db.rows("ledger"), 1)
    pushes: dict[int, list[Push]] = {}
    for each in db.rows("pushes", "ORDER BY in_update, worker, step"):
        push = Push(each["worker"], each["step"], each["token"], each["version"])
        pushes.setdefault(each.get("in_update", 0), []).append(push)
    waiting = tuple(pushes.pop(0, ()))
    history = [Update(number, tuple(own)) for number, own in sorted(pushes.items())]
    _complete(db, "pushes", history, history[-1].number + 1 - history[0].number if history else 0)
    steps = {each["worker"]: each["step"] for each in db.rows("steps")}
    staleness = {each["staleness"]: each["pushes"] for each in db.rows("staleness", "ORDER BY staleness")}
    leases = [Holder(each["client"], each["token"], each["until"]) for each in db.rows("lease")]
    del row["id"]
    return Ledger(**row, steps=steps, waiting=waiting, staleness=staleness), history, (leases or [None])[0]


def check_job(job: Job, given: Job, where: str) -> None:
    """Refuse to resume with a folder of another job.

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


def _complete(db: Database, table: str, rows: Iterable[Any], count: int) -> list[Any]:
    rows = list(rows)
    if len(rows) != count:
        damaged(db.path, f"`{table}` has {len(rows)} entries, not {count}")
    return rows

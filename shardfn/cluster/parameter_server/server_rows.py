"""A server as tables: the snapshot of its arrays, and the parts of pushes that it was sent since."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardfn.cluster.parameter_server.ledger import Push
from shardfn.cluster.parameter_server.partition import Rows
from shardfn.cluster.parameter_server.server_state import Part, Slot
from shardfn.durable import ARRAY_COLUMNS, Arrays, Database, new_database
from shardfn.durable.store_errors import damaged

FILE = "server.db"

TABLES = {
    "snapshot": "id INTEGER PRIMARY KEY, version INTEGER, retired_steps TEXT, arrays INTEGER",
    "slots": f"place INTEGER PRIMARY KEY, path TEXT, name TEXT, start INTEGER, {ARRAY_COLUMNS}",
    "parts": "token TEXT, number INTEGER, total INTEGER, worker TEXT, step INTEGER, version INTEGER, row_number INTEGER, "
             "row_rate REAL, arrays INTEGER, PRIMARY KEY (token, number)",
    "part_arrays": "token TEXT, number INTEGER, place INTEGER, name TEXT, start INTEGER, kind TEXT, "
                   f"{ARRAY_COLUMNS}, PRIMARY KEY (token, number, place)",
}  # fmt: skip
"""A part is a message of a push: its arrays are rows of the gradient of `name` from `start` on, or those with the ids of the
array before it (`kind` is "ids" or "values")."""


class ServerData(NamedTuple):
    """A server as data.

    Attributes:
      version: its version.
      retired_steps: the last step of each worker whose parts are not needed any more.
      slots: the arrays.
      parts: the parts of pushes that are in none of its updates.
    """

    version: int
    retired_steps: Mapping[str, int]
    slots: tuple[Slot, ...]
    parts: tuple[Part, ...] = ()


def write_new_server(folder: pathlib.Path, saved: ServerData) -> None:
    """Write the first state of a server.

    Raises:
      CheckpointFileError: the disk is full.
    """
    with new_database(folder / FILE, TABLES) as db:
        write_server(db, saved)


def write_server(db: Database, saved: ServerData) -> None:
    """Write the state of a server in the place of the one before, and delete the parts that are in it.

    Raises:
      CheckpointFileError: the disk is full, and nothing changed.
    """
    arrays = db.arrays()
    try:
        columns = [arrays.add([slot.values])[0] for slot in saved.slots]
        kept = {(part.push.token, part.number) for part in saved.parts}
        there = {(row["token"], row["number"]) for row in db.rows("parts")}
        new = [part_rows(db, p, arrays) for p in saved.parts if (p.push.token, p.number) not in there]

        def change() -> None:
            db.delete("slots")
            for place, (slot, own) in enumerate(zip(saved.slots, columns, strict=True)):
                db.put("slots", place=place, path=slot.path, start=slot.start, **own,
                       **({} if slot.name is None else {"name": slot.name}))  # fmt: skip
            steps = json.dumps(dict(saved.retired_steps))
            db.put("snapshot", id=0, version=saved.version, retired_steps=steps, arrays=len(columns))
            for token, number in there - kept:
                db.delete("parts", "token = ? AND number = ?", token, number)
                db.delete("part_arrays", "token = ? AND number = ?", token, number)
            for put in new:
                put()

        db.write(change, arrays)
    except BaseException:
        db.discard(arrays)
        raise
    db.sweep()


def part_rows(db: Database, part: Part, arrays: Arrays) -> Callable[[], None]:
    """Write the arrays of a part, if they are large.

    Returns:
      What writes its rows, within a change.

    Raises:
      CheckpointFileError: the disk is full.
    """
    found = [(r, kind, x) for r in part.rows for kind, x in (("ids", r.ids), ("values", r.values)) if x is not None]
    columns = arrays.add([x for _, _, x in found])
    key = {"token": part.push.token, "number": part.number}
    step = {} if part.row_step is None else {"row_number": part.row_step[0], "row_rate": float(part.row_step[1])}

    def put() -> None:
        push = {"worker": part.push.worker, "step": part.push.step, "version": part.push.version}
        db.put("parts", **key, **push, **step, total=part.total, arrays=len(found))
        for place, ((rows, kind, _), own) in enumerate(zip(found, columns, strict=True)):
            db.put("part_arrays", **key, place=place, name=rows.name, start=rows.start, kind=kind, **own)

    return put


def read_server(db: Database) -> ServerData:
    """The server of a database.

    Raises:
      CheckpointFileError: rows or files are damaged or missing.
    """
    snapshots = db.rows("snapshot")
    slots = tuple(
        Slot(row["path"], row.get("name"), row["start"], db.array(row)) for row in db.rows("slots", "ORDER BY place")
    )
    if [row["arrays"] for row in snapshots] != [len(slots)]:
        damaged(db.path, "arrays of a row of `snapshot` are missing")
    arrays: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in db.rows("part_arrays", "ORDER BY token, number, place"):
        arrays.setdefault((row["token"], row["number"]), []).append(row)
    parts = tuple(_part(db, row, arrays.get((row["token"], row["number"]), [])) for row in db.rows("parts"))
    return ServerData(snapshots[0]["version"], json.loads(snapshots[0]["retired_steps"]), slots, parts)


def _part(db: Database, row: Mapping[str, Any], arrays: list[dict[str, Any]]) -> Part:
    if row["arrays"] != len(arrays):
        damaged(db.path, "arrays of a row of `parts` are missing")
    rows, ids = [], None
    for own in arrays:
        if own["kind"] == "ids":
            ids = db.array(own)
        else:
            rows.append(Rows(own["name"], own["start"], ids, db.array(own)))
            ids = None
    step = (row["row_number"], row["row_rate"]) if "row_number" in row else None
    push = Push(row["worker"], row["step"], row["token"], row["version"])
    return Part(push, row["number"], row["total"], tuple(rows), step)

"""Incremental saves of a table: each adds the rows that changed, in one transaction, and is complete or absent."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from shardfn.durable import ARRAY_COLUMNS, Database, new_database
from shardfn.durable.database import refuse_earlier
from shardfn.durable.store_errors import damaged
from shardfn.embedding.store import Fields
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, raise_problems

FILE = "table.db"

TABLES = {
    "kind": "id INTEGER PRIMARY KEY, kind TEXT",
    "saves": "save INTEGER PRIMARY KEY, token TEXT, updates INTEGER, rows_saved INTEGER, arrays INTEGER",
    "arrays": "save INTEGER, chunk INTEGER, place INTEGER, name TEXT, "
              f"{ARRAY_COLUMNS}, PRIMARY KEY (save, chunk, place)",
}  # fmt: skip
"""A save has chunks of rows: the array `ids`, and those of the rows and their moments. A later save takes precedence."""

IDS = "ids"

Chunks = Iterable[tuple[np.ndarray, Fields]]
"""Ids, and their rows and moments."""


@dataclasses.dataclass(frozen=True)
class Saves:
    """What a folder of saves holds.

    Attributes:
      table: what the table is: rows, width, dtype, optimizer, first rows.
      count: the number of updates of the last save.
      saves: how many saves there were.
      token: names the last save.
      rows: rows in all saves, those that changed twice counted twice.
    """

    table: dict[str, Any]
    count: int = 0
    saves: int = 0
    token: str = ""
    rows: int = 0


def read_saves(folder: pathlib.Path) -> Saves | None:
    """What a folder holds; None if it has no saves.

    Raises:
      ClusterError, CheckpointFileError: as `Database`.
    """
    with _opened(folder) as db:
        return None if db is None else _saves(db)


def append(folder: pathlib.Path, before: Saves, chunks: Chunks, count: int, *, replace: bool = False) -> Saves:
    """Add a save to a folder.

    Args:
      folder: the folder, created if it is not there.
      before: what it holds now.
      chunks: what to write.
      count: the number of updates of the table.
      replace: whether the new save holds all rows, so that the earlier ones are deleted.

    Returns:
      What the folder holds then.

    Raises:
      CheckpointFileError: the disk is full, or the folder cannot be written. The earlier saves are complete.
    """
    if not (folder / FILE).exists():
        with new_database(folder / FILE, TABLES, log=False) as db:
            db.write(lambda: db.put("kind", id=0, kind=json.dumps(before.table)))
    save, token = before.saves + 1, secrets.token_hex(8)
    with contextlib.closing(Database(folder / FILE, log=False)) as db:
        arrays = db.arrays()
        try:
            rows, found = 0, []
            for chunk, (ids, fields) in enumerate(chunks):
                columns = arrays.add([ids, *fields.values()])
                rows += len(ids)
                found += [
                    {"save": save, "chunk": chunk, "place": place, "name": name, **own}
                    for place, (name, own) in enumerate(zip([IDS, *fields], columns, strict=True))
                ]

            def change() -> None:
                if replace:
                    db.delete("saves")
                    db.delete("arrays")
                for row in found:
                    db.put("arrays", **row)
                db.put("saves", save=save, token=token, updates=count, rows_saved=rows, arrays=len(found))

            db.write(change, arrays)
        except BaseException:
            db.discard(arrays)
            raise
        db.sweep()
    return Saves(before.table, count, save, token, rows + (0 if replace else before.rows))


def are_there(folder: pathlib.Path) -> bool:
    """Whether all files of the saves are there and not truncated; `replay` checks what is in them."""
    with _opened(folder) as db:
        return db is None or all(map(db.has_array, db.rows("arrays")))


def replay(folder: pathlib.Path) -> Iterator[tuple[np.ndarray, Fields]]:
    """The rows of all saves, the earliest first. All are checked before the first ones are given.

    Raises:
      CheckpointFileError: what is missing, truncated or damaged, by name; all of it together.
    """
    with _opened(folder) as db:
        if db is None:
            return
        saves = [row["save"] for row in db.rows("saves", "ORDER BY save")]
        raise_problems(
            [p for save in saves for row in _arrays(db, save) for p in _faults(db, row)], CheckpointFileError
        )
        for save in saves:
            for _, rows in itertools.groupby(_arrays(db, save), key=lambda row: row["chunk"]):
                fields = {row["name"]: db.array(row) for row in rows}
                yield fields.pop(IDS), fields


def same_table(folder: pathlib.Path, saved: Saves, table: dict[str, Any]) -> None:
    """Refuse the saves of another table.

    Raises:
      CheckpointError: everything that differs.
    """
    raise_problems([
        Problem(f"the saved table has another {key}", where=f"{folder}: {key} = {saved.table.get(key)!r}",
                why=f"this table has {value!r}", fix=f"make the table with {key} = {saved.table.get(key)!r}")
        for key, value in table.items() if saved.table.get(key) != value
    ], CheckpointError)  # fmt: skip


@contextlib.contextmanager
def _opened(folder: pathlib.Path) -> Iterator[Database | None]:
    """The database of a folder; None if it has none."""
    refuse_earlier(folder / FILE)
    if not (folder / FILE).exists():
        yield None
        return
    with contextlib.closing(Database(folder / FILE, log=False)) as db:
        yield db


def _saves(db: Database) -> Saves | None:
    kinds, saves = db.rows("kind"), db.rows("saves", "ORDER BY save")
    arrays = sum(row["arrays"] for row in saves)
    if len(kinds) != 1 or arrays != len(db.rows("arrays")):
        damaged(db.path, f"{arrays} arrays were saved, and it has others")
    if not saves:
        return None
    last = saves[-1]
    rows = sum(row["rows_saved"] for row in saves)
    return Saves(json.loads(kinds[0]["kind"]), last["updates"], last["save"], last["token"], rows)


def _arrays(db: Database, save: int) -> list[dict[str, Any]]:
    return db.rows("arrays", "WHERE save = ? ORDER BY chunk, place", save)


def _faults(db: Database, row: dict[str, Any]) -> list[Problem]:
    try:
        db.array(row)
    except CheckpointFileError as error:
        return list(error.problems)
    return []

"""A database stands kills, power cuts, a full disk and damage; what was acknowledged is there, or damage is told."""

import contextlib
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from shardfn.durable import ARRAY_COLUMNS, Database, DatabaseClosed, FolderInUse, arrays, database, new_database
from shardfn.durable.sqlite_log import log_damage
from shardfn.errors import CheckpointFileError, ClusterError
from tests.durable.faults import error, watch

TABLES = {"pushes": "number INTEGER PRIMARY KEY, note TEXT", "arrays": f"number INTEGER PRIMARY KEY, {ARRAY_COLUMNS}"}
PAGE = 4096


def made(folder):
    with new_database(folder / "a.db", TABLES):
        pass
    return Database(folder / "a.db")


def push(db, number, note="x" * 30):
    db.write(lambda: db.put("pushes", number=number, note=note))


def numbers(folder):
    with contextlib.closing(Database(folder / "a.db")) as db:
        return [row["number"] for row in db.rows("pushes", "ORDER BY number")]


def kill(folder, to):
    """What a kill leaves: the files as they are now."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


@pytest.fixture
def pushed(tmp_path):
    """Five pushes, some of several pages, and a sixth: the files before and after it."""
    db = made(tmp_path / "job")
    for number in range(5):
        push(db, number, "x" * 3000 * number)
    before = kill(tmp_path / "job", tmp_path / "before")
    push(db, 5, "y" * 9000)
    after = kill(tmp_path / "job", tmp_path / "after")
    db.close()
    return before, after


def test_a_power_cut_at_any_byte_of_a_commit_loses_nothing_that_was_acknowledged(pushed, tmp_path):
    """The tail of the log is cut off, or is zeros, or what it was, from any sector on and in any one sector."""
    before, after = (folder / "a.db-wal" for folder in pushed)
    old, new = before.read_bytes(), after.read_bytes()
    assert new.startswith(old) and len(new) > len(old) + 2 * PAGE
    logs = [new[:at] for at in (*range(len(old), len(new), 997), len(new) - 1, len(new))]
    logs += [new[:at] + bytes(len(new) - at) for at in range(len(old), len(new), 1536)]
    first = -(-len(old) // 512) * 512
    logs += [new[:at] + bytes(512) + new[at + 512 :] for at in range(first, len(new), 1024)]
    found = set()
    for log in logs:
        (again := kill(pushed[1], tmp_path / "again") / "a.db-wal").write_bytes(log)
        kept = numbers(again.parent)
        assert kept[:5] == [0, 1, 2, 3, 4]
        found.add(len(kept))
    assert found == {5, 6}


def test_damage_of_a_log_before_its_last_transaction_is_told_each_time(pushed, tmp_path):
    """SQLite takes it for the end of the log, and would drop pushes that were acknowledged."""
    log, last = pushed[1] / "a.db-wal", (pushed[0] / "a.db-wal").stat().st_size
    data, draw = log.read_bytes(), random.Random(0)
    assert log_damage(log) == ""
    for at in {*range(0, 32, 3), *(draw.randrange(32, last) for _ in range(24))}:
        again = kill(pushed[1], tmp_path / "again")
        damaged = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        (again / "a.db-wal").write_bytes(damaged)
        for _ in range(2):
            with pytest.raises(CheckpointFileError, match=r"(?s)a\.db-wal is damaged.*restore the folder from a copy"):
                numbers(again)
        assert (again / "a.db-wal").read_bytes() == damaged
        (again / "a.db-wal").write_bytes(data)
        assert numbers(again) == [0, 1, 2, 3, 4, 5]
    zeros = data[: last // 2] + bytes(PAGE) + data[last // 2 + PAGE :]
    (again / "a.db-wal").write_bytes(zeros)
    with pytest.raises(CheckpointFileError, match=r"a\.db-wal is damaged"):
        numbers(again)


def test_a_log_of_which_only_a_part_of_the_header_is_there_is_an_interrupted_write(pushed, tmp_path):
    for size in (0, 1, 31):
        (again := kill(pushed[1], tmp_path / "again") / "a.db-wal").write_bytes(bytes(size))
        assert log_damage(again) == ""


def test_damage_of_the_pages_is_told_or_without_effect(tmp_path):
    with contextlib.closing(made(tmp_path / "job")) as db:
        for number in range(60):
            push(db, number, "x" * 100)
    data, told, draw = (tmp_path / "job" / "a.db").read_bytes(), 0, random.Random(0)
    for kind in ("flip", "cut", "zeros"):
        for at in (draw.randrange(len(data)) for _ in range(70)):
            damaged = {"flip": data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :], "cut": data[:at],
                       "zeros": data[:at] + bytes(len(data) - at)}[kind]  # fmt: skip
            (tmp_path / "job" / "a.db").write_bytes(damaged)
            try:
                assert numbers(tmp_path / "job") == [*range(60)], (kind, at)
            except CheckpointFileError as error:
                told += "a.db" in str(error)
    assert told > 90


def test_changes_that_wait_at_the_same_time_share_a_transaction(tmp_path):
    db, begun, go = made(tmp_path), threading.Event(), threading.Event()

    def first():
        begun.set()
        go.wait(30)
        db.put("pushes", number=0)

    threads = [threading.Thread(target=db.write, args=(first,))]
    threads[0].start()
    begun.wait(30)
    threads += [threading.Thread(target=push, args=(db, number)) for number in range(1, 9)]
    for thread in threads[1:]:
        thread.start()
    while len(db._waiting) < 8:
        pass
    go.set()
    for thread in threads:
        thread.join(30)
    assert db.commits == 2 and len(db.rows("pushes")) == 9
    db.close()


def test_a_change_that_is_refused_does_not_stop_the_others(tmp_path):
    db = made(tmp_path)

    def refused():
        raise ClusterError([])

    with pytest.raises(ClusterError):
        db.write(refused)
    push(db, 1)
    assert db.commits == 1
    db.close()


@pytest.mark.parametrize("at", ["BEGIN", "INSERT", "COMMIT"])
@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR])
def test_a_statement_that_fails_is_told_and_changes_nothing(at, code, tmp_path, monkeypatch):
    left = []

    def before(db, sql):
        if left and sql.startswith(at):
            raise error("disk I/O error", left.pop())

    watch(monkeypatch, before)
    db, undone = made(tmp_path), []
    db.undone = lambda: undone.append(True)
    push(db, 0)
    left.append(code)
    with pytest.raises(CheckpointFileError, match=r"(?s)a\.db cannot be written.*disk I/O error.*free space"):
        push(db, 1)
    assert undone and [row["number"] for row in db.rows("pushes")] == [0]
    push(db, 2)
    db.close()
    assert numbers(tmp_path) == [0, 2]


def test_a_full_disk_refuses_changes_and_goes_on_when_there_is_space(tmp_path, monkeypatch):
    db = made(tmp_path)
    monkeypatch.setattr(arrays, "INLINE_BYTES", 10_000)
    push(db, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def large():
        own = db.arrays()
        try:
            (columns,) = own.add([np.arange(50_000)])
            db.write(lambda: db.put("arrays", number=0, **columns), own)
        except CheckpointFileError:
            db.discard(own)
            raise

    for room in range(0, 40_000, 5_000):
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (room, limits[1])
        )  # what a write then raises is what a full disk does
        try:
            with pytest.raises(CheckpointFileError, match="cannot be written"):
                large()
            with contextlib.suppress(CheckpointFileError):
                push(db, room + 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "arrays").iterdir())
    large()
    (row,) = db.rows("arrays")
    np.testing.assert_array_equal(db.array(row), np.arange(50_000))
    kept = [row["number"] for row in db.rows("pushes", "ORDER BY number")]
    db.close()
    assert kept[0] == 0 and numbers(tmp_path) == kept


@pytest.mark.parametrize("size", [10, 50_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_arrays_come_back_small_or_large(size, dtype, tmp_path, monkeypatch):
    import jax.numpy as jnp

    monkeypatch.setattr(arrays, "INLINE_BYTES", 20_000)
    with contextlib.closing(made(tmp_path)) as db:
        given = [
            np.arange(size).reshape(2, -1).astype(jnp.dtype(dtype)),
            np.zeros((0, 3), jnp.dtype(dtype)),
            np.asarray(3),
        ]
        own = db.arrays()
        columns = own.add(given)
        db.write(lambda: [db.put("arrays", number=n, **each) for n, each in enumerate(columns)], own)
    with contextlib.closing(Database(tmp_path / "a.db")) as db:
        assert len(list((tmp_path / "arrays").iterdir())) == (size > 10)
        for row, want in zip(db.rows("arrays", "ORDER BY number"), given, strict=True):
            found = db.array(row)
            assert found.dtype == want.dtype and found.shape == want.shape and (found == want).all()


def test_files_that_no_row_names_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "INLINE_BYTES", 1)
    with contextlib.closing(made(tmp_path)) as db:
        own, other = db.arrays(), db.arrays()
        (columns,) = own.add([np.arange(3)])
        other.add([np.arange(3)])
        db.write(lambda: db.put("arrays", number=0, **columns), own)
        db.sweep()
        assert {path.name for path in (tmp_path / "arrays").iterdir()} == {own.name, other.name}, "one is on its way"
        other.sync()
    with contextlib.closing(Database(tmp_path / "a.db")) as db:
        db.sweep()
        assert [path.name for path in (tmp_path / "arrays").iterdir()] == [own.name]
        db.write(lambda: db.delete("arrays"))
        db.sweep()
        assert not list((tmp_path / "arrays").iterdir())


def test_a_closed_database_writes_nothing_where_another_is_open(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.1)
    db = made(tmp_path)
    with pytest.raises(FolderInUse, match=r"is in use"):
        Database(tmp_path / "a.db")
    db.close()
    db.close()
    with contextlib.closing(Database(tmp_path / "a.db")) as other:
        with pytest.raises(DatabaseClosed):
            push(db, 1)
        push(other, 2)
    assert numbers(tmp_path) == [2]


def test_another_process_is_kept_out_and_comes_in_after_a_kill(tmp_path):
    code = ("import sys, pathlib, time; from shardfn.durable import Database; db = Database(pathlib.Path(sys.argv[1]));"
            "db.write(lambda: db.put('pushes', number=7)); print('open', flush=True); time.sleep(60)")  # fmt: skip
    made(tmp_path).close()
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path / "a.db"], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"open\n"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(FolderInUse):
        patch.setattr(database, "LOCK_WAIT_S", 0.1)
        Database(tmp_path / "a.db")
    threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL)).start()
    assert numbers(tmp_path) == [7], "it waits for the process to end"
    child.wait()


def test_a_missing_database_and_one_of_another_version_are_errors(tmp_path):
    with pytest.raises(CheckpointFileError, match="cannot be opened"):
        Database(tmp_path / "a.db")
    made(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(CheckpointFileError, match=r"(?s)another version of shardfn.*is 9, not 1"):
        Database(tmp_path / "a.db")
    (tmp_path / "a.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(CheckpointFileError, match=r"(?s)a\.db is damaged.*not a database"):
        Database(tmp_path / "a.db")


@pytest.mark.parametrize("name", ["snapshot-000001", "log-000007"])
def test_a_folder_of_an_earlier_version_is_refused_and_left_as_it_is(name, tmp_path):
    (tmp_path / name).touch()
    for call in (lambda: Database(tmp_path / "a.db"), lambda: made(tmp_path)):
        with pytest.raises(
            CheckpointFileError, match=f"(?s)by an earlier version.*{name}, and no a.db.*nothing was changed"
        ):
            call()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_new_database_that_is_not_complete_is_none(tmp_path):
    with pytest.raises(KeyError), new_database(tmp_path / "a.db", TABLES) as db:
        push(db, 1)
        raise KeyError
    assert not list(tmp_path.glob("*.db*")) and not list(tmp_path.glob(".*"))

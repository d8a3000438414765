"""Crashes at any point of a write, lost and doubled messages, damage, a full disk: no push is lost, and none counts twice.

The push of step s of worker w adds 1 to element w * STEPS + s, so the parameters say how often each push was applied.
"""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import optax
import pytest

from shardfn.cluster.parameter_server import InProcess, ParameterServer, RowGradient, folders
from shardfn.cluster.parameter_server.engine import COORDINATOR, Target, Unreachable, targets_of
from shardfn.durable import arrays
from shardfn.errors import CheckpointFileError, ClusterError
from tests.durable.faults import error, path_of, watch
from tests.processes import bare_environment

WORKERS, STEPS = 2, 6
OPTIMIZER = optax.sgd(1.0)


def start(folder, engine=None, synchronous=False, servers=2, **options):
    return ParameterServer.create(np.zeros(WORKERS * STEPS, "float32"), OPTIMIZER, folder=folder, servers=servers, workers=WORKERS,
                                  synchronous=synchronous, staleness=None if synchronous else 100, engine=engine, **options)  # fmt: skip


def push(server, worker, step):
    return server.push(RowGradient([worker * STEPS + step], [-1.0]), worker, step)


def counts(server):
    return server.pull().values.astype(int).reshape(WORKERS, STEPS)


class Faults(InProcess):
    """Calls that get lost, before or after their effect; that come twice; or that come again much later. And crashes."""

    def __init__(self, seed, rate=0.3):
        super().__init__()
        self.draw, self.rate, self.late, self.faults = random.Random(seed), rate, [], 0

    def pause(self, seconds):
        pass

    def _call(self, one):
        if self.late and self.draw.random() < 0.2:
            self._quietly(self.late.pop(self.draw.randrange(len(self.late))))
        if self.draw.random() > self.rate:
            return super()._call(one)
        self.faults += 1
        kind = self.draw.choice(["request", "reply", "twice", "later", "crash"])
        if kind in ("reply", "twice"):
            self._quietly(one)
        elif kind == "later":
            self.late.append(one)
        elif kind == "crash":
            self.restart(one.to)
        if kind == "twice":
            return super()._call(one)
        raise Unreachable(kind)

    def _quietly(self, one):
        with contextlib.suppress(Unreachable, ClusterError):
            super()._call(one)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_messages_lost_doubled_and_late_and_crashes_change_nothing(tmp_path, seed, synchronous):
    engine = Faults(seed)
    server = start(tmp_path, engine, synchronous, log_bytes=1500)
    for step in range(STEPS):
        if step == 2:
            server.resize(servers=3)
        for worker in range(WORKERS):
            receipt = push(server, worker, step)
            assert receipt.is_kept
    assert engine.faults > 20
    np.testing.assert_array_equal(counts(server), 1)
    assert server.report().accepted == WORKERS * STEPS


@pytest.mark.parametrize("inline", [1, 1 << 20], ids=["files", "rows"])
def test_a_crash_at_any_point_of_a_write_loses_nothing_that_was_acknowledged(tmp_path, monkeypatch, inline):
    """The folder is copied before and in each transaction, and in each write and `fsync` of arrays; each copy goes on."""
    copies, acknowledged, steps = [], [], [0]
    write, sync = arrays._write, arrays._sync

    def copy(*_):
        steps[0] += 1
        if (tmp_path / "job" / "job").is_dir() and steps[0] % 5 == 0:
            to = tmp_path / f"copy-{len(copies)}"
            shutil.copytree(tmp_path / "job", to)
            copies.append((to, list(acknowledged)))

    def half(file, data):
        write(file, data[: len(data) // 2])
        copy()
        write(file, data[len(data) // 2 :])

    watch(monkeypatch, copy)
    monkeypatch.setattr(arrays, "INLINE_BYTES", inline)
    monkeypatch.setattr(arrays, "_write", half)
    monkeypatch.setattr(arrays, "_sync", lambda file: (copy(), sync(file)))
    server = start(tmp_path / "job", log_bytes=700)
    for step in range(3):
        for worker in range(WORKERS):
            push(server, worker, step)
            acknowledged.append((worker, step))
        if step == 1:
            server.resize(servers=3)
            server.save()
    server.close()
    monkeypatch.undo()
    assert len(copies) > 30
    for at, (folder, done) in enumerate(copies[:: len(copies) // 30]):
        again = start(folder)
        found = counts(again)
        assert found.max() <= 1 and all(found[key] == 1 for key in done), f"copy {at}"
        assert found.sum() - len(done) <= 1, "at most the push whose answer did not come"
        for worker in range(WORKERS):
            push(again, worker, again.next_step(worker))
        assert counts(again).sum() == found.sum() + WORKERS
        again.close()
        shutil.rmtree(folder)


CHILD = """
import os, sys, threading
sys.path[:0] = sys.argv[2:]
from tests.cluster.test_parameter_server_faults import KILLED, drilled
def work(worker):
    client = type(server)(server.engine, server.setup, server.job, server.names, server.options)
    for step in range(client.next_step(worker), KILLED):
        client.push(gradient(worker, step), worker, step)
        os.write(1, b"%d %d\\n" % (worker, step))
server, gradient = drilled(sys.argv[1])
threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
KILLED = 2000


def drilled(folder):
    """Servers whose pushes are small or, each fourth one, in files; and their gradients."""
    first = np.zeros((2 * KILLED, 1), "float32")
    server = ParameterServer.create(first, OPTIMIZER, folder=folder, servers=2, synchronous=False, staleness=10**6,
                                    log_bytes=100_000)  # fmt: skip

    def gradient(worker, step):
        own = worker * KILLED + step
        if step % 4:
            return RowGradient([own], [[-1.0]])
        found = np.zeros_like(first)
        found[own] = -1
        return found

    arrays.INLINE_BYTES = 2000
    return server, gradient


@pytest.mark.processes
def test_kills_at_random_moments_lose_nothing_that_was_acknowledged_and_apply_nothing_twice(tmp_path):
    draw, done = random.Random(0), set()
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), os.getcwd()], stdout=subprocess.PIPE, text=True,
                                 env=bare_environment() | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"})  # fmt: skip
        done.add(tuple(map(int, child.stdout.readline().split())))
        time.sleep(draw.random())
        child.send_signal(signal.SIGKILL)
        done |= {
            tuple(map(int, line.split()))
            for line in child.stdout.read().splitlines(keepends=True)
            if line.endswith("\n")
        }
        child.wait()
    inline = arrays.INLINE_BYTES
    server, _ = drilled(tmp_path)
    arrays.INLINE_BYTES = inline
    found = server.pull().values.astype(int).reshape(2, KILLED)
    assert len(done) > 20 and found.max() == 1 and all(found[key] == 1 for key in done)
    assert found.sum() == server.report().accepted <= len(done) + 16, "those whose answers did not come"
    server.close()


def finished(folder):
    server = start(folder)
    for step in range(4):
        for worker in range(WORKERS):
            push(server, worker, step)
        if step == 2:
            server.save()
    server.close()


def outcome(folder):
    """The counts of a start from a folder, or the error."""
    try:
        server = start(folder)
        return counts(server)
    except CheckpointFileError as error:
        return error


@pytest.mark.parametrize("inline", [1, 1 << 20], ids=["files", "rows"])
def test_a_damaged_file_is_an_error_or_without_effect(tmp_path, monkeypatch, inline):
    monkeypatch.setattr(arrays, "INLINE_BYTES", inline)
    finished(tmp_path / "job")
    wanted = np.repeat([[1, 1, 1, 1, 0, 0]], WORKERS, 0)
    draw, errors = random.Random(0), 0
    for file in sorted(path for path in (tmp_path / "job").rglob("*") if path.is_file()):
        for damage in ("cut", "flip", "flip", "flip", "gone"):
            shutil.rmtree(tmp_path / "again", ignore_errors=True)
            shutil.copytree(tmp_path / "job", tmp_path / "again")
            path = tmp_path / "again" / file.relative_to(tmp_path / "job")
            data, at = bytearray(path.read_bytes()), draw.randrange(file.stat().st_size)
            if damage == "gone":
                path.unlink()
            else:
                data[at] ^= 16
                path.write_bytes(data[:at] if damage == "cut" else data)
            found = outcome(tmp_path / "again")
            if isinstance(found, CheckpointFileError):
                errors += 1
                assert path.name in str(found) and " a copy" in str(found)
            else:
                np.testing.assert_array_equal(found, wanted)
                assert damage == "flip", "in bytes that a database does not use"
    assert errors >= 6


def test_a_lost_folder_is_an_error(tmp_path):
    finished(tmp_path)
    shutil.rmtree(next(tmp_path.rglob("server-0")))
    with pytest.raises(CheckpointFileError, match="server-0 cannot be opened"):
        start(tmp_path)


def test_a_job_of_an_earlier_version_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "job/coordinator").mkdir(parents=True)
    old = tmp_path / "job/coordinator/snapshot-000001"
    old.touch()
    with pytest.raises(
        CheckpointFileError, match=r"(?s)earlier version of shardfn.*snapshot-000001.*choose another folder"
    ):
        start(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [old]


def test_a_person_reads_the_ledger_and_the_servers_with_sqlite(tmp_path):
    server = start(tmp_path)
    push(server, 0, 0)
    push(server, 1, 0)
    server.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "job/coordinator/ledger.db")) as db:
        assert db.execute("SELECT version, epoch, servers, workers, accepted FROM ledger").fetchall() == [
            (2, 0, 2, 2, 2)
        ]
        assert db.execute("SELECT worker, step, in_update FROM pushes ORDER BY in_update").fetchall() == [
            ("0", 0, 1),
            ("1", 0, 2),
        ]
        assert not db.execute("SELECT * FROM lease").fetchall()
    with contextlib.closing(sqlite3.connect(tmp_path / "job/epoch-0/server-0/server.db")) as db:
        assert db.execute("SELECT version, arrays FROM snapshot").fetchall() == [(0, 1)]
        dtype, shape, data = db.execute("SELECT dtype, shape, data FROM slots").fetchone()
        assert shape == "[6]" and not np.frombuffer(data, dtype).any()
        assert db.execute("SELECT worker, kind, shape FROM parts JOIN part_arrays USING (token) ORDER BY worker, place").fetchall() == [
            ("0", "ids", "[1]"), ("0", "values", "[1]")], "the part of worker 1 here has no rows"  # fmt: skip


class Disk:
    """A disk on which so many statements succeed; then it is full."""

    left = 10**9
    where = ""

    def before(self, db, sql):
        if self.where in path_of(db) and not sql.startswith(("PRAGMA", "SELECT", "ROLLBACK")):
            self.left -= 1
            if self.left < 0:
                raise error("database or disk is full")


@pytest.fixture
def disk(monkeypatch):
    found = Disk()
    watch(monkeypatch, found.before)
    return found


def test_a_full_disk_refuses_pushes_and_goes_on_when_there_is_space(tmp_path, disk):
    server = start(tmp_path)
    push(server, 0, 0)
    for room in range(0, 60, 6):
        for action in (lambda: push(server, 1, server.next_step(1)), lambda: server.resize(servers=3), server.save):
            disk.left = room
            try:
                action()
            except CheckpointFileError as told:
                assert "disk is full" in str(told)
        disk.left = 10**9
        server.resize(servers=2)
        found = counts(server)
        assert found.max() == 1 and found[0, 0] == 1 and found.sum() == 1 + server.next_step(1)
        if server.next_step(1) == STEPS:
            break
    for step in range(1, 3):
        push(server, 0, step)
    wanted = counts(server)
    assert wanted.max() == 1 and wanted[0, :3].sum() == 3
    server.engine.restart(COORDINATOR)
    server.engine.restart(targets_of(server._place)[0])
    np.testing.assert_array_equal(counts(server), wanted)


@pytest.mark.parametrize("failing", ["_write", "_sync", "sync_folder"])
def test_arrays_that_cannot_be_written_are_told_and_sent_again(tmp_path, monkeypatch, failing):
    monkeypatch.setattr(arrays, "INLINE_BYTES", 1)
    server = start(tmp_path, log_bytes=1)

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(arrays, failing, fail)
        for call in (lambda: push(server, 0, 0), lambda: server.resize(servers=3)):
            with pytest.raises(CheckpointFileError, match="Input/output error"):
                call()
    assert server.next_step(0) == 0
    push(server, 0, 0)
    server.resize(servers=3)
    push(server, 0, 1)
    server.close()
    assert counts(start(tmp_path)).sum() == 2


@pytest.mark.parametrize(
    "call",
    [lambda s: push(s, 0, 0), lambda s: s.resize(workers=3), lambda s: s.resize(servers=3)],
    ids=["push", "workers", "servers"],
)
def test_a_coordinator_whose_disk_is_full_accepts_nothing_and_tells_what_is_on_disk(tmp_path, disk, call):
    server = start(tmp_path)
    push(server, 1, 0)
    disk.where, disk.left = "/coordinator/", 0
    for refused in (lambda: push(server, 1, 1), lambda: call(server)):
        with pytest.raises(CheckpointFileError, match="disk is full"):
            refused()
    report = server.report()
    assert server.next_step(1) == 1 and counts(server).sum() == 1 and (report.workers, report.servers) == (2, 2)
    disk.left = 10**9
    call(server)
    assert push(server, 1, 1).is_kept
    before = server.report()
    server.engine.restart(COORDINATOR)
    assert server.report()[:2] == before[:2]


def test_close_and_create_bring_back_a_coordinator_whose_disk_was_full(tmp_path, disk):
    server = start(tmp_path)
    push(server, 1, 0)
    disk.where, disk.left = "/coordinator/", 0
    with pytest.raises(CheckpointFileError, match="disk is full"):
        push(server, 1, 1)
    server.close()
    disk.left = 10**9
    again = start(tmp_path)
    assert again.next_step(1) == 1
    push(again, 1, 1)


class Closing(InProcess):
    """A server is stopped between the look for it and a call of it, as other clients do at the end of a resize."""

    methods: tuple[str, ...] = ()

    def _call(self, one):
        if one.method not in self.methods:
            return super()._call(one)
        self.methods = ()
        closed = self.running[one.to]
        self.stop([one.to])
        return getattr(closed, one.method)(*one.args)


@pytest.mark.parametrize("method", ["prepare", "snapshot"])
def test_a_server_that_is_closed_under_a_call_is_asked_again(tmp_path, method):
    engine = Closing()
    server = start(tmp_path, engine, timeout_s=5)
    push(server, 0, 0)
    engine.methods = (method,)
    push(server, 0, 1)
    server.save()
    assert not engine.methods and counts(server)[0].tolist() == [1, 1, 0, 0, 0, 0]


def test_new_folders_are_on_disk_before_a_push_counts_there(tmp_path, monkeypatch):
    whole, seen = folders.sync_folder, {}

    def sync_folder(folder):
        seen[folder] = {path.name for path in folder.iterdir()}
        whole(folder)

    monkeypatch.setattr(arrays, "INLINE_BYTES", 1)
    monkeypatch.setattr(folders, "sync_folder", sync_folder)
    for place in ("durable.arrays", "durable.database", "files"):
        monkeypatch.setattr(f"shardfn.{place}.sync_folder", sync_folder)
    server = start(tmp_path / "jobs/one")
    server.resize(servers=3)
    server.push(np.ones(WORKERS * STEPS), 0, 0)
    for path in (path for path in tmp_path.rglob("*") if path.is_dir() or path.parent.name == "arrays"):
        assert path.name in seen[path.parent], path


def test_servers_that_do_not_answer_are_told_by_name(tmp_path):
    server = start(tmp_path, timeout_s=0)
    target = Target(0, 1)
    server.engine.stop([target])
    server.engine.start = lambda *_: None
    with pytest.raises(ClusterError, match="epoch-0/server-1 does not run"):
        push(server, 0, 0)

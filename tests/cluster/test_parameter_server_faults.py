"""Crashes at any point of a log, lost and doubled messages, damaged files, a full disk: no push is lost, none counts twice.

The push of step s of worker w adds 1 to element w * STEPS + s, so the parameters say how often each push was applied.
"""

import contextlib
import errno
import io
import random
import shutil

import numpy as np
import optax
import pytest

from shardfn.cluster.parameter_server import InProcess, ParameterServer, RowGradient, folders, journal
from shardfn.cluster.parameter_server.engine import COORDINATOR, Target, Unreachable, targets_of
from shardfn.errors import CheckpointFileError, ClusterError

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


def test_a_crash_at_any_point_of_a_write_loses_nothing_that_was_acknowledged(tmp_path, monkeypatch):
    """A copy of the folder is taken in the middle and at the end of each write, and before each `fsync`; each copy goes on."""
    copies, acknowledged = [], []
    whole, sync = journal._write, journal._sync

    def copy():
        to = tmp_path / f"copy-{len(copies)}"
        shutil.copytree(tmp_path / "job", to)
        copies.append((to, list(acknowledged)))

    def write(file, data):
        half = len(memoryview(data)) // 2
        whole(file, memoryview(data)[:half])
        copy()
        whole(file, memoryview(data)[half:])
        copy()

    server = start(tmp_path / "job", log_bytes=700)
    monkeypatch.setattr(journal, "_write", write)
    monkeypatch.setattr(journal, "_sync", lambda file: (copy(), sync(file)))
    for step in range(3):
        for worker in range(WORKERS):
            push(server, worker, step)
            acknowledged.append((worker, step))
        if step == 1:
            server.resize(servers=3)
            server.save()
    server.close()
    monkeypatch.undo()
    assert len(copies) > 100
    for at, (folder, done) in enumerate(copies):
        if at % 3:
            continue
        again = start(folder)
        found = counts(again)
        assert found.max() <= 1 and all(found[key] == 1 for key in done), f"copy {at}"
        assert found.sum() - len(done) <= 1, "at most the push whose answer did not come"
        for worker in range(WORKERS):
            push(again, worker, again.next_step(worker))
        assert counts(again).sum() == found.sum() + WORKERS
        again.close()
        shutil.rmtree(folder)


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


def test_a_damaged_file_is_an_error_or_without_effect(tmp_path):
    finished(tmp_path / "job")
    wanted = np.repeat([[1, 1, 1, 1, 0, 0]], WORKERS, 0)
    draw, errors, right = random.Random(0), 0, 0
    for file in sorted((tmp_path / "job").rglob("*-0*")):
        if not file.is_file() or not file.stat().st_size:
            continue
        for damage in ("cut", "flip", "gone"):
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
                assert "restore the folder from a copy" in str(found)
            elif (found == wanted).all():
                right += 1
            else:  # a cut end of the newest log cannot be told from a crash in a write: the worker's next push tells it
                assert damage == "cut" and "coordinator/log-" in str(path), (path, damage)
                assert (found <= wanted).all() and found.max() == 1
    assert errors and right, "a damaged newest snapshot has one before it"


def test_every_flipped_bit_of_a_newest_log_is_an_error_and_every_end_of_it_a_write_that_was_interrupted(tmp_path):
    server = start(tmp_path)
    for step in range(3):
        push(server, 0, step)
    server.close()
    for log in sorted(tmp_path.rglob("log-000001")):
        data = log.read_bytes()
        ends = [end for end in range(len(data) + 1) if journal.read_records(io.BytesIO(data[:end])).is_complete]
        assert len(ends) == 4, "before each record, and at the end"
        for at in range(len(data)):
            for bit in range(8):
                flipped = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
                found = journal.read_records(io.BytesIO(flipped))
                if at + 1 in ends:  # the last byte of a record: what the record says has its checksum
                    assert found.is_complete and len(found.records) == 3
                else:
                    assert found.is_damaged
            found = journal.read_records(io.BytesIO(data[:at]))
            assert not found.is_damaged and found.end == max(end for end in ends if end <= at)
        log.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
        with pytest.raises(CheckpointFileError, match=f"{log.name} is damaged"):
            journal.Journal(log.parent)
        log.write_bytes(data)
    assert start(tmp_path).next_step(0) == 3


def test_zeros_from_a_sector_on_are_a_write_that_was_interrupted_and_other_zeros_are_damage(tmp_path):
    journal.write_first(tmp_path, [])
    own = journal.Journal(tmp_path)
    for size in (100, 3000, 100):
        own.append(journal.Record("part", {}, [np.full(size, 7, np.uint8)]))
    own.close()
    data = (tmp_path / "log-000001").read_bytes()
    ends = [end for end in range(len(data) + 1) if journal.read_records(io.BytesIO(data[:end])).is_complete]
    for at in range(len(data)):
        begin = max(end for end in ends if end <= at)
        stop = min(end for end in ends if end > at)
        found = journal.read_records(io.BytesIO(data[:at] + bytes(len(data) - at)))
        if at == stop - 1:
            assert found.end == stop, "the last byte is lost, and nothing that the record says"
            continue
        assert found.end == begin
        if at == begin or at % journal.SECTOR == 0:
            assert not found.is_damaged
        elif data[at - 1] and at // journal.SECTOR == (stop - 1) // journal.SECTOR:
            assert found.is_damaged, "no sector of this record is all zero"
    damaged = bytearray(data)
    damaged[ends[1] + 200] ^= 1  # in the second record, while the third one was not written
    assert journal.read_records(io.BytesIO(damaged[: ends[2]] + bytes(5000))).is_damaged


def test_zeros_at_the_end_of_a_log_are_cut_off_and_a_lost_folder_is_an_error(tmp_path):
    server = start(tmp_path)
    push(server, 0, 0)
    server.close()
    for log in tmp_path.rglob("log-*"):  # a file can grow before its bytes are on disk
        log.write_bytes(log.read_bytes() + bytes(4096))
    server = start(tmp_path)
    assert server.next_step(0) == 1
    server.close()
    shutil.rmtree(next(tmp_path.rglob("server-0")))
    with pytest.raises(CheckpointFileError, match="server-0 cannot be opened"):
        start(tmp_path)


def test_a_snapshot_whose_folder_could_not_be_synced_is_taken_back(tmp_path, monkeypatch):
    """It would be read without what the log before it holds from then on."""
    journal.write_first(tmp_path, [journal.Record("first")])
    own, whole, calls = journal.Journal(tmp_path), journal.sync_folder, []

    def second_fails(folder):
        calls.append(folder)
        if len(calls) == 2:  # after the snapshot was renamed
            raise OSError(errno.EIO, "no answer of the disk")
        whole(folder)

    monkeypatch.setattr(journal, "sync_folder", second_fails)
    with pytest.raises(CheckpointFileError, match="no answer"):
        own.rotate([journal.Record("second")])
    monkeypatch.setattr(journal, "sync_folder", whole)
    assert len(calls) == 2 and {path.name for path in tmp_path.glob("*-*")} == {"log-000001", "snapshot-000001"}
    own.append(journal.Record("third"))
    own.close()
    assert [record.kind for record in journal.Journal(tmp_path).records] == ["first", "third"]


def test_a_closed_journal_is_on_disk(tmp_path, monkeypatch):
    journal.write_first(tmp_path, [])
    own, synced = journal.Journal(tmp_path), []
    monkeypatch.setattr(journal, "_sync", lambda file: synced.append(file.name))
    own.append(journal.Record("last"))
    own.close()
    assert len(synced) == 1


def test_a_full_disk_refuses_pushes_and_goes_on_when_there_is_space(tmp_path, monkeypatch):
    server = start(tmp_path)
    push(server, 0, 0)
    whole, left = journal._write, [60]

    def write(file, data):
        part = memoryview(data)[: left[0]]
        whole(file, part)
        left[0] -= len(part)
        if len(part) < len(memoryview(data)):
            raise OSError(errno.ENOSPC, "No space left on device")

    for room in range(0, 700, 60):
        monkeypatch.setattr(journal, "_write", write)
        left[0] = room
        for action in (lambda: push(server, 1, 0), lambda: server.resize(servers=3), server.save):
            try:
                action()
            except CheckpointFileError as error:
                assert "No space left" in str(error)
        monkeypatch.setattr(journal, "_write", whole)
        found = counts(server)
        assert found.max() == 1 and found[0, 0] == 1 and found.sum() == 1 + server.next_step(1)
    push(server, 1, server.next_step(1))
    for step in range(1, 3):
        push(server, 0, step)
    wanted = counts(server)
    assert wanted.max() == 1 and wanted[0, :3].sum() == 3
    server.engine.restart(COORDINATOR)
    server.engine.restart(targets_of(server._place)[0])
    np.testing.assert_array_equal(counts(server), wanted)


def test_a_failed_sync_is_told_and_a_restart_decides(tmp_path, monkeypatch):
    server = start(tmp_path)

    def fail(file):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_sync", fail)
        with pytest.raises(CheckpointFileError, match="Input/output error"):
            push(server, 0, 0)
    with pytest.raises(CheckpointFileError, match="Input/output error"):
        push(server, 0, 0)
    for target in list(server.engine.running):
        server.engine.restart(target)
    assert push(server, 0, 0).is_kept and counts(server).sum() == 1


def fill_the_disk_of_the_coordinator(monkeypatch):
    sync = journal._sync

    def fail(file):
        if "/coordinator/" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(journal, "_sync", fail)


@pytest.mark.parametrize(
    "call",
    [lambda s: push(s, 0, 0), lambda s: s.pull(), lambda s: s.next_step(0), lambda s: s.resize(workers=3), lambda s: s.resize(servers=3)],
    ids=["push", "pull", "next_step", "workers", "servers"],
)  # fmt: skip
def test_a_coordinator_whose_sync_fails_tells_nobody_what_is_not_on_disk(tmp_path, monkeypatch, call):
    server = start(tmp_path)
    fill_the_disk_of_the_coordinator(monkeypatch)
    with pytest.raises(CheckpointFileError, match="No space left"):
        push(server, 1, 0)
    with pytest.raises(CheckpointFileError, match="No space left"):
        call(server)
    monkeypatch.undo()
    server.engine.restart(COORDINATOR)
    assert server.next_step(1) == 0, "what was not synced is gone"
    call(server)


def test_close_and_create_bring_back_a_coordinator_whose_disk_was_full(tmp_path, monkeypatch):
    server = start(tmp_path)
    push(server, 1, 0)
    fill_the_disk_of_the_coordinator(monkeypatch)
    with pytest.raises(CheckpointFileError, match="No space left"):
        push(server, 1, 1)
    monkeypatch.undo()
    server.close()
    again = start(tmp_path)
    assert again.next_step(1) in (1, 2), "the disk decides whether the push counts"
    push(again, 1, again.next_step(1))


def test_a_restart_loses_what_was_not_synced(tmp_path):
    journal.write_first(tmp_path, [])
    own = journal.Journal(tmp_path)
    own.append(journal.Record("synced"))
    own.sync(own.position())
    own.append(journal.Record("not synced"))
    own.lose_power()
    assert [record.kind for record in journal.Journal(tmp_path).records] == ["synced"]


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


def test_a_closed_journal_writes_nothing_into_a_folder_that_another_may_have_open(tmp_path):
    journal.write_first(tmp_path, [])
    own = journal.Journal(tmp_path)
    own.close()
    own.close()
    other, files = journal.Journal(tmp_path), sorted(tmp_path.iterdir())
    for call in (lambda: own.append(journal.Record("x")), lambda: own.rotate([])):
        with pytest.raises(journal.JournalClosed):
            call()
    assert sorted(tmp_path.iterdir()) == files
    other.close()


def test_two_snapshots_are_kept_also_after_a_kill_in_a_rotation(tmp_path, monkeypatch):
    job, killed = tmp_path / "job", tmp_path / "killed"
    journal.write_first(job, [journal.Record("1")])
    own = journal.Journal(job)
    own.append(journal.Record("x"))
    own.rotate([journal.Record("1"), journal.Record("x")])
    own.append(journal.Record("y"))
    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_snapshot", lambda *_: shutil.copytree(job, killed))
        own.rotate([])
    own = journal.Journal(killed)
    assert [record.kind for record in own.records] == ["1", "x", "y"] and own.generation == 3
    own.append(journal.Record("z"))
    own.rotate([journal.Record("4")])
    own.close()
    newest = killed / "snapshot-000004"
    newest.write_bytes(newest.read_bytes()[:-2] + b"??")
    assert [record.kind for record in journal.Journal(killed).records] == ["1", "x", "y", "z"]


def test_new_folders_are_on_disk_before_a_push_counts_there(tmp_path, monkeypatch):
    whole, seen = journal.sync_folder, {}

    def sync_folder(folder):
        seen[folder] = {path.name for path in folder.iterdir()}
        whole(folder)

    monkeypatch.setattr(journal, "sync_folder", sync_folder)
    monkeypatch.setattr(folders, "sync_folder", sync_folder)
    monkeypatch.setattr("shardfn.layoutfile.files.sync_folder", sync_folder)
    server = start(tmp_path / "jobs/one")
    server.resize(servers=3)
    for folder in (folder for folder in tmp_path.rglob("*") if folder.is_dir()):
        assert folder.name in seen[folder.parent], folder


def test_servers_that_do_not_answer_are_told_by_name(tmp_path):
    server = start(tmp_path, timeout_s=0)
    target = Target(0, 1)
    server.engine.stop([target])
    server.engine.start = lambda *_: None
    with pytest.raises(ClusterError, match="epoch-0/server-1 does not run"):
        push(server, 0, 0)

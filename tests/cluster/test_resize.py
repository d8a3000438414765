"""Several clients change the servers at once, stall, and die at any step: no parameter is lost, and no push."""

import threading
import time

import numpy as np
import optax
import pytest

from shardfn.cluster.parameter_server import InProcess, ParameterServer, coordinator, line, resize, train
from shardfn.cluster.parameter_server.engine import COORDINATOR, Target, Unreachable, ask, targets_of
from shardfn.errors import ClusterError

FIRST = np.arange(12, dtype="float32")


class Hooked(InProcess):
    """Calls functions once, before or after a call of a method."""

    def __init__(self):
        super().__init__()
        self.before, self.after = {}, {}

    def _call(self, one):
        if threading.current_thread() is not threading.main_thread():  # the one that renews a lease
            return super()._call(one)
        self.before.pop(one.method, lambda: None)()
        answer = super()._call(one)
        self.after.pop(one.method, lambda: None)()
        return answer


class Lazy(InProcess):
    """Servers read their folders at their first call, as on Ray."""

    def start(self, setup, targets):
        self._setup = setup
        self.running = dict.fromkeys(targets) | self.running

    def stop(self, targets):
        for target in targets:
            if (running := self.running.pop(target, None)) is not None:
                running.close()

    def _call(self, one):
        with self._starting:
            if one.to in self.running and self.running[one.to] is None:
                self.running[one.to] = self._setup.make(one.to)
        return super()._call(one)


def start(folder, engine=None, **options):
    return ParameterServer.create(
        FIRST, optax.sgd(1.0), folder=folder, engine=engine or Hooked(), **{"timeout_s": 20, **options}
    )


def other(server, **options):
    """Another client of the same servers."""
    options = server.options if not options else type(server.options)(**options)
    return ParameterServer(server.engine, server.setup, server.job, server.names, options)


def push(server, step, worker=0):
    assert server.push(-np.ones(12), worker, step).is_kept


def check(server, folder, servers, pushes=0):
    """The parameters, before and after all processes were killed, and that nothing else runs or has a folder."""
    assert server.report().servers == servers
    np.testing.assert_array_equal(server.pull().values, FIRST + pushes)
    assert len(server.engine.running) == servers + 1
    (live,) = (folder / "job").glob("epoch-*")
    assert live.name in targets_of(server._place)[0].name and len(list(live.iterdir())) == servers
    for target in list(server.engine.running):
        server.engine.restart(target)
    np.testing.assert_array_equal(server.pull().values, FIRST + pushes)


def is_clean(folder):
    return len(list((folder / "job").glob("epoch-*"))) == 1


def test_two_clients_change_the_servers_one_after_the_other(tmp_path):
    first = start(tmp_path)
    second = other(first, timeout_s=0)

    def disturb():
        with pytest.raises(ClusterError, match="another client changes the servers"):
            second.resize(servers=3)
        with pytest.raises(ClusterError, match="the servers change"):
            push(second, 0)

    first.engine.before["switch"] = disturb
    first.resize(servers=2)
    check(first, tmp_path, 2)
    second.resize(servers=3)
    push(second, 0)
    check(second, tmp_path, 3, 1)
    assert is_clean(tmp_path)


@pytest.mark.parametrize("step", ["lease", "advance", "portion", "renew", "switch"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_that_stalls_while_another_changes_the_servers(tmp_path, monkeypatch, step, when):
    first = start(tmp_path, servers=2)
    second = other(first)

    def overtake():
        monkeypatch.setattr(coordinator, "LEASE_S", 60)
        for number in range(3):
            push(second, number)
        second.resize(servers=3)
        push(second, 3)

    monkeypatch.setattr(coordinator, "LEASE_S", 0)  # the lease of the first ran out while it stalled
    getattr(first.engine, when)[step] = overtake
    first.resize(servers=4)
    is_overtaken = step == "switch" and when == "after"
    check(first, tmp_path, 3 if is_overtaken else 4, 4)
    assert first._place.epoch == 2


@pytest.mark.parametrize("step", ["renew", "switch"])
@pytest.mark.parametrize("change", ["push", "workers"])
def test_what_happens_after_a_lease_ran_out_is_in_the_new_servers(tmp_path, monkeypatch, change, step):
    monkeypatch.setattr(coordinator, "LEASE_S", 0)
    first = start(tmp_path, workers=3)
    second = other(first)
    for worker in range(2):
        push(second, 0, worker)
    first.engine.before[step] = lambda: push(second, 0, 2) if change == "push" else second.resize(workers=2)
    first.resize(servers=2)
    check(first, tmp_path, 2, 3 if change == "push" else 2)


def test_a_change_of_the_workers_ends_a_lease_and_holds_up_nobody(tmp_path):
    """The update that it makes takes the parts of waiting pushes from the servers."""
    first = start(tmp_path, workers=3)
    second = other(first)
    for worker in range(2):
        push(second, 0, worker)
    first.engine.after["lease"] = lambda: second.resize(workers=2)
    first.resize(servers=2)
    push(second, 1, 0)
    push(second, 1, 1)
    check(first, tmp_path, 2, 4)


class Killed(BaseException):
    pass


def die():
    raise Killed


@pytest.mark.parametrize("step", ["lease", "portion", "renew", "switch"])
def test_a_client_that_fails_gives_its_lease_back(tmp_path, step):
    first = start(tmp_path)
    first.engine.before[step] = die
    with pytest.raises(Killed):
        first.resize(servers=2)
    push(other(first, timeout_s=0), 0)
    check(first, tmp_path, 1, 1)
    assert is_clean(tmp_path)


def test_a_client_that_is_killed_leaves_a_folder_that_the_next_change_deletes(tmp_path, monkeypatch):
    first = start(tmp_path)
    first.engine.before["switch"] = die
    monkeypatch.setattr(coordinator.Coordinator, "release", lambda *_: die())
    with pytest.raises(Killed):
        first.resize(servers=2)
    monkeypatch.undo()
    assert len(list((tmp_path / "job").glob("epoch-*"))) == 2
    with pytest.raises(ClusterError, match="the servers change"):
        push(other(first, timeout_s=0), 0)
    first.engine.running[COORDINATOR]._state.next_lease = first.engine.running[COORDINATOR]._state.lease._replace(
        until=0
    )
    push(first, 0)
    first.resize(servers=3)
    check(first, tmp_path, 3, 1)


@pytest.mark.parametrize(
    "call", [lambda s: s.pull(), lambda s: push(s, 1), lambda s: s.save(), lambda s: s.resize(servers=2)]
)
def test_whoever_comes_after_a_client_that_died_after_the_switch_starts_the_servers(tmp_path, call):
    first = start(tmp_path, servers=2)
    second, third = other(first), other(first)
    push(second, 0)
    third.save()
    first.engine.after["switch"] = die
    with pytest.raises(Killed):
        first.resize(servers=3)
    assert Target(0, 1) in first.engine.running
    call(second)
    assert {target.epoch for target in first.engine.running if target != COORDINATOR} == {second._place.epoch}
    assert is_clean(tmp_path)
    third.pull()


def test_a_change_may_take_longer_than_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(resize, "LEASE_S", 0.1)  # for the client alone, so that it renews often
    first = start(tmp_path)

    def stall():
        begin, deadline = first.engine.running[COORDINATOR]._state.lease.until, time.monotonic() + 20
        while first.engine.running[COORDINATOR]._state.lease.until < begin + 0.2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.monotonic() < deadline

    first.engine.after["portion"] = stall
    first.resize(servers=2)
    check(first, tmp_path, 2)


@pytest.mark.parametrize("step", ["lease", "portion", "renew", "switch"])
def test_an_answer_that_is_lost_costs_another_try_and_leaves_nothing(tmp_path, step):
    def lose():
        raise Unreachable("lost")

    first = start(tmp_path)
    first.engine.after[step] = lose
    first.resize(servers=2)
    check(first, tmp_path, 2)
    assert is_clean(tmp_path)


@pytest.mark.parametrize("engine", [InProcess, Lazy])
@pytest.mark.parametrize("call", [lambda s: s.pull(), lambda s: push(s, 0), lambda s: s.save()])
def test_servers_that_are_started_after_they_were_retired_end(tmp_path, engine, call):
    """A client has read which servers are live, and another one changes them before it starts them."""
    first = start(tmp_path, engine(), servers=2)
    second, third, begin = other(first), other(first), first.engine.start
    third.pull()

    def late(setup, targets):
        first.engine.start = begin
        second.resize(servers=3)
        begin(setup, targets)

    first.engine.start = late
    call(other(first))
    call(third)
    assert {target.epoch for target in first.engine.running if target != COORDINATOR} == {1}


@pytest.mark.parametrize("call", [lambda s: s.pull(), lambda s: push(s, 0), lambda s: s.resize(servers=2)])
def test_an_error_of_a_retired_server_is_none(tmp_path, call):
    """Ray may start a retired server again, which finds no folder."""
    first = start(tmp_path, Lazy(), servers=2)
    second = other(first)
    second.pull()
    first.resize(servers=3)
    first.engine.running |= dict.fromkeys([Target(0, 0), Target(0, 1)])
    call(second)


def test_a_client_of_former_servers_makes_the_coordinator_forget_nothing(tmp_path):
    server = start(tmp_path)
    push(server, 0)
    server.resize(servers=2)
    for epoch, kept in [(0, 1), (1, 0)]:
        ask(server.engine, "compact", 1, epoch)
        assert len(ask(server.engine, "status", 0).updates) == kept


def test_workers_push_while_clients_change_the_servers(tmp_path):
    server = start(tmp_path, InProcess(), workers=2, synchronous=False, staleness=10**6)
    done, errors, pushes = threading.Event(), [], [0, 0]

    def guarded(work, *args):
        try:
            work(other(server), *args)
        except BaseException as error:
            errors.append(error)

    def work(client, worker):
        for receipt in train(client, worker, lambda *_: -np.ones(12), lambda step: step, 10**6):
            pushes[worker] += receipt.is_kept
            if done.is_set():
                return

    def change(client, numbers):
        for servers in numbers:
            before = client.report().accepted
            while not errors and client.report().accepted < before + 2:
                time.sleep(0.001)
            client.resize(servers=servers)

    threads = [threading.Thread(target=guarded, args=(work, worker)) for worker in range(2)]
    movers = [threading.Thread(target=guarded, args=(change, numbers)) for numbers in [(2, 3, 1, 2), (3, 1, 2, 2)]]
    for thread in threads + movers:
        thread.start()
    for thread in movers:
        thread.join(100)
    done.set()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads + movers)
    assert not errors and server.report().accepted == sum(pushes) and min(pushes) > 0
    check(server, tmp_path, server.report().servers, sum(pushes))


def test_changes_without_pause_hold_up_no_push(tmp_path):
    """A client that changes the servers again and again, and two that push: each push gets its turn before the next change."""
    server = start(tmp_path, InProcess(), workers=2, synchronous=False, staleness=10**6)
    done, errors, changes = threading.Event(), [], []

    def guarded(work, *args):
        try:
            work(other(server), *args)
        except BaseException as error:
            errors.append(error)

    def change(client):
        while not done.is_set():
            client.resize(servers=2 + len(changes) % 2)
            changes.append(time.monotonic())

    def work(client, worker):
        for step in range(3):
            before = len(changes)
            push(client, step, worker)
            waits.append(len(changes) - before)

    waits = []
    mover = threading.Thread(target=guarded, args=(change,))
    workers = [threading.Thread(target=guarded, args=(work, worker)) for worker in range(2)]
    mover.start()
    while not changes:
        time.sleep(0.01)
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(100)
    done.set()
    mover.join(100)
    assert not errors and not any(thread.is_alive() for thread in [mover, *workers])
    assert len(waits) == 6 and max(waits) <= 3, "changes that a push waited for"
    check(server, tmp_path, server.report().servers, 6)


def test_whoever_waits_goes_before_a_change_that_comes_later_and_one_that_died_holds_it_up_for_a_while(
    tmp_path, monkeypatch
):
    first = start(tmp_path)
    second = other(first, timeout_s=0)
    ask(first.engine, "join_line", "somebody")
    with pytest.raises(ClusterError, match="calls that came before wait for their turn"):
        second.resize(servers=2)
    push(second, 0)
    ask(first.engine, "leave_line", "somebody")
    second.resize(servers=2)
    ask(first.engine, "join_line", "who died")
    monkeypatch.setattr(line, "TURN_S", 0)
    second.resize(servers=3)
    check(second, tmp_path, 3, 1)


def test_a_lease_outlives_a_restart_of_the_coordinator(tmp_path):
    first = start(tmp_path)
    second = other(first, timeout_s=0)

    def restart():
        first.engine.restart(COORDINATOR)
        with pytest.raises(ClusterError, match="the servers change"):
            push(second, 0)

    first.engine.after["portion"] = restart
    first.resize(servers=2)
    assert first._place.epoch == 1
    push(first, 0)
    check(first, tmp_path, 2, 1)

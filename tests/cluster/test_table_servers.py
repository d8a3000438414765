"""Tables on parameter servers: the numbers of a host store bit by bit, whatever gets lost, is killed, or changes in number."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import embedding, train
from shardfn.cluster import ParameterServer, TableServers
from shardfn.cluster.parameter_server import InProcess, tables
from shardfn.cluster.parameter_server.engine import COORDINATOR, Target, Unreachable
from shardfn.embedding import Table
from shardfn.embedding.cache import LfuIndex
from shardfn.errors import CheckpointError, ClusterError, StrategyError
from tests.cluster.test_parameter_server_faults import Faults
from tests.embedding.test_table import GRADIENT, ROWS, WIDTH, batches, trained

OPTIMIZERS = {
    "adagrad": embedding.adagrad(0.1),
    "adam": embedding.adam(lambda n: 0.1 / (n + 1)),
    "lamb": embedding.lamb(0.1, weight_decay=0.01),
}


def make(store="host", optimizer="adagrad", **options):
    return Table(ROWS, WIDTH, store=store, optimizer=OPTIMIZERS[optimizer], init=0.5, **options)


def same(one, other):
    np.testing.assert_array_equal(one.values(), other.values())
    assert one.count == other.count
    for name, rows in one.moments().items():
        np.testing.assert_array_equal(rows, other.moments()[name])


class Spy(InProcess):
    """Counts the rows that travel."""

    pulled = pushed = 0

    def _call(self, one):
        answer = super()._call(one)
        if one.method == "pull":
            self.pulled += sum(len(rows.values) for rows in answer.rows)
        if one.method == "prepare":
            self.pushed += sum(len(rows.values) for rows in one.args[0].rows)
        return answer


@pytest.mark.parametrize("cache_rows", [0, 24])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_servers_equal_the_host_store_bit_by_bit_and_send_touched_rows_only(optimizer, cache_rows):
    engine = Spy()
    servers = TableServers(servers=3, engine=engine, chunk_bytes=40)
    table, host = (make(store, optimizer, cache_rows=cache_rows) for store in (servers, "host"))
    engine.pulled = engine.pushed = 0
    for ids in batches():
        touched = len(np.unique(ids))
        for each in (host, table):
            batch = each.fetch(ids)
            each.update(batch, GRADIENT(batch.values, jnp.asarray(batch.positions)))
        if not cache_rows:
            assert (engine.pulled, engine.pushed) == (touched, touched)
            engine.pulled = engine.pushed = 0
    if cache_rows:
        fields = 1 + len(OPTIMIZERS[optimizer].moments)
        assert engine.pulled == table.cache.misses * fields and engine.pushed == table.cache.written_back * fields
        assert table.cache == host.cache and table.cache.hits > table.cache.misses > 0 < table.cache.written_back
    same(table, host)


def test_rows_and_moments_move_with_the_number_of_servers():
    servers = TableServers(servers=1)
    table, host = make(servers, "adam", dtype=jnp.bfloat16), make("host", "adam", dtype=jnp.bfloat16)
    for count in (4, 2, 3):
        trained(table, batches(2, seed=count), prefetch=True)
        servers.server.resize(servers=count)
        trained(host, batches(2, seed=count))
    same(table, host)
    assert servers.server.report().accepted == 6


@pytest.mark.parametrize("cache_rows", [0, 24])
@pytest.mark.parametrize("seed", range(3))
def test_lost_doubled_and_late_messages_and_crashes_change_nothing(tmp_path, seed, cache_rows):
    engine = Faults(seed, rate=0.2)
    servers = TableServers(folder=tmp_path, servers=2, engine=engine, log_bytes=1500)
    table, host = make(servers, "adam", cache_rows=cache_rows), make("host", "adam", cache_rows=cache_rows)
    trained(host, batches(12))
    trained(table, batches(12), prefetch=True)
    assert engine.faults > 3  # how many calls are made depends on the thread that prefetches
    same(table, host)


def test_servers_killed_between_steps_and_a_worker_that_starts_again_lose_nothing(tmp_path):
    engine, host = InProcess(), make("host", "adam")
    table = make(TableServers(folder=tmp_path, servers=2, engine=engine), "adam")
    for step, target in enumerate([Target(0, 0), COORDINATOR, Target(0, 1)] * 2):
        for each in (table, host):
            trained(each, batches(1, seed=step))
        engine.restart(target)
        same(table, host)
    engine.stop(list(engine.running))  # the process of the worker ends, and that of the servers
    servers = TableServers(folder=tmp_path, servers=2)
    again = make(servers, "adam")
    assert servers.server.report().accepted == 6
    same(again, host)
    for each in (again, host):
        trained(each, batches(3, seed=9))
    same(again, host)
    assert again.save(tmp_path / "saves") == ROWS, "which rows changed before is not known any more"
    host.restore(tmp_path / "saves")
    same(again, host)


def test_a_cache_is_flushed_to_the_servers(tmp_path):
    engine = InProcess()
    table = make(TableServers(folder=tmp_path, engine=engine), cache_rows=24)
    trained(table, batches(4))
    assert table.flush() > 0 and table.flush() == 0
    wanted, moments = table.values(), table.moments()
    engine.stop(list(engine.running))
    again = make(TableServers(folder=tmp_path))
    jax.tree.map(np.testing.assert_array_equal, (again.values(), again.moments()), (wanted, moments))
    assert again.count == table.count == 4


def test_a_restore_on_servers_takes_back_what_is_not_in_the_save(tmp_path):
    host = make("host")
    trained(host, batches(3))
    host.save(tmp_path / "saves")
    table = make(TableServers(folder=tmp_path, servers=2))
    trained(table, batches(5, seed=3))
    table.restore(tmp_path / "saves")
    same(table, host)
    assert int(table._opened.store.server.pull(["count"]).values["count"]) == 3


def test_workers_in_threads_sum_their_gradients(tmp_path):
    engine, steps, found = InProcess(), 6, {}
    ids = {worker: batches(steps, seed=worker) for worker in range(2)}

    def work(worker):
        table = make(TableServers(folder=tmp_path, servers=2, workers=2, worker=worker, engine=engine))
        trained(table, ids[worker], prefetch=True)
        found[worker] = table.values()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    host = make("host")
    for pair in zip(*ids.values(), strict=True):
        both = np.concatenate(pair)
        trained(host, [both])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], host.values(), rtol=1e-6)


def test_train_step_with_a_table_on_servers_equals_the_host_store():
    def loss(params, ids, y):
        return jnp.mean((params["items"][ids].sum((1, 2)) * params["scale"] - y) ** 2)

    found = {}
    for name in ("host", "servers"):
        table = make(TableServers(servers=2) if name == "servers" else name, cache_rows=0)
        step = train.step(loss, optax.adam(1e-2), ids={"items": 0}, mode="data_parallel")
        data = [(ids, np.ones(len(ids), "float32")) for ids in np.asarray(batches(5)).repeat(4, 1)]
        state = step.init({"items": table, "scale": jnp.ones(())}, *data[0])
        losses = []
        for batch in step.feed(data):
            state, value = step(state, batch)
            losses.append(float(value))
        found[name] = losses, np.asarray(state.params["scale"]), table.values()
    jax.tree.map(np.testing.assert_array_equal, *found.values())
    assert found["host"][0][-1] < found["host"][0][0]


class Silent(InProcess):
    """Servers that do not answer for a while."""

    is_silent = False

    def _call(self, one):
        if self.is_silent and one.to != COORDINATOR:
            raise Unreachable("silence")
        return super()._call(one)


@pytest.mark.parametrize("cache_rows", [0, 24])
def test_a_call_that_servers_did_not_answer_can_be_made_again(cache_rows):
    engine, host = Silent(), make("host", cache_rows=cache_rows)
    table = make(TableServers(servers=2, engine=engine, timeout_s=0), cache_rows=cache_rows)
    for ids in batches():
        for method in ("fetch", "update"):
            engine.is_silent = True
            for is_last in (False, True):
                engine.is_silent = not is_last
                try:
                    if method == "fetch":
                        batch = table.fetch(ids)
                    else:
                        table.update(batch, GRADIENT(batch.values, jnp.asarray(batch.positions)))
                except ClusterError as error:
                    assert not is_last and "do not answer" in str(error)
                else:
                    if method == "update":
                        break
        trained(host, [ids])
    engine.is_silent = False
    same(table, host)


class Deaf(InProcess):
    """While `is_deaf`, a push is accepted, and nobody hears so."""

    is_deaf = False

    def _call(self, one):
        answer = super()._call(one)
        if self.is_deaf and one.method == "commit":
            raise Unreachable("no answer")
        return answer


@pytest.mark.parametrize("is_accepted", [True, False])
def test_an_update_whose_answer_was_lost_does_not_hide_the_next_one(is_accepted):
    engine = Deaf() if is_accepted else Silent()
    table, host = make(TableServers(servers=2, engine=engine, timeout_s=0)), make()
    for ids in batches()[:3]:
        batch = table.fetch(ids)
        engine.is_deaf = engine.is_silent = True
        with pytest.raises(ClusterError):
            table.update(batch, GRADIENT(batch.values, jnp.asarray(batch.positions)))
        engine.is_deaf = engine.is_silent = False
        table.update(batch, other := 2 * GRADIENT(batch.values, jnp.asarray(batch.positions)))
        for gradients in (other / 2, other):
            host.update(host.fetch(ids), gradients)
        np.testing.assert_array_equal(table.values(), host.values())


def test_a_folder_keeps_its_number_of_workers(tmp_path):
    make(TableServers(folder=tmp_path)).flush()
    with pytest.raises(StrategyError, match="the table has 1 workers, not 2"):
        make(TableServers(folder=tmp_path, workers=2))
    make(TableServers(folder=tmp_path))


def test_a_worker_that_joins_with_another_number_of_workers_harms_nobody(tmp_path):
    engine = InProcess()
    table = make(TableServers(folder=tmp_path, engine=engine, timeout_s=1))
    with pytest.raises(StrategyError, match="the table has 1 workers, not 2"):
        make(TableServers(folder=tmp_path, engine=engine, workers=2, worker=1))
    trained(table, batches(1))
    assert table.count == 1


def test_a_process_counts_the_pushes_of_the_first_one_from_where_all_processes_met(tmp_path, monkeypatch):
    """The first process pushes as soon as all have read where the table is."""
    engine = InProcess()
    first = make(TableServers(folder=tmp_path, engine=engine))
    trained(first, batches(2))

    def meet(own):
        trained(first, batches(1))

    monkeypatch.setattr(tables, "first_other", meet)
    second = make(TableServers(folder=tmp_path, engine=engine))
    assert first.count == 3 and second.count == second._opened.store.version == 2


def test_lfu_index_takes_back_what_it_placed():
    index, draw = LfuIndex(100, 8), np.random.default_rng(0)
    for _ in range(50):
        index.place(np.unique(draw.integers(0, 100, 6)))
        before = index.slot_of.copy(), index.id_of.copy(), index.uses.copy()
        for count in (True, False):
            ids = np.unique(draw.integers(0, 100, 6))
            index.take_back(ids, index.place(ids, count), count)
            for now, then in zip((index.slot_of, index.id_of, index.uses), before, strict=True):
                np.testing.assert_array_equal(now, then)


def test_usual_mistakes(tmp_path):
    with pytest.raises(StrategyError, match="TableServers"):
        make("servers")
    with pytest.raises(StrategyError, match="no table has these servers"):
        _ = TableServers().server
    with pytest.raises(StrategyError, match="`servers` cannot be"):
        TableServers(servers=0)
    with pytest.raises(StrategyError, match="does not go with other workers"):
        make(several := TableServers(workers=2), cache_rows=8)
    make(several)  # nothing was started
    servers = TableServers(folder=tmp_path / "a", engine=(engine := InProcess()))
    make(servers)
    with pytest.raises(StrategyError, match="have a table"):
        make(servers)
    with pytest.raises(ClusterError, match="runs another job"):
        make(TableServers(folder=tmp_path / "b", engine=engine))
    with pytest.raises(ClusterError, match="runs another job"):
        ParameterServer.create(np.zeros(3), optax.sgd(1.0), folder=tmp_path / "b", engine=engine)
    engine.stop(list(engine.running))
    with pytest.raises(CheckpointError, match="another init"):
        Table(
            ROWS, WIDTH, optimizer=embedding.adagrad(0.1), init=0.5, seed=1, store=TableServers(folder=tmp_path / "a")
        )

"""The parameter server in one process: the same numbers as one process, whatever the servers, the messages and their size."""

import contextlib
import functools
import sqlite3
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn.cluster import ParameterServer, TableServers
from shardfn.cluster.parameter_server import InProcess, RowGradient, train
from shardfn.cluster.parameter_server.partition import ArraySpec, Partition
from shardfn.durable import database
from shardfn.errors import CheckpointError, ClusterError, StrategyError

ROWS, WIDTH, BATCH, STEPS = 60, 4, 24, 100


def first_params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "table": jax.random.normal(keys[0], (ROWS, WIDTH)),
        "layers": [jax.random.normal(keys[1], (WIDTH, 3)), jax.random.normal(keys[2], (3,))],
        "scale": jnp.float32(1.0),
    }


def batch_of(step):
    random = np.random.default_rng(step)
    return random.integers(0, ROWS, BATCH), random.standard_normal((BATCH, 3)).astype("float32")


@jax.jit
def gradient(params, ids, y):
    def loss(params):
        h = jnp.tanh(params["table"][ids]) @ params["layers"][0] + params["layers"][1]
        return jnp.sum((params["scale"] * h - y) ** 2) / BATCH

    return jax.grad(loss)(params)


def sparse(grads, ids):
    """The gradient of the table as rows, some ids twice."""
    rows = np.unique(ids)
    half = np.asarray(grads["table"])[rows] / 2
    return {**grads, "table": RowGradient(np.concatenate([rows, rows[::-1]]), np.concatenate([half, half[::-1]]))}


@functools.cache
def alone(steps):
    """The parameters of one process after some steps."""
    optimizer, params = optax.adam(0.01), first_params()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, ids, y):
        changes, state = optimizer.update(gradient(params, ids, y), state, params)
        return optax.apply_updates(params, changes), state

    for number in range(steps):
        params, state = step(params, state, *batch_of(number))
    return params


def push_all(server, step, workers):
    params = server.pull(version=step).values
    ids, y = batch_of(step)
    for worker in range(workers):
        part = slice(worker * BATCH // workers, (worker + 1) * BATCH // workers)
        server.push(sparse(gradient(params, ids[part], y[part]), ids[part]), worker, step)


def near(tree, wanted, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), tree, wanted)


def test_synchronous_training_equals_one_process_while_servers_and_workers_come_and_go(tmp_path):
    server = ParameterServer.create(
        first_params(), optax.adam(0.01), folder=tmp_path, workers=2, chunk_bytes=500, timeout_s=0
    )
    sizes = {15: (3, None), 30: (None, 4), 50: (2, 3), 70: (5, 2), 85: (1, None)}
    workers = 2
    for step in range(STEPS):
        servers, changed = sizes.get(step, (None, None))
        server.resize(servers=servers, workers=changed)
        workers = changed or workers
        push_all(server, step, workers)
    found = server.pull(version=STEPS)
    assert found.version == STEPS
    near(found.values, alone(STEPS))
    assert len(server.engine.running) == 2 and len(list(tmp_path.glob("job/epoch-*"))) == 1


def test_servers_change_while_pushes_wait_for_another_worker(tmp_path):
    server = ParameterServer.create(first_params(), optax.adam(0.01), folder=tmp_path, workers=2, timeout_s=0)
    ids, y = batch_of(0)
    for worker in range(2):
        part = slice(worker * 12, worker * 12 + 12)
        receipt = server.push(gradient(first_params(), ids[part], y[part]), worker, 0)
        server.resize(servers=2 + worker)
    assert receipt.status == "applied"
    near(server.pull(version=1).values, alone(1))


def test_a_worker_that_leaves_does_not_hold_up_the_others():
    server = ParameterServer.create(np.zeros(2, "float32"), optax.sgd(1.0), workers=2, timeout_s=0)
    assert server.push(np.ones(2), "a", 0).status == "waiting"
    with pytest.raises(ClusterError, match="pushes of a are there, of 2 workers"):
        server.pull(version=1)
    server.resize(workers=1)
    assert server.pull(version=1).values.tolist() == [-1, -1]


def test_backup_workers_are_not_waited_for():
    server = ParameterServer.create(
        np.zeros(2, "float32"), optax.sgd(1.0), servers=2, workers=3, backup_workers=1, timeout_s=0
    )
    statuses = [server.push(np.full(2, 10.0**worker), worker, 0).status for worker in range(3)]
    assert statuses == ["waiting", "applied", "late"]
    assert server.pull().values.tolist() == [-11, -11] and server.report().late == 1
    assert [server.next_step(worker) for worker in range(3)] == [1, 1, 1]
    assert server.push(np.full(2, 10.0), 1, 0).status == "applied", "sent again"
    assert server.pull().values.tolist() == [-11, -11]


def test_asynchronous_training_enforces_and_reports_the_staleness():
    server = ParameterServer.create(
        np.zeros(4, "float32"), optax.sgd(1.0), servers=2, workers=2, synchronous=False, staleness=2
    )
    slow = server.pull()
    for step in range(3):
        assert server.push(np.ones(4), "fast", step, version=server.pull().version).status == "applied"
    refused = server.push(np.full(4, 100), "slow", 0, version=slow.version)
    assert (refused.status, refused.is_kept, refused.staleness) == ("stale", False, 3)
    assert server.push(np.ones(4), "slow", 0, version=1).staleness == 2
    report = server.report()
    assert (report.updates, report.stale, report.staleness, report.largest_staleness) == (4, 1, {0: 3, 2: 1}, 2)
    assert server.pull().values.tolist() == [-4] * 4
    with pytest.raises(ClusterError, match="the next step is 1"):
        server.push(np.ones(4), "slow", 2)


@pytest.mark.parametrize("synchronous", [True, False])
def test_workers_in_threads_share_syncs_and_converge(tmp_path, synchronous):
    """Softmax regression on characters: the loss of asynchronous training comes near that of synchronous training."""
    text = (
        np.frombuffer(b"the quick brown fox jumps over the lazy dog and runs away from the quick cat " * 4, np.uint8)
        - 32
    )
    params = {"w": np.zeros((96, 96), "float32")}

    @jax.jit
    def grad(params, x, y):
        return jax.grad(lambda p: optax.softmax_cross_entropy_with_integer_labels(p["w"][x], y).mean() / 4)(params)

    server = ParameterServer.create(
        params, optax.adam(0.2), folder=tmp_path, servers=2, workers=4, synchronous=synchronous
    )

    def work(worker):
        client = ParameterServer(server.engine, server.setup, server.job, server.names, server.options)
        parts = text[worker::4], np.roll(text, -1)[worker::4]
        for _ in train(client, worker, lambda params, parts: grad(params, *parts), lambda step: parts, 20):
            pass

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for pushes, servers in [(10, 3), (25, 1), (40, 2)]:
        while server.report().accepted < pushes and any(thread.is_alive() for thread in threads):
            time.sleep(0.001)
        server.resize(servers=servers)
    for thread in threads:
        thread.join(60)
    report, found = server.report(), server.pull().values
    loss = float(optax.softmax_cross_entropy_with_integer_labels(found["w"][text], np.roll(text, -1)).mean())
    assert report.accepted == 80 and report.updates == (20 if synchronous else 80)
    assert report.largest_staleness <= 16
    assert loss < 1.5, f"the first loss is {np.log(96):.2f}"
    assert 20 <= report.syncs <= 80 + 3 * 10, "one for each push, and some for each resize, at most"


def test_a_client_without_a_folder_joins_the_servers_of_its_engine_and_may_resize_them():
    engine = InProcess()
    first, second = (
        ParameterServer.create(np.zeros(6, "float32"), optax.sgd(1.0), servers=2, engine=engine) for _ in "ab"
    )
    first.push(np.ones(6), 0, 0)
    second.resize(servers=3)
    first.push(np.ones(6), 0, 1)
    assert second.setup.folder == first.setup.folder and second.pull().values.tolist() == [-2] * 6


def test_compressed_messages_and_reads_of_some_rows():
    params = {"w": np.linspace(1, 2, 40, dtype="float32").reshape(10, 4), "empty": np.zeros((0, 3), "float32")}
    server = ParameterServer.create(params, optax.sgd(1.0), servers=3, chunk_bytes=24, compress=True)
    server.push({"w": RowGradient([7, 1], np.full((2, 4), 1 / 3))}, 0, 0)
    some = server.pull(["w"], ids={"w": [7, 1, 7]}).values["w"]
    np.testing.assert_allclose(some, params["w"][[7, 1, 7]] - 1 / 3, rtol=1e-2)
    server.options = type(server.options)()
    exact = server.pull()
    assert exact.version == 1 and exact.values["empty"].shape == (0, 3)
    np.testing.assert_array_equal(np.delete(exact.values["w"], [1, 7], 0), np.delete(params["w"], [1, 7], 0))


@pytest.mark.parametrize("name", ["server.db", "ledger.db"])
def test_a_database_that_somebody_reads_is_told_at_once(tmp_path, monkeypatch, name):
    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.1)
    params = {"w": np.zeros(6, "float32")}
    ParameterServer.create(params, optax.sgd(1.0), folder=tmp_path).close()
    file = next((tmp_path / "job").rglob(name))
    with contextlib.closing(sqlite3.connect(file)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM sqlite_schema").fetchall()
        began = time.monotonic()
        with pytest.raises(ClusterError, match=rf"is in use[\s\S]*{name}"):
            ParameterServer.create(params, optax.sgd(1.0), folder=tmp_path)
        assert time.monotonic() - began < 5
    ParameterServer.create(params, optax.sgd(1.0), folder=tmp_path).close()


def test_an_array_whose_path_is_empty():
    server = ParameterServer.create({"": jnp.ones(1), "w": jnp.arange(8.0)}, optax.sgd(0.1), servers=2)
    pulled = server.pull().values
    server.close()
    np.testing.assert_array_equal(pulled["w"], np.arange(8.0))
    np.testing.assert_array_equal(pulled[""], [1.0])


def test_a_folder_goes_on_with_its_own_job_only(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.1)
    params = {"w": np.zeros(6, "float32")}

    def create(params=params, optimizer=None, **options):
        return ParameterServer.create(params, optimizer or optax.adam(0.1), folder=tmp_path, servers=2, **options)

    server = create()
    server.push({"w": np.ones(6)}, "a", 0)
    server.save()
    server.push({"w": np.ones(6)}, "a", 1)
    server.resize(servers=3, workers=2)
    wanted = server.pull(version=2).values["w"]
    with pytest.raises(ClusterError, match="is in use"):
        create()
    server.close()
    again = create()
    np.testing.assert_array_equal(again.pull().values["w"], wanted)
    assert again.next_step("a") == 2 and len(again.engine.running) == 4
    again.close()
    for wrong, match in [
        ({"params": {"w": np.zeros(7, "float32")}}, "other parameters"),
        ({"synchronous": False}, "other rules"),
        ({"optimizer": optax.sgd(0.1)}, "another optimizer"),
    ]:
        with pytest.raises(CheckpointError, match=match) as held:  # and with it the frames of `create`
            create(**wrong)
        create().close()
        del held
    again.close()
    with pytest.raises(ClusterError, match="is closed"):
        again.pull()


def test_partition_is_balanced_to_a_row():
    arrays = tuple(ArraySpec(f"a{i:02}", (n, 3), "float32") for i, n in enumerate([5, 100, 1, 7, 40, 2]))
    for servers in (1, 2, 3, 7):
        parts = [sum((b - a) * 12 for a, b in own.values()) for own in Partition(arrays, servers).ranges]
        assert sum(parts) == 155 * 12 and max(parts) - min(parts) <= 24


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s: s.push({"v": np.ones(2)}, 0, 0), "no array `v`"),
        (lambda s: s.push({"w": np.ones(3)}, 0, 0), "another shape"),
        (lambda s: s.push({"w": RowGradient([2], [1.0])}, 0, 0), "outside the array"),
        (lambda s: s.push({"w": RowGradient([[0]], [1.0])}, 0, 0), "does not fit"),
        (lambda s: s.push({"w": np.array(["a", "b"])}, 0, 0), "cannot be added"),
        (lambda s: s.push({"w": np.ones(2) * 1j}, 0, 0), "cannot be added"),
        (lambda s: s.push({"w": np.array([np.nan, 1.0])}, 0, 0), "1 of 2 values are NaN or infinite"),
        (lambda s: s.push({"w": RowGradient([0], [np.inf])}, 0, 0), "not finite"),
        (lambda s: s.push({"w": np.array([1e300, 0.0])}, 0, 0), "1 of 2 values are NaN or infinite as float32"),
        (lambda s: s.push(None, 0, 0), "the gradients are None"),
        (lambda s: jax.jit(lambda g: s.push({"w": g}, 0, 0))(np.ones(2)), "is traced"),
        (lambda s: s.push({"w": np.ones(2)}, 1.5, 0), "`worker` cannot be 1.5"),
        (lambda s: s.push(np.ones(3), 0, 0), "one array without a name"),
        (lambda s: s.push({"w": np.ones(2)}, None, 0), "`worker` cannot be None"),
        (lambda s: s.next_step(""), "`worker` cannot be ''"),
        (lambda s: s.pull(version=-3), "`version` cannot be -3"),
        (lambda s: s.pull(["v"]), "no array `v`"),
        (lambda s: s.pull(ids={"w": [-1]}), "outside the array"),
        (lambda s: s.pull(ids={"w": [0.5]}), "do not fit"),
        (lambda s: ParameterServer.create({"a": "text", "b": jax.random.key(0)}, optax.sgd(1.0)), "no array of numbers"),
        (lambda s: ParameterServer.create({"a/b": np.ones(2), "a": {"b": np.ones(2)}}, optax.sgd(1.0)), "two arrays"),
        (lambda s: ParameterServer.create({"n": np.int64(2**40), "d": np.array([1e300]), "ok": np.array(np.inf)}, optax.sgd(1.0)),
         "(?s)^2 problems.*`d` has values that float32 has not.*`n` has values that int32 has not"),
        (lambda s: ParameterServer.create({"u": np.array([2**31], "uint32"), "n": np.uint64(2**32)}, optax.sgd(1.0)),
         "^`n` has values that uint32 has not"),
        (lambda s: s.push({}, 0, -1), "`step` cannot be -1"),
        (lambda s: s.resize(servers=0), "`servers` cannot be 0"),
        (lambda s: s.resize(workers=0), "`workers` cannot be 0"),
        (lambda s: ParameterServer.create({}, optax.sgd(1.0)), "no parameters"),
        (lambda s: ParameterServer.create(np.ones(2), optax.sgd(1.0), staleness=3), "no staleness"),
        (lambda s: ParameterServer.create(np.ones(2), optax.sgd(1.0), folder=3, engine="ray", chunk_bytes=0, timeout_s="1", log_bytes=-1,
                                          synchronous="no", compress="int8"), "(?s)^7 problems"),
        (lambda s: TableServers(engine=InProcess, timeout_s=float("nan")), "(?s)`engine` cannot be.*`timeout_s` cannot be nan"),
        (lambda s: ParameterServer.create(np.ones(2), optax.sgd(1.0), backup_workers=1), "wait for no worker"),
        (lambda s: ParameterServer.create(np.ones(2), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))), "each element alone"),
        (lambda s: ParameterServer.create(np.ones(2), optax.lamb(1.0)), "each element alone"),
        (lambda s: ParameterServer.create(np.ones(2), optax.apply_if_finite(optax.sgd(1.0), 3)), "each element alone"),
        (lambda s: ParameterServer.create(np.ones((2, 3)), optax.sm3(1.0)), "is .2. for an array"),
        (lambda s: ParameterServer.create(np.ones(2), optax.masked(optax.sgd(1.0), {"b": True})), "some of the arrays"),
    ],
)  # fmt: skip
def test_usual_mistakes(call, match):
    server = ParameterServer.create({"w": np.zeros(2, "float32")}, optax.sgd(1.0))
    with pytest.raises(StrategyError, match=match):
        call(server)


def test_arrays_of_ints_have_no_gradient_and_ints_may_be_numpys():
    params = {"ids": jnp.arange(3), "w": jnp.ones(2)}
    server = ParameterServer.create(params, optax.sgd(1.0), servers=np.int64(1))
    server.push(jax.grad(lambda params: params["w"].sum(), allow_int=True)(params), 0, np.int64(0))
    near(server.pull(version=1).values, {"ids": np.arange(3), "w": np.zeros(2)})

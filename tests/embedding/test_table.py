"""Tables of which a step sees a batch's rows: equal to dense training wherever the rows are, and safe to save."""

import os
import pathlib
import resource
import signal
import sqlite3
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import ShardError, embedding
from shardfn.cluster import TableServers
from shardfn.durable import arrays as durable_arrays
from shardfn.embedding import Table
from shardfn.embedding.cache import LfuIndex
from shardfn.errors import CheckpointError, CheckpointFileError
from tests.processes import bare_environment

ROWS, WIDTH = 60, 4
STORES = {
    "host": {},
    "file": {"path": True},
    "cache": {"cache_rows": 24},
    "cache, columns sharded": {"cache_rows": 24, "strategy": (1, 4)},
    "servers": {"store": "servers"},
    "cache, servers": {"store": "servers", "cache_rows": 24},
    "device": {"store": "device"},
    "device, rows sharded": {"store": "device", "strategy": (4, 1)},
    "device, columns sharded": {"store": "device", "strategy": (1, 4)},
}


def make(name, tmp_path, **options):
    options = {"optimizer": embedding.adagrad(0.1), "init": 0.5, **STORES[name], **options}
    options |= {"path": tmp_path / "files"} if options.get("path") else {}
    options |= {"store": TableServers(servers=2)} if options.get("store") == "servers" else {}
    options |= {"device": jax.devices()[:4]} if "strategy" in options else {}
    return Table(ROWS, WIDTH, **options)


def batches(count=8, seed=0):
    random = np.random.default_rng(seed)
    return [np.minimum(random.zipf(1.3, (6, 3)) - 1, ROWS - 1) for _ in range(count)]


def loss(rows):
    return (jnp.sin(rows).sum(-1) ** 2).sum()


GRADIENT = jax.jit(jax.grad(lambda values, at: loss(values[at])))


def trained(table, all_ids, prefetch=False):
    for batch in table.prefetch(all_ids) if prefetch else map(table.fetch, all_ids):
        table.update(batch, GRADIENT(batch.values, jnp.asarray(batch.positions)))
    return table.values()


def dense(first, all_ids, optimizer):
    table, state = jnp.asarray(first), optimizer.init(jnp.asarray(first))
    grad = jax.jit(jax.grad(lambda t, i: loss(t[i])))
    for ids in all_ids:
        updates, state = optimizer.update(grad(table, ids), state, table)
        table = optax.apply_updates(table, updates)
    return np.asarray(table)


@pytest.mark.parametrize("name", STORES)
def test_table_equals_dense_training_with_adagrad(name, tmp_path):
    table = make(name, tmp_path)
    want = dense(table.values(), batches(), optax.adagrad(0.1))
    np.testing.assert_allclose(trained(table, batches()), want, rtol=2e-6, atol=1e-7)
    again = make(name, tmp_path)
    np.testing.assert_array_equal(trained(again, batches(), prefetch=True), table.values())
    if "cache" in name:
        assert table.cache.hits > table.cache.misses > 0 < table.cache.written_back
        assert table.device_bytes == 24 * WIDTH * 4 * 2


@pytest.mark.parametrize("store", ["host", "cache"])
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (embedding.sgd(0.1), optax.sgd(0.1)),
        (embedding.adam(0.1), optax.adam(0.1)),
        (
            embedding.lamb(lambda n: 0.1 / (n + 1), weight_decay=0.01),
            optax.lamb(lambda n: 0.1 / (n + 1), weight_decay=0.01),
        ),
    ],
    ids=["sgd", "adam", "lamb"],
)
def test_row_optimizers_equal_optax_for_every_row(store, mine, other, tmp_path):
    by_row = optax.GradientTransformation(jax.vmap(other.init), lambda g, s, p: jax.vmap(other.update)(g, s, p))
    ids = [np.arange(20).reshape(10, 2)] * 3  # every batch touches these rows, so that lazy is not late
    table = make(store, tmp_path, optimizer=mine)
    want = dense(table.values()[:20], ids, by_row)
    np.testing.assert_allclose(trained(table, ids)[:20], want, rtol=3e-6, atol=4e-6)


def test_lazy_adam_leaves_rows_without_gradient(tmp_path):
    table = make("host", tmp_path, optimizer=embedding.adam(0.1))
    before = table.values()
    after = trained(table, [np.array([[1, 2]]), np.array([[3, 3]])])
    assert set(np.flatnonzero((before != after).any(1))) == {1, 2, 3}
    assert set(np.flatnonzero(table.moments()["mean"].any(1))) == {1, 2, 3}


def test_bfloat16_rows_have_float32_moments(tmp_path):
    for name in ("host", "cache"):
        table = make(name, tmp_path, dtype=jnp.bfloat16)
        trained(table, batches(2))
        assert table.values().dtype == jnp.bfloat16 and table.moments()["sum_of_squares"].dtype == np.float32
        table.save(tmp_path / name)
        again = make("device", tmp_path, dtype=jnp.bfloat16)
        again.restore(tmp_path / name)
        np.testing.assert_array_equal(again.values(), table.values())


def test_fetch_of_bad_ids_says_which():
    table = Table(10, 2)
    for ids, text in [
        ([[1, 2], [-1, 3]], r"ids\[1, 0\] = -1"),
        ([10, 11], "2 ids are not in the table"),
        ([0.5], "integers"),
        ([[1, 2], [3]], "different lengths"),
    ]:
        with pytest.raises(ShardError, match=text):
            table.fetch(ids)
        with pytest.raises(ShardError, match=text):
            list(table.prefetch([[1], ids]))
    with pytest.raises(ShardError, match="traced"):
        jax.jit(table.fetch)(jnp.ones(2, int))
    empty = table.fetch(np.empty((0, 3), int))
    assert empty.positions.shape == (0, 3) and not len(empty.ids)
    table.update(empty, jnp.zeros_like(empty.values))
    same = table.fetch([4, 4, 4])
    table.update(same, jnp.ones_like(same.values))
    with pytest.raises(ShardError, match="has the shape"):
        table.update(same, jnp.ones((3, 2)))
    with pytest.raises(ShardError, match="gradient is traced"):
        jax.jit(lambda g: table.update(same, g))(same.values)
    with pytest.raises(ShardError, match="`capacity` cannot be"):
        table.fetch([1], capacity=1.5)
    with pytest.raises(ShardError, match="learning rate"):
        wrong = Table(10, 2, optimizer=embedding.sgd(lambda _: None))
        wrong.update(batch := wrong.fetch([4]), batch.values)
    with pytest.raises(ShardError, match="room for 4"):
        Table(10, 2, cache_rows=4).fetch(np.arange(5))


@pytest.mark.parametrize(
    "options",
    [{"rows": 0}, {"store": "disk"}, {"store": "servers"}, {"store": TableServers(), "path": "files"}, {"store": TableServers(), "strategy": (2, 1)},
     {"store": "device", "cache_rows": 4}, {"strategy": (2, 1)}, {"optimizer": optax.sgd(0.1)},
     {"init": np.ones((3, 2))}, {"store": "device", "strategy": (3, 1)}, {"store": "device", "strategy": (0, 1)},
     {"dtype": "int32"}, {"dtype": "floet32"}, {"init": "zeros"}, {"init": float("nan")}, {"seed": -1}, {"rows": 2**55},
     {"rows": 2**31, "store": "device"}, {"store": "device", "strategy": (8, 1), "device": "tpu-v5e:8"}],
    ids=lambda options: ", ".join(options),
)  # fmt: skip
def test_table_refuses_options_that_do_not_fit(options):
    with pytest.raises(ShardError):
        Table(**{"rows": 8, "width": 2, **options})


def test_lfu_index_never_evicts_what_a_batch_needs():
    random, index, rows = np.random.default_rng(0), LfuIndex(200, 32), {}
    for _ in range(200):
        ids = np.unique(random.zipf(1.2, 24) % 200)
        placed = index.place(ids)
        assert not np.isin(placed.evicted, ids).any()
        rows = {slot: row for slot, row in rows.items() if row not in placed.evicted}
        rows |= dict(zip(index.slot_of[placed.missing].tolist(), placed.missing.tolist(), strict=True))
        assert [rows[slot] for slot in placed.slots] == ids.tolist()
    hot = np.argsort(index.uses)[-8:]
    assert (index.slot_of[hot] >= 0).all()


# ---- saves


def test_saves_are_incremental_and_go_to_any_store(tmp_path):
    table, folder = make("cache", tmp_path), tmp_path / "saves"
    trained(table, [np.arange(40).reshape(20, 2)[:10], np.arange(20, 40).reshape(10, 2)])
    assert table.save(folder) == 40
    trained(table, [np.array([[1, 2]])])
    assert table.save(folder) == 2 and table.save(folder) == 0
    for name in STORES:
        other = make(name, tmp_path)
        trained(other, [np.array([[50, 1]])])  # a restore takes back what is not in the save
        other.restore(folder)
        np.testing.assert_array_equal(other.values(), table.values())
        assert other.count == table.count == 3
    np.testing.assert_array_equal(trained(other, batches()), trained(table, batches()))
    for _ in range(4):
        trained(table, [np.arange(20)[:, None], np.arange(20, 40)[:, None]])
        table.save(folder)
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 2.2 * 60 * WIDTH * 4 * 2 + 80_000


def test_save_refuses_the_folder_of_another_run(tmp_path):
    one, two = make("host", tmp_path), make("host", tmp_path)
    trained(one, batches(1))
    one.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="did not make"):
        two.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="another optimizer"):
        make("host", tmp_path, optimizer=embedding.sgd(0.1)).restore(tmp_path / "a")
    with pytest.raises(CheckpointError, match="no saved table"):
        two.restore(tmp_path / "b")


@pytest.fixture
def in_files(monkeypatch):
    """Arrays in files, however small they are."""
    monkeypatch.setattr(durable_arrays, "INLINE_BYTES", 1)


def damage(path, fault):
    data = path.read_bytes()
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-40] if fault == "truncated" else data[:-40] + bytes(40))


@pytest.mark.parametrize(("fault", "text"), [("truncated", "is truncated"), ("damaged", "do not have their checksum"),
                                             ("missing", "cannot be read")])  # fmt: skip
def test_restore_of_damaged_files_changes_nothing(fault, text, tmp_path, in_files):
    table, folder = make("host", tmp_path), tmp_path / "saves"
    for _ in range(2):
        trained(table, batches(1))
        table.save(folder)
    path = max((folder / "arrays").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    damage(path, fault)
    other = make("host", tmp_path)
    before = other.values()
    with pytest.raises(CheckpointFileError, match=f"(?s){path.name}.*{text}"):
        other.restore(folder)
    np.testing.assert_array_equal(other.values(), before)


def test_every_damage_of_a_saved_table_is_told_or_without_effect(tmp_path):
    table, folder = make("host", tmp_path), tmp_path / "saves"
    for _ in range(2):
        trained(table, batches(1))
        table.save(folder)
    data, told = (folder / "table.db").read_bytes(), 0
    for at in range(0, len(data), 101):
        (folder / "table.db").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        other = make("host", tmp_path)
        before = other.values()
        try:
            other.restore(folder)
            np.testing.assert_array_equal(other.values(), table.values())
        except (CheckpointFileError, CheckpointError) as error:
            told += "table.db" in str(error)
            np.testing.assert_array_equal(other.values(), before)
    assert told > 10
    (folder / "table.db").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointFileError, match=r"table.db is damaged"):
        make("host", tmp_path).restore(folder)


def test_full_disk_keeps_earlier_saves(tmp_path):
    table, folder = make("host", tmp_path), tmp_path / "saves"
    trained(table, batches(1))
    table.save(folder)
    saved = table.values()
    trained(table, [np.arange(ROWS)[:, None]])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # what a write then raises is what a full disk does
    try:
        with pytest.raises(CheckpointFileError, match="what was saved before is complete"):
            table.save(folder)
        with pytest.raises(CheckpointFileError, match="cannot be created"):
            make("file", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    other = make("host", tmp_path)
    other.restore(folder)
    np.testing.assert_array_equal(other.values(), saved)
    assert table.save(folder) == ROWS  # nothing was forgotten
    other.restore(folder)
    np.testing.assert_array_equal(other.values(), table.values())


CHILD = """
import sys, numpy as np
from shardfn import embedding
table = embedding.Table(20000, 16, optimizer=embedding.sgd(1.0), init=0.0, path=sys.argv[1] + "/files", cache_rows=4096)
while True:
    for _ in range(3):
        batch = table.fetch(np.arange(table.count % 7, 20000, 7))
        table.update(batch, -np.ones(batch.values.shape, "float32"))
    table.save(sys.argv[1])
    print(table.count, flush=True)
"""


def test_killed_write_back_or_save_leaves_what_was_reported(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                             env=bare_environment() | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"})  # fmt: skip
    reported = [int(child.stdout.readline()) for _ in range(20)][-1]
    child.send_signal(signal.SIGKILL)
    reported = max([reported, *map(int, child.stdout.read().split())])
    child.wait()
    table = Table(20000, 16, optimizer=embedding.sgd(1.0), init=0.0)
    table.restore(tmp_path)
    assert table.count >= reported and table.count % 3 == 0
    want = [(table.count - residue + 6) // 7 for residue in np.arange(20000) % 7]
    np.testing.assert_array_equal(table.values()[:, 0], want)


def test_prefetch_of_a_generator_that_fills_one_array_again_reads_each_batch():
    table, ids = Table(20, 2), np.zeros(2, int)

    def batches():
        for first in range(5):
            ids[:] = first, first + 1
            yield ids

    assert [batch.ids.tolist() for batch in table.prefetch(batches(), ahead=2)] == [[i, i + 1] for i in range(5)]


def test_saves_in_two_folders_in_turns_hold_every_row(tmp_path):
    table = Table(9, 2, init=np.zeros((9, 2), "float32"), optimizer=embedding.sgd(1.0))
    for turn, folder in enumerate("abab"):
        fetched = table.fetch([turn, 8])
        table.update(fetched, jnp.ones_like(fetched.values))
        table.save(tmp_path / folder)
        again = Table(9, 2, init=np.zeros((9, 2), "float32"), optimizer=embedding.sgd(1.0))
        again.restore(tmp_path / folder)
        np.testing.assert_array_equal(again.values(), table.values())


@pytest.mark.parametrize(
    "optimizer", [embedding.adam(1.0), embedding.lamb(1.0), embedding.adagrad(1.0)], ids=lambda o: o.name
)
def test_optimizers_of_host_and_device_agree(optimizer, tmp_path):
    ids = [np.arange(20).reshape(10, 2)] * 4
    host, device = (trained(make(store, tmp_path, optimizer=optimizer), ids) for store in ("host", "device"))
    np.testing.assert_allclose(host, device, rtol=1e-6, atol=4e-6)


def test_adagrad_without_accumulator_leaves_elements_without_gradient():
    optimizer, rows, g = (
        embedding.adagrad(0.1, initial_accumulator=0.0, eps=0.0),
        np.ones((1, 2), "float32"),
        [[0.0, 2.0]],
    )
    for xp in (np, jnp):
        found, _ = optimizer.update(
            xp.asarray(rows), {"sum_of_squares": xp.zeros((1, 2), "float32")}, xp.asarray(g, "float32"), 0, 0.1
        )
        np.testing.assert_allclose(found, [[1.0, 0.9]], rtol=1e-6)


@pytest.mark.parametrize("failing", ["_sync", "sync_folder"])
def test_a_save_whose_arrays_could_not_be_synced_is_none(failing, tmp_path, monkeypatch, in_files):
    table, folder = make("host", tmp_path), tmp_path / "saves"
    trained(table, batches(1))
    table.save(folder)
    saved, files = table.values(), list((folder / "arrays").iterdir())

    def fails(file):
        raise OSError("the disk is gone")

    trained(table, [np.arange(ROWS)[:, None]])
    with monkeypatch.context() as patch:
        patch.setattr(durable_arrays, failing, fails)
        with pytest.raises(CheckpointFileError, match="what was saved before is complete"):
            table.save(folder)
    assert list((folder / "arrays").iterdir()) == files
    again = make("host", tmp_path)
    again.restore(folder)
    np.testing.assert_array_equal(again.values(), saved)
    assert table.save(folder) == ROWS
    again.restore(folder)
    np.testing.assert_array_equal(again.values(), table.values())


def test_the_folders_of_a_first_save_are_on_disk(tmp_path, monkeypatch, in_files):
    table, synced = make("host", tmp_path), []
    trained(table, batches(1))
    for place in ("durable.arrays", "durable.database", "files"):
        monkeypatch.setattr(f"shardfn.{place}.sync_folder", synced.append)
    table.save(tmp_path / "a" / "b")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "arrays"} <= set(synced)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Table(10, 4).update(Table(100, 4).fetch([5]), np.ones((8, 4))), "a batch of another table"),
        (lambda: Table(10, 4).update("x", np.ones(3)), "`update` is given a str"),
        (lambda: Table(10, 4, path=5), "`path` is an int"),
        (lambda: Table(10, 4, store="device", device="cpu"), "`device` goes with `strategy`"),
        (lambda: Table(10, 4, store=pathlib.Path("x")), "there is no store"),
        (lambda: next(Table(10, 4).prefetch(5)), "`batches` is an int"),
        (lambda: embedding.sgd("x"), "the learning rate of a table is a str"),
        (lambda: embedding.sgd(float("nan")), "the learning rate of a table is nan"),
        (lambda: embedding.adam(0.1, b1=2), "`b1` of adam cannot be 2"),
        (lambda: embedding.adagrad(0.1, initial_accumulator=-1), "`initial_accumulator` of adagrad cannot be -1"),
    ],
)
def test_usual_mistakes_are_named(call, text):
    with pytest.raises(ShardError, match=text):
        call()


def test_save_refuses_a_folder_whose_database_is_gone(tmp_path, in_files):
    table, folder = make("host", tmp_path), tmp_path / "saves"
    trained(table, batches(1))
    table.save(folder)
    files = list((folder / "arrays").iterdir())
    (folder / "table.db").unlink()
    with pytest.raises(CheckpointFileError, match=r"holds arrays, and no table\.db"):
        make("host", tmp_path).save(folder)
    assert list((folder / "arrays").iterdir()) == files


@pytest.mark.parametrize("name", ["manifest.json", "000001.rows"])
def test_a_folder_of_an_earlier_version_is_refused_and_left_as_it_is(name, tmp_path):
    table = make("host", tmp_path)
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / name).write_text("{}")
    for call in (table.save, table.restore):
        with pytest.raises(
            CheckpointFileError, match=f"(?s)an earlier version of shardfn.*holds {name}, and no table.db"
        ):
            call(tmp_path / "saves")
    assert [path.name for path in (tmp_path / "saves").iterdir()] == [name]


@pytest.mark.parametrize("fault", ["truncated", "missing"])
def test_a_save_writes_again_what_earlier_files_lost(fault, tmp_path, in_files):
    table, folder = make("host", tmp_path), tmp_path / "saves"
    for _ in range(2):
        trained(table, batches(1))
        table.save(folder)
    damage(min((folder / "arrays").iterdir(), key=lambda path: path.stat().st_mtime_ns), fault)
    trained(table, [np.array([[1, 2]])])
    assert table.save(folder) > 2, "all rows that ever changed"
    again = make("host", tmp_path)
    again.restore(folder)
    np.testing.assert_array_equal(again.values(), table.values())


def test_a_person_reads_a_saved_table_with_sqlite(tmp_path):
    table = Table(10, 2, init=np.ones((10, 2), "float32"), optimizer=embedding.sgd(0.5))
    table.save(tmp_path)
    db = sqlite3.connect(tmp_path / "table.db")
    name, dtype, shape, data = db.execute("SELECT name, dtype, shape, data FROM arrays WHERE name = 'rows'").fetchone()
    assert (name, shape) == ("rows", "[10, 2]") and (np.frombuffer(data, dtype) == 1).all()
    assert db.execute("SELECT updates, rows_saved FROM saves").fetchall() == [(0, 10)]
    db.close()


def test_options_of_an_optimizer_may_be_of_numpy():
    assert embedding.adam(np.float32(0.5), b1=np.float32(0.25), eps=np.float64(1e-8)).name == "adam"

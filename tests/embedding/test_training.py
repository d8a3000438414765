"""`embedding.step`: a table is a parameter like any other, in every mode of `train.step`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import ShardError, checkpoint, embedding, train

ITEMS, WIDTH, BATCH = 96, 8, 32


def batches(count=5):
    random = np.random.default_rng(0)
    for _ in range(count):
        ids = np.stack([np.minimum(random.zipf(1.3, BATCH) - 1, ITEMS - 1), random.integers(0, 10, BATCH)], -1)
        yield (
            ids.astype(np.int32),
            random.normal(size=(BATCH, 3)).astype(np.float32),
            random.normal(size=BATCH).astype(np.float32),
        )


def loss(params, ids, x, y):
    hidden = jnp.concatenate([params["items"][ids[:, 0]], params["groups"][ids[:, 1]], x], -1)
    return jnp.mean((jnp.tanh(hidden @ params["w1"]) @ params["w2"] - y) ** 2)


def dense_params():
    k1, k2 = jax.random.split(jax.random.key(0))
    return {"w1": jax.random.normal(k1, (2 * WIDTH + 3, 16)) / 4, "w2": jax.random.normal(k2, (16,)) / 4}


def make_tables(**options):
    options = {"optimizer": embedding.adagrad(0.1), "init": 0.3, **options}
    return {"items": embedding.Table(ITEMS, WIDTH, **options), "groups": embedding.Table(10, WIDTH, store="device", **{
        **options, "cache_rows": 0})}  # fmt: skip


def run(tables, feed=False, **options):
    step = embedding.step(loss, optax.adam(1e-2), tables=tables, ids={"items": (0, 0), "groups": (0, 1)}, **options)
    state, losses = step.init(dense_params, *next(batches())), []
    for batch in step.feed(batches()) if feed else batches():
        state, value = step(state, batch) if feed else step(state, *batch)
        losses.append(float(value))
    return step, state, losses


def run_dense(frozen=(), **options):
    tables = {name: table.values() for name, table in make_tables().items()}
    kinds = optax.multi_transform({"table": optax.adagrad(0.1), "rest": optax.adam(1e-2)},
                                  lambda params: {k: "table" if k in tables else "rest" for k in params})  # fmt: skip
    step = train.step(loss, kinds, frozen=frozen, **options)
    state, losses = step.init({**dense_params(), **tables}), []
    for batch in batches():
        state, value = step(state, *batch)
        losses.append(float(value))
    return state, losses


@pytest.mark.parametrize(
    ("options", "cache_rows", "feed"),
    [({"mode": "stand_alone"}, 0, True), ({"mode": "data_parallel", "micro_batches": 2}, 64, True),
     ({"mode": "semi_auto_parallel", "parameter_plan": {"items": (8, 1), "w1": (1, 2)}}, 64, False),
     ({"mode": "data_parallel", "compute_dtype": jnp.bfloat16}, 0, False)],
    ids=["one device, prefetched", "data parallel, micro-batches, cached, prefetched", "semi-auto, cached", "mixed precision"],
)  # fmt: skip
def test_step_with_tables_equals_the_dense_step(options, cache_rows, feed):
    tables = make_tables(cache_rows=cache_rows)
    same = {key: value for key, value in options.items() if key == "compute_dtype"}
    want, dense_losses = run_dense(mode="stand_alone", **same)
    _, state, losses = run(tables, feed, **options)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if same else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(losses, dense_losses, **tolerance)
    for name, table in tables.items():
        np.testing.assert_allclose(table.values(), want.params[name], **tolerance)
    np.testing.assert_allclose(state.params["w1"], want.params["w1"], **tolerance)
    assert state.params.keys() == {"w1", "w2"}


def test_step_resumes_from_saves(tmp_path):
    options = {"mode": "stand_alone", "tables": make_tables(cache_rows=64), "ids": {"items": (0, 0), "groups": (0, 1)}}
    step, all_batches = embedding.step(loss, optax.adam(1e-2), **options), list(batches())
    state, losses = step.init(dense_params, *all_batches[0]), []
    for number, batch in enumerate(all_batches):
        state, value = step(state, *batch)
        losses.append(float(value))
        if number == 2:
            checkpoint.save(tmp_path / "dense", state)
            assert [table.save(tmp_path / name) > 0 for name, table in step.tables.items()]
    again = embedding.step(loss, optax.adam(1e-2), **{**options, "tables": make_tables()})
    for name, table in again.tables.items():
        table.restore(tmp_path / name)
    state = checkpoint.restore(tmp_path / "dense", jax.devices()[0], like=again.init(dense_params, *all_batches[0]))
    resumed = []
    for batch in all_batches[3:]:
        state, value = again(state, *batch)
        resumed.append(float(value))
    np.testing.assert_allclose(resumed, losses[3:], rtol=1e-5)


def test_frozen_table_stays():
    tables = make_tables()
    before = tables["items"].values()
    _, losses = run_dense(frozen=("items",), mode="stand_alone")
    got = run(tables, mode="stand_alone", frozen=("items",))[2]
    np.testing.assert_allclose(got, losses, rtol=1e-4)
    np.testing.assert_array_equal(tables["items"].values(), before)
    assert tables["items"].count == 0 and tables["groups"].count == 5


def test_memory_on_devices_does_not_depend_on_rows():
    peaks = []
    for rows in (10_000, 1_000_000):
        table = embedding.Table(rows, WIDTH, cache_rows=64, optimizer=embedding.sgd(0.1), init=0.0)
        step = embedding.step(loss, optax.adam(1e-2), tables={**make_tables(), "items": table},
                              ids={"items": (0, 0), "groups": (0, 1)}, mode="stand_alone")  # fmt: skip
        batch = next(batches())
        state = step.init(dense_params, *batch)
        peaks.append((step.plan(state, *batch).cost.memory.peak, table.device_bytes))
    assert peaks[0] == peaks[1]
    assert "state/params/items" in str(step.explain(state, *batch).to_dict())


def test_step_refuses_tables_without_a_place():
    tables = make_tables()
    with pytest.raises(ShardError, match="different tables"):
        embedding.step(loss, optax.sgd(1.0), tables=tables, ids={"items": 0})
    with pytest.raises(ShardError, match="no number of an argument"):
        embedding.step(loss, optax.sgd(1.0), tables=tables, ids={"items": "ids", "groups": 0})
    step = embedding.step(loss, optax.sgd(1.0), tables=tables, ids={"items": (0, 0), "groups": 5}, mode="stand_alone")
    with pytest.raises(ShardError, match="no argument 5"):
        step.init(dense_params, *next(batches()))
    with pytest.raises(ShardError, match="without the tables"):
        twice = embedding.step(
            loss, optax.sgd(1.0), tables={"w1": tables["items"]}, ids={"w1": (0, 0)}, mode="stand_alone"
        )
        twice.init(dense_params, *next(batches()))

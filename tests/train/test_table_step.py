"""A table is a parameter like any other, in every mode of `train.step`."""

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


IDS = {"items": (0, 0), "groups": (0, 1)}


def run(tables, feed=False, **options):
    step = train.step(loss, optax.adam(1e-2), ids=IDS, **options)
    state, losses = step.init(lambda: {**dense_params(), **tables}, *next(batches())), []
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
    [pytest.param({"mode": "stand_alone"}, 0, True, marks=pytest.mark.slow), ({"mode": "data_parallel", "micro_batches": 2}, 64, True),
     pytest.param({"mode": "semi_auto_parallel", "parameter_plan": {"items": (8, 1), "w1": (1, 2)}}, 64, False, marks=pytest.mark.slow),
     pytest.param({"mode": "data_parallel", "compute_dtype": jnp.bfloat16}, 0, False, marks=pytest.mark.slow)],
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
    assert all(state.params[name] is table for name, table in tables.items())


@pytest.mark.slow
def test_step_resumes_from_saves(tmp_path):
    options, all_batches = {"mode": "stand_alone", "ids": IDS}, list(batches())
    step = train.step(loss, optax.adam(1e-2), **options)
    state, losses = step.init({**dense_params(), **make_tables(cache_rows=64)}, *all_batches[0]), []
    for number, batch in enumerate(all_batches):
        state, value = step(state, *batch)
        losses.append(float(value))
        if number == 2:
            checkpoint.save(tmp_path / "dense", state)
            assert [table.save(tmp_path / name) > 0 for name, table in step.tables.items()]
    again = train.step(loss, optax.adam(1e-2), **options)
    like = again.init({**dense_params(), **make_tables()}, *all_batches[0])
    for name, table in again.tables.items():
        table.restore(tmp_path / name)
    state = checkpoint.restore(tmp_path / "dense", jax.devices()[0], like=like)
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
        step = train.step(loss, optax.adam(1e-2), ids=IDS, mode="stand_alone")
        batch = next(batches())
        state = step.init({**dense_params(), **make_tables(), "items": table}, *batch)
        peaks.append((step.plan(state, *batch).cost.memory.peak, table.device_bytes))
    assert peaks[0] == peaks[1]
    assert "state/params/items" in str(step.explain(state, *batch).to_dict())


def test_tables_and_ids_that_do_not_fit_are_refused():
    params, batch = {**dense_params(), **make_tables()}, next(batches())
    for ids, text in [
        ({}, "does not know the ids of the table `groups`"),
        ({"items": (0, 0)}, "does not know the ids of the table `groups`"),
        ({**IDS, "w1": 0}, "no table at `w1`"),
        ({**IDS, "items": 5}, "no argument 5"),
        ({**IDS, "items": (0, 2)}, "no column 2"),
        ({**IDS, "items": (2, 0)}, "no column 0"),
    ]:
        with pytest.raises(ShardError, match=text):
            train.step(loss, optax.sgd(1.0), ids=ids, mode="stand_alone").init(params, *batch)
    for place in ("ids", -1, (0, -1), (0, ()), (0, (1, 1)), (0, 1, 2)):
        with pytest.raises(ShardError, match="no number of an argument"):
            train.step(loss, optax.sgd(1.0), ids={"items": place})
    with pytest.raises(ShardError, match="not a dict"):
        train.step(loss, optax.sgd(1.0), ids=[("items", 0)])
    step = train.step(loss, optax.sgd(1.0), ids=IDS, mode="data_parallel", layerwise_parallel=["items"])
    with pytest.raises(ShardError, match="`layerwise_parallel` names the table"):
        step.init(params, *batch)
    with pytest.raises(ShardError, match="has not seen its tables"):
        next(step.feed([batch]))
    with pytest.raises(ShardError, match="the table `groups` is at `items` too"):
        train.step(loss, optax.sgd(1.0), ids=IDS).init({**params, "items": params["groups"]}, *batch)
    step = train.step(loss, optax.sgd(1.0), ids=IDS, mode="data_parallel")
    state = step.init(params, *batch)
    with pytest.raises(ShardError, match="the ids of a step with tables are traced"):
        jax.jit(lambda *batch: step(state, *batch))(*batch)


@pytest.mark.parametrize(
    ("masked", "text"),
    [
        (lambda rows, ids: jnp.where(ids[..., None] > 0, rows[ids], 0), "computes with the ids in argument 0"),
        (jax.checkpoint(lambda rows, ids: rows[ids] + rows[jnp.arange(2)]), "reads rows of `items` that are not those"),
    ],
)
def test_a_loss_that_needs_more_than_rows_at_ids_is_warned_of(masked, text):
    tables, ids = {"items": make_tables()["items"]}, np.ones((BATCH, 2), "int32")
    step = train.step(lambda params, ids: masked(params["items"], ids).sum(), optax.sgd(1.0), ids={"items": 0})
    with pytest.warns(UserWarning, match=text):
        jax.eval_shape(lambda: step.init(tables, ids))


def test_tables_inside_other_parameters_go_with_scanned_layers_and_a_sharded_optimizer():
    random = np.random.default_rng(0)
    first = random.normal(size=(ITEMS, WIDTH)).astype("float32")
    layers = [random.normal(size=(WIDTH, WIDTH)).astype("float32") / 3 for _ in range(4)]

    def deep(params, ids, y):
        x = params["embed"]["items"][ids].sum(1)
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x.sum(1) - y) ** 2)

    def trained(items, optimizer, **options):
        step = train.step(deep, optimizer, **options)
        data = [(random.integers(0, ITEMS, (BATCH, 3)), np.ones(BATCH, "float32")) for _ in range(3)]
        state, losses = step.init({"embed": {"items": items}, "layers": layers}, *data[0]), []
        for batch in data:
            state, value = step(state, *batch)
            losses.append(float(value))
        return step.model(state), losses

    random = np.random.default_rng(1)
    kinds = optax.multi_transform(
        {"table": optax.sgd(0.5), "rest": optax.adam(1e-2)}, {"embed": "table", "layers": "rest"}
    )
    dense, want = trained(first, kinds, mode="stand_alone")
    for options in (
        {"mode": "data_parallel", "reuse": "auto"},
        {"mode": "data_parallel", "enable_parallel_optimizer": True},
    ):
        random = np.random.default_rng(1)
        table = embedding.Table(ITEMS, WIDTH, init=first, optimizer=embedding.sgd(0.5))
        model, losses = trained(table, optax.adam(1e-2), ids={"embed/items": 0}, **options)
        np.testing.assert_allclose(losses, want, rtol=1e-4)
        np.testing.assert_allclose(table.values(), dense["embed"]["items"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(model["layers"][3], dense["layers"][3], rtol=1e-3, atol=1e-5)
        assert model["embed"]["items"] is table


@pytest.mark.slow
def test_a_step_whose_table_fails_is_finished_by_the_next_call(monkeypatch):
    class Fails:
        left = 2

    def apply(self, ids, gradients):
        if self.optimizer.name == "sgd" and Fails.left:
            Fails.left -= 1
            raise TimeoutError("the servers do not answer")
        return whole(self, ids, gradients)

    tables, other = (make_tables(optimizer=embedding.adagrad(0.1)) for _ in range(2))
    for found in (tables, other):
        found["groups"] = embedding.Table(10, WIDTH, optimizer=embedding.sgd(0.1), init=0.3)
    _, _, want = run(other)
    whole = embedding.Table.apply
    monkeypatch.setattr(embedding.Table, "apply", apply)
    step = train.step(loss, optax.adam(1e-2), ids=IDS)
    state, losses = step.init(lambda: {**dense_params(), **tables}, *next(batches())), []
    for batch in batches():
        while True:
            try:
                state, value = step(state, *batch)
                break
            except TimeoutError:
                pass
        losses.append(float(value))
    assert losses == want and not Fails.left
    for name, table in tables.items():
        np.testing.assert_array_equal(table.values(), other[name].values())

"""What each process of `test_processes` runs: `worker.py CASES DIRECTORY`. Every case is compared with this process alone."""
# ruff: noqa: E402

import pathlib
import sys

from shardfn import cluster

cluster.init()  # before anything else of JAX
cluster.init()  # again: nothing changes

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn.mindspore as ms
from shardfn import ShardError, checkpoint, embedding, shard, train
from tests.processes import raises

FOLDER = pathlib.Path(sys.argv[2])
RANK, SIZE = cluster.rank(), cluster.size()
MESH = Mesh(np.array(jax.devices()), ("x",))
X = np.arange(64, dtype="float32").reshape(16, 4) / 64
Y = X.sum(1)
PARAMS = {"w": np.random.default_rng(0).normal(size=(4, 16)).astype("float32"), "v": np.ones(16, "float32")}
LAYERS = [lambda w, x: jnp.tanh(x @ w), lambda w, x, y: jnp.mean((x @ w - y) ** 2)]


ALL = P()


def spanning(value, spec=ALL, mesh=MESH):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def everywhere(array):
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(MESH, P()))(array)
    return np.asarray(whole.addressable_data(0))


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def trained(params=PARAMS, function=loss, **options):
    step = train.step(function, optax.adam(0.1), **options)
    state = step.init(params, X, Y)
    for _ in range(3):
        state, value = step(state, X, Y)
    return float(value)


def same_as_alone(**options):
    np.testing.assert_allclose(trained(**options), trained(mode="stand_alone"), rtol=1e-5)


def group():
    assert (ms.get_rank(), ms.get_group_size()) == (RANK, SIZE) == (jax.process_index(), jax.process_count())
    assert ms.get_auto_parallel_context("device_num") == jax.device_count()
    assert jax.devices()[ms.get_auto_parallel_context("global_rank")] == jax.local_devices()[0]
    ms.init("gloo")
    for wrong in ("nccl", "hccl"):
        try:
            ms.init(wrong)
        except RuntimeError:
            continue
        raise AssertionError(wrong)


def arguments():
    def double():
        return shard(lambda x: x * 2, ((4, 1),))

    local = Mesh(np.array(jax.local_devices()), ("l",))
    for x in (X, jnp.asarray(X), jax.device_put(X, jax.local_devices()[-1]), jax.device_put(X, NamedSharding(local, P("l"))),
              spanning(X), spanning(X, P("x"), Mesh(MESH.devices[::-1], ("x",)))):  # fmt: skip
        result = double()(x)
        assert result.sharding.spec == P("a", None)
        np.testing.assert_array_equal(everywhere(result), X * 2)
    alone = shard(lambda x: x * 2, ((1, 1),), device=jax.local_devices()[:1])
    np.testing.assert_array_equal(alone(spanning(X)), X * 2)
    assert float(jax.jit(lambda y: y.sum() + double()(X).sum())(X)) == 3 * X.sum()


def plans():
    report = str(shard(lambda x: x * 2, ((4, 1),)).explain(X))
    assert f"{RANK} (this)" in report and "x[0:8,:]" in report and "x[8:16,:]" in report
    for f, where in (
        (shard(lambda x: x * 2, ((4, 1) if RANK else (2, 2),)), "process 0: a = 2; process 1: a = 4"),
        (shard(lambda x: jnp.tanh(x) if RANK else jnp.exp(x), ((4, 1),)), "fingerprint"),
    ):
        try:
            f(X)
        except ShardError as error:
            assert "another plan in process 1 than in process 0" in str(error) and where in str(error)
        else:
            raise AssertionError(where)


def first_steps():
    same_as_alone(mode="data_parallel", params={k: spanning(v) for k, v in PARAMS.items()})
    same_as_alone(mode="semi_auto_parallel", params={"w": spanning(PARAMS["w"], P(None, "x")), "v": PARAMS["v"]})


def modes():
    for mode in ("data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel"):
        same_as_alone(mode=mode)
        same_as_alone(mode=mode, params={k: spanning(v) for k, v in PARAMS.items()})
        same_as_alone(mode=mode, params=lambda: {k: jnp.asarray(v) for k, v in PARAMS.items()})
        same_as_alone(mode=mode, enable_parallel_optimizer=True)
        same_as_alone(mode=mode, opt_state_memory_kind="pinned_host")
        same_as_alone(mode=mode, micro_batches=2)
    same_as_alone(mode="data_parallel", comm_fusion={"allreduce": {"mode": "size", "config": 1}})
    mine = {k: v + RANK for k, v in PARAMS.items()}
    same_as_alone(mode="data_parallel", params=mine, parameter_broadcast=True) if RANK == 0 else trained(
        mode="data_parallel", params=mine, parameter_broadcast=True
    )


def pipelines():
    params = [PARAMS["w"], PARAMS["v"]]
    same_as_alone(params=params, function=train.pipeline(LAYERS, micro_size=2))
    pipe = train.pipeline(LAYERS, micro_size=2)
    same_as_alone(params=pipe.pack(params, X, Y), function=pipe)


def layers():
    def deep(params, x, y):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x.sum(1) - y) ** 2)

    params = {"layers": [np.full((4, 4), i / 10, "float32") for i in range(4)]}
    alone = trained(params, deep, mode="stand_alone")
    np.testing.assert_allclose(trained(params, deep, mode="data_parallel", reuse=True), alone, rtol=1e-5)
    spread = jax.tree.map(spanning, params)
    np.testing.assert_allclose(trained(spread, deep, mode="data_parallel", reuse=True), alone, rtol=1e-5)


def models():
    assert shard(lambda m, x: m(x))(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), X).shape == (16, 1)

    class Model(ms.Cell):
        def __init__(self):
            super().__init__()
            self.w = jnp.asarray(PARAMS["w"])

        def construct(self, x):
            return x @ self.w

    np.testing.assert_allclose(everywhere(Model().shard(((SIZE, 1),))(X)), X @ PARAMS["w"], rtol=1e-5)
    compiled = shard(lambda x, w: jnp.tanh(x @ w), compile_candidates=3)
    np.testing.assert_allclose(everywhere(compiled(X, PARAMS["w"])), np.tanh(X @ PARAMS["w"]), rtol=1e-5)
    assert "Compiled" in str(compiled.explain(X, PARAMS["w"], compiled=True))


def states():
    step = train.step(loss, optax.adam(0.1), mode="data_parallel", enable_parallel_optimizer=True)
    state, _ = step(step.init(PARAMS, X, Y), X, Y)
    checkpoint.save(FOLDER / "state", state, step=1)
    back = checkpoint.restore(FOLDER / "state", like=step.init(PARAMS, X, Y))
    assert float(step(state, X, Y)[1]) == float(step(back, X, Y)[1])
    file = FOLDER / f"plan-{RANK}.toml"
    shard(lambda x: x * 2, ((SIZE, 1),)).plan(X).save(file)
    assert shard(lambda x: x * 2, layout=file)(X).sharding.spec[0] is not None


def tables():
    """Each process has a share of the rows; the losses are those of one process."""
    first = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
    ids = np.random.default_rng(1).integers(0, 50, (3, 16, 2))

    def click_loss(params, ids, x, y):
        return loss(params, params["items"][ids].sum(1) + x, y)

    def run(items, optimizer, as_batch=lambda x: x, feed=False, **options):
        step = train.step(click_loss, optimizer, **options)
        data = [(as_batch(each), X, Y) for each in ids]
        state, losses = step.init({**PARAMS, "items": items}, *data[0]), []
        for batch in step.feed(data) if feed else data:
            state, value = step(state, batch) if feed else step(state, *batch)
            losses.append(float(value))
        return losses, state.params["items"]

    kinds = optax.multi_transform({"table": optax.adagrad(0.1), "rest": optax.adam(0.1)},
                                  {"items": "table", "w": "rest", "v": "rest"})  # fmt: skip
    want, rows = run(first, kinds, mode="stand_alone")
    options = {"ids": {"items": 0}, "micro_batches": 2, "mode": "data_parallel"}
    for number, (kind, as_batch, feed) in enumerate([
        ({}, lambda x: x, False), ({"cache_rows": 32}, lambda x: spanning(x, P("x")), True), ({"store": "device"}, lambda x: x, True)
    ]):  # fmt: skip
        table = embedding.Table(50, 4, init=first, optimizer=embedding.adagrad(0.1), **kind)
        losses, _ = run(table, optax.adam(0.1), as_batch, feed, **options)
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        np.testing.assert_allclose(table.values(), rows, rtol=1e-4, atol=1e-5)
        folder = FOLDER / f"table-{number}"
        assert table.save(folder) == 50 and table.save(folder) == 0
        again = embedding.Table(50, 4, init=first, optimizer=embedding.adagrad(0.1))
        again.restore(folder)
        np.testing.assert_array_equal(again.values(), table.values())
        np.testing.assert_array_equal(again.moments()["sum_of_squares"], table.moments()["sum_of_squares"])
    drawn = embedding.Table(9000, 2, seed=3).lookup([0, 1, 4097, 8999])
    alone = embedding.store.Normal(0.01, 3, 2)(np.array([0, 1, 4097, 8999]))
    np.testing.assert_array_equal(drawn, alone)
    (FOLDER / "a file").write_text("") if RANK == 0 else None
    small = embedding.Table(50, 4, cache_rows=8)
    for call, text in ((lambda: again.fetch([RANK]), "other ids than process 0"),
                       (lambda: small.fetch(np.arange(9) * SIZE + 1), "the cache has room for 8"),
                       (lambda: again.restore(FOLDER / ("table-0", "nothing")[RANK > 0]), "finds 0 saves"),
                       (lambda: again.save(FOLDER / "a file" / "x"), "a file")):  # fmt: skip
        raises(ShardError, text, call)


def fails():
    jnp.zeros(1).block_until_ready()
    if RANK == 1:
        raise ValueError("the error of process 1")
    spanning(X).block_until_ready()
    everywhere(spanning(X, P("x")))  # waits for process 1


CASES = {"essential": (group, arguments, plans, first_steps), "fails": (fails,),
         "rest": (group, modes, pipelines, layers, models, states, tables), "tables": (tables,)}  # fmt: skip

if __name__ == "__main__":
    for case in CASES[sys.argv[1]]:
        case()
    print(f"done on {jax.local_device_count()} of {jax.device_count()} devices")

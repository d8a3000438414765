"""What each process of `test_processes` runs of the packages above `train`: `libraries.py DIRECTORY`."""
# ruff: noqa: E402

import pathlib
import sys

from shardfn import cluster

cluster.init()

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn.mindspore as ms
from shardfn import ShardError, checkpoint, embedding, experts, shard, train
from tests.processes import raises

FOLDER, N = pathlib.Path(sys.argv[1]), jax.device_count()
MESH = jax.make_mesh((N,), ("data",), (AxisType.Auto,))
TOKENS = NamedSharding(MESH, P("data"))
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = np.sin(X)


def everywhere(array):
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(MESH, P()))(array)
    return np.asarray(whole.addressable_data(0))


def trained(loss, params, *batch, **options):
    step = train.step(loss, optax.adam(0.01), **options)
    state = step.init(params, *batch)
    for _ in range(2):
        state, value = step(state, *batch)
    return float(value), state, step


def inference():
    params = {
        "up": np.random.default_rng(1).normal(size=(8, 16)).astype("float32"),
        "down": np.ones((16, 4), "float32"),
    }
    serve = lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"]  # noqa: E731
    checkpoint.save(FOLDER / "serve", {"params": params})
    serving = shard(serve, parameter_plan={"up": (1, N), "down": (N, 1)})
    layout = ms.infer_predict_layout(serving, params, X)
    weights = ms.load_distributed_checkpoint(serving, FOLDER / "serve", layout)
    assert weights["up"].addressable_shards[0].data.shape == (8, 16 // N)
    np.testing.assert_allclose(everywhere(serving(weights, X)), np.tanh(X @ params["up"]) @ params["down"], rtol=1e-4)


def tables():
    split, ids = embedding.UnevenRows((10, 20, 30, 4)), np.array([[3, 12, 59, 63], [9, 29, 30, 60]], "int32")
    table = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    look = lambda table, ids, **how: embedding.lookup(table, ids, strategy=(4, 1), rows=split, **how)  # noqa: E731
    np.testing.assert_array_equal(everywhere(look(split.pack(table), ids)), table[ids])
    raises(ShardError, "outside", lambda: look(split.pack(table), ids[:, ::-1], check=True))
    placed, y = embedding.placement((4, 1), split, (4, 30, 16), ids.shape), np.ones(2, "float32")
    packed, state, _ = trained(
        lambda p, ids, y: jnp.mean((look(p["items"], ids).sum((1, 2)) - y) ** 2), {"items": split.pack(table)}, ids, y,
        mode="semi_auto_parallel", device=placed.mesh, in_strategy=((1, 4), (1,)), parameter_plan={"items": (4, 1, 1)},
    )  # fmt: skip
    dense = lambda p, ids, y: jnp.mean((p["items"][ids].sum((1, 2)) - y) ** 2)  # noqa: E731
    np.testing.assert_allclose(packed, trained(dense, {"items": table}, ids, y, mode="stand_alone")[0], rtol=1e-5)
    assert embedding.unpack(state, {"items": split}).params["items"].shape == (64, 16)
    ours, batch = embedding.Table(64, 16, init=table, optimizer=embedding.sgd(0.1)), (ids.repeat(2, 0), y.repeat(2))
    value, _, _ = trained(dense, {"items": ours}, *batch, ids={"items": 0}, mode="data_parallel")
    after = table - 0.1 * jax.grad(dense)({"items": jnp.asarray(table)}, *batch)["items"]
    np.testing.assert_allclose(value, dense({"items": after}, *batch), rtol=1e-4)


def mixture():
    shapes = {"router": (8, 8), "up": (8, 8, 16), "down": (8, 16, 8)}
    params = {name: np.random.default_rng(len(name)).normal(size=s).astype("float32") / 3 for name, s in shapes.items()}
    strategies = {"router": (1, 1), "up": (N, 1, 1), "down": (N, 1, 1)}
    for how in ({"capacity_factor": 1.25, "groups": N}, {}):

        def layer(params, x, layout=TOKENS, how=how):
            sent = experts.dispatch(x, experts.route(x @ params["router"], k=2, **how), layout=layout)
            return experts.combine(sent.dot(jax.nn.gelu(sent.dot(sent.rows, params["up"])), params["down"]), sent)

        alone = jax.jit(lambda p, x, layer=layer: layer(p, x, None))(params, X)
        np.testing.assert_allclose(everywhere(shard(layer, (strategies, (N, 1)))(params, X)), alone, atol=1e-4)


class Block(eqx.Module):
    up: eqx.nn.Linear

    def __init__(self, key):
        self.up = eqx.nn.Linear(8, 8, key=key)

    def __call__(self, x):
        return x + jnp.tanh(jax.vmap(self.up)(x))


class Flax(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.up(x)))


def modules():
    loss = lambda model, x, y: jnp.mean((model(x) - y) ** 2)  # noqa: E731
    for make, weight in ((lambda: Block(jax.random.key(0)), "up/weight"), (lambda: Flax(nnx.Rngs(0)), "up/kernel")):
        semi = {"mode": "semi_auto_parallel", "in_strategy": ((2, 1), (2, 1)), "parameter_plan": {weight: (1, 2)}}
        value, state, step = trained(loss, make, X, Y, **semi)
        np.testing.assert_allclose(value, trained(loss, make, X, Y, mode="stand_alone")[0], rtol=1e-4)
        step.model(state)
        assert "Processes" in str(step.explain(state, X, Y, compiled=True))


if __name__ == "__main__":
    for case in (inference, tables, mixture, modules):
        case()
    print(f"done on {jax.local_device_count()} of {N} devices")

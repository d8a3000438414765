"""MindSpore's ways to say things, in a training step and in cells: cells as models, `dataset_strategy`, orders of arguments."""

import functools
import json
import warnings

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn
import shardfn.mindspore as ms
from shardfn import train
from tests.marks import some_slow
from tests.messages import refusal

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)


class Dense(ms.Cell):
    def __init__(self, size=32):
        self.weight = jnp.eye(size) / 2

    def construct(self, x):
        return jnp.tanh(x @ self.weight)


class Net(ms.Cell):
    def __init__(self):
        self.dense = Dense()

    def construct(self, x):
        return self.dense(x)


class WithLoss(ms.Cell):
    def __init__(self, net):
        self.net = net

    def construct(self, x, y):
        return jnp.mean((self.net(x) - y) ** 2)


def mean_square(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


@functools.cache
def by_hand(steps=2):
    @jax.jit
    @jax.value_and_grad
    def loss(w):
        return jnp.mean((jnp.tanh(X @ w) - X) ** 2)

    w = jnp.eye(32) / 2
    for _ in range(steps):
        value, gradient = loss(w)
        w = w - 0.1 * gradient
    return w, value


class ShardedInside(ms.Cell):
    """A network with strategies of an operator and of a block."""

    def __init__(self):
        self.first, self.second = Dense(), Dense()
        self.second.shard(((2, 4),))
        self.matmul = ms.shard(jnp.matmul, ((2, 1), (1, 4)))

    def construct(self, x):
        return self.second(jnp.tanh(self.matmul(x, self.first.weight)))


@jax.jit
@jax.value_and_grad
def two_layers(w):
    return jnp.mean((jnp.tanh(jnp.tanh(X @ w[0]) @ w[1]) - X) ** 2)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=str)
@pytest.mark.parametrize(
    "mode",
    [
        "stand_alone",
        "data_parallel",
        "hybrid_parallel",
        "semi_auto_parallel",
        pytest.param("auto_parallel", marks=pytest.mark.slow),
    ],
)
def test_step_of_a_network_with_operators_sharded_inside_has_its_losses_in_every_mode(mode, options):
    step = train.step(mean_square, optax.sgd(0.1), mode=mode, **options)
    state = step.init(ShardedInside(), X, X)
    weights = jnp.stack([jnp.eye(32) / 2] * 2)
    for _ in range(2):
        value, gradient = two_layers(weights)
        weights = weights - 0.1 * gradient
        state, loss = step(state, X, X)
        np.testing.assert_allclose(loss, value, rtol=1e-5)


@pytest.mark.parametrize(
    "mode", ["data_parallel", "semi_auto_parallel", pytest.param("auto_parallel", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("own_loss", [False, True], ids=["loss function", "cell with loss"])
def test_step_trains_a_cell_as_by_hand(mode, own_loss):
    cell = WithLoss(Net()) if own_loss else Net()
    step = train.step(cell if own_loss else mean_square, optax.sgd(0.1), mode=mode)
    state = step.init(cell, X, X)
    for _ in range(2):
        state, value = step(state, X, X)
    w, expected = by_hand()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    (path,) = state.params
    assert path == ("net/dense/weight" if own_loss else "dense/weight")
    trained = step.model(state)
    assert type(trained) is type(cell)
    np.testing.assert_allclose(trained.parameters_dict()[path], w, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(cell.parameters_dict()[path], jnp.eye(32) / 2)  # the given cell is unchanged


@pytest.mark.parametrize("make", [Net, lambda: Net()], ids=["class", "function"])
def test_step_makes_a_cell_with_its_shardings(make):
    step = train.step(mean_square, optax.sgd(0.1), mode="semi_auto_parallel", parameter_plan={"dense/weight": (1, 8)})
    state = step.init(make, X, X)
    assert state.params["dense/weight"].sharding.shard_shape((32, 32)) == (32, 4)
    state, value = step(state, X, X)
    np.testing.assert_allclose(value, by_hand(1)[1], rtol=1e-5)
    np.testing.assert_allclose(step.model(state).dense.weight, by_hand(1)[0], rtol=1e-4, atol=1e-6)


class Counting(ms.Cell):
    def __init__(self):
        self.dense, self.count = Dense(), jnp.int32(0)

    def construct(self, x):
        self.count = self.count + 1
        return self.dense(x)


class Module(nnx.Module):
    def __init__(self):
        self.net, self.seen = nnx.data(Net()), nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        self.seen[...] += 1
        return self.net(x)


class Around(ms.Cell):
    def __init__(self):
        self.module = Module()

    def construct(self, x):
        return self.module(x)


NESTED = {
    "dict": (lambda: {"net": Net()}, lambda d: d["net"], "net/dense/weight"),
    "tuple": (lambda: (Net(), jnp.int32(3)), lambda t: t[0], "0/dense/weight"),
    "module": (Module, lambda m: m, "net/dense/weight"),
    "cell with a module": (Around, lambda c: c, "module/net/dense/weight"),
    "tied": (lambda: dict.fromkeys("ab", Net()), lambda d: d["b"], "a/dense/weight"),
}


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
@pytest.mark.parametrize("is_made", some_slow({"model": False, "function": True}, {"function"}))
@pytest.mark.parametrize("name", NESTED)
def test_step_trains_a_cell_in_a_pytree_as_by_hand(name, is_made, mode):
    make, net_of, path = NESTED[name]
    options = {"parameter_plan": {path: (1, 8)}} if mode == "semi_auto_parallel" else {}
    step = train.step(lambda model, x, y: mean_square(net_of(model), x, y), optax.sgd(0.1), mode=mode, **options)
    state = step.init(make if is_made else make(), X, X)
    assert step.plan(state, X, X).decision(f"state/params/{path}").strategy == ((1, 8) if options else (1, 1))
    for _ in range(2):
        state, value = step(state, X, X)
    w, expected = by_hand()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    model = step.model(state)
    assert type(model) is type(make())
    for module in (model, getattr(model, "module", None)):
        assert getattr(module, "seen", 2) == 2  # batch statistics are no parameters, and are kept
    np.testing.assert_allclose(net_of(model)(X), jnp.tanh(X @ w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [Counting, lambda: [Counting()]], ids=["cell", "list"])
def test_step_keeps_what_a_cell_counts(make):
    net_of = lambda model: model[0] if isinstance(model, list) else model  # noqa: E731
    step = train.step(lambda model, x, y: mean_square(net_of(model), x, y), optax.sgd(0.1), mode="data_parallel")
    state = step.init(make(), X, X)
    for _ in range(2):
        state, _ = step(state, X, X)
    assert net_of(step.model(state)).count == 2


class Smooth(ms.Cell):
    def __init__(self):
        self.dense, self.mean = Dense(), jnp.zeros(32)

    def construct(self, x):
        self.mean = (self.mean + x.mean(0)) / 2
        return self.dense(x - self.mean)


def test_statistics_of_a_cell_are_kept_when_they_are_frozen_and_refused_when_they_are_trained():
    error = refusal(lambda: fitted_smooth())
    assert "the loss changes what is trained: mean" in str(error) and "frozen=['mean']" in error.problems[0].fix
    np.testing.assert_allclose(fitted_smooth(frozen=["mean"]).mean, X.mean(0) * 3 / 4, rtol=1e-5)


def fitted_smooth(**options):
    step = train.step(mean_square, optax.sgd(0.1), mode="semi_auto_parallel", **options)
    state = step.init(Smooth(), X, X)
    for _ in range(2):
        state, _ = step(state, X, X)
    return step.model(state)


class Hiding(nnx.Module):
    def __init__(self, mark=lambda cell: cell):
        self.net = mark(Net())

    def __call__(self, x):
        return self.net(x)


def test_cell_that_a_module_takes_as_static_is_refused_with_a_mend_that_works():
    step = train.step(mean_square, optax.sgd(0.1), mode="data_parallel")
    error = refusal(step.init, Hiding(), X, X)
    assert "`net` of Hiding is a Cell" in str(error) and "self.net = nnx.data(Net(...))" in error.problems[0].fix
    assert list(step.init(Hiding(nnx.data), X, X).params.net) == ["dense/weight"]


@pytest.mark.parametrize("argument", [Dense(), {"net": Dense()}], ids=["cell", "dict"])
def test_cell_as_an_argument_is_refused_with_a_mend_that_works(argument):
    net_of = lambda given: given["net"] if isinstance(given, dict) else given  # noqa: E731
    error = refusal(shardfn.shard(lambda net, x: net_of(net)(x)), argument, X)
    assert "cell.parameters_dict()" in error.problems[0].fix and "cell.with_parameters(arrays)" in error.problems[0].fix
    cell = net_of(argument)
    for made in (
        shardfn.shard(cell)(X),
        shardfn.shard(lambda arrays, x: cell.with_parameters(arrays)(x))(cell.parameters_dict(), X),
    ):
        np.testing.assert_allclose(made, cell(X), rtol=1e-6)


def test_step_of_a_cell_takes_the_batch_by_name():
    step = train.step(WithLoss(Net()), optax.sgd(0.1), mode="data_parallel")
    state = step.init(WithLoss(Net()))
    _, value = step(state, y=X, x=X)
    np.testing.assert_allclose(value, by_hand(1)[1], rtol=1e-5)


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize(
    ("said", "strategy"), [("full_batch", (1, 1)), ("data_parallel", (8, 1)), (((2, 1),), (2, 1)), (((1, 4),), (1, 4))]
)
def test_dataset_strategy_shards_the_batch_of_a_step(mode, said, strategy):
    with ms.auto_parallel(parallel_mode=mode, dataset_strategy=said):
        step = train.step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.sgd(0.1))
    state = step.init({"w": jnp.ones((32, 4))}, X)
    assert step.plan(state, X).inputs[-1].strategy == strategy
    assert np.isfinite(step(state, X)[1])


def test_full_batch_of_a_pytree_is_replicated():
    with ms.auto_parallel(parallel_mode="semi_auto_parallel", full_batch=True):
        step = train.step(lambda p, b: jnp.mean((b["x"] @ p["w"]) ** 2) * b["by"], optax.sgd(0.1))
    batch = {"x": X, "by": jnp.float32(2)}
    state = step.init({"w": jnp.ones((32, 4))}, batch)
    assert step.plan(state, batch).decision("batch/0/x").strategy == (1, 1)


@pytest.mark.parametrize(
    ("mode", "said", "warns"),
    [("data_parallel", "full_batch", True), ("hybrid_parallel", ((2, 1),), True), ("stand_alone", ((2, 1),), True),
     ("data_parallel", ((8, 1),), False), ("data_parallel", "data_parallel", False), ("stand_alone", "full_batch", False)],
)  # fmt: skip
def test_dataset_strategy_without_effect_is_warned_of(mode, said, warns):
    with ms.auto_parallel(parallel_mode=mode, dataset_strategy=said), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train.step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(0.1))
    assert bool(found) == warns
    assert all(f"has no effect in mode {mode!r}" in str(one.message) for one in found)


def test_stand_alone_with_device_num_warns_that_one_device_is_used():
    with (pytest.warns(UserWarning, match="uses one device, whatever device_num=8"),
          ms.auto_parallel(parallel_mode="stand_alone", device_num=8)):  # fmt: skip
        assert shardfn.plan(lambda x: x + 1, X).mesh.size == 1


@pytest.mark.parametrize(
    "arguments",
    [(((8, 1),), None, "CPU", 0), (((8, 1),), None, "CPU"), (((8, 1),), None, None, 2), (((8, 1),), None, {"weight": (1, 1)}, "CPU", 0),
     (((8, 1),), None, jax.devices(), 1)],
    ids=["older", "older without level", "level alone", "newer", "older with devices"],
)  # fmt: skip
def test_orders_of_arguments_are_told_apart_by_type(arguments):
    cell, level = Dense().shard(*arguments), next((a for a in arguments[3:] if isinstance(a, int)), 0)
    for made in (cell.plan(X), ms.shard(Dense(), *arguments).plan(X)):
        assert made.decision("x").strategy == (8, 1)
        assert made.level == level


def test_recomputed_cell_keeps_its_gradient_and_fewer_values():
    plain, again = Dense(), Dense().recompute()
    loss = lambda cell: lambda p: (cell.with_parameters(p)(X) ** 2).sum()  # noqa: E731
    gradients = [jax.grad(loss(cell))(cell.parameters_dict())["weight"] for cell in (plain, again)]
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-5)
    texts = [str(jax.make_jaxpr(jax.grad(loss(cell)))(cell.parameters_dict())) for cell in (plain, again)]
    assert [text.count("remat") + text.count("checkpoint") > 0 for text in texts] == [False, True]
    sharded = Dense().recompute(mp_comm_recompute=False).shard(((8, 1),))
    np.testing.assert_allclose(sharded(X), plain(X), rtol=1e-6)
    assert sharded(X).sharding.shard_shape((16, 32))[0] == 2


def test_recompute_mode_and_second_call():
    cell = Dense()
    assert type(cell.recompute(mode=False)) is Dense
    assert train.recompute(cell, mode=False) is cell
    with pytest.raises(shardfn.ShardError, match="is recomputed already"):
        cell.recompute().recompute()
    with pytest.raises(shardfn.ShardError, match="mode"):
        Dense().recompute(mode="no")


def test_only_trainable_params_of_a_step_leaves_states_and_batch_out(tmp_path):
    names = {}
    for only in (True, False):
        file = tmp_path / f"{only}.json"
        with ms.auto_parallel(strategy_ckpt_config={"save_file": str(file), "only_trainable_params": only}):
            step = train.step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.adam(0.1))
            step(step.init({"w": jnp.ones((32, 4))}, X), X)
        names[only] = set(json.loads(file.read_text())["parallel_layout_item"])
    assert names[True] == {"params.w"}
    assert names[False] > {"params.w", "opt_state.0.mu.w", "step"}


def test_strategy_json_keeps_the_name_of_an_only_child(tmp_path):
    net = Net().shard(((2, 1),), None, {"dense.weight": (1, 4)})
    net.plan(X).save(tmp_path / "s.json")
    assert list(json.loads((tmp_path / "s.json").read_text())["parallel_layout_item"]) == ["dense.weight", "x"]
    again = Net().shard(layout=tmp_path / "s.json")
    assert again.plan(X).decision("dense/weight").strategy == (1, 4)


def test_parameter_named_like_an_input_has_a_path_of_its_own():
    class Named(ms.Cell):
        def __init__(self):
            self.x = jnp.ones((32, 8))

        def construct(self, x):
            return x @ self.x

    cell = Named().shard(((2, 1),), None, {"self.x": (1, 4)})
    assert {d.path: d.strategy for d in cell.plan(X).inputs} == {"self/x": (1, 4), "x": (2, 1)}
    np.testing.assert_allclose(cell(X), X @ cell.x, rtol=1e-5)


def test_folder_as_strategy_file_names_the_files_in_it(tmp_path):
    (tmp_path / "s.json").write_text("{}")
    said = r"it is a folder(.|\n)*name a file in it: '.*s\.json'"
    with pytest.raises(shardfn.ShardError, match=said), ms.auto_parallel(strategy_ckpt_load_file=f"{tmp_path}/"):
        pass


def test_init_with_another_cell_than_the_loss_is_refused():
    step = train.step(WithLoss(Net()), optax.sgd(0.1), mode="data_parallel")
    error = refusal(step.init, Net(), X, X)
    assert "the model is a Net, and the loss is the Cell WithLoss" in str(error)
    assert "init(WithLoss(...), *batch)" in str(error)
    step(step.init(WithLoss(Net()), X, X), X, X)


@pytest.mark.parametrize("mode", ["data_parallel", pytest.param("auto_parallel", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("loss", "model"), [(mean_square, Net()), (WithLoss(Net()), WithLoss(Net()))], ids=["function", "cell"]
)
def test_state_of_a_cell_given_to_a_step_without_init_is_refused(mode, loss, model):
    state = train.step(loss, optax.sgd(0.1), mode=mode).init(model, X, X)
    step = train.step(loss, optax.sgd(0.1), mode=mode)
    assert "call init(" in refusal(step, state, X, X).problems[0].fix
    step.init(model, X, X)
    step(state, X, X)

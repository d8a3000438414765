"""Modules of the common libraries train in every mode, with what they change on the way."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from shardfn import train
from shardfn.errors import StrategyError
from tests.train.regression import data, run

MODES = ["data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel"]


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(jax.nn.relu(self.norm(self.up(x)))))


def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def eqx_loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def eqx_net():
    return eqx.nn.MLP(16, 8, 32, 1, key=jax.random.key(0))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(linen.relu(linen.Dense(32)(x)))


def linen_loss(params, x, y):
    return jnp.mean((LinenNet().apply(params, x) - y) ** 2)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.activation = lambda x: jax.nn.relu(x)  # another function for each module that is made

    def __call__(self, x):
        return self.down(self.activation(self.up(x)))


MODELS = {
    "eqx": (eqx_loss, eqx_net),
    "linen": (linen_loss, lambda: LinenNet().init(jax.random.key(0), data()[0])),
    "nnx": (nnx_loss, lambda: Plain(nnx.Rngs(0))),
}


@pytest.fixture(scope="module")
def alone():
    """The losses of 20 steps of each model on one device."""
    step = lambda loss: train.step(loss, optax.adam(1e-2), mode="stand_alone")  # noqa: E731
    return {name: run(step(loss), make=make)[0] for name, (loss, make) in MODELS.items()}


TRAINED = [  # quick: each model in a mode or more, and each mode but the searched one with one model or more
    pytest.param(name, mode, marks=[] if mode != MODES[-1] and (name == "nnx" or (i + j) % 2 == 0) else pytest.mark.slow)
    for i, name in enumerate(MODELS) for j, mode in enumerate(MODES)
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), TRAINED)
def test_losses_of_twenty_steps_are_those_of_one_device(name, mode, alone):
    loss, make = MODELS[name]
    losses, _ = run(train.step(loss, optax.adam(1e-2), mode=mode), make=make)
    np.testing.assert_allclose(losses, alone[name], rtol=2e-4)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_one_device_takes_the_steps_of_plain_jax(name, alone):
    loss, make = MODELS[name]
    is_param = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    params, rest = eqx.partition(make(), is_param)
    optimizer, losses = optax.adam(1e-2), []
    state = optimizer.init(params)

    @jax.jit
    def one(params, state):
        value, grads = jax.value_and_grad(lambda p: loss(eqx.combine(p, rest), *data()))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    for _ in range(20):
        params, state, value = one(params, state)
        losses.append(float(value))
    np.testing.assert_allclose(alone[name], losses, rtol=2e-4)


@pytest.mark.parametrize("mode", ["semi_auto_parallel", pytest.param("auto_parallel", marks=pytest.mark.slow)])
def test_an_nnx_module_with_statistics_and_dropout(mode):
    def make():
        return Net(nnx.Rngs(0), 0.5)

    alone, first = run(train.step(nnx_loss, optax.sgd(1e-2), mode="stand_alone"), make=make, steps=4)
    losses, state = run(train.step(nnx_loss, optax.sgd(1e-2), mode=mode), make=make, steps=4)
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    np.testing.assert_allclose(state.params.norm.mean[...], first.params.norm.mean[...], rtol=1e-3, atol=1e-6)
    assert int(state.params.drop.rngs.count[...]) == 4


def test_statistics_of_the_parts_are_averaged():
    step = train.step(nnx_loss, optax.sgd(0.0), mode="data_parallel")
    _, state = run(step, make=lambda: Net(nnx.Rngs(0)), steps=1)
    hidden = Net(nnx.Rngs(0)).up(data()[0])
    np.testing.assert_allclose(state.params.norm.mean[...], 0.01 * hidden.mean(0), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_the_model_of_a_state_is_whole_again():
    step = train.step(eqx_loss, optax.adam(1e-2), mode="data_parallel")
    _, state = run(step, make=eqx_net, steps=2)
    assert state.params.activation is None
    assert step.model(state)(data()[0][0]).shape == (8,)
    step = train.step(nnx_loss, optax.adam(1e-2), mode="data_parallel")
    state, _ = step(step.init(Net(nnx.Rngs(0))), *data())
    assert step.model(state)(data()[0]).shape == (32, 8)


def test_statistics_are_not_trained():
    step = train.step(nnx_loss, optax.adam(1e-2), mode="data_parallel")
    state = step.init(lambda: Net(nnx.Rngs(0)))
    assert len(jax.tree.leaves(state.opt_state[0].mu)) == 6


class Scaled(eqx.Module):
    inner: eqx.nn.Linear
    drop: eqx.nn.Dropout
    scale: float

    def __init__(self):
        self.inner, self.drop, self.scale = eqx.nn.Linear(16, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.5), 0.5

    def __call__(self, x):
        return self.scale * self.drop(self.inner(x), key=jax.random.key(1))


def test_numbers_of_an_equinox_module_are_settings():
    losses, state = run(train.step(eqx_loss, optax.sgd(0.1), mode="data_parallel"), make=Scaled, steps=3)
    alone, _ = run(train.step(eqx_loss, optax.sgd(0.1), mode="stand_alone"), make=Scaled, steps=3)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert state.params.scale is None
    with pytest.raises(StrategyError, match="call init"):
        train.step(eqx_loss, optax.sgd(0.1), mode="data_parallel")(state, *data())


class Tied(nnx.Module):
    """A kernel at two places, and a norm with statistics that is called twice."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.mid, self.down = (nnx.Linear(16, n, rngs=rngs) for n in (16, 16, 8))
        self.mid.kernel = self.up.kernel
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.norms = nnx.List([self.norm])

    def __call__(self, x):
        x = self.mid(jnp.tanh(self.up(x)))
        return self.down(self.norms[0](jnp.tanh(self.norm(x))))


@pytest.mark.parametrize(
    ("mode", "make"),
    [("semi_auto_parallel", Tied), pytest.param("auto_parallel", Tied(), marks=pytest.mark.slow)],
    ids=["made", "given"],
)
def test_a_variable_at_two_places_is_one_array(mode, make):
    plain = Tied()
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def by_hand(plain, optimizer):
        value, grads = nnx.value_and_grad(nnx_loss)(plain, *data())
        optimizer.update(plain, grads)
        return value

    losses = [float(by_hand(plain, optimizer)) for _ in range(3)]
    step = train.step(nnx_loss, optax.sgd(0.1), mode=mode)
    found, state = run(step, make=make, steps=3)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert len(jax.tree.leaves(state.params)) == 9
    model = step.model(state)
    assert model.mid.kernel is model.up.kernel
    np.testing.assert_allclose(model.mid.kernel[...], plain.up.kernel[...], atol=1e-5)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=1e-6)
    with pytest.raises(StrategyError, match="call init"):
        train.step(nnx_loss, optax.sgd(0.1), mode=mode)(state, *data())


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(linen.BatchNorm(use_running_average=False)(linen.Dense(16)(x)))


def with_collections(variables, x, y):
    out, changed = Normed().apply(variables, x, mutable=["batch_stats"])
    return jnp.mean((out - y) ** 2), changed


@pytest.mark.parametrize("mode", ["semi_auto_parallel", pytest.param("auto_parallel", marks=pytest.mark.slow)])
def test_collections_that_the_loss_changes_are_kept(mode):
    variables = dict(Normed().init(jax.random.key(0), data()[0]))
    first, losses, optimizer = variables, [], optax.sgd(0.1)

    @jax.jit
    def by_hand(variables):
        of = jax.value_and_grad(lambda p: with_collections({**variables, "params": p}, *data()), has_aux=True)
        (value, changed), grads = of(variables["params"])
        return value, {"params": jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads), **changed}

    for _ in range(3):
        value, variables = by_hand(variables)
        losses.append(float(value))
    step = train.step(with_collections, optimizer, mode=mode, mutable="batch_stats")
    found, state = run(step, make=lambda: first, steps=3)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (state.params, variables)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_collections_beside_an_auxiliary_output():
    def loss(variables, x, y):
        value, changed = with_collections(variables, x, y)
        return value, (x[:, 0], changed)

    variables = Normed().init(jax.random.key(0), data()[0])
    step = train.step(
        loss, optax.sgd(0.1), mode="data_parallel", mutable=["batch_stats"], has_aux=True, micro_batches=2
    )
    state, (_, aux) = step(step.init(variables), *data())
    np.testing.assert_array_equal(aux, data()[0][:, 0])
    assert float(jnp.abs(state.params["batch_stats"]["BatchNorm_0"]["mean"]).max()) > 0


COLLECTIONS = [
    ({"mutable": "statistics"}, with_collections, "the model's collections are 'batch_stats', 'params'"),
    ({"mutable": "batch_stats", "has_aux": True}, with_collections, "return (loss, (auxiliary output, collections))"),
    ({"mutable": "batch_stats"}, lambda *args: with_collections(*args)[0], "return (loss, collections)"),
    ({"mutable": "batch_stats"}, lambda *args: (with_collections(*args)[0], {"batch_stats": {}}), "changes its form"),
    ({"mutable": "batch_stats", "reuse": "auto"}, with_collections, "cannot scan layers of a loss that changes collections"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "loss", "text"), COLLECTIONS, ids=[text for *_, text in COLLECTIONS])
def test_what_is_wrong_with_collections(options, loss, text):
    variables = Normed().init(jax.random.key(0), data()[0])
    with pytest.raises(StrategyError, match=re.escape(text)):
        run(train.step(loss, optax.sgd(0.1), mode="data_parallel", **options), make=lambda: variables, steps=1)


def test_of_linen_variables_the_parameters_are_trained():
    variables = {"params": {"w": jnp.ones((16, 8))}, "batch_stats": {"mean": jnp.ones(8)}}
    step = train.step(
        lambda v, x, y: jnp.mean((x @ v["params"]["w"] - v["batch_stats"]["mean"] - y) ** 2),
        optax.adamw(0.1, weight_decay=0.1),
        mode="data_parallel",
    )
    _, state = run(step, make=lambda: variables, steps=2)
    np.testing.assert_array_equal(state.params["batch_stats"]["mean"], jnp.ones(8))

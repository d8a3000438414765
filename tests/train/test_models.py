"""Modules of the common libraries train in every mode, with what they change on the way."""

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

MODES = ["data_parallel", "semi_auto_parallel", "auto_parallel"]


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


MODELS = {
    "eqx": (eqx_loss, eqx_net),
    "linen": (linen_loss, lambda: LinenNet().init(jax.random.key(0), data()[0])),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_losses_as_on_one_device(name, mode):
    loss, make = MODELS[name]
    losses = [run(train.step(loss, optax.adam(1e-2), mode=m), make=make, steps=5)[0] for m in ("stand_alone", mode)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
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
    losses, state = run(train.step(eqx_loss, optax.sgd(0.1), mode="auto_parallel"), make=Scaled, steps=3)
    alone, _ = run(train.step(eqx_loss, optax.sgd(0.1), mode="stand_alone"), make=Scaled, steps=3)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert state.params.scale is None
    with pytest.raises(StrategyError, match="call init"):
        train.step(eqx_loss, optax.sgd(0.1), mode="data_parallel")(state, *data())


def test_a_variable_at_two_places_is_refused():
    model = Net(nnx.Rngs(0))
    model.again = model.up
    with pytest.raises(StrategyError, match="same variable"):
        train.step(nnx_loss, optax.sgd(0.1), mode="data_parallel").init(model)


def test_of_linen_variables_the_parameters_are_trained():
    variables = {"params": {"w": jnp.ones((16, 8))}, "batch_stats": {"mean": jnp.ones(8)}}
    step = train.step(
        lambda v, x, y: jnp.mean((x @ v["params"]["w"] - v["batch_stats"]["mean"] - y) ** 2),
        optax.adamw(0.1, weight_decay=0.1),
        mode="data_parallel",
    )
    _, state = run(step, make=lambda: variables, steps=2)
    np.testing.assert_array_equal(state.params["batch_stats"]["mean"], jnp.ones(8))

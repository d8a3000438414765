"""The optimizer's state in the host's memory: it lies there between steps, and the losses stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import train
from shardfn.errors import StrategyError, StrategyTypeError
from tests.marks import some_slow

X, Y = jnp.ones((16, 8)) / 3, jnp.arange(64, dtype=jnp.float32).reshape(16, 4) / 64
PARAMS = {"up": jnp.eye(8, 32), "down": jnp.ones((32, 4)) / 9}


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


ZERO = {"optimizer_level": "level1", "parallel_optimizer_threshold": 0}
HOW = [
    dict(mode="data_parallel"),
    dict(mode="data_parallel", parallel_optimizer_config=ZERO, micro_batches=2),
    dict(mode="data_parallel", fusion={"*": 1}),
    dict(mode="semi_auto_parallel", parameter_plan={"up": (1, 4), "down": (4, 1)}),
    dict(mode="stand_alone"),
]


@pytest.mark.parametrize("how", some_slow(HOW, HOW[3:4]), ids=str)
def test_between_steps_it_lies_there(how):
    values = []
    for kind in (None, "pinned_host"):
        step = train.step(loss, optax.adamw(1e-2), opt_state_memory_kind=kind, **how)
        state = step.init(PARAMS, X, Y)
        for _ in range(3):
            assert kinds(state.opt_state) == {kind or "device"} and kinds(state.params) == {"device"}
            state, value = step(state, X, Y)
        values.append((value, state.params))
    for a, b in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_program_moves_it():
    step = train.step(loss, optax.adamw(1e-2), mode="data_parallel", opt_state_memory_kind="pinned_host")
    state = step.init(PARAMS, X, Y)
    text = step.lower(state, X, Y).as_text()
    assert text.count("annotate_device_placement") >= 4  # two moments of two parameters come
    assert text.count('"pinned_host"') >= 4  # and go
    elsewhere = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[0]), state)
    after, _ = step(elsewhere, X, Y)
    assert kinds(after.opt_state) == {"pinned_host"}, "a state from elsewhere is moved"


@pytest.mark.slow
def test_without_a_batch_and_in_a_pipeline():
    step = train.step(loss, optax.adamw(1e-2), mode="data_parallel", opt_state_memory_kind="pinned_host")
    assert kinds(step.init(PARAMS).opt_state) == {"pinned_host"}
    layers = [lambda w, x: jnp.tanh(x @ w), lambda w, x, y: jnp.mean((x @ w - y) ** 2)]
    ws = [PARAMS["up"], PARAMS["down"]]
    pipe = train.pipeline(layers, 2)
    step = train.step(pipe, optax.adam(1e-2), opt_state_memory_kind="pinned_host")
    state = step.init(pipe.pack(ws, X, Y), X, Y)
    state, value = step(state, X, Y)
    assert kinds(state.opt_state) == {"pinned_host"}
    np.testing.assert_allclose(value, loss(PARAMS, X, Y), rtol=1e-5)


@pytest.mark.parametrize(("kind", "error"), [("host", StrategyError), (True, StrategyTypeError)])
def test_errors(kind, error):
    with pytest.raises(error, match="`opt_state_memory_kind` cannot be"):
        train.step(loss, optax.sgd(0.1), opt_state_memory_kind=kind)

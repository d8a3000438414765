"""Mistakes in calls of functions, steps and commands: each is refused with what to do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import data, shard, train
from shardfn.cli.main import main
from shardfn.errors import StrategyError, StrategyTypeError

X = jnp.ones((8, 4))


@dataclasses.dataclass
class Model:
    w: jax.Array


def loss(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean()


def made(**options):
    step = train.step(loss, optax.sgd(0.1), **options)
    return step, step.init({"w": jnp.ones((4, 4))}, X, X)


def old_state():
    step, state = made()
    step(state, X, X)
    return step.model(state)


MISTAKES = {
    "dataclass": (lambda: shard(lambda m, x: x @ m.w)(Model(X.T), X), StrategyTypeError, r"register_dataclass\(Model"),
    "dataclass inside": (lambda: shard(lambda p, x: x)({"m": Model(X.T)}, X), StrategyTypeError, r"register_dataclass\(Model"),
    "jit with a static argument": (
        lambda: shard(jax.jit(lambda x, n: x[:n], static_argnums=1))(X, 2), StrategyTypeError, "shard the function that jax.jit has",
    ),
    "jit with a static argument inside": (
        lambda: shard(lambda x, n: jax.jit(lambda x, n: x[:n], static_argnums=1)(x, n))(X, 2), StrategyTypeError, "static_argnums",
    ),
    "batch of 12 on 8": (
        lambda: next(iter(data.load({"x": np.ones((24, 2), np.float32)}, batch_size=12))), StrategyError,
        r"where: strategy = 'data_parallel', x: float32\[12, 2\]",
    ),
    "explain without a batch": (lambda: made()[0].explain(made()[1]), StrategyTypeError, r"pass \(state, x, y\)"),
    "plan with half a batch": (lambda: made()[0].plan(made()[1], X), StrategyTypeError, "1 argument after the state"),
    "step with too large a batch": (lambda: made()[0](made()[1], X, X, X), StrategyTypeError, "3 arguments after the state"),
    "model of an old state": (old_state, StrategyError, "the state was given away"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_with_what_to_do(name):
    call, kind, text = MISTAKES[name]
    with pytest.raises(kind, match=text):
        call()


def test_what_the_fixes_say_works():
    registered = jax.tree_util.register_dataclass(Model, data_fields=["w"], meta_fields=[])
    assert shard(lambda m, x: x @ m.w)(registered(X.T), X).shape == (8, 8)
    assert shard(lambda x, n: x[:n], static_argnums=1)(X, 2).shape == (2, 4)
    step, state = made()
    assert step.explain(state, X, X).to_dict()["arguments"]


def test_the_command_alone_prints_its_help(capsys):
    assert main([]) == 0
    assert "compare" in capsys.readouterr().out

"""Optimizers that take more than gradients and parameters go the way they go by plain optax."""

import re

import jax
import numpy as np
import optax
import optax.contrib
import pytest

from shardfn import train
from shardfn.errors import StrategyError, StrategyTypeError
from tests.train.regression import data, mean_square, run, start

STEPS = 5
PIECES = {"parallel_optimizer_config": {"optimizer_level": "level2", "parallel_optimizer_threshold": 0}}
AHEAD = optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)
OPTIMIZERS = {
    "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5)),
    "polyak": optax.polyak_sgd(max_learning_rate=0.5),
    "line search": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 2),
}


def by_optax(optimizer, wrap=lambda p: p, fast=lambda p: p):
    """Losses and parameters of plain optax."""
    update = (
        optimizer.update if isinstance(optimizer, optax.MultiSteps) else optax.with_extra_args_support(optimizer).update
    )
    params, losses = wrap(start()), []
    state = optimizer.init(params)

    @jax.jit
    def one(params, state):
        value, grads = jax.value_and_grad(mean_square)(fast(params), *data())
        more = {"value": value, "grad": grads, "value_fn": lambda p: mean_square(p, *data())}
        updates, state = update(grads, state, params, **more)
        return optax.apply_updates(params, updates), state, value

    for _ in range(STEPS):
        params, state, value = one(params, state)
        losses.append(float(value))
    return losses, params


@pytest.mark.parametrize(("name", "options"), [
    ("plateau", {"mode": "data_parallel", **PIECES}),
    pytest.param("polyak", {"mode": "auto_parallel"}, marks=pytest.mark.slow),
    ("line search", {"mode": "data_parallel"}),
    ("several steps", {"mode": "semi_auto_parallel"}),
])  # fmt: skip
def test_an_optimizer_is_told_the_loss(name, options):
    losses, _ = run(train.step(mean_square, OPTIMIZERS[name], **options), steps=STEPS)
    np.testing.assert_allclose(losses, by_optax(OPTIMIZERS[name])[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto_parallel"])
def test_lbfgs(mode):
    losses, _ = run(train.step(mean_square, optax.lbfgs(), mode=mode), steps=STEPS)
    np.testing.assert_allclose(losses, by_optax(optax.lbfgs())[0], rtol=1e-4)


@pytest.mark.parametrize("options", [{"mode": "data_parallel", **PIECES}, {"mode": "semi_auto_parallel", "micro_batches": 2}],
                         ids=["in pieces", "micro-batches"])  # fmt: skip
def test_lookahead_takes_plain_parameters(options):
    expected, both = by_optax(AHEAD, optax.LookaheadParams.init_synced, lambda p: p.fast)
    losses, state = run(train.step(mean_square, AHEAD, **options), steps=STEPS)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, slow in state.opt_state.slow.items():
        np.testing.assert_allclose(slow, both.slow[name], atol=1e-5)
        np.testing.assert_allclose(state.params[name], both.fast[name], atol=1e-5)
    assert state.opt_state.slow["w1"].sharding.is_fully_replicated == ("micro_batches" in options)


def asks_for_more(updates, state, params=None, *, secret, **_):
    return updates, state


WRONG = [
    (lambda: train.step(mean_square, AHEAD, mode="data_parallel").init(optax.LookaheadParams.init_synced(start())),
     StrategyTypeError, "pass the parameters as they are"),
    (lambda: run(train.step(mean_square, optax.GradientTransformationExtraArgs(lambda p: (), asks_for_more)), steps=1),
     StrategyError, "it passes value, grad, value_fn"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_errors_say_what_to_do(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()

"""`train.step(..., check=True)`: the loss and the next state are those of the unsharded step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import ShardError, train
from shardfn.errors import CheckError
from tests.runtime.test_check import row_sums

X, Y = (jax.random.normal(jax.random.key(i), (32, 8)) for i in range(2))
PARAMS = {"w": jax.random.normal(jax.random.key(2), (8, 8)), "b": jnp.zeros(8)}


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def with_aux(params, x, y):
    value = loss(params, x, y)
    return value, {"twice": 2 * value}


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("auto_parallel", {}),
        ("semi_auto_parallel", {"parameter_plan": {"w": (1, 4)}}),
        ("data_parallel", {"parallel_optimizer_config": {"optimizer_level": "level3"}}),
        ("data_parallel", {"compute_dtype": jnp.bfloat16}),
        ("auto_parallel", {"micro_batches": 4, "has_aux": True}),
    ],
)
def test_a_right_step(mode, options):
    step = train.step(with_aux if options.get("has_aux") else loss, optax.adamw(1e-2), mode=mode, check=True, **options)
    state = step.init(PARAMS, X, Y)
    result = step.check(state, X, Y)
    assert result.agrees and not state.step.is_deleted()
    paths = {row.path for row in result.rows}
    assert {"state/params/w", "state/opt_state/0/mu/b", "state/step", "loss"} < paths
    assert ("aux/twice" in paths) == ("has_aux" in options)
    state, _ = step(state, X, Y)
    state, _ = step(state, X, Y)
    assert int(state.step) == 2
    said = f"checked: {len(result.rows)} arrays agree with"
    assert said in " ".join(step.plan(state, X, Y).diagnostics) and said in str(step.explain(state, X, Y))


def test_a_wrong_step():
    step = train.step(lambda p, x: jnp.mean(row_sums(x) * p["w"]), optax.sgd(1.0), in_strategy=((4, 1),), check=True)
    state = step.init({"w": jnp.ones(8)}, X)
    with pytest.raises(CheckError, match=r"state/params/w\[\d\]|loss") as caught:
        step(state, X)
    assert not state.step.is_deleted() and "step.check(state, *batch)" in caught.value.problems[0].fix
    assert {row.path for row in caught.value.result.differing} == {"state/params/w", "loss"}


def test_a_loss_that_is_no_mean_is_told_apart():
    step = train.step(lambda p, x, y: jnp.sum((x @ p["w"] - y) ** 2), optax.sgd(1e-3), mode="data_parallel", check=True)
    with pytest.raises(CheckError, match="no mean over the batch"):
        step(step.init(PARAMS, X, Y), X, Y)


def test_steps_of_several_shapes_are_checked_once_each():
    step = train.step(loss, optax.sgd(0.1), mode="data_parallel", check=True, donate=False)
    state = step.init(PARAMS, X, Y)
    step(state, X, Y)
    assert [one.is_checked for one in step._sharded.values()] == [True]
    step(state, X[:16], Y[:16])
    assert [one.is_checked for one in step._sharded.values()] == [True, True]


@pytest.mark.parametrize(
    "options", [{"gradients_mean": False}, {"loss_repeated_mean": False}, {"layerwise_parallel": ["w"]}, {"check": 1}]
)
def test_what_has_no_unsharded_step_is_refused(options):
    with pytest.raises(ShardError, match="check") as caught:
        train.step(loss, optax.sgd(1), mode="data_parallel", **{"check": True, **options})
    assert all(problem.fix for problem in caught.value.problems)


def test_what_a_step_returns_is_that_of_one_without_a_check():
    results = []
    for check in (False, True):
        step = train.step(loss, optax.adamw(1e-2), mode="data_parallel", check=check)
        results.append(step(step.init(PARAMS, X, Y), X, Y))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

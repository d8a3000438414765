"""A loss that each device calls on its part of the batch is the user's as it is: it may start loops from constants, and its own
derivatives and branches may be constants."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import train


@jax.custom_vjp
def _sine(a):
    return jnp.sin(a)


_sine.defvjp(lambda a: (jnp.sin(a), a.shape), lambda shape, _: (jnp.zeros(shape),))


def _loop(params, x, y):
    hidden, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["w"] + x), None), jnp.zeros(x.shape), length=3)
    return jnp.mean((hidden - y) ** 2)


def _while(params, x, y):
    body = lambda c: (c[0] + 1, jax.lax.stop_gradient(jnp.tanh(c[1] + x)))  # noqa: E731
    _, hidden = jax.lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.zeros(x.shape)))
    return jnp.mean((hidden @ params["w"] - y) ** 2)


CONSTANTS = {
    "scan": _loop,
    "while": _while,
    "custom derivative": lambda params, x, y: jnp.mean((_sine(x @ params["w"]) + x @ params["w"] - y) ** 2),
    "branch": lambda params, x, y: jnp.mean(
        (jax.lax.cond(y.shape[0] * params["w"].sum() > 0, lambda: jnp.zeros(x.shape), lambda: x) @ params["w"] - y) ** 2
    ),
}
TENSOR_W = {"parameter_plan": {"w": (1, 4)}, "in_strategy": ((2, 1), (2, 1))}
LEVEL_3 = {"parallel_optimizer_config": {"optimizer_level": "level3", "parallel_optimizer_threshold": 0}}
CONSTANTS_IN = {
    "data": {"mode": "data_parallel"},
    "level 3": {"mode": "data_parallel", "parallel_optimizer_comm_recompute": True, **LEVEL_3},
    "micro-batches": {"mode": "semi_auto_parallel", "micro_batches": 2, **TENSOR_W},
}


@pytest.mark.parametrize("options", CONSTANTS_IN.values(), ids=CONSTANTS_IN)
@pytest.mark.parametrize("loss", CONSTANTS.values(), ids=CONSTANTS)
def test_a_loss_with_constants_runs_on_each_part_of_the_batch_as_it_is(loss, options):
    params = {"w": jax.random.normal(jax.random.key(0), (16, 16)) / 4}
    x, y = jax.random.normal(jax.random.key(1), (2, 32, 16))
    step = train.step(loss, optax.sgd(0.1), **options)
    state, value = step(step.init(lambda: params, x, y), x, y)
    expected, grads = jax.value_and_grad(loss)(params, x, y)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], params["w"] - 0.1 * grads["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "options", "parts"),
    [
        ("data_parallel", {}, 8),
        ("data_parallel", {"micro_batches": 2}, 16),
        ("auto_parallel", {"micro_batches": 2}, 2),
        ("data_parallel", {"gradients_mean": False}, 0),
        ("semi_auto_parallel", {}, 0),
    ],
)
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean])
def test_a_sum_is_told_where_the_mean_of_parts_is_taken(mode, options, parts, reduce):
    def loss(p, x):
        return reduce(jax.nn.relu(x @ p["w"]) ** 2)

    params, x = {"w": jnp.ones((4, 2))}, jnp.ones((16, 4))
    step = train.step(loss, optax.sgd(0.1), mode=mode, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, value = step(step.init(params, x), x)
    if reduce is jnp.sum:
        assert [f"{parts} parts" in str(one.message) for one in told] == [True] * bool(parts)
        assert value == loss(params, x) / max(parts, 1)
    else:
        assert not told


@pytest.mark.parametrize(("reduce", "message"), [
    (jnp.sum, "the loss is a sum over the batch.* 8 parts"),
    (lambda x: jnp.average(x, weights=jnp.arange(x.size * 1.0).reshape(x.shape)), "nothing shows that the loss is a mean.* 8 parts"),
])  # fmt: skip
def test_a_recomputed_sum_and_an_average_with_weights_are_told(reduce, message):
    loss = jax.checkpoint(lambda p, x: reduce(jax.nn.relu(x @ p["w"]) ** 2))
    params, x = {"w": jnp.ones((4, 2))}, jnp.ones((16, 4))
    step = train.step(loss, optax.sgd(0.1), mode="data_parallel")
    with pytest.warns(UserWarning, match=message):
        step(step.init(params, x), x)


@pytest.mark.parametrize(
    ("options", "fix"), [({"mode": "data_parallel"}, "semi_auto"), ({"micro_batches": 2}, "micro_batches=1")]
)
def test_a_mean_with_a_mask_of_parts_is_told(options, fix):
    def loss(p, x, mask):
        return jnp.sum(mask * jnp.sum((x @ p["w"]) ** 2, -1)) / jnp.sum(mask)

    params, x, mask = {"w": jnp.ones((4, 2))}, jnp.ones((16, 4)), jnp.ones(16).at[3:7].set(0.0)
    step = train.step(loss, optax.sgd(0.1), **options)
    with pytest.warns(UserWarning, match=f"a mean with weights or a mask, has another value; .*{fix}"):
        step(step.init(params, x, mask), x, mask)

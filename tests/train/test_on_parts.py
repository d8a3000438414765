"""Operators with shardings run without them, and say so once, where a loss is called on a part of the batch."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn.mindspore as ms
from shardfn import embedding, experts, halo, train

LAYOUT = ms.Layout((2, 4), ("dp", "mp"))
KEYS = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "up": jax.random.normal(KEYS[0], (16, 32)) / 4,
    "kernel": jax.random.normal(KEYS[1], (3, 3, 1, 2)),
    "gate": jax.random.normal(KEYS[2], (32, 4)),
    "table": jax.random.normal(KEYS[3], (8, 32)),
    "down": jax.random.normal(KEYS[4], (32, 16)) / 6,
}
X, Y = jax.random.normal(KEYS[5], (64, 16)), jnp.ones((64, 16))
ROWS = embedding.UnevenRows((3, 1, 2, 2))
CONVOLUTION = {"window_strides": (2, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def loss_with(matmul, reshard, conv, layout, lookup):
    """A mean over the batch, of every operator."""

    def loss(params, x, y):
        h = reshard(jnp.tanh(matmul(x, params["up"])))
        image = conv(h.reshape(-1, 8, 4, 1), params["kernel"]).mean((1, 2, 3))
        sent = experts.dispatch(h, experts.route(h @ params["gate"], k=2), layout=layout, axes=layout and "mp")
        h = experts.combine(sent.dot(sent.rows, jnp.stack([params["down"]] * 4)), sent)
        ids = jnp.where(x[:, :4] > 0, jnp.array([2, 3, 5, 7]), jnp.array([0, 1, 4, 6]))  # of an id 1 in part 1 no row
        return jnp.mean((h + image[:, None] + lookup(params["table"], ids).mean(1)[:, :16] - y) ** 2)

    return loss


def plain_lookup(table, ids):
    is_row = (ids >= jnp.array([0, 3, 4, 6])) & (ids < jnp.array([3, 4, 6, 8]))
    return jnp.where(is_row[..., None], table[ids], 0)


sharded = loss_with(
    ms.shard(jnp.matmul, ((2, 1), (1, 4))),
    lambda h: ms.reshard(h, LAYOUT("dp", "mp")),
    lambda x, k: halo.conv(x, k, **CONVOLUTION, layout=LAYOUT("dp", "mp", "None", "None")),
    LAYOUT("dp", "None"),
    lambda table, ids: embedding.lookup(table, ids, strategy=((4, 1), (2, 4)), rows=ROWS),
)
plain = loss_with(
    jnp.matmul, lambda h: h, lambda x, k: jax.lax.conv_general_dilated(x, k, **CONVOLUTION), None, plain_lookup
)
OPERATORS = ["embedding.lookup", "experts.dispatch", "halo.conv", "matmul", "reshard"]
BATCH = (LAYOUT("dp", "None"),) * 2


def said(run):
    """The operators of the warnings, what these suggest, and the result."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = run()
    found = [re.match(r"`(.*)` runs without its sharding: .*; (.*)", str(w.message)) for w in told]
    return sorted(m[1] for m in found if m), {m[2] for m in found if m}, result


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


@pytest.fixture(scope="module")
def expected():
    return jax.jit(jax.value_and_grad(plain))(PARAMS, X, Y)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"mode": "data_parallel", "micro_batches": 2}, 'use mode="semi_auto_parallel" or "auto_parallel"'),
        (
            {"mode": "semi_auto_parallel", "in_strategy": BATCH, "micro_batches": 32},  # parts of one row
            "shard them by parameter_plan, or leave micro_batches out",
        ),
        pytest.param(
            {"mode": "auto_parallel", "in_strategy": BATCH, "cross_batch": True},
            "shard them by parameter_plan, or leave cross_batch out",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data-parallel", "micro-batches", "cross_batch"],
)
def test_step_on_parts_of_the_batch_has_the_values_and_gradients_of_the_unsharded_operators(options, fix, expected):
    step = train.step(sharded, optax.sgd(1.0), donate=False, **options)
    names, fixes, (after, value) = said(lambda: step(step.init(PARAMS, X, Y), X, Y))
    gradients = jax.tree.map(lambda a, b: a - b, PARAMS, after.params)
    assert (names, fixes) == (OPERATORS, {fix})
    assert_close((value, gradients), expected)


@pytest.mark.parametrize(
    ("micro_size", "plan"),
    [(16, {}), pytest.param(2, {"up": (1, 2)}, marks=pytest.mark.slow)],
    ids=["parts of one row", "tensor parallel"],
)
def test_pipeline_has_the_values_and_gradients_of_the_unsharded_operators(micro_size, plan, expected):
    pipe = train.pipeline(sharded, micro_size, pipeline_stages=2, auto_pipeline=True, parameter_plan=plan)
    names, fixes, found = said(lambda: jax.value_and_grad(pipe)(PARAMS, X, Y))
    assert (names, fixes) == (
        OPERATORS,
        {"shard parameters by the pipeline's parameter_plan, over its axis `tensor`"},
    )
    assert_close(found, expected)


class Net(ms.Cell):
    def __init__(self):
        self.up, self.down = PARAMS["up"], PARAMS["down"]

    def construct(self, x, y):
        return jnp.mean((jnp.tanh(x @ self.up) @ self.down - y) ** 2)


def test_pipeline_of_a_sharded_cell_has_the_loss_of_the_cell():
    net = Net()
    value = net(X, Y)
    net.shard(((2, 1), (2, 1)), None, {"up": (1, 4)})
    pipe = train.pipeline(net, 16, pipeline_stages=2, auto_pipeline=True)
    names, _, found = said(lambda: pipe(net.parameters_dict(), X, Y))
    assert names == ["Net"]
    np.testing.assert_allclose(found, value, rtol=1e-5)


def test_nothing_is_said_where_the_loss_is_called_on_the_global_batch():
    def loss(params, x, y):
        return jnp.mean((ms.reshard(x @ params["up"] @ params["down"], LAYOUT("dp", "mp")) - y) ** 2)

    step = train.step(loss, optax.sgd(1.0), mode="semi_auto_parallel", in_strategy=BATCH)
    assert not said(lambda: step(step.init(PARAMS, X, Y), X, Y))[0]


def test_nothing_is_said_of_a_pipeline_on_one_device(expected):
    pipe = train.pipeline(sharded, 2, pipeline_stages=1, auto_pipeline=True, device=jax.devices()[:1])
    names, _, value = said(lambda: pipe(PARAMS, X, Y))
    assert not names
    np.testing.assert_allclose(value, expected[0], rtol=1e-4)

"""Options of a training step two by two: each pair of values stands in a row, and each row is the run of one device.

`ROWS` is data: a covering set, found greedily once. A pair that is refused by design stands in `REFUSED` with its error.
Rows that search take long: `make test` has one of them.
"""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import train
from shardfn.errors import StrategyError
from tests.marks import some_slow

FACTORS = {
    "mode": ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel"),
    "level": (0, 1, 2, 3),  # of the parallel optimizer; 0 is off
    "micro_batches": (1, 4),
    "recompute": ("off", "on"),
    "pipeline": ("off", "1f1b"),
    "fusion": ("off", "size"),
    "dtype": ("float32", "bfloat16"),  # of the loss; parameters and states are float32
}
ROWS = (
    ("stand_alone", 0, 4, "on", "off", "size", "float32"),
    ("stand_alone", 1, 4, "off", "1f1b", "off", "bfloat16"),
    ("stand_alone", 2, 1, "on", "off", "off", "bfloat16"),
    ("stand_alone", 3, 4, "on", "off", "off", "float32"),
    ("data_parallel", 0, 4, "off", "1f1b", "size", "float32"),
    ("data_parallel", 1, 1, "off", "off", "off", "bfloat16"),
    ("data_parallel", 2, 4, "off", "off", "off", "bfloat16"),
    ("data_parallel", 3, 4, "on", "off", "off", "bfloat16"),
    ("hybrid_parallel", 0, 4, "off", "off", "off", "bfloat16"),
    ("hybrid_parallel", 1, 1, "on", "off", "size", "bfloat16"),
    ("hybrid_parallel", 2, 4, "off", "1f1b", "off", "bfloat16"),
    ("hybrid_parallel", 3, 1, "on", "off", "off", "float32"),
    ("semi_auto_parallel", 0, 4, "off", "1f1b", "size", "bfloat16"),
    ("semi_auto_parallel", 1, 1, "on", "off", "off", "float32"),
    ("semi_auto_parallel", 2, 4, "on", "off", "off", "bfloat16"),
    ("semi_auto_parallel", 3, 4, "off", "off", "size", "bfloat16"),
    ("auto_parallel", 0, 1, "on", "off", "off", "bfloat16"),
    ("auto_parallel", 1, 4, "off", "off", "off", "bfloat16"),
    ("auto_parallel", 2, 1, "off", "1f1b", "size", "float32"),
    ("auto_parallel", 3, 4, "off", "1f1b", "off", "bfloat16"),
)
REFUSED = {(("recompute", "on"), ("pipeline", "1f1b")): "backward pass rematerialises every stage"}

STEPS = 3
LOSSES = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far a loss may be from that of one device in float32, or in bfloat16, as a part of it."""
PARAMETERS = {"float32": 1e-4, "bfloat16": 4e-3}
"""The same of an updated parameter, absolute."""

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def loss(params, x, y):
    x = x.astype(params["head"].dtype)
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params["head"] - y) ** 2).astype(jnp.float32)


@functools.cache
def start():
    """Parameters, drawn once: to draw them is what costs most of a compile."""
    first, *rest = jax.random.split(jax.random.key(0), 3)
    return {
        "layers": [{"w": 0.3 * jax.random.normal(k, (16, 16)), "b": jnp.zeros(16)} for k in rest],
        "head": 0.3 * jax.random.normal(first, (16, 8)),
    }


@functools.cache
def data():
    k1, k2 = jax.random.split(jax.random.key(1))
    return jax.random.normal(k1, (64, 16)), jax.random.normal(k2, (64, 8))


@pytest.fixture(scope="module")
def alone():
    """Losses and parameters of plain JAX and optax on one device."""
    found = {}
    for dtype in FACTORS["dtype"]:

        @jax.jit
        def one(params, state, x, y, dtype=dtype):
            value, grads = jax.value_and_grad(loss)(jax.tree.map(lambda p: p.astype(dtype), params), x, y)
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
            updates, state = OPTIMIZER.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        params, losses = start(), []
        state = OPTIMIZER.init(params)
        for _ in range(STEPS):
            params, state, value = one(params, state, *data())
            losses.append(float(value))
        found[dtype] = losses, params
    return found


def trained(mode, level, micro_batches, recompute, pipeline, fusion, dtype):
    """Losses and parameters of the row."""
    options = {"mode": mode, "micro_batches": micro_batches}
    if level:
        options["parallel_optimizer_config"] = {"optimizer_level": f"level{level}", "parallel_optimizer_threshold": 0}
    if recompute == "on":
        options["recompute"] = 1
    if fusion == "size":
        kinds = ("allreduce", "allgather", "reducescatter")
        options["comm_fusion"] = {kind: {"mode": "size", "config": 1} for kind in kinds}
    if dtype != "float32":
        options["compute_dtype"] = dtype
    if mode == "semi_auto_parallel" and pipeline == "off":  # data x tensor parallel; equal layers are stacked
        stacked = (1,) if recompute == "on" else ()
        options["in_strategy"] = ((4, 1), (4, 1))
        options["parameter_plan"] = {"layers/*/w": (*stacked, 1, 2), "layers/*/b": (*stacked, 2), "head": (2, 1)}
    function, params, batch = loss, start(), data()
    if pipeline == "1f1b":
        function = train.pipeline(loss, micro_size=2, pipeline_stages=2, schedule="1f1b", auto_pipeline=True)
        params = function.pack(params, *batch)
    step = train.step(function, OPTIMIZER, **options)
    state, losses = step.init(params, *batch), []
    for _ in range(STEPS):
        state, value = step(state, *batch)
        losses.append(float(value))
    return losses, function.unpack(state.params) if pipeline == "1f1b" else step.model(state)


LONG = [row for row in ROWS if (row[0] == "auto_parallel" and row[-1] == "bfloat16") or row in ROWS[1::2]]


@pytest.mark.parametrize("row", some_slow(ROWS, LONG), ids=lambda row: "-".join(map(str, row)))
def test_a_row_is_the_run_of_one_device(row, alone):
    dtype = row[-1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fusion has no effect")  # where XLA's partitioner makes the collectives
        losses, params = trained(*row)
    expected, after = alone[dtype]
    np.testing.assert_allclose(losses, expected, rtol=LOSSES[dtype])
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(found, wanted, atol=PARAMETERS[dtype])
    moved = max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (params, start())), strict=True))
    assert moved > 2 * PARAMETERS[dtype]


def test_every_pair_of_values_stands_in_a_row():
    values = [[(name, value) for value in found] for name, found in FACTORS.items()]
    wanted = {pair for a, b in itertools.combinations(values, 2) for pair in itertools.product(a, b)}
    covered = {pair for row in ROWS for pair in itertools.combinations(zip(FACTORS, row, strict=True), 2)}
    assert wanted - covered == set(REFUSED)


@pytest.mark.parametrize(("pair", "text"), REFUSED.items(), ids=str)
def test_a_pair_that_is_refused_says_why(pair, text):
    row = {name: found[0] for name, found in FACTORS.items()} | dict(pair)
    with pytest.raises(StrategyError, match=text):
        trained(**row)

"""A batch that the mode shards over the axes of tensor-parallel weights: a diagnostic names the in_strategy that avoids it."""

import ast
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from shardfn import train

PARAMS = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
X, Y = jnp.ones((32, 64)), jnp.zeros((32, 64))
TENSOR = {"up": (1, 4), "down": (4, 1)}


def loss(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)


def planned(params=PARAMS, **options):
    step = train.step(loss, optax.adam(1e-3), **{"mode": "semi_auto_parallel", **options})
    return step.plan(step.init(params, X, Y), X, Y)


def said(plan):
    return [text for text in plan.diagnostics if "in_strategy" in text]


@pytest.mark.parametrize(
    ("options", "entry"),
    [
        ({}, (2, 1)),
        ({"parameter_plan": {"up": (1, 8), "down": (8, 1)}}, (1, 1)),
        ({"micro_batches": 2}, (2, 1)),
        ({"parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}, (2, 1)),
    ],
)
def test_the_named_in_strategy_makes_the_plan_tensor_parallel(options, entry):
    options = {"parameter_plan": TENSOR, **options}
    plan = planned(**options)
    (text,) = said(plan)
    assert "tensor parallel" not in plan.kind
    assert "shards the batch over all 8 devices" in text and "`state/params/up`" in text
    named = ast.literal_eval(re.findall(r"in_strategy=(\(.*\))$", text)[0])
    assert named == (entry, entry)
    better = planned(in_strategy=named, **options)
    assert "tensor parallel over" in better.kind
    assert not said(better)


@pytest.mark.parametrize(
    "options",
    [
        {"parameter_plan": TENSOR, "in_strategy": ((2, 1), (2, 1))},
        {"parameter_plan": {"up": (8, 1), "down": (8, 1)}},  # FSDP
        {},
        {"mode": "auto_parallel", "parameter_plan": TENSOR},
        {"mode": "data_parallel"},
    ],
)
def test_other_steps_have_no_such_diagnostic(options):
    assert not said(planned(**options))

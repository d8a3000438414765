"""Replicated biases whose dimension is tied to a sharded one: a report names the entry, and the reason does."""

import ast
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import shardfn
from shardfn import train
from shardfn.planning.questions import with_tied_replicas

S = jax.ShapeDtypeStruct
X = S((4096, 512), "float32")
PARAMS = {"up": S((512, 2048), "float32"), "b": S((2048,), "float32"), "down": S((2048, 512), "float32")}
WEIGHTS = {"up": (1, 8), "down": (8, 1)}


def mlp(p, x):
    return jax.nn.relu(x @ p["up"] + p["b"]) @ p["down"]


def loss(p, x):
    return jnp.mean(mlp(p, x) ** 2)


def found(made):
    return [text for text in with_tied_replicas(made).diagnostics if "is tied to dim" in text]


def stepped(**entries):
    options = {"mode": "semi_auto_parallel", "device": "h100:8", "in_strategy": ((1, 1),)}
    step = train.step(loss, optax.adam(1e-3), parameter_plan=entries, **options)
    zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), PARAMS)  # noqa: E731
    return step.plan(jax.eval_shape(lambda: step.init(zeros)), X)


def test_a_step_names_the_entry_that_saves_what_it_says():
    made = stepped(**WEIGHTS)
    (text,) = found(made)
    assert text.startswith("`state/params/b` (1,): dim 0 is tied to dim 0 of `state/params/down`, sharded 8 ways")
    entry = ast.literal_eval(re.findall(r"parameter_plan=(\{.*?\})", text)[0])
    other = stepped(**WEIGHTS, **entry)
    assert other.cost.time_s < made.cost.time_s and other.cost.bytes_sent < made.cost.bytes_sent
    assert not found(other)
    assert (
        str(shardfn.explain(made)).count("parameter_plan={'state/params/b': (8,)}") == 2
    )  # the next step, the diagnostic


def test_the_reason_of_a_replicated_bias_names_its_tie():
    made = stepped(**WEIGHTS)
    assert made.decision("state/params/b").reason == (
        "mode='semi_auto_parallel': no entry in parameter_plan; dim 0 is tied to dim 0 of `state/params/down`, sharded 8 ways: "
        "parameter_plan={'state/params/b': (8,)} shards it alike"
    )
    assert made.decision("state/opt_state/0/mu/b").reason == "as `state/params/b`"


def test_biases_of_layers_have_one_entry():
    def deep(ps, x):
        for p in ps:
            x = x + mlp(p, x)
        return x.sum()

    given = {"*/up": (1, 8), "*/down": (8, 1), "*/b": (1,), "x": (1, 1)}
    made = shardfn.plan(jax.grad(deep), [PARAMS] * 3, X, parameter_plan=given, device="h100:8")
    (text,) = found(made)
    assert text.startswith("`ps/0/b` and 2 like it (1,)") and text.endswith("fix: parameter_plan={'ps/*/b': (8,)}")


@pytest.mark.parametrize(
    "entries",
    [{"up": (8, 1), "down": (1, 8)}, {"up": (1, 1), "down": (1, 1)}, WEIGHTS | {"b": (8,)}],
    ids=["tied to nothing", "replicated", "sharded"],
)  # fmt: skip
def test_others_have_no_diagnostic(entries):
    assert not found(stepped(**entries))

"""The exact search: its model against enumeration, and its plans against the simple policy's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from examples.models import abstract, attention, mlp
from shardfn.cost.hardware import CHIPS
from shardfn.search import dynamic, propagation
from shardfn.search.labelling import cost_of
from shardfn.search.problem import Problem
from shardfn.search.solve import solve
from shardfn.search.strategies import Grid, build, change, value_labels
from shardfn.trace import trace

S = jax.ShapeDtypeStruct
H100 = CHIPS["h100"]


def two_layers(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


def looped(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=4)[0].sum()


PROGRAMS = {
    "matmul": (jnp.matmul, (S((8, 4), jnp.float32), S((4, 8), jnp.float32))),
    "two layers": (two_layers, (S((8, 4), jnp.float32), S((4, 8), jnp.float32), S((8, 4), jnp.float32))),
    "scan": (looped, (S((8, 4), jnp.float32), S((4, 4), jnp.float32))),
    "gradient": (jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (S((4, 4), jnp.float32), S((8, 4), jnp.float32))),
}


def problem_of(graph, inputs, level=2, devices=4):
    shapes = tuple(graph.values[v].shape for v in inputs)
    return Problem(
        tuple(map(str, inputs)), shapes, ((),) * len(inputs), {}, (), (None,) * len(inputs), devices, level,
        lambda axes, specs: None, graph, H100, inputs, {}, {},
    )  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_optimum_is_that_of_enumeration(name, level):
    function, args = PROGRAMS[name]
    traced = trace(function, args, (), "cpu")
    space = build(traced.graph, Grid((2,), H100), ("a",), {}, {}, {})
    labels = dynamic.labelling_of(space, problem_of(traced.graph, traced.inputs, level))
    count = np.prod([len(c) for c in labels.costs], dtype=float)
    if count > 200_000:
        pytest.skip(f"{count:.0f} labellings are too many to list")
    best = min(cost_of(labels, choice) for choice in itertools.product(*(range(len(c)) for c in labels.costs)))
    found = solve(labels)
    assert found.proved
    assert found.cost == pytest.approx(best)


def test_changing_a_layout_costs_what_its_collectives_cost():
    grid = Grid((4,), H100)
    labels = value_labels((8, 8), grid.sizes)  # whole, rows, columns
    sent, _ = change(labels, labels, 256.0, grid)
    assert labels.tolist() == [[-1], [0], [1]]
    assert sent.tolist() == [[0, 0, 0], [192, 0, 48], [192, 48, 0]]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("make", [mlp.make, attention.make], ids=["mlp", "attention"])
def test_the_plan_is_never_worse_than_the_simple_policys(make, level):
    function, args = abstract(make)
    options = {"device": "h100:8", "level": level}
    simple = shardfn.plan(function, *args, **options)
    exact = shardfn.plan(function, *args, search_mode="dynamic_programming", **options)
    rate = lambda plan: propagation.objective(plan.price, problem_of(plan.flow.graph, (), level))  # noqa: E731
    assert rate(exact) <= rate(simple)
    assert exact == shardfn.plan(function, *args, search_mode="dynamic_programming", **options)  # deterministic


def test_parameters_are_cut_for_memory_and_whole_for_time():
    args = (S((8192, 1024), jnp.float32), S((1024, 4096), jnp.float32), S((4096, 1024), jnp.float32))
    options = {"device": "h100:8", "search_mode": "dynamic_programming"}
    least, fastest = (shardfn.plan(two_layers, *args, level=level, **options) for level in (1, 2))
    assert all(np.prod(d.cuts) == 8 for d in least.inputs)
    assert least.price.memory.peak < fastest.price.memory.peak
    assert least.price.time_s > fastest.price.time_s
    assert "proved" in least.policy


def test_a_users_cut_is_kept_and_the_values_are_right():
    x, w1, w2 = jnp.ones((16, 8)), jnp.ones((8, 32)) * 0.1, jnp.ones((32, 8))
    function = shardfn.shard(two_layers, (shardfn.AUTO, (1, 4), shardfn.AUTO), search_mode="dynamic_programming")
    np.testing.assert_allclose(function(x, w1, w2), two_layers(x, w1, w2), rtol=1e-5)
    made = function.plan(x, w1, w2)
    assert made.decision("w1").cuts == (1, 4)
    assert made.decision("w1").source == "you"

"""Sharding propagation: the user's strategies spread with the least resharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from examples.models import abstract, gpt2
from shardfn import AUTO
from shardfn.search.generators import default_policy, sharding_propagation
from shardfn.search.problem import objective

S = jax.ShapeDtypeStruct
HERE = {"device": "h100:8", "search_mode": "sharding_propagation", "level": 2}


def ffn(x, params):
    for w1, w2 in params:
        x = x + jax.nn.relu(x @ w1) @ w2
    return x


def shapes(layers, rows=8192, width=1024, hidden=4096):
    f32 = jnp.float32
    return S((rows, width), f32), [(S((width, hidden), f32), S((hidden, width), f32))] * layers


def looped(x, params):
    return jax.lax.scan(lambda x, w: (x + jax.nn.relu(x @ w[0]) @ w[1], None), x, params)[0]


def strategies(made):
    return [d.strategy for d in made.inputs]


def test_propagation_of_a_seed_reaches_the_last_layer():
    x, params = shapes(3)
    made = shardfn.plan(ffn, x, params, parameter_plan={"params/0/0": (1, 4)}, **HERE)
    assert strategies(made) == [(2, 1)] + [(1, 4), (4, 1)] * 3
    assert [d.source for d in made.inputs] == ["propagated", "you"] + ["propagated"] * 5
    assert {(c.kind, c.axes) for c in made.collectives} == {("all-reduce", ("a",))}


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_propagation_of_a_seed_in_the_middle_spreads_the_work(rows):
    x, params = shapes(3)
    made = shardfn.plan(ffn, x, params, parameter_plan={"params/1/1": (rows, 1)}, **HERE)
    assert made.decision("params/1/1").strategy == (rows, 1)
    assert made.cost.flops <= 1.01 * 3 * 2 * 2 * 8192 * 1024 * 4096 / 8


def test_propagation_of_data_parallel_stays_data_parallel():
    x, params = shapes(2)
    made = shardfn.plan(ffn, x, params, in_strategy=((8, 1), AUTO), **HERE)
    assert strategies(made) == [(8, 1)] + [(1, 1), (1, 1)] * 2
    assert made.cost.bytes_sent == 0


@pytest.mark.parametrize("seed", [{"x": (8, 1)}, {"x": (2, 1), "params/0": (1, 1, 4)}, {"params/1": (1, 4, 2)}])
def test_propagation_through_a_loop_spreads_the_work(seed):
    x, params = shapes(1)
    stacked = jax.tree.map(lambda leaf: S((4, *leaf.shape), leaf.dtype), tuple(params[0]))
    made = shardfn.plan(looped, x, stacked, parameter_plan=seed, **HERE)
    for path, said in seed.items():
        assert made.decision(path).strategy == said
    assert made.cost.flops < 1.1 * 4 * 2 * 2 * 8192 * 1024 * 4096 / 8, "the work is spread over all devices"


@pytest.mark.slow
def test_propagation_is_no_worse_than_the_default_policy():
    asked = []

    def both(problem):
        answers = [sharding_propagation.search(problem), default_policy.search(problem)]
        asked.append([objective(problem.evaluate(a.axes, a.specs, a.constraints), problem) for a in answers])
        return answers[0]

    function, args = abstract(gpt2.make, gpt2.Config(layers=1))
    shardfn.register_search("both", both)
    try:
        for seed in (
            {"tokens": (8, 1)},
            {"params/blocks/0/mlp/w1": (1, 4)},
            {"params/tokens": (2, 1), "tokens": (4, 1)},
        ):
            for level in (0, 1, 2):
                shardfn.plan(function, *args, parameter_plan=seed, device="h100:8", level=level, search_mode="both")
    finally:
        shardfn.search.forget("both")
    assert len(asked) == 9
    assert all(mine <= plain for mine, plain in asked)
    assert any(mine < plain for mine, plain in asked), "spreading is of some use"


def test_propagation_gives_the_values_and_the_same_plan_each_time():
    key = jax.random.key(0)
    x = jax.random.normal(key, (16, 32))
    params = [(jax.random.normal(key, (32, 64)) / 8, jax.random.normal(key, (64, 32)) / 8)] * 2
    options = {"parameter_plan": {"params/0/0": (1, 4)}, "search_mode": "sharding_propagation", "level": 2}
    sharded = shardfn.shard(ffn, **options)
    np.testing.assert_allclose(sharded(x, params), ffn(x, params), rtol=1e-4, atol=1e-5)
    assert sharded.plan(x, params) == shardfn.shard(ffn, **options).plan(x, params)

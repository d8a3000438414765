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
    assert {c.axes for c in made.collectives} == {("a",)}


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


def attention(x, q, k, v, o):
    batch, length, width = x.shape

    def heads(w):
        return (x @ w).reshape(batch, length, 8, width // 8).transpose(0, 2, 1, 3)

    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", heads(q), heads(k)))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, heads(v))
    return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ o


GIVEN = {
    "attention, heads": (attention, [(8, 128, 512)] + [(512, 512)] * 4, ((1, 1, 1), (1, 8), (1, 8), (1, 8), (8, 1))),
    "attention, one by rows": (
        attention, [(8, 128, 512)] + [(512, 512)] * 4, ((1, 1, 1), (1, 8), (1, 8), (8, 1), (8, 1)),
    ),
    "matmuls, partial sums": (lambda x, v, w: jax.nn.relu(x @ v) @ w, [(512, 1024)] + [(1024, 1024)] * 2,
                              ((1, 8), (8, 1), (1, 1))),
    "matmuls, mixed": (lambda x, u, v, w: jax.nn.relu(jax.nn.relu(x @ u) @ v) @ w, [(512, 1024)] + [(1024, 1024)] * 3,
                       ((2, 1), (4, 2), (2, 4), (8, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_propagation_between_given_arguments_is_the_same_at_every_level_and_sends_no_more_than_following(name):
    function, sizes, entries = GIVEN[name]
    args, options = [S(size, jnp.float32) for size in sizes], {"in_strategy": entries, "device": "h100:8"}
    spread = [shardfn.plan(function, *args, search_mode=HERE["search_mode"], level=n, **options) for n in range(3)]
    assert len({made.cost for made in spread}) == 1
    assert len({str(made.constraints) for made in spread}) == 1
    assert [made.decision(d.path).source for made in spread for d in made.inputs] == ["you"] * 3 * len(args)
    followed = shardfn.plan(function, *args, **options)
    assert spread[0].cost.communication_s <= followed.cost.communication_s
    if name == "attention, heads":  # a reduce-scatter in place of an all-reduce
        assert 2 * spread[0].cost.bytes_sent == followed.cost.bytes_sent


def test_propagation_gathers_no_given_weight_where_a_search_does():
    args = S((65536, 256), jnp.float32), S((256, 1024), jnp.float32), S((1024, 256), jnp.float32)
    options = {"in_strategy": ((2, 1), (1, 4), (4, 1)), "device": "tpu-v5e:8", "level": 0}
    searched, spread = (
        shardfn.plan(lambda x, v, w: jax.nn.relu(x @ v) @ w, *args, search_mode=mode, **options)
        for mode in ("auto", HERE["search_mode"])
    )
    assert any(c.kind == "all-gather" for c in searched.collectives)
    assert not any(c.kind == "all-gather" for c in spread.collectives)
    assert spread.cost.flops == pytest.approx(searched.cost.flops, rel=0.01)

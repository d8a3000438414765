"""Results whose sharding is left open: they are searched with the rest, and constrained where propagation would choose another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn import AUTO, ShardError

KEY = jax.random.key(0)
S = jax.ShapeDtypeStruct


def drawn(key):
    return jax.random.normal(key, (64, 32))


def init(key):
    first, second = jax.random.split(key)
    return {"w": jax.random.normal(first, (64, 32)), "b": jnp.zeros(128), "state": jnp.zeros((64, 32)),
            "u": jax.random.normal(second, (64, 32))}  # fmt: skip


@pytest.mark.parametrize("level", [0, 1, 2])
def test_result_made_of_a_key_is_sharded(level):
    """No argument has a dimension to shard, and propagation alone would replicate everything."""
    made = shardfn.plan(drawn, KEY, level=level, device="cpu:8")
    by_hand = shardfn.plan(drawn, KEY, level=level, device="cpu:8", out_strategy=((8, 1),))
    options = {"out_strategy": ((1, 1),), "search_mode": "sharding_propagation"}
    unsharded = shardfn.plan(drawn, KEY, level=level, device="cpu:8", **options)
    assert made.outputs[0].source == "searched" and made.outputs[0].reason
    assert made.cost.flops <= by_hand.cost.flops < unsharded.cost.flops / 4
    assert made.cost.memory.peak <= by_hand.cost.memory.peak < unsharded.cost.memory.peak / 4
    assert "searched: with the arguments: propagation" in str(shardfn.explain(made, detail="full"))


def test_result_shardings_are_compiled_as_planned(tmp_path):
    sharded = shardfn.shard(init, level=1)
    found, made = sharded(KEY), sharded.plan(KEY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, init(KEY))
    assert all(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in jax.tree.leaves(found))
    assert {d.spec for d in made.outputs if d.shape == (64, 32)} == {made.decision("result/w").spec}, (
        "zeros are sharded alike"
    )
    compiled = sharded.lower(KEY).compile().memory_analysis()
    assert compiled.output_size_in_bytes <= 1.1 * sum(d.local_bytes for d in made.outputs) + 64
    made.save(tmp_path / "layout.toml")
    again = shardfn.plan(init, KEY, layout=tmp_path / "layout.toml")
    assert [d.spec for d in again.outputs] == [d.spec for d in made.outputs]


def test_memory_limit_that_sharded_results_keep_is_kept():
    size = 64 * 32 * 4
    made = shardfn.plan(drawn, KEY, memory_limit=int(0.6 * size), device="cpu:8")
    assert made.cost.memory.peak <= 0.6 * size
    with pytest.raises(ShardError, match=f"memory_limit={made.cost.memory.peak}$"):
        shardfn.plan(drawn, KEY, memory_limit=100, level=1, device="cpu:8")


def test_result_of_a_function_without_arguments_is_sharded():
    made = shardfn.plan(lambda: jnp.zeros((64, 64)) + 1.0, level=1, device="cpu:8")
    assert made.outputs[0].local_bytes == 64 * 64 * 4 // 8


def mixed(x, w):
    return jnp.sort(x @ w, axis=1), jnp.argsort(x, axis=0)


ARGS = S((64, 128), "float32"), S((128, 256), "float32")


def test_result_beside_given_arguments_is_searched_only_where_asked():
    given = {"in_strategy": ((8, 1), (1, 1)), "device": "cpu:8"}
    followed = shardfn.plan(mixed, *ARGS, **given)
    asked = shardfn.plan(mixed, *ARGS, out_strategy=(AUTO, AUTO), level=2, **given)
    assert followed.policy == "every sharding was given"
    assert [d.source for d in asked.inputs] == ["you", "you"]
    assert asked.outputs[1].source == "searched" and asked.outputs[1].strategy == (1, 8)
    assert asked.cost.time_s < followed.cost.time_s


@pytest.mark.slow
def test_result_that_takes_the_place_of_an_argument_is_sharded_as_it():
    def step(params, x):
        grads = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean() + p["b"].sum())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x @ params["w"]

    params = {"w": S((128, 64), "float32"), "b": S((128,), "float32")}
    for level in (0, 1, 2):
        made = shardfn.plan(step, params, ARGS[0], level=level, device="cpu:8", donate_argnums=0)
        for name in params:
            assert made.decision(f"result/0/{name}").spec == made.decision(f"params/{name}").spec

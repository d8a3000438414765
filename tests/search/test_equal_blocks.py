"""Equal blocks are planned once: the search of a large program looks at one with fewer of them."""

import functools

import jax
import numpy as np
import pytest

import shardfn
from shardfn import AUTO
from shardfn.search.problem import objective
from tests.ir.test_equal_blocks import arguments, step
from tests.marks import some_slow

BLOCKS = "equal blocks as 3"

FEW = 4_000
"""Visits that pay for few candidates of the program."""


@functools.cache
def made(level, budget, layers=8):
    return shardfn.plan(step, *arguments(layers), level=level, device="h100:8", budget=budget)


@pytest.mark.parametrize("level", some_slow([0, 1, 2], {0, 1}))
def test_plan_of_equal_blocks_is_within_a_percent_of_that_of_a_full_search(level):
    few, full = made(level, FEW), made(level, "default")
    assert BLOCKS in few.policy and BLOCKS not in full.policy
    own, best = (objective(plan.cost, plan._answered.problem).aim[0] for plan in (few, full))
    assert own <= 1.01 * best


@pytest.mark.parametrize("level", some_slow([0, 1, 2], {0, 1}))
def test_inner_layers_get_the_same_shardings(level):
    strategies = {d.path: d.strategy for d in made(level, FEW).inputs}
    for path, strategy in strategies.items():
        for n in range(2, 7):
            if f"layers/{n}/" in path:
                assert strategy == strategies[path.replace(f"layers/{n}/", "layers/1/")]


def test_plan_of_equal_blocks_keeps_entries():
    args = arguments(8)
    first = jax.tree.map(lambda leaf: AUTO, args[0])
    first["layers"][3]["w1"] = (1, 8)
    plan = shardfn.plan(step, *args, in_strategy=(first, AUTO, (8, 1), AUTO), level=2, device="h100:8", budget=FEW)
    strategies = {d.path: d.strategy for d in plan.inputs}
    assert strategies["params/layers/3/w1"] == (1, 8) and strategies["x"] == (8, 1)


def test_step_of_equal_blocks_computes_the_same():
    keys = iter(jax.random.split(jax.random.key(0), 200))
    args = jax.tree.map(lambda s: 0.1 * jax.random.normal(next(keys), s.shape, s.dtype), arguments(6))
    sharded = shardfn.shard(step, level=2, device=jax.devices()[:8], budget=2_000)
    assert BLOCKS in sharded.plan(*args).policy
    for own, there in zip(jax.tree.leaves(sharded(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(own, there, rtol=1e-3, atol=1e-4)


def test_memory_limit_is_kept_by_equal_blocks():
    peak = made(2, FEW).cost.memory.peak
    least = made(1, FEW).cost.memory.peak
    limit = (peak + least) // 2
    if least < limit:
        options = {"level": 2, "device": "h100:8", "budget": FEW, "memory_limit": limit}
        assert shardfn.plan(step, *arguments(8), **options).cost.memory.peak <= limit


def test_plan_of_equal_blocks_is_the_same_each_time():
    assert made(2, FEW) == shardfn.plan(step, *arguments(8), level=2, device="h100:8", budget=FEW)

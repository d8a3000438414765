"""The programs on which MindSpore's searches were timed, planned here."""

import dataclasses

import jax
import pytest

import shardfn
from examples.models import abstract, mindspore
from shardfn import AUTO

DEVICE = "h100:8"
SEED = {"params/0/q": (1, 4)}
BLOCK = {"q": (1, 4), "k": (1, 4), "v": (1, 4), "o": (4, 1), "up": (1, 4), "down": (4, 1)}
"""Tensor parallel over four devices, as MindSpore's propagation lays out every block."""


def program(config, train):
    return abstract(mindspore.make, dataclasses.replace(config, train=train))


def cut_of_batch(config):
    return (8, 1, 1) if config.heads else (8, 1)


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forward", "gradients"])
def test_propagation_of_one_seed_gives_every_block_tensor_and_data_parallel(train):
    function, args = program(mindspore.TRANSFORMER, train)
    made = shardfn.plan(
        function, *args, parameter_plan=SEED, search_mode="sharding_propagation", level=2, device=DEVICE
    )
    assert made.decision("params/0/q").source == "you"
    strategies = {d.path: d.strategy for d in made.inputs}
    assert {f"params/{i}/{name}": strategies[f"params/{i}/{name}"] for i in range(4) for name in BLOCK} == {
        f"params/{i}/{name}": strategy for i in range(4) for name, strategy in BLOCK.items()
    }
    assert strategies["x"] == (2, 1, 1)


@pytest.mark.parametrize("mode", [pytest.param("dynamic_programming", marks=pytest.mark.slow), "recursive_programming"])
def test_search_mode_with_a_seed_keeps_it_and_is_faster_than_propagation(mode):
    function, args = program(mindspore.TRANSFORMER, train=False)
    options = {"parameter_plan": SEED, "level": 2, "device": DEVICE}
    made = shardfn.plan(function, *args, search_mode=mode, **options)
    assert made.decision("params/0/q").strategy == (1, 4)
    spread = shardfn.plan(function, *args, search_mode="sharding_propagation", **options)
    assert made.cost.time_s < spread.cost.time_s / 1.5 and made.cost.bytes_sent < spread.cost.bytes_sent / 10


@pytest.mark.slow
def test_plan_with_every_block_named_shards_every_block():
    function, args = program(mindspore.TRANSFORMER, train=False)
    made = shardfn.plan(function, *args, parameter_plan={"params/*/q": (1, 4)}, level=2, device=DEVICE)
    assert [made.decision(f"params/{i}/q").strategy for i in range(4)] == [(1, 4)] * 4


@pytest.mark.parametrize("train", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("config", [mindspore.MLP, mindspore.TRANSFORMER], ids=["mlp", "transformer"])
@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "recursive_programming"])
def test_plan_without_a_seed_sends_no_more_than_data_parallel(mode, config, train):
    function, args = program(config, train)
    replicated = jax.tree.map(lambda leaf: (1,) * len(leaf.shape), args[0])
    data_parallel = shardfn.plan(function, *args, in_strategy=(replicated, cut_of_batch(config)), device=DEVICE)
    made = shardfn.plan(function, *args, in_strategy=(AUTO, AUTO), search_mode=mode, level=2, device=DEVICE)
    assert made.cost.time_s <= data_parallel.cost.time_s
    assert made.cost.bytes_sent <= 1.001 * data_parallel.cost.bytes_sent, "small arrays at most, gathered to save time"
    assert made.cost.flops <= 1.01 * data_parallel.cost.flops, "or it does the work several times to send less"

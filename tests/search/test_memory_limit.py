"""Memory limits: how they are written, plans that keep them, and the error where none does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from examples.models import abstract, mlp
from shardfn.errors import Problem, ShardError, StrategyError
from shardfn.frontend.byte_sizes import bytes_of
from shardfn.report.saved_graphs import strategies_text
from tests.search.problems import S, two_layers

ARGS = S((64, 1024), jnp.float32), S((1024, 4096), jnp.float32), S((4096, 1024), jnp.float32)
TRAINED = {"device": "h100:8", "donate_argnums": (0, 1)}


def step(w1, w2, x):
    grads = jax.grad(lambda w: (two_layers(x, *w) ** 2).mean())((w1, w2))
    return w1 - 0.1 * grads[0], w2 - 0.1 * grads[1]


STEP = ARGS[1], ARGS[2], S((64, 1024), jnp.float32)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("14GiB", 14 * 2**30), ("1.5 kB", 1500), ("16gb", 16e9), (" 3 TiB ", 3 * 2**40), ("512", 512), ("1e3MB", 1e9), (7, 7),
     (np.int64(200_000), 200_000), (np.uint8(200), 200), (np.float32(16e9), 16e9)],
)  # fmt: skip
def test_bytes_of_a_size_is_its_number_of_bytes(text, amount):
    assert bytes_of(text, "memory_limit") == amount


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "0", "12 apples", "1,5GB", "1.5", "1.5 B", 0, -3, 1.5, float("nan"), float("inf"), np.int8(-3),
     np.float64(1.5)],
)  # fmt: skip
def test_bytes_of_what_is_no_size_is_a_problem(text):
    found = bytes_of(text, "memory_limit")
    assert isinstance(found, Problem) and not found.is_type
    with pytest.raises(ShardError, match="memory_limit") as error:
        shardfn.shard(two_layers, memory_limit=text)
    assert "GiB" in str(error.value)


@pytest.mark.parametrize("value", [True, np.True_, [1], None, b"1GiB"])
def test_bytes_of_another_type_is_a_problem_of_type(value):
    found = bytes_of(value, "memory_limit")
    assert isinstance(found, Problem) and found.is_type


@pytest.mark.slow
def test_options_that_are_numpy_numbers_are_numbers():
    given = {
        "level": np.int32(2),
        "memory_limit": np.int64(2**30),
        "compile_candidates": np.uint8(0),
        "time_limit": np.float32(60),
    }
    plain = {name: value.item() for name, value in given.items()}
    made, same = (shardfn.plan(two_layers, *ARGS, device="h100:8", **o) for o in (given, plain))
    assert made == same and type(made.level) is int
    with pytest.raises(ShardError) as error:
        shardfn.shard(two_layers, level=np.float32(1), compile_candidates=np.float64(2), time_limit=np.int8(-1))
    assert len(error.value.problems) == 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "dynamic_programming", "recursive_programming"])
@pytest.mark.parametrize("level", [0, 2])
def test_memory_limit_below_data_parallel_is_kept(mode, level):
    parallel = shardfn.plan(step, *STEP, in_strategy=((1, 1), (1, 1), (8, 1)), level=level, **TRAINED)
    limit = int(0.6 * parallel.cost.memory.peak)
    made = shardfn.plan(step, *STEP, level=level, search_mode=mode, memory_limit=limit, **TRAINED)
    assert made.cost.memory.peak <= limit < parallel.cost.memory.peak
    assert "it may not fit" not in str(made.diagnostics)


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "recursive_programming"])
def test_memory_limit_that_nothing_keeps_names_the_least(mode):
    with pytest.raises(ShardError, match=r"fits in 977 KiB per device") as error:
        shardfn.plan(two_layers, *ARGS, level=2, search_mode=mode, memory_limit="1MB", device="h100:8")
    text, least = str(error.value), least_of(error)
    assert least > 1e6
    assert "`w1` f32[" in text and "`w2` f32[" in text, "the largest tensors are named"
    made = shardfn.plan(two_layers, *ARGS, level=2, search_mode=mode, memory_limit=least, device="h100:8")
    assert made.cost.memory.peak <= least


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"compile_candidates": 2}, marks=pytest.mark.slow), {"search_mode": "recursive_programming"}],
    ids=str,
)
def test_memory_limit_without_its_unit_is_refused(options):
    with pytest.raises(ShardError, match=r'in 14 B per device(.|\n)*did you mean memory_limit="14GiB"') as error:
        shardfn.plan(two_layers, *ARGS, level=2, memory_limit="14", device="cpu:8", **options)
    arguments = "the arguments alone, however sharded, take at least 4.03 MiB on each device"
    assert (arguments in error.value.problems[0].why) == ("compile_candidates" not in options)


@pytest.mark.parametrize("limit", ["10 B", "10b", "10", 10])
def test_memory_limit_hint_is_true_with_and_without_a_unit(limit):
    with pytest.raises(ShardError, match=r'did you mean memory_limit="10GiB"\? The limit is 10 B'):
        shardfn.plan(two_layers, *ARGS, memory_limit=limit, device="cpu:8")


def test_memory_limit_error_lists_the_largest_arrays_with_shape_and_line():
    """Sums of gradients have no line of their own: the error names the line of what they add."""

    def both(w, x):
        return jax.grad(lambda w: (jnp.tanh(x @ w) + jnp.sin(x @ w)).sum())(w)

    shapes = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((8, 64), "float32")
    with pytest.raises(ShardError) as error:
        shardfn.plan(both, *shapes, level=1, memory_limit=1000, device="cpu:1")
    largest = error.value.problems[0].why.partition("the largest: ")[2].split("; ")
    line = rf"at {re.escape(__file__)}:\d+: 16 KiB"
    assert largest[0] == "`w` f32[64,64]: 16 KiB" and largest[3] == "`x` f32[8,64]: 2 KiB"
    assert all(re.fullmatch(rf"\w+ f32\[64,64\] {line}", text) for text in largest[1:3]) and len(largest) == 4


def test_memory_limit_error_leaves_out_arrays_in_vector_memory():
    """On a TPU with nothing in between: arguments and results alone."""

    def chain(w, x):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return x.sum(axis=0)

    shapes = S((256, 256), jnp.float32), S((1024, 256), jnp.float32)
    with pytest.raises(ShardError) as error:
        shardfn.plan(chain, *shapes, level=1, memory_limit=100_000, device="tpu-v5e:1")
    why = error.value.problems[0].why
    assert " and 0 B of temporaries; " in why
    assert [text.split()[0] for text in why.partition("the largest: ")[2].split("; ")] == ["`x`", "`w`", "reduce"], why


def least_of(error):
    found = re.search(r"the least found is .*\n.*or memory_limit=(\d+)", str(error.value))
    assert found
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(("level", "share"), [(0, 0.9), (1, 0.1), (2, 0.9)])
def test_memory_limit_that_an_error_names_is_kept(level, share):
    """Far below what can be kept, and near it, where much else is tried."""
    function, args = abstract(mlp.make, batch=64, train=True)
    options = {"level": level, "device": "cpu:8"}
    bound = shardfn.plan(function, *args, **options | {"level": 1}).cost.memory.peak
    with pytest.raises(ShardError, match="memory_limit") as error:
        shardfn.plan(function, *args, memory_limit=int(share * bound), **options)
    least = least_of(error)
    assert least <= bound, "level 1 alone finds no less"
    made = shardfn.plan(function, *args, memory_limit=least, **options)
    assert made.cost.memory.peak <= least
    assert f"memory_limit={least}" in str(error.value)


def test_memory_limit_weakens_no_entry():
    with pytest.raises(ShardError, match="memory_limit"):
        shardfn.plan(two_layers, *ARGS, in_strategy=((8, 1), (1, 1), (1, 1)), memory_limit="20MB", device="h100:8")


def test_memory_of_the_device_is_a_diagnostic_and_no_error():
    args = S((64, 2**17), jnp.float32), S((2**17, 2**18), jnp.float32), S((2**18, 2**17), jnp.float32)
    made = shardfn.plan(two_layers, *args, level=2, device="h100:2")
    assert any("it may not fit" in finding for finding in made.diagnostics)


@pytest.mark.slow
def test_memory_limit_error_of_captured_arrays_names_them():
    """It has no arguments of its own, and what it captures comes first in its graph."""
    texts = []

    def outer(w):
        made = shardfn.plan(lambda: w @ w, device="cpu:8")
        texts.append(strategies_text(made))
        with pytest.raises(StrategyError, match=r"(?s)memory_limit = 100\n.*the largest: "):
            shardfn.plan(lambda: w @ w, device="cpu:8", memory_limit=100)
        return w

    jax.eval_shape(outer, S((64, 64), jnp.float32))
    assert "dot_general(" in texts[0] and "argument" not in texts[0]

"""The first call leaves the process alone: few traces, no exception as control flow, the garbage collector as it was."""

import gc
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn

ROOT = str(pathlib.Path(shardfn.__file__).parent)
X, W = np.ones((16, 32), np.float32), np.full((32, 8), 0.5, np.float32)
GIVEN = ((2, 1), (1, 4))
ASKED = {
    "nothing": {},
    "given": {"in_strategy": GIVEN},
    "communication": {"level": 0},
    "memory": {"level": 1, "donate_argnums": 1},
    "time": {"level": 2},
    "recursive": {"level": 2, "search_mode": "recursive_programming"},
    "a result": {"in_strategy": GIVEN, "out_strategy": ((8, 1),)},
    "compiled candidates": {"level": 2, "compile_candidates": 2},
}


def program(seen):
    """A function that notes, in each trace, what `seen` says."""

    def step(x, w):
        seen()
        return jnp.tanh(x @ w)

    return step


@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_first_call_traces_the_function_once(options):
    traces = []
    sharded = shardfn.shard(program(lambda: traces.append(1)), **options)
    sharded(X, W.copy())
    assert len(traces) == 1
    made = sharded.plan(X, W)
    sharded(X, W.copy())
    assert len(traces) == 1, "later calls and the plan trace nothing"
    assert made.cost.flops


def test_first_call_of_a_rewritten_function_traces_it_once():
    """A workaround for an XLA bug rewrites what was traced."""
    traces = []

    def pooled(x):
        traces.append(1)
        return jax.lax.reduce(x, np.int32(0), jax.lax.bitwise_xor, (0,))

    sharded = shardfn.shard(pooled, ((4, 2),))
    sharded(np.ones((16, 8), np.int32))
    assert len(traces) == 1 and any(
        "shardfn gathers" in text for text in sharded.plan(np.ones((16, 8), np.int32)).diagnostics
    )


def test_first_call_with_arrays_that_are_sharded_traces_the_function_once():
    traces = []
    sharded = shardfn.shard(program(lambda: traces.append(1)), **ASKED["given"])
    plan = sharded.plan(X, W)
    args = jax.device_put((X, W), tuple(plan.in_shardings))
    np.testing.assert_allclose(sharded(*args), np.tanh(X @ W), rtol=1e-4)
    assert len(traces) == 1


def test_first_call_under_other_settings_than_the_plan_traces_again():
    traces = []

    def step(x, w):
        traces.append(jax.config.jax_default_matmul_precision)
        return x @ w

    sharded = shardfn.shard(step, **ASKED["given"])
    sharded.plan(X, W)
    with jax.default_matmul_precision("highest"):
        text = sharded.lower(X, W).as_text()
    assert traces[-1] == "highest" and "HIGHEST" in text


def test_first_call_with_another_weak_type_than_the_plan_gives_its_dtype():
    sharded = shardfn.shard(lambda x, s: x * s, ((8, 1), ()))
    x = jnp.ones((16, 8), jnp.bfloat16)
    assert sharded(x, 2.0).dtype == jnp.bfloat16
    assert sharded(x, jnp.float32(2)).dtype == jnp.float32
    assert sharded(x, 3.0).dtype == jnp.bfloat16


def test_first_call_of_a_function_with_effects_has_each_effect_once():
    seen = []

    def step(x):
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(x))
        return 2 * x

    shardfn.shard(step, ((8, 1),))(jnp.ones((16, 8))).block_until_ready()
    jax.effects_barrier()
    assert seen == [128.0]


@pytest.mark.parametrize("options", [ASKED["given"], ASKED["communication"], ASKED["time"]], ids=str)
def test_first_call_raises_no_exception_inside_the_library(options):
    raised = []

    def watch(frame, event, arg):
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "exception" and arg[0] not in (StopIteration, GeneratorExit):
            raised.append((arg[0].__name__, f"{frame.f_code.co_filename}:{frame.f_lineno}"))
        return watch

    sharded, before = shardfn.shard(program(lambda: None), **options), sys.gettrace()
    sys.settrace(watch)
    try:
        sharded(X, W)
    finally:
        sys.settrace(before)
    assert raised == []


@pytest.mark.parametrize("enabled", [True, False])
def test_first_call_leaves_the_garbage_collector_as_it_is(enabled):
    def state():
        return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()

    def search(problem):
        seen.append(state())
        return shardfn.search.MODES["auto"](problem)

    seen = []
    shardfn.register_search("watched", search)
    (gc.enable if enabled else gc.disable)()
    before = state()
    try:
        shardfn.shard(program(lambda: seen.append(state())), level=2, search_mode="watched")(X, W)
        assert seen and set(seen) == {before} == {state()}
    finally:
        gc.enable()
        shardfn.search.forget("watched")

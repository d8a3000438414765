"""The plain layouts: which of them are priced, in which order, and when no more are."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import shardfn
from examples.models import abstract, attention, gpt2, mlp
from shardfn import search
from shardfn.ir import shardy
from shardfn.search import baselines, dynamic_programming
from shardfn.search.problem import objective


def asked(function, args, **options):
    """The problem that a plan asks, with its flows, and the plan."""
    seen = []

    def mine(problem):
        seen.append(problem)
        return dynamic_programming.search(problem)

    search.register("mine", mine)
    try:
        made = shardfn.plan(function, *args, search_mode="mine", **options)
    finally:
        search.forget("mine")
    return seen[0], made


def counted(monkeypatch):
    """A list that grows by one with every flow."""
    flows = []
    old = shardy.propagate
    monkeypatch.setattr(shardy, "propagate", lambda *a, **k: flows.append(1) or old(*a, **k))
    return flows


@pytest.mark.parametrize("make", [mlp.make, attention.make])
def test_at_level_1_what_is_left_out_holds_more(make):
    problem, _ = asked(*abstract(make, batch=64), level=1, device="h100:8")
    found = baselines.candidates(problem)
    every = baselines.candidates(dataclasses.replace(problem, level=2))
    assert 0 < len(found) <= len(every)
    assert found[0].cost.memory.peak == min(c.cost.memory.peak for c in every)
    left = [c for c in every if (c.axes, c.specs) not in {(f.axes, f.specs) for f in found}]
    for one in baselines._layouts(problem, True):
        cost = problem.evaluate(one.axes, one.specs, {})
        assert baselines.held(problem, one) <= cost.memory.peak, "a bound"
    assert all(objective(c.cost, problem) >= objective(found[0].cost, problem) for c in left)


def test_of_a_large_program_the_few_are_priced_that_promise_most(monkeypatch):
    monkeypatch.setattr("shardfn.search.effort.FEWEST", 5)
    monkeypatch.setattr("shardfn.search.effort.PLAIN_OPS", 0)
    problem, _ = asked(*abstract(attention.make, batch=64), level=1, device="cpu:8")
    few = baselines.candidates(problem)
    every = [problem.evaluate(one.axes, one.specs, {}).memory.peak for one in baselines._layouts(problem, True)]
    assert len(few) <= 5 < len(every)
    assert few[0].cost.memory.peak <= 1.02 * min(every) < 0.5 * max(every)


def test_the_time_limit_holds_for_flows_too(monkeypatch):
    """With a limit that is over at once: one grid, the flow of what it gives, and that of a plain layout."""
    flows = counted(monkeypatch)
    function, args = abstract(mlp.make, batch=64)
    for level in (0, 1, 2):
        for mode in ("dynamic_programming", "recursive_programming"):
            flows.clear()
            made = shardfn.plan(function, *args, level=level, search_mode=mode, device="h100:8", time_limit=1e-6)
            assert 2 <= len(flows) <= 1 + baselines.HASTY
            assert "1e-06 s" in made.policy, made.policy
            if mode == "dynamic_programming":
                assert made.gap is None and "not in 1e-06 s: " in made.policy


def test_in_a_hurry_it_is_no_worse_than_data_parallel():
    function, args = abstract(gpt2.make, gpt2.small())
    options = {"device": "cpu:8", "level": 2, "donate_argnums": (0, 1)}
    batch = shardfn.plan(function, *args, in_strategy=(None, None, (8, 1)), **options)
    problem, _ = asked(function, args, **options)
    parallel = next(c for c in baselines.batch_baselines(problem) if "pieces" not in c.name)
    hasty = shardfn.plan(function, *args, time_limit=1e-6, **options)
    assert hasty.cost.time_s <= parallel.cost.time_s
    assert batch.cost.time_s <= parallel.cost.time_s
    limit = parallel.cost.memory.peak * 9 // 10
    tight = shardfn.plan(function, *args, time_limit=1e-6, memory_limit=limit, **options)
    assert tight.cost.memory.peak <= limit


def test_without_hurry_nothing_is_said_of_time():
    function, args = abstract(mlp.make, batch=64)
    made = shardfn.plan(function, *args, level=2, device="h100:8")
    assert " s" not in made.policy.replace(" search", "").partition("grids tried")[2]


def test_the_layouts_of_a_batch_are_data_parallel_zero_1_and_fsdp():
    problem, _ = asked(*abstract(gpt2.make, gpt2.TINY), level=2, device="h100:2", donate_argnums=(0, 1))
    every, only_state, whole = (frozenset(
        path for path, spec in zip(problem.names, one.specs, strict=True) if any(spec)) for one in (
        baselines.batch_baselines(problem)[i] for i in (2, 1, 0)))  # fmt: skip
    assert whole == {"tokens"}
    assert whole < only_state < every and not any(path.startswith("params") for path in only_state)
    fixed, _ = asked(*abstract(mlp.make, batch=64), level=2, device="h100:8")
    assert baselines.batch_baselines(fixed) == (), "nothing is given back: no argument is known to be a batch"


def test_small_parameters_stay_whole_beside_large_ones_in_pieces():
    """Each of them in pieces would cost the latency of a gather."""

    def step(params, rows, x):
        def loss(p):
            h = jnp.concatenate([p["table"][rows], x], 1)
            for w in p["small"]:
                h = jax.nn.relu(h @ w)
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    params = {"table": shape(2**18, 32), "small": [shape(48, 32), shape(32, 32), shape(32, 16)]}
    args = params, jax.ShapeDtypeStruct((512,), jnp.int32), shape(512, 16)
    problem, made = asked(step, args, level=2, device="tpu-v5e:4x4")
    assert [name for name, small in zip(problem.names, baselines.are_small_parameters(problem), strict=True) if small] == [
        "params/small/0", "params/small/1", "params/small/2"
    ]  # fmt: skip
    laid = [one for one in baselines._layouts(problem, False) if one.pieces is baselines.ArgumentSharding.SIZEABLE]
    assert laid and all(one.specs[-1] and any(map(any, one.specs[-3:])) for one in laid)
    assert all(not any(spec) for one in laid for spec in one.specs[:2])
    by_hand = shardfn.plan(
        step, *args, device="tpu-v5e:4x4", parameter_plan={"params/table": (16, 1), "params/small/*": (1, 1)},
        in_strategy=(shardfn.AUTO, (16,), (16, 1)),
    )  # fmt: skip
    assert made.cost.time_s <= by_hand.cost.time_s


@pytest.mark.parametrize(("fastest", "pieces"), [(1e9, True), (1e-9, False)])
def test_what_is_far_behind_is_not_cut_in_pieces_as_well(fastest, pieces):
    problem, _ = asked(*abstract(mlp.make, batch=64, train=True), level=2, device="h100:8", donate_argnums=0)
    found = baselines.candidates(problem, fastest=fastest)
    assert found and any(" in 8 pieces" in c.name for c in found) == pieces
    whole = {c.name for c in baselines.candidates(problem) if " pieces" not in c.name}
    assert {c.name for c in found if " pieces" not in c.name} == whole

"""The baselines: which are evaluated, in which order, and what each shards."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import shardfn
from examples.models import abstract, attention, gpt2, mlp
from shardfn.search import baselines
from shardfn.search.baselines import ArgumentSharding
from shardfn.search.problem import objective
from shardfn.search.selection import answer_of
from tests.search.problems import S, planned_problem


@pytest.mark.parametrize("make", [mlp.make, attention.make])
def test_at_level_1_what_is_left_out_holds_more(make):
    function, args = abstract(make, batch=64)
    problem = planned_problem(function, *args, level=1, device="h100:8")
    found = baselines.evaluated_baselines(problem)
    every = baselines.evaluated_baselines(dataclasses.replace(problem, level=2))
    assert 0 < len(found) <= len(every)
    assert found[0].cost.memory.peak == min(c.cost.memory.peak for c in every)
    left = [c for c in every if (c.axes, c.specs) not in {(f.axes, f.specs) for f in found}]
    for one in baselines._all(problem, True):
        cost = problem.evaluate(one.axes, one.specs, {})
        assert baselines.resident_bytes(problem, one.axes, one.specs) <= cost.memory.peak, "a bound"
    assert all(objective(c.cost, problem) >= objective(found[0].cost, problem) for c in left)


def test_in_a_hurry_it_is_no_worse_than_data_parallel():
    function, args = abstract(gpt2.make, gpt2.small())
    options = {"device": "cpu:8", "level": 2, "donate_argnums": (0, 1)}
    batch = shardfn.plan(function, *args, in_strategy=(None, None, (8, 1)), **options)
    problem = planned_problem(function, *args, **options)
    parallel = next(c for c in baselines.batch_baselines(problem) if "sharded over" not in c.name)
    hasty = shardfn.plan(function, *args, time_limit=1e-6, **options)
    assert hasty.cost.time_s <= parallel.cost.time_s
    assert batch.cost.time_s <= parallel.cost.time_s
    limit = parallel.cost.memory.peak * 9 // 10
    tight = shardfn.plan(function, *args, time_limit=1e-6, memory_limit=limit, **options)
    assert tight.cost.memory.peak <= limit


def test_without_hurry_nothing_is_said_of_time():
    function, args = abstract(mlp.make, batch=64)
    made = shardfn.plan(function, *args, level=2, device="h100:8")
    assert " s" not in made.policy.replace(" search", "").partition("meshes tried")[2]


def test_the_layouts_of_a_batch_are_data_parallel_zero_1_and_fsdp():
    function, args = abstract(gpt2.make, gpt2.TINY)
    problem = planned_problem(function, *args, level=2, device="h100:2", donate_argnums=(0, 1))
    every, only_state, whole = (frozenset(
        path for path, spec in zip(problem.names, one.specs, strict=True) if any(spec)) for one in (
        baselines.batch_baselines(problem)[i] for i in (2, 1, 0)))  # fmt: skip
    assert whole == {"tokens"}
    assert whole < only_state < every and not any(path.startswith("params") for path in only_state)
    function, args = abstract(mlp.make, batch=64)
    fixed = planned_problem(function, *args, level=2, device="h100:8")
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
    made = shardfn.plan(step, *args, level=2, device="tpu-v5e:4x4")
    problem = made._study.problem
    assert [name for name, small in zip(problem.names, baselines.are_small_parameters(problem), strict=True) if small] == [
        "params/small/0", "params/small/1", "params/small/2"
    ]  # fmt: skip
    laid = [one for one in baselines._all(problem, False) if one.rest is baselines.ArgumentSharding.SIZEABLE]
    assert laid and all(one.specs[-1] and any(map(any, one.specs[-3:])) for one in laid)
    assert all(not any(spec) for one in laid for spec in one.specs[:2])
    by_hand = shardfn.plan(
        step, *args, device="tpu-v5e:4x4", parameter_plan={"params/table": (16, 1), "params/small/*": (1, 1)},
        in_strategy=(shardfn.AUTO, (16,), (16, 1)),
    )  # fmt: skip
    assert made.cost.time_s <= by_hand.cost.time_s


@pytest.mark.parametrize(("fastest", "pieces"), [(1e9, True), (1e-9, False)])
def test_what_is_far_behind_is_not_cut_in_pieces_as_well(fastest, pieces):
    function, args = abstract(mlp.make, batch=64, train=True)
    problem = planned_problem(function, *args, level=2, device="h100:8", donate_argnums=0)
    found = baselines.evaluated_baselines(problem, fastest=fastest)
    assert found and any(" sharded over 8" in c.name for c in found) == pieces
    whole = {c.name for c in baselines.evaluated_baselines(problem) if " sharded over" not in c.name}
    assert {c.name for c in found if " sharded over" not in c.name} == whole


def step(w, momentum, x):
    """Momentum is read by the update alone; the batch is divisible by 4, everything else by 8."""
    grad = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    momentum = {"w": 0.9 * momentum["w"] + grad, "b": momentum["b"]}
    return {"w": w - 0.1 * momentum["w"]}, momentum


ARGS = (S((16, 32), jnp.float32), {"w": S((16, 32), jnp.float32), "b": S((32,), jnp.float32)}, S((4, 16), jnp.float32))


@pytest.fixture(scope="module")
def laid():
    """The cuts of each argument, by the layout's name and the grid."""
    problem = planned_problem(step, *ARGS, device="cpu:8")
    found = {}
    for c in baselines.evaluated_baselines(problem):
        sizes = dict(c.axes)
        cuts = [tuple(math.prod(sizes[axis] for axis in dim) for dim in spec) for spec in c.specs]
        found[c.name, tuple(sizes.values())] = dict(zip(problem.names, cuts, strict=True))
    return found


def test_a_class_that_not_all_devices_divide_is_cut_beside_another(laid):
    assert not any(name.startswith("x dim 0 sharded 8") for name, _ in laid)
    mixed = next(cuts for (name, grid), cuts in laid.items() if grid == (4, 2) and cuts["x"] == (4, 1))
    assert mixed["w"] in ((1, 2), (2, 1))


def test_only_what_the_update_alone_reads_is_cut_as_zero_1_cuts_it(laid):
    names = [name for name, _ in laid if ArgumentSharding.STATE.value in name]
    assert names
    zero = next(
        cuts for (name, grid), cuts in laid.items() if ArgumentSharding.STATE.value in name and cuts["x"] == (4, 1)
    )
    assert zero["momentum/w"] != zero["w"], "momentum is in pieces, and the weights are not"
    full = next(
        cuts for (name, grid), cuts in laid.items() if ArgumentSharding.ALL.value in name and cuts["x"] == (4, 1)
    )
    assert full["momentum/w"] == full["w"]


def test_what_is_given_stays():
    problem = planned_problem(step, *ARGS, parameter_plan={"w": (1, 8)}, device="cpu:8")
    assert baselines.evaluated_baselines(problem) == (), "with a grid of the user's own there is nothing plain to add"


def test_in_pieces_products_are_held_to_the_cut_of_their_class():
    """Weights in pieces over the batch's axis would have propagation cut the products' sums instead."""
    problem = planned_problem(step, *ARGS[:2], S((64, 16), jnp.float32), level=0, device="cpu:8")
    full = next(
        c
        for c in baselines.evaluated_baselines(problem)
        if c.name.startswith("x dim 0 sharded 8") and ArgumentSharding.ALL.value in c.name
    )
    assert full.constraints and all(constraint.operands == (None, None) for constraint in full.constraints.values())
    alone = problem.evaluate(full.axes, full.specs, {})
    assert full.cost.bytes_sent <= alone.bytes_sent
    made = [problem.graph.ops[index].outputs[0] for index in full.constraints]
    assert any(problem.graph.values[v].shape[0] == 64 for v in made)


def test_a_plain_layout_that_wins_lets_go_of_what_it_need_not_hold():
    problem = planned_problem(step, *ARGS[:2], S((64, 16), jnp.float32), level=1, device="cpu:8")
    answer = answer_of(problem, (), "nothing searched", lambda *_: ())
    best = baselines.evaluated_baselines(problem)[0]
    assert (
        answer.specs == best.specs and set(answer.constraints) <= set(best.constraints) and best.name in answer.policy
    )
    made = problem.evaluate(answer.axes, answer.specs, answer.constraints)
    assert objective(made, problem) <= objective(best.cost, problem)

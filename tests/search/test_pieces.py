"""Plain layouts are those that people write: data parallel, ZeRO-1, fully sharded, and two classes on two axes."""

import math

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.search import baselines, default_policy, forget
from shardfn.search.baselines import ArgumentSharding
from shardfn.search.problem import objective
from shardfn.search.selection import answer_of

S = jax.ShapeDtypeStruct


def step(w, momentum, x):
    """Momentum is read by the update alone; the batch is divisible by 4, everything else by 8."""
    grad = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    momentum = {"w": 0.9 * momentum["w"] + grad, "b": momentum["b"]}
    return {"w": w - 0.1 * momentum["w"]}, momentum


def asked(function, *args, **options):
    """The problem that a search is asked."""
    problems = []
    shardfn.register_search("listening", lambda problem: problems.append(problem) or default_policy.search(problem))
    try:
        shardfn.plan(function, *args, device="cpu:8", search_mode="listening", **options)
    finally:
        forget("listening")
    return problems[0]


ARGS = (S((16, 32), jnp.float32), {"w": S((16, 32), jnp.float32), "b": S((32,), jnp.float32)}, S((4, 16), jnp.float32))


@pytest.fixture(scope="module")
def laid():
    """The cuts of each argument, by the layout's name and the grid."""
    problem = asked(step, *ARGS)
    found = {}
    for c in baselines.candidates(problem):
        sizes = dict(c.axes)
        cuts = [tuple(math.prod(sizes[axis] for axis in dim) for dim in spec) for spec in c.specs]
        found[c.name, tuple(sizes.values())] = dict(zip(problem.names, cuts, strict=True))
    return found


def test_a_class_that_not_all_devices_divide_is_cut_beside_another(laid):
    assert not any(name.startswith("x dim 0 cut 8") for name, _ in laid)
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
    problem = asked(step, *ARGS, parameter_plan={"w": (1, 8)})
    assert baselines.candidates(problem) == (), "with a grid of the user's own there is nothing plain to add"


def test_in_pieces_products_are_held_to_the_cut_of_their_class():
    """Weights in pieces over the batch's axis would have propagation cut the products' sums instead."""
    problem = asked(step, *ARGS[:2], S((64, 16), jnp.float32), level=0)
    full = next(
        c
        for c in baselines.candidates(problem)
        if c.name.startswith("x dim 0 cut 8") and ArgumentSharding.ALL.value in c.name
    )
    assert full.constraints and all(constraint.operands == (None, None) for constraint in full.constraints.values())
    alone = problem.evaluate(full.axes, full.specs, {})
    assert full.cost.bytes_sent <= alone.bytes_sent
    made = [problem.graph.ops[index].outputs[0] for index in full.constraints]
    assert any(problem.graph.values[v].shape[0] == 64 for v in made)


def test_a_plain_layout_that_wins_lets_go_of_what_it_need_not_hold():
    problem = asked(step, *ARGS[:2], S((64, 16), jnp.float32), level=1)
    answer = answer_of(problem, (), "nothing searched", lambda *_: ())
    best = baselines.candidates(problem)[0]
    assert (
        answer.specs == best.specs and set(answer.constraints) <= set(best.constraints) and best.name in answer.policy
    )
    made = problem.evaluate(answer.axes, answer.specs, answer.constraints)
    assert objective(made, problem) <= objective(best.cost, problem)

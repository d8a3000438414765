"""Plain layouts are those that people write: data parallel, ZeRO-1, fully sharded, and two classes on two axes."""

import math

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.search import forget, plain, propagation

S = jax.ShapeDtypeStruct


def step(w, momentum, x):
    """Momentum is read by the update alone; the batch is divisible by 4, everything else by 8."""
    grad = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    momentum = {"w": 0.9 * momentum["w"] + grad, "b": momentum["b"]}
    return {"w": w - 0.1 * momentum["w"]}, momentum


def asked(function, *args, **options):
    """The problem that a search is asked."""
    problems = []
    shardfn.register_search("listening", lambda problem: problems.append(problem) or propagation.search(problem))
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
    for c in plain.candidates(problem):
        sizes = dict(c.axes)
        cuts = [tuple(math.prod(sizes[axis] for axis in dim) for dim in spec) for spec in c.specs]
        found[c.name, tuple(sizes.values())] = dict(zip(problem.names, cuts, strict=True))
    return found


def test_a_class_that_not_all_devices_divide_is_cut_beside_another(laid):
    assert not any(name.startswith("x dim 0 cut 8") for name, _ in laid)
    mixed = next(cuts for (name, grid), cuts in laid.items() if grid == (4, 2) and cuts["x"] == (4, 1))
    assert mixed["w"] in ((1, 2), (2, 1))


def test_only_what_the_update_alone_reads_is_cut_as_zero_1_cuts_it(laid):
    names = [name for name, _ in laid if plain.STATE in name]
    assert names
    zero = next(cuts for (name, grid), cuts in laid.items() if plain.STATE in name and cuts["x"] == (4, 1))
    assert zero["momentum/w"] != zero["w"], "momentum is in pieces, and the weights are not"
    full = next(cuts for (name, grid), cuts in laid.items() if plain.ALL in name and cuts["x"] == (4, 1))
    assert full["momentum/w"] == full["w"]


def test_what_is_given_stays():
    problem = asked(step, *ARGS, parameter_plan={"w": (1, 8)})
    assert plain.candidates(problem) == (), "with a grid of the user's own there is nothing plain to add"

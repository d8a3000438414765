"""Refinement: argument shardings changed group by group, and arguments that follow the products."""

import jax
import jax.numpy as jnp
import pytest

from shardfn.search.baselines import batch_arguments
from shardfn.search.problem import SearchCandidate, objective
from shardfn.search.refinement import argument_groups, fewer_axes, follow_products, fully_sharded, one_more_axis, refine
from tests.search.problems import planned_problem

S = jax.ShapeDtypeStruct
AXES = (("a", 4), ("b", 2))
WHOLE = ((), ())
A, B = ("a",), ("b",)


def step(w1, w2, bias, x):
    """A batch cut over a and hidden units over b send least; a bias that is cut would cut all that it is added to."""

    def loss(weights):
        w1, w2, bias = weights
        return ((jax.nn.relu((x + bias) @ w1) @ w2 + bias) ** 2).mean()

    grads = jax.grad(loss)((w1, w2, bias))
    return jax.tree.map(lambda p, g: p - 0.1 * g, (w1, w2, bias), grads)


ARGS = (S((256, 1024), jnp.float32), S((1024, 256), jnp.float32), S((256,), jnp.float32), S((512, 256), jnp.float32))
BEST = ((), B), (B, ()), ((),), (A, ())


@pytest.fixture(scope="module")
def problem():
    return planned_problem(lambda w, x: (step(*w, x), 0.0), ARGS[:3], ARGS[3], device="cpu:8", level=0)


def candidate(problem, *specs):
    return SearchCandidate("one", AXES, specs, {}, problem.evaluate(AXES, specs, {}))


def test_what_is_fresh_comes_first_then_the_smallest(problem):
    assert batch_arguments(problem) == {3}
    assert argument_groups(problem, BEST) == [(3,), (2,), (0,), (1,)]
    assert argument_groups(problem, (WHOLE, WHOLE, ((),), WHOLE))[1] == (2,)


@pytest.mark.parametrize(
    "astray", [(((), B), (B, ()), (B,), ((), A)), (((), B), (B, ()), (("a", "b"),), (("a", "b"), ()))]
)
def test_polishing_finds_the_way_back(problem, astray):
    start = candidate(problem, *astray)
    found = refine(problem, start)
    assert objective(found.cost, problem) <= objective(candidate(problem, *BEST).cost, problem)
    assert objective(found.cost, problem) < objective(start.cost, problem)


def test_what_no_product_reads_lies_as_the_products_do(problem):
    """The bias is cut and the batch whole, but what products make is cut as it is best."""
    start = candidate(problem, ((), B), (B, ()), (B,), WHOLE)
    cut = {problem.groups[3][0]: A, problem.groups[0][1]: B}
    laid = follow_products(problem, start, lambda v: tuple(cut.get(class_, ()) for class_ in problem.value_groups[v]))
    assert laid.specs == BEST
    assert laid.cost.bytes_sent < start.cost.bytes_sent


def test_moves():
    assert list(one_more_axis((7, 16), ((), A), AXES, False)) == [((), ("a", "b"))]
    assert list(one_more_axis((8, 16), ((), A), AXES, False)) == [(B, A)]
    assert list(one_more_axis((7, 3), WHOLE, AXES, False)) == []
    assert list(fewer_axes((8, 16), ((), A), AXES, False)) == [WHOLE]
    assert list(fewer_axes((8, 16), ((), A), AXES, True)) == [WHOLE, (A, ()), (B, ())]


def test_an_answer_in_pieces_keeps_what_is_made_of_the_batch(problem):
    start = candidate(problem, *BEST)
    laid = fully_sharded(problem, start)
    assert laid.specs == ((A, B), (B, A), (("a", "b"),), (A, ()))
    assert laid.cost.memory.peak < start.cost.memory.peak
    assert laid.constraints and all(
        (A, B) in constraint.results or (A, ()) in constraint.results for constraint in laid.constraints.values()
    )
    assert fully_sharded(problem, start, only_state=True).specs == start.specs, "there is no state"

"""Each plan that was evaluated has a name of its own."""

import collections

import jax
import pytest

import shardfn
from shardfn.ir.model import OpConstraint
from shardfn.planning.answers import distinct_names
from shardfn.planning.plan import Candidate, Figures
from shardfn.search.problem import SearchCandidate

A, W = (("a", 8),), (("a", 4), ("b", 2))
ROWS, COLUMNS, REPLICATED = (("a",), ()), ((), ("a",)), ((), ())
CONSTRAINT = OpConstraint((None,), (ROWS,))


def candidate(name, *specs, axes=A, constraints=None, result_specs=None):
    return SearchCandidate(name, axes, specs, constraints or {}, result_specs or {}, cost=None)


CASES = [
    ([candidate("8", ROWS, REPLICATED), candidate("4x2", ROWS, REPLICATED, axes=W)], ["8", "4x2"]),
    ([candidate("8", ROWS, REPLICATED), candidate("8", ROWS, COLUMNS)], ["8: w (1, 1)", "8: w (1, 8)"]),
    (
        [candidate("8", ROWS, REPLICATED), candidate("8", REPLICATED, REPLICATED), candidate("8", ROWS, ROWS)],
        ["8: x (8, 1), w (1, 1)", "8: x (1, 1), w (1, 1)", "8: x (8, 1), w (8, 1)"],
    ),
    (
        [candidate("8", ROWS, ROWS), candidate("8", ROWS, ROWS, constraints={1: CONSTRAINT}), candidate("8", ROWS, ROWS, constraints={1: CONSTRAINT, 2: CONSTRAINT})],
        ["8: no ops constrained", "8: 1 op constrained", "8: 2 ops constrained"],
    ),
    ([candidate("8", ROWS, ROWS), candidate("8", ROWS, ROWS, result_specs={0: ROWS})], ["8: no results constrained", "8: 1 result constrained"]),
    ([candidate("8", ROWS, ROWS), candidate("8", ROWS, ROWS)], ["8", "8 (2)"]),
]  # fmt: skip


@pytest.mark.parametrize(("found", "names"), CASES)
def test_distinct_names_say_what_differs(found, names):
    assert distinct_names(("x", "w"), found) == names


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2])
def test_candidates_of_a_plan_have_names_of_their_own(level):
    def step(w1, w2, x):
        grads = jax.grad(lambda w: (jax.nn.relu(x @ w[0]) @ w[1]).var())((w1, w2))
        return w1 - grads[0], w2 - grads[1]

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((32, 128), (128, 32), (64, 32))]
    plan = shardfn.plan(step, *shapes, device="tpu-v5e:2x4", level=level)
    rows = plan.candidates
    assert len(rows) > 5 and rows[0] == Candidate("this plan", plan.axes, Figures.of(plan.cost))
    assert max(collections.Counter((row.name, row.axes) for row in rows).values()) == 1


def test_candidates_of_given_shardings_are_none():
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 192), (64, 64))]
    plan = shardfn.plan(lambda w, x: x @ w, *shapes, in_strategy=((1, 1), (8, 1)), device="h100:8")
    assert plan.candidates == ()

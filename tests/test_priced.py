"""Each plan that was priced has a name of its own."""

import collections

import jax
import pytest

import shardfn
from shardfn.graph.model import Pin
from shardfn.priced import told_apart
from shardfn.search.problem import Candidate

A, W = (("a", 8),), (("a", 4), ("b", 2))
ROWS, COLUMNS, WHOLE = (("a",), ()), ((), ("a",)), ((), ())
PIN = Pin((None,), (ROWS,))


def candidate(name, *specs, axes=A, pins=None, ends=None):
    return Candidate(name, axes, specs, pins or {}, None, ends or {})


CASES = [
    ([candidate("8", ROWS, WHOLE), candidate("4x2", ROWS, WHOLE, axes=W)], ["8", "4x2"]),
    ([candidate("8", ROWS, WHOLE), candidate("8", ROWS, COLUMNS)], ["8: w (1, 1)", "8: w (1, 8)"]),
    (
        [candidate("8", ROWS, WHOLE), candidate("8", WHOLE, WHOLE), candidate("8", ROWS, ROWS)],
        ["8: x (8, 1), w (1, 1)", "8: x (1, 1), w (1, 1)", "8: x (8, 1), w (8, 1)"],
    ),
    (
        [candidate("8", ROWS, ROWS), candidate("8", ROWS, ROWS, pins={1: PIN}), candidate("8", ROWS, ROWS, pins={1: PIN, 2: PIN})],
        ["8: no ops held inside", "8: 1 op held inside", "8: 2 ops held inside"],
    ),
    ([candidate("8", ROWS, ROWS), candidate("8", ROWS, ROWS, ends={0: ROWS})], ["8: no results held", "8: 1 result held"]),
    ([candidate("8", ROWS, ROWS), candidate("8", ROWS, ROWS)], ["8", "8 (2)"]),
]  # fmt: skip


@pytest.mark.parametrize(("found", "names"), CASES)
def test_what_differs_is_said(found, names):
    assert told_apart(("x", "w"), found) == names


@pytest.mark.parametrize("level", [0, 1, 2])
def test_no_two_rows_of_a_plan_have_one_name(level):
    def step(w1, w2, x):
        grads = jax.grad(lambda w: (jax.nn.relu(x @ w[0]) @ w[1]).var())((w1, w2))
        return w1 - grads[0], w2 - grads[1]

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((32, 128), (128, 32), (64, 32))]
    rows = shardfn.plan(step, *shapes, device="tpu-v5e:2x4", level=level).candidates
    assert len(rows) > 5 and rows[0].name == "this plan"
    assert max(collections.Counter((row.name, row.axes) for row in rows).values()) == 1

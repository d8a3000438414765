"""A NaN ends the solver instead of becoming a bound or a label."""

import dataclasses

import numpy as np
import pytest

from shardfn.solver import debug_nans
from shardfn.solver.bound import Messages
from shardfn.solver.budget import Budget
from shardfn.solver.content import Store
from shardfn.solver.dominance import reduced
from shardfn.solver.lagrange import Ascent
from shardfn.solver.solve import solve
from tests.solver.random_problems import KINDS, assert_consistent, drawn


def ascent() -> Ascent:
    found = reduced(drawn(KINDS["all pairs"], 1, 12), Store(), Budget())
    return Ascent(found.costs, found.tables, found.memory)


def test_price_that_is_not_a_number_is_an_error():
    made = ascent()
    with pytest.raises(FloatingPointError, match="a price of memory is not a number"):
        made.set_prices(np.full(len(made.multipliers), np.nan))


@pytest.mark.parametrize("debug", [True, False])
def test_message_that_is_not_a_number_is_an_error(debug, monkeypatch):
    monkeypatch.setattr(debug_nans, "DEBUG_NANS", debug)
    made = ascent()
    made.messages.sent[:] = np.nan
    with pytest.raises(FloatingPointError, match="is not a number"):
        made.sweep()


def test_belief_that_is_not_a_number_is_an_error_in_the_debug_mode(monkeypatch):
    monkeypatch.setattr(debug_nans, "DEBUG_NANS", True)
    messages = Messages([np.array([np.nan, 1.0])], np.array([0, 2]), [{}])
    with pytest.raises(FloatingPointError, match="a belief is not a number"):
        messages.forward(decide=True)


@pytest.mark.parametrize("kind", KINDS)
def test_solve_in_the_debug_mode_meets_no_nan(kind, monkeypatch):
    monkeypatch.setattr(debug_nans, "DEBUG_NANS", True)
    for seed in range(2):
        problem = drawn(KINDS[kind], 2000 + seed, 16)
        assert_consistent(problem, solve(problem, Budget(2e7)))
        if problem.limit > 0:  # prices begin at nothing, and end there
            free = dataclasses.replace(problem, costs=tuple(np.zeros(len(cost)) for cost in problem.costs), tables=())
            assert_consistent(free, solve(free, Budget(1e7)))

"""The solver on problems of many kinds, against trying everything and against HiGHS."""

import itertools
import math

import pytest

from shardfn.solver.budget import Budget
from shardfn.solver.solve import Effort, solve
from tests.solver.integer_program import integer_program
from tests.solver.random_problems import KINDS, assert_between, assert_consistent, drawn
from tests.solver.test_solve import enumerated

SMALL, MIDDLE = 200_000, 60
"""Labellings that are all tried; nodes of a problem for HiGHS."""


def small(kind, seed):
    """As many nodes as `SMALL` labellings allow, at most 7."""
    nodes = int(math.log(SMALL) / math.log(kind.labels[1]))
    return drawn(kind, seed, 1 + seed % min(nodes, 7))


def seeds(quick: int, every: int):
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= quick)) for seed in range(every)]


@pytest.mark.parametrize("block", seeds(1, 20))
@pytest.mark.parametrize("kind", KINDS)
def test_solve_of_a_small_problem_is_the_optimum(kind, block):
    for seed in range(7 * block, 7 * block + 7):
        problem = small(KINDS[kind], seed)
        found, best = solve(problem), enumerated(problem)
        assert_consistent(problem, found)
        assert_between(found, best)
        assert found.proved and found.feasible == math.isfinite(best), seed


@pytest.mark.parametrize("block", seeds(1, 20))
@pytest.mark.parametrize("kind", KINDS)
def test_solve_stopped_early_is_consistent(kind, block):
    efforts = [Effort(1, 1, 0, 0), Effort(1, 5, 1, 1), Effort(3, 5, 2, 3, close=0.05), Effort()]
    for seed, work in itertools.product(range(3 * block, 3 * block + 3), (1e3, 1e5, math.inf)):
        problem = small(KINDS[kind], seed)
        found = solve(problem, Budget(work), efforts[seed % 4])
        assert_consistent(problem, found)
        assert_between(found, enumerated(problem))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_solve_of_a_middling_problem_agrees_with_highs(kind, seed):
    problem = drawn(KINDS[kind], 1000 + seed, MIDDLE)
    found = solve(problem, Budget(2e8))
    assert_consistent(problem, found)
    assert_between(found, *integer_program(problem, seconds=20))

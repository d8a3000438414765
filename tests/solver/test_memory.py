"""Nodes that hold several values at different times, limits that can't be kept, and the least peak."""

import dataclasses
import math

import numpy as np
import pytest

from shardfn.solver.labelling import UsageInterval, labelling, peak_of
from shardfn.solver.peak import least_peak
from shardfn.solver.solve import Effort, solve
from tests.marks import some_slow
from tests.solver.test_solve import NEVER, dense_problem, enumerated, every_labelling, random_problem


def with_held(seed: int):
    """A random problem whose nodes hold more, at times of their own."""
    problem = random_problem(seed)
    rng = np.random.default_rng(1000 + seed)
    rows = []
    for _ in range(int(rng.integers(0, 10))):
        v, start = int(rng.integers(len(problem.costs))), int(rng.integers(0, 12))
        rows.append(
            UsageInterval(
                v, start, start + int(rng.integers(0, 6)), rng.integers(0, 9, len(problem.costs[v])).astype(float)
            )
        )
    return dataclasses.replace(problem, usage_intervals=tuple(rows), limit=problem.limit + 8 * len(rows) * rng.random())


@pytest.mark.parametrize("block", range(6))
def test_peak_of_usage_at_many_times_counts_each(block):
    feasible = 0
    for seed in range(20 * block, 20 * block + 20):
        problem = with_held(seed)
        _, peak = every_labelling(problem)
        for at in range(0, peak.size, max(1, peak.size // 5)):
            assert peak_of(problem, np.unravel_index(at, peak.shape)) == pytest.approx(peak.flat[at])
        found, best = solve(problem), enumerated(problem)
        assert found.proved and found.feasible == math.isfinite(best), seed
        if found.feasible:
            assert found.cost == best and found.least_peak is None, seed
            feasible += 1
    assert feasible > 5


@pytest.mark.parametrize("block", some_slow(range(4), {0, 2, 3}))
def test_least_peak_bounds_that_of_enumeration(block):
    close = 0
    for seed in range(20 * block, 20 * block + 20):
        problem = with_held(seed)
        cost, peak = every_labelling(problem)
        least, found = peak[np.isfinite(cost)].min(initial=math.inf), least_peak(problem)
        if math.isinf(least):
            assert found is None or math.isinf(found.peak)
            continue
        assert found is not None and found.bound <= least + 1e-9, seed
        assert found.peak >= least and (math.isinf(found.peak) or found.peak == peak_of(problem, found.choice))
        close += found.peak <= 1.05 * least
    assert close >= 15


def test_solve_of_an_infeasible_limit_gives_the_least_peak():
    problem = labelling(
        [[0, 1], [0, 1]], usage_intervals=[(0, 0, 2, [5, 4]), (1, 1, 3, [5, 4]), (1, 7, 9, [3, 7])], limit=7
    )
    found = solve(problem)
    assert found.proved and not found.feasible and math.isinf(found.bound)
    assert found.least_peak is not None
    assert found.least_peak.peak == 8 and found.least_peak.choice == (1, 1)
    assert found.least_peak.bound == pytest.approx(8, rel=1e-5)


def test_solve_of_a_label_settled_by_forbidden_pairs_counts_its_usage():
    never = [NEVER, 0, NEVER, NEVER]  # only labels 0 and 1 together
    problem = labelling([[1, 1], [1, 1], [5, 1]], [[2, 9], [2, 9], [1, 6]], None, [((0, 1), never)], limit=12)
    found = solve(problem)
    assert found.proved and found.choice == (0, 1, 0) and peak_of(problem, found.choice) == 12


@pytest.mark.parametrize(
    "row", [(5, 0, 1, [1, 2]), (0, 0, 1, [1]), (0, 0, 1, [-1, 2])], ids=["node", "labels", "negative"]
)
def test_labelling_with_a_malformed_usage_is_refused(row):
    with pytest.raises(ValueError, match="usage"):
        labelling([[1, 2]], usage_intervals=[row])


@pytest.mark.parametrize("seed", range(6))
def test_solve_with_a_close_enough_gap_bounds_the_optimum(seed):
    problem = dense_problem(seed, whole=False)
    best, found = enumerated(problem), solve(problem, effort=Effort(rounds=2, close=0.05))
    assert found.feasible and found.gap <= 0.05 + 1e-12
    assert found.bound - 1e-9 <= best <= found.cost + 1e-9


def test_solve_of_an_infeasible_limit_without_the_least_peak():
    problem = labelling([[0, 1], [0, 1]], usage_intervals=[(0, 0, 2, [5, 4]), (1, 1, 3, [5, 4])], limit=7)
    found = solve(problem, effort=Effort(least_peak=False))
    assert found.proved and not found.feasible and found.least_peak is None

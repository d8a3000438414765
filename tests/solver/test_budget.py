"""Counted work bounds a search, the same on every machine; a clock does only where the user set a limit."""

import itertools
import math
import time

import numpy as np
import pytest

import shardfn
from examples.models import abstract, attention, mlp
from shardfn.solver import budget as budgets
from shardfn.solver.budget import Budget
from shardfn.solver.labelling import labelling
from shardfn.solver.peak import least_peak
from shardfn.solver.solve import Effort, solve
from tests.marks import some_slow

PLANS = {
    "level 0": (mlp, {"level": 0}),
    "level 1": (mlp, {"level": 1}),
    "level 2": (attention, {"level": 2}),
    "recursive": (attention, {"level": 2, "search_mode": "recursive_programming"}),
    "within a limit": (attention, {"level": 2, "memory_limit": 190_000}),
}


def loose(made):
    """All that a plan decides."""
    return (
        made.axes,
        [d.strategy for d in (*made.inputs, *made.outputs)],
        made.constraints,
        made.cost,
        made.policy,
        made.gap,
    )


def tight(seed: int, nodes: int = 24):
    """Many tables and a limit in the middle of what can be held: nothing is proved at once."""
    rng = np.random.default_rng(seed)
    costs, usages = rng.uniform(0, 30, (2, nodes, 5))
    pairs = [(a, b) for a, b in itertools.combinations(range(nodes), 2) if rng.random() < 0.4]
    tables = [((a, b), rng.uniform(0, 30, 25).tolist()) for a, b in pairs]
    alive = [(start, start + 8) for start in rng.integers(0, 8, nodes).tolist()]
    return labelling(costs.tolist(), usages.tolist(), alive, tables, limit=5.5 * nodes)


@pytest.mark.parametrize("case", some_slow([*PLANS], {"level 0", "level 1", "level 2", "within a limit"}))
def test_plan_under_a_slow_clock_is_the_same(case, monkeypatch):
    module, options = PLANS[case]
    function, args = abstract(module.make, batch=64)
    plan = lambda: shardfn.plan(function, *args, device="h100:8", **options)  # noqa: E731
    first, clock = loose(plan()), itertools.count(0.0, 1e4)
    for name in ("monotonic", "perf_counter", "time", "process_time"):
        monkeypatch.setattr(time, name, lambda: next(clock))
    assert loose(plan()) == first


def test_solve_without_a_time_limit_reads_no_clock(monkeypatch):
    def stopped():
        raise AssertionError("the clock was read")

    monkeypatch.setattr(budgets.time, "monotonic", stopped)
    assert math.isfinite(solve(tight(1), Budget(3e6)).cost)
    with pytest.raises(AssertionError, match="the clock was read"):
        solve(tight(1), Budget(3e6, seconds=60.0))


@pytest.mark.slow
def test_solve_within_a_budget_ends_at_the_same_step_and_improves_with_it():
    bounds = []
    for work in (1e5, 1e7, 1e8):
        whole = Budget(2 * work)
        first, second = solve(tight(2), Budget(work)), solve(tight(2), whole.part(0.5))
        assert (first.choice, first.bound) == (second.choice, second.bound)
        assert first.feasible and not first.proved
        assert work <= whole.spent < 1.2 * work + 5e6, work  # a step that has begun is ended
        bounds.append((first.cost, -first.bound))
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[-1]


def test_budget_counts_the_work_of_every_part():
    problem = tight(3)
    for run in (
        lambda b: solve(problem, b, Effort(rounds=1, steps=2, parts=0)),
        lambda b: solve(problem, b, Effort(rounds=1, steps=2, parts=2)),
        lambda b: least_peak(problem, b, steps=2),
    ):
        spent = Budget()
        run(spent)
        assert spent.spent > 1e4

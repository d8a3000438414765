"""The memory lower bound, from which a search knows that a program fits nowhere."""

import dataclasses

import pytest

from examples.models import abstract, dlrm, gpt2, mlp
from shardfn.search import baselines
from shardfn.search.feasibility import memory_lower_bound
from tests.search.problems import planned_problem


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda size: mlp.make(**size), {"batch": 64, "train": True}),
        pytest.param(gpt2.make, dataclasses.replace(gpt2.TINY, scan=True, layers=2), marks=pytest.mark.slow),
        (dlrm.make, dlrm.small()),
    ],
)
def test_memory_lower_bound_is_below_every_baseline_and_near_the_least(make, size):
    function, args = abstract(make, size)
    problem = planned_problem(function, *args, level=1, device="h100:8", donate_argnums=0)
    peaks = [c.cost.memory.peak for c in baselines.evaluated_baselines(dataclasses.replace(problem, level=2))]
    assert min(peaks) >= min(memory_lower_bound(problem), memory_lower_bound(problem, True))
    assert min(peaks) >= 0.8 * memory_lower_bound(problem)

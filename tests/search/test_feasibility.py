"""Programs that fit nowhere: an even share of what they hold is a bound, and no search for least memory is begun for them."""

import dataclasses

import jax
import pytest

from examples.models import abstract, dlrm, gpt2, mlp
from shardfn.cost.memory.live_ranges import memory
from shardfn.ir.model import PartitionedProgram
from shardfn.search import baselines, constrained_candidates, exact
from shardfn.search.feasibility import SCHEDULED_SHARE, UNSCHEDULED_SHARE, is_infeasible, memory_lower_bound
from tests.search.problems import planned_problem

TRAINED = {"batch": 64, "train": True}


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda size: mlp.make(**size), TRAINED),
        pytest.param(gpt2.make, dataclasses.replace(gpt2.TINY, scan=True, layers=2), marks=pytest.mark.slow),
        (dlrm.make, dlrm.small()),
    ],
)
def test_no_flow_holds_less_than_an_even_share(make, size):
    function, args = abstract(make, size)
    problem = planned_problem(function, *args, level=1, device="h100:8", donate_argnums=0)
    peaks = [c.cost.memory.peak for c in baselines.evaluated_baselines(dataclasses.replace(problem, level=2))]
    assert min(peaks) >= min(memory_lower_bound(problem), memory_lower_bound(problem, True))
    assert min(peaks) >= 0.8 * memory_lower_bound(problem)


def test_an_even_share_is_that_on_the_chip():
    def narrow(x, w):
        return (x @ w).sum()

    args = jax.ShapeDtypeStruct((256, 2**13), "float32"), jax.ShapeDtypeStruct((2**13, 256), "float32")
    shares = {}
    for device in ("a100:8", "h100:8"):  # an A100 makes fewer parts of a product
        problem = planned_problem(narrow, *args, level=2, device=device)
        whole = PartitionedProgram(
            problem.graph, tuple(((),) * len(v.shape) for v in problem.graph.values), {}, (), "cuda"
        )
        shares[device] = memory_lower_bound(problem)
        assert shares[device] == memory(whole, (), problem.hardware.chip).peak / 8
    assert shares["a100:8"] < shares["h100:8"]


@pytest.mark.parametrize(("device", "of_share", "nowhere"), [
    ("h100:8", 0.9 * UNSCHEDULED_SHARE, True), ("h100:8", 0.9 * SCHEDULED_SHARE, True), ("h100:8", 1.0, False), ("tpu-v5e:2x4", 0.1, False),
])  # fmt: skip
def test_a_program_fits_nowhere_whose_even_share_is_clearly_more_than_the_limit(device, of_share, nowhere):
    function, args = abstract(mlp.make, **TRAINED)
    problem = planned_problem(function, *args, level=2, device=device, donate_argnums=0)
    share = min(memory_lower_bound(problem), memory_lower_bound(problem, True))
    assert is_infeasible(dataclasses.replace(problem, memory_limit=of_share * share)) == nowhere


def test_what_fits_nowhere_is_mended_to_what_holds_least_alone():
    function, args = abstract(mlp.make, **TRAINED)
    problem = planned_problem(function, *args, level=2, device="h100:8", donate_argnums=0)
    small = dataclasses.replace(problem, memory_limit=0.5 * memory_lower_bound(problem))
    budget = exact.budget_of(small)
    (found,) = exact.solve_mesh(small, (("a", 8),), budget)
    made = constrained_candidates.fully_constrained(small, found)
    (least,) = exact.less_memory(small, found, made, budget)
    assert least.peak <= found.peak
    roomy = dataclasses.replace(problem, memory_limit=0.99 * made.cost.memory.peak)
    assert len(list(exact.less_memory(roomy, found, made, budget))) == 2

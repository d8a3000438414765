"""Programs that fit nowhere: an even share of what they hold is a bound, and no search for least memory is begun for them."""

import dataclasses
import re

import jax
import pytest

import shardfn
from examples.models import abstract, dlrm, gpt2, mlp
from shardfn.cost.memory.live_ranges import memory
from shardfn.errors import StrategyError
from shardfn.ir.model import PartitionedProgram
from shardfn.search import baselines, constrained_candidates, dynamic_programming, exact
from shardfn.search.feasibility import ROUGH, SURE, is_infeasible, memory_lower_bound
from shardfn.search.memory_limit import within_limit
from shardfn.search.problem import SearchProblem
from tests.search.test_baselines import asked

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
    problem, _ = asked(*abstract(make, size), level=1, device="h100:8", donate_argnums=0)
    peaks = [c.cost.memory.peak for c in baselines.candidates(dataclasses.replace(problem, level=2))]
    assert min(peaks) >= min(memory_lower_bound(problem), memory_lower_bound(problem, True))
    assert min(peaks) >= 0.8 * memory_lower_bound(problem)


def test_an_even_share_is_that_on_the_chip():
    def narrow(x, w):
        return (x @ w).sum()

    args = jax.ShapeDtypeStruct((256, 2**13), "float32"), jax.ShapeDtypeStruct((2**13, 256), "float32")
    shares = {}
    for device in ("a100:8", "h100:8"):  # an A100 makes fewer parts of a product
        problem, _ = asked(narrow, args, level=2, device=device)
        whole = PartitionedProgram(
            problem.graph, tuple(((),) * len(v.shape) for v in problem.graph.values), {}, (), "cuda"
        )
        shares[device] = memory_lower_bound(problem)
        assert shares[device] == memory(whole, (), problem.hardware.chip).peak / 8
    assert shares["a100:8"] < shares["h100:8"]


@pytest.mark.parametrize(("device", "of_share", "nowhere"), [
    ("h100:8", 0.9 * ROUGH, True), ("h100:8", 0.9 * SURE, True), ("h100:8", 1.0, False), ("tpu-v5e:2x4", 0.1, False),
])  # fmt: skip
def test_a_program_fits_nowhere_whose_even_share_is_clearly_more_than_the_limit(device, of_share, nowhere):
    problem, _ = asked(*abstract(mlp.make, **TRAINED), level=2, device=device, donate_argnums=0)
    share = min(memory_lower_bound(problem), memory_lower_bound(problem, True))
    assert is_infeasible(dataclasses.replace(problem, memory_limit=of_share * share)) == nowhere


@pytest.mark.parametrize(("of_share", "is_asked", "levels"), [(0.5, False, []), (0.5, True, [1]), (1.0, False, [1])])
def test_the_least_memory_is_looked_for_where_something_may_fit_or_the_limit_is_the_user_s(of_share, is_asked, levels):
    problem, _ = asked(*abstract(mlp.make, **TRAINED), level=2, device="h100:8", donate_argnums=0)
    small = dataclasses.replace(problem, memory_limit=of_share * memory_lower_bound(problem))
    answer, searched = dynamic_programming.search(problem), []

    def search(again):
        searched.append(again.level)
        return answer

    if is_asked:
        with pytest.raises(StrategyError, match="no layout found holds"):
            within_limit(small, answer, search, is_asked)
    else:
        assert within_limit(small, answer, search, is_asked) is answer
    assert searched[:1] == levels


def test_a_limit_that_nothing_can_keep_is_refused_after_a_first_look(monkeypatch):
    function, args = abstract(mlp.make, **TRAINED)
    options = {"level": 2, "device": "h100:8", "donate_argnums": 0}
    problem, _ = asked(function, args, **options)
    limit = int(0.5 * memory_lower_bound(problem))
    flows, cost = [], SearchProblem.evaluate
    for small in (500, 5):
        monkeypatch.setattr("shardfn.search.effort.SMALL_OPS", small)
        priced = []
        with monkeypatch.context() as patch:
            patch.setattr(SearchProblem, "evaluate", lambda *a, priced=priced: priced.append(a[1:]) or cost(*a))
            with pytest.raises(StrategyError, match="no layout found holds") as error:
                shardfn.plan(function, *args, memory_limit=limit, **options)
        flows.append(len({repr(key) for key in priced}))
    least = int(re.findall(r"memory_limit=(\d+)", str(error.value))[0])
    assert "; the largest: " in str(error.value)
    assert flows[1] < min(30, flows[0] / 2), flows
    assert shardfn.plan(function, *args, memory_limit=least, **options).cost.memory.peak <= least


def test_what_fits_nowhere_is_mended_to_what_holds_least_alone(monkeypatch):
    problem, _ = asked(*abstract(mlp.make, **TRAINED), level=2, device="h100:8", donate_argnums=0)
    small = dataclasses.replace(problem, memory_limit=0.5 * memory_lower_bound(problem))
    budget = exact.budget_of(small)
    (found,) = exact.solve_mesh(small, (("a", 8),), budget)
    made = constrained_candidates.candidate(small, found)
    (least,) = exact.less_memory(small, found, made, budget)
    assert least.peak <= found.peak
    roomy = dataclasses.replace(problem, memory_limit=0.99 * made.cost.memory.peak)
    assert len(list(exact.less_memory(roomy, found, made, budget))) == 2

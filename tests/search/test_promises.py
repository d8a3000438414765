"""What is priced of what was found: how its ops are held, and what else where the flow is worse than the model promised."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

import shardfn
from examples.models import abstract, mlp
from shardfn.search import choose, dynamic, forget, plain
from shardfn.search.levels import totals
from shardfn.search.problem import objective
from shardfn.search.solver.budget import Budget

WIDE = {"batch": 512, "d_in": 1024, "d_hidden": 4096, "d_out": 1024, "train": True}
"""Weights that are dear to gather beside the batch."""


def asked_and_made(level=2, device="tpu-v5e:2x4"):
    problems = []
    shardfn.register_search("listening", lambda problem: problems.append(problem) or dynamic.search(problem))
    try:
        fn, args = abstract(mlp.make, **WIDE)
        made = shardfn.plan(fn, *args, device=device, search_mode="listening", level=level, donate_argnums=0)
    finally:
        forget("listening")
    return problems[0], made


@pytest.mark.parametrize("level", [0, 2])
def test_how_a_product_reads_its_operands_is_left_to_the_compiler(level):
    """On a TPU what is gathered for a product travels as bf16, but as f32 where the operand itself is held whole."""
    problem, made = asked_and_made(level)
    found = next(dynamic.on_grid(problem, (("a", 8),), Budget()))
    loose, held = next(choose.candidates(problem, found)), choose.candidate(problem, found)
    assert loose.pins and all(spec is None for pin in loose.pins.values() for spec in pin.operands)
    assert {problem.graph.ops[i].name for i in loose.pins} == {"dot_general"}
    assert loose.price.bytes_sent < held.price.bytes_sent
    assert objective(made.price, problem) <= objective(loose.price, problem)


def test_a_flow_that_keeps_its_promise_is_enough(monkeypatch):
    problem, _ = asked_and_made()
    found = next(dynamic.on_grid(problem, (("a", 8),), Budget()))
    loose = next(choose.candidates(problem, found)).price
    full = loose.memory.peak
    cases = [  # whether it works as found, the peak as found, the limit, the best so far in seconds, candidates
        (True, full, full, math.inf, 1),
        (False, full, full, math.inf, 2),
        (True, full - 1, full - 1, math.inf, 2),  # it was to fit
        (True, full, full - 1, math.inf, 1),
        (False, full, full, 0.1 * loose.time_s, 1),
    ]
    for kept, peak, limit, best_s, count in cases:
        monkeypatch.setattr(choose, "works_as_found", lambda *_, kept=kept: kept)
        monkeypatch.setattr(choose.Found, "peak", peak)
        limited = dataclasses.replace(problem, memory_limit=limit)
        assert len(list(choose.candidates(limited, found, best_s))) == count, (kept, peak, limit, best_s)


@pytest.mark.parametrize("kept", [True, False])
def test_where_all_disappoint_the_grid_of_one_axis_is_priced_too(monkeypatch, kept):
    problem, _ = asked_and_made()
    found = [next(dynamic.on_grid(problem, axes, Budget())) for axes in ((("a", 4), ("b", 2)), (("a", 8),))]
    monkeypatch.setattr(choose, "PLAIN", 0)
    monkeypatch.setattr(choose, "keeps_promise", lambda *_: kept)
    monkeypatch.setattr(choose, "weighed", lambda problem: 1)
    monkeypatch.setattr(choose, "priced", lambda problem: 1)
    tried, candidates = [], choose.candidates
    monkeypatch.setattr(
        choose, "candidates", lambda problem, one, *far: tried.append(one) or candidates(problem, one, *far)
    )
    choose.answer_of(problem, found, "a search", lambda *_: ())
    assert tried == found[: 1 if kept else 2]


@pytest.mark.parametrize(
    ("level", "kept", "plain_ops", "is_asked"),
    [(0, True, 0, False), (0, False, 0, True), (0, True, 500, True), (2, True, 500, True), (2, False, 0, False)],
)
def test_what_was_found_for_the_other_aim_is_priced_where_flows_disappoint_and_for_small_programs(
    monkeypatch, level, kept, plain_ops, is_asked
):
    problem, _ = asked_and_made(level)
    found = [next(dynamic.on_grid(problem, (("a", 8),), Budget()))]
    monkeypatch.setattr(choose, "PLAIN", plain_ops)
    monkeypatch.setattr(choose, "keeps_promise", lambda *_: kept)
    turned = []

    def turn(problem, one):
        turned.append(one)
        return dynamic.turned(problem, one, Budget())

    choose.answer_of(problem, found, "a search", lambda *_: (), turn=turn)
    assert turned == (found if is_asked else [])


@pytest.mark.parametrize("level", [0, 2])
def test_the_layout_for_the_other_aim_costs_what_it_costs_at_the_problem_s_own(level):
    problem, _ = asked_and_made(level)
    axes = (("a", 4), ("b", 2))
    own = next(dynamic.on_grid(problem, axes, Budget()))
    (other,) = dynamic.turned(problem, own, Budget())
    theirs = next(dynamic.on_grid(dataclasses.replace(problem, level=2 - level), axes, Budget()))
    assert other.labels is own.labels and not other.solution.proved
    assert own.solution.cost <= other.solution.cost + 1e-12
    if level == 0:
        aims = [totals(f.space, f.solution.choice) for f in (other, own)]
        assert aims[0].sent >= aims[1].sent
        assert other.solution.choice == theirs.solution.choice


@pytest.mark.parametrize("kept", [True, False])
def test_beside_a_large_program_s_plan_that_disappoints_stand_those_of_the_batch(monkeypatch, kept):
    monkeypatch.setattr(choose, "LARGE", 0)
    monkeypatch.setattr(choose, "PLAIN", 0)
    monkeypatch.setattr(choose, "keeps_promise", lambda *_: kept)
    tried = []
    monkeypatch.setattr(plain, "of_batch", lambda problem, real=plain.of_batch: tried.extend(real(problem)) or tried)
    problem, made = asked_and_made()
    assert bool(tried) != kept
    assert all(objective(made.price, problem) <= objective(c.price, problem) for c in tried)


def test_a_promise_is_what_is_sent_and_computed():
    problem, _ = asked_and_made()
    found = next(dynamic.on_grid(problem, (("a", 8),), Budget()))
    made = choose.candidate(problem, found)
    sums = choose.totals(found.space, found.solution.choice)
    of = lambda **figures: SimpleNamespace(price=SimpleNamespace(**{  # noqa: E731
        "memory": SimpleNamespace(peak=0), "flops": sums.flops, "communication_s": sums.sent_s, "time_s": 1e-3,
        "bytes_sent": sums.sent, **figures}))  # fmt: skip
    assert made.price.flops and choose.keeps_promise(problem, found, of())
    assert choose.keeps_promise(problem, found, of(time_s=2e-3)), "more work beside products is no broken promise"
    for broken in ({"flops": 1.2 * sums.flops}, {"communication_s": sums.sent_s + 1e-4},
                   {"memory": SimpleNamespace(peak=1e15)}):  # fmt: skip
        assert not choose.keeps_promise(problem, found, of(**broken)), broken

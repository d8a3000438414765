"""Candidates of a mesh solution: which ops get constraints, and how they compare with the estimate."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import shardfn
import shardfn.mindspore
from examples.models import abstract, mlp
from examples.models.families import FAMILIES
from shardfn.search.constrained_candidates import FOLLOWING_OPS, constrained_candidates, fully_constrained
from shardfn.search.exact import other_objective, solve_mesh
from shardfn.search.level_costs import totals
from shardfn.search.mesh_solution import estimate_holds
from shardfn.search.problem import Memo, objective
from shardfn.solver.budget import Budget
from tests.search.problems import planned_problem


def trained(level=2, device="tpu-v5e:2x4"):
    made = shardfn.plan(*mlp_step(), device=device, level=level, donate_argnums=0)
    return made._study.problem, made


def mlp_step():
    function, args = abstract(mlp.make, **WIDE)
    return function, *args


WIDE = {"batch": 512, "d_in": 1024, "d_hidden": 4096, "d_out": 1024, "train": True}
"""Weights that are dear to gather beside the batch."""


@pytest.mark.parametrize("level", [0, 2])
def test_how_a_product_reads_its_operands_is_left_to_the_compiler(level):
    """On a TPU what is gathered for a product travels as bf16, but as f32 where the operand itself is held whole."""
    problem, made = trained(level)
    found = next(solve_mesh(problem, (("a", 8),), Budget()))
    loose, held = next(constrained_candidates(problem, found)), fully_constrained(problem, found)
    assert loose.constraints and all(
        spec is None for constraint in loose.constraints.values() for spec in constraint.operands
    )
    assert {problem.graph.ops[i].name for i in loose.constraints} == {"dot_general"}
    assert loose.cost.bytes_sent < held.cost.bytes_sent
    assert objective(made.cost, problem) <= objective(loose.cost, problem)


def test_work_is_spread_where_that_of_products_is_where_these_are_most():
    """What each device does beside them, as an update of small weights, is worth no bytes."""
    problem, _ = trained(0)
    assert 2 * problem.facts.matrix_flops > problem.facts.flops, "most are of products"
    even, beside = problem.facts.matrix_flops / 8, 3 * problem.facts.flops / 8
    assert problem.imbalance(even + beside, even) == 0
    assert problem.imbalance(2 * even, 2 * even) == pytest.approx(2 / 1.1 - 1, abs=0.01)
    facts = dataclasses.replace(problem.facts, matrix_flops=0.1 * problem.facts.flops)
    other = dataclasses.replace(problem, memo=Memo(facts=facts))
    assert other.imbalance(2 * problem.facts.flops / 8, 0.0) == pytest.approx(2 / 1.1 - 1, abs=0.01)


@pytest.mark.parametrize("level", [0, 2])
def test_the_layout_for_the_other_aim_costs_what_it_costs_at_the_problem_s_own(level):
    problem, _ = trained(level)
    axes = (("a", 4), ("b", 2))
    own = next(solve_mesh(problem, axes, Budget()))
    other, cut = other_objective(problem, own, Budget())
    assert cut.is_fully_sharded and cut.solution.cost >= own.solution.cost
    theirs = next(solve_mesh(dataclasses.replace(problem, level=2 - level), axes, Budget()))
    assert other.labels is own.labels and not other.solution.proved
    assert own.solution.cost <= other.solution.cost + 1e-12
    if level == 0:
        aims = [totals(f.space, f.solution.choice) for f in (other, own)]
        assert aims[0].sent >= aims[1].sent * (1 - 1e-5)  # bytes that a tie of idle devices is worth
        assert other.solution.choice == theirs.solution.choice


S = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731


def test_pieces_of_a_scale_do_not_spread_to_the_activation_that_it_meets():
    """What is read whole is held to that where a sum or a product reads it: it is gathered, not the activation."""
    args = S(8192, 1024), S(1024), S(1024), S(1024, 4096)
    on = shardfn.mindspore.Layout((4, 2), ("data", "model"))
    given = on("data", "None"), on("model"), on("model"), on("None", "model")
    problem = planned_problem(
        lambda x, scale, shift, up: jnp.tanh(x * scale + shift) @ up, *args, device="h100:8", level=2, in_strategy=given
    )
    found = next(solve_mesh(problem, problem.axes, Budget()))
    made, loose = fully_constrained(problem, found), next(constrained_candidates(problem, found))
    held = {i: constraint for i, constraint in made.constraints.items() if problem.graph.ops[i].name in FOLLOWING_OPS}
    assert len(held) == 2 and all(constraint.results == (None,) for constraint in held.values())
    assert held.items() <= loose.constraints.items()
    without = problem.evaluate(
        made.axes, made.specs, {i: constraint for i, constraint in made.constraints.items() if i not in held}
    )
    assert made.cost.bytes_sent == 2 * 512 * 4 < without.bytes_sent / 100


def test_a_promise_is_what_is_sent_and_computed():
    problem, _ = trained()
    found = next(solve_mesh(problem, (("a", 8),), Budget()))
    made = fully_constrained(problem, found)
    sums = totals(found.space, found.solution.choice)
    of = lambda **figures: SimpleNamespace(cost=SimpleNamespace(**{  # noqa: E731
        "memory": SimpleNamespace(peak=0), "flops": sums.flops, "communication_s": sums.sent_s, "time_s": 1e-3,
        "bytes_sent": sums.sent, **figures}))  # fmt: skip
    assert made.cost.flops and estimate_holds(problem, found, of())
    assert estimate_holds(problem, found, of(time_s=2e-3)), "more work beside products is no broken promise"
    for broken in ({"flops": 1.2 * sums.flops}, {"communication_s": sums.sent_s + 1e-4},
                   {"memory": SimpleNamespace(peak=1e15)}):  # fmt: skip
        assert not estimate_holds(problem, found, of(**broken)), broken


def test_plan_of_a_vision_transformer_sends_less_than_the_hand_written_one():
    """Followers of decisions, such as a layer norm's sums, need constraints too."""
    family = FAMILIES["vit"]
    size = dataclasses.replace(family.small, layers=1)
    fn, args = family.on_paper(size)
    options = {"device": "cpu:8", "donate_argnums": family.donated}
    hand = family.hand_written(size, 8)["data x tensor, 4 x 2"]
    by_hand = shardfn.plan(hand.written(fn), *args, in_strategy=hand.in_strategy, **options)
    assert shardfn.plan(fn, *args, level=0, **options).cost.bytes_sent < by_hand.cost.bytes_sent

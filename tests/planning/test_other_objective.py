"""`Plan.at`: the plan of the same call for another objective."""

import pickle

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.planning.plan import answered_call
from shardfn.search.problem import OBJECTIVES, is_no_worse, search_problem
from tests.messages import refusal, told
from tests.search.problems import S


def layers(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x[:, 1:] - x[:, :-1]


ARGS = [S((256, 256), jnp.float32)] * 2, S((64, 256), jnp.float32)


def conv(x, k):
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")


def rank(plan, level):
    problem = answered_call(plan).problem.at(level)
    return search_problem.objective(plan.cost, problem)


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize("first", range(3))
def test_it_is_no_worse_than_a_plan_from_the_start_nor_than_the_first_plan(first, level):
    plan = shardfn.plan(layers, *ARGS, device="h100:8", level=first)
    other = plan.at(OBJECTIVES[level])
    assert other.level == level and plan.level == first and other == plan.at(level)
    alone = shardfn.plan(layers, *ARGS, device="h100:8", level=level)
    assert is_no_worse(rank(other, level), rank(alone, level), 1e-6)
    assert is_no_worse(rank(other, level), rank(plan, level), 1e-6)


def test_what_was_evaluated_is_not_evaluated_again(monkeypatch):
    evaluated = []
    estimate = search_problem.estimate_cost
    monkeypatch.setattr(search_problem, "estimate_cost", lambda *args: evaluated.append(1) or estimate(*args))
    plan = shardfn.plan(lambda x, w: x @ w, *ARGS[0], device="h100:8")
    before = len(evaluated)
    assert plan.at("communication") == plan and len(evaluated) - before <= 1
    alone = len(evaluated)
    shardfn.plan(lambda x, w: x @ w, *ARGS[0], device="h100:8", level="time")
    alone, before = len(evaluated) - alone, len(evaluated)
    plan.at("time")
    assert len(evaluated) - before < alone


def test_entries_are_kept_and_a_workaround_too():
    plan = shardfn.plan(conv, S((8, 8, 16, 16), jnp.float32), S((8, 8, 3, 3), jnp.float32),
                        in_strategy=((1, 1, 2, 1), (8, 1, 1, 1)), device="cpu:8")  # fmt: skip
    other = plan.at("time")
    assert [d.strategy for d in other.inputs] == [(1, 1, 2, 1), (8, 1, 1, 1)]
    assert any("shardfn gathers" in note for note in other.diagnostics)


def test_a_plan_with_shifts_is_one_of_the_other_objective_where_no_row_moves():
    def diffused(x):
        for _ in range(2):
            x = x.at[1:-1].add(x[2:] + x[:-2] - 2 * x[1:-1])
        return x

    shapes = S((1024, 64), jnp.float32)
    plan = shardfn.plan(diffused, shapes, device="h100:8", level="memory")
    other = plan.at("time")
    as_written = [answered_call(one).posed.call.function.is_as_written for one in (plan, other)]
    assert as_written == [False, True] and other.level == 2
    assert other.gap is not None and other == shardfn.plan(diffused, shapes, device="h100:8", level="time")


def test_a_wrong_objective_and_a_pickled_plan_are_refused():
    plan = shardfn.plan(jnp.sin, S((8,), jnp.float32), device="h100:8")
    assert "did you mean 'time'?" in str(refusal(plan.at, "tiem"))
    assert told(refusal(plan.at, 3)) == "StrategyError: level"
    assert "was pickled" in str(refusal(pickle.loads(pickle.dumps(plan)).at, "time"))


def test_no_level_is_refused():
    plan = shardfn.plan(jnp.sin, S((8,), jnp.float32), device="h100:8")
    assert told(refusal(plan.at, None)) == "StrategyTypeError: level"

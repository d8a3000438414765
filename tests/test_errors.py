"""Errors: how problems are told, and what an except clause can catch."""

import inspect
import pickle

import jax
import numpy as np
import pytest

from shardfn import errors
from shardfn.errors import Problem, ShardError, StrategyError, StrategyTypeError, a, fail, raise_problems

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ShardError) and kind is not ShardError
]
FULL = Problem("`w1` cannot be sharded", where="in_strategy[1]", why="30 is odd", fix="use 3")


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("only this"), "only this"),
        (FULL, "`w1` cannot be sharded\n  where: in_strategy[1]\n  why:   30 is odd\n  fix:   use 3"),
        (Problem("no reason", fix="use 3"), "no reason\n  fix:   use 3"),
    ],
)
def test_a_problem_tells_what_it_knows(problem, text):
    assert str(problem) == str(ShardError(problem)) == text


def test_several_problems_are_numbered_and_indented():
    assert str(ShardError([FULL, Problem("another")])) == (
        "2 problems:\n1. `w1` cannot be sharded\n     where: in_strategy[1]\n     why:   30 is odd\n     fix:   use 3\n2. another"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_builtin_one_too(kind):
    assert issubclass(kind, (ValueError, TypeError, RuntimeError, OSError, ImportError)), (
        "as user code expects to catch it"
    )
    assert ("Type" in kind.__name__) == issubclass(kind, TypeError)
    with pytest.raises(ShardError) as caught:
        fail(kind, "what", where="where", why="why", fix="fix")
    assert caught.type is kind
    assert caught.value.problems == (Problem("what", "where", "why", "fix"),)


@pytest.mark.parametrize(
    ("problems", "kind"),
    [
        ([], None),
        ([FULL], StrategyError),
        ([Problem("t", is_type=True)], StrategyTypeError),
        ([Problem("t", is_type=True), Problem("u", is_type=True)], StrategyTypeError),
        ([Problem("t", is_type=True), FULL], StrategyError),
    ],
)
def test_wrong_types_alone_make_a_type_error(problems, kind):
    if kind is None:
        raise_problems(problems)
        return
    with pytest.raises(ShardError) as caught:
        raise_problems(problems)
    assert (caught.type, caught.value.problems) == (kind, tuple(problems))


def test_an_error_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(StrategyError([FULL, Problem("another")])))
    assert (type(error), error.problems) == (StrategyError, (FULL, Problem("another")))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "an int"), (True, "a bool"), (1.0, "a float"), ("s", "a str"), (None, "None"), ([], "a list"),
        ({}, "a dict"), (np.zeros(1), "an ndarray"), (jax.numpy.zeros(1), "a jax.Array"), (object(), "an object"),
    ],
)  # fmt: skip
def test_a_type_with_its_article(value, text):
    assert a(value) == text

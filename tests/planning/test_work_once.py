"""What planning does once, and what it leaves out: nobody asks for it."""

import collections
import pickle

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.planning.answers import planner
from shardfn.planning.call import call_function
from shardfn.search.engine import Archive
from shardfn.search.problem import COMMUNICATION, MEMORY, TIME, Proposal, search_problem
from tests.search.problems import S, planned_problem

IMAGE, KERNEL = S((8, 8, 16, 16), jnp.float32), S((8, 8, 3, 3), jnp.float32)


def conv(x, k):
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")


@pytest.fixture
def counts(monkeypatch):
    """How often a function of a module was called."""
    found = collections.Counter()

    def count(module, name):
        function = getattr(module, name)

        def counted(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    for module, name in ((planner, "finish"), (call_function, "lower"), (search_problem, "facts_of"),
                         (search_problem, "estimate_cost")):  # fmt: skip
        count(module, name)
    return found


def test_a_call_with_workarounds_is_lowered_without_and_with_them_and_finished_once(counts):
    plan = shardfn.plan(conv, IMAGE, KERNEL, in_strategy=((1, 1, 2, 1), (8, 1, 1, 1)), device="cpu:8")
    assert any("shardfn gathers" in note for note in plan.diagnostics)
    assert counts == {"lower": 2, "finish": 1, "estimate_cost": 1}


def test_where_every_sharding_is_given_the_unsharded_program_is_not_costed(counts):
    plan = shardfn.plan(jnp.matmul, S((64, 64), jnp.float32), S((64, 64), jnp.float32),
                        in_strategy=((1, 8), (8, 1)), device="h100:8")  # fmt: skip
    assert plan.cost.bytes_sent and plan.gap is None
    assert counts == {"lower": 1, "finish": 1, "estimate_cost": 1}


def test_what_is_not_searched_is_judged_when_it_is_read_and_once(counts):
    x = jnp.ones((64, 64))
    function = shardfn.shard(jnp.matmul, ((1, 8), (8, 1)))
    function(x, x)
    assert counts == {"lower": 1, "finish": 1}
    plan = function.plan(x, x)
    copied = pickle.loads(pickle.dumps(plan))
    assert plan.cost.bytes_sent and plan.diagnostics == copied.diagnostics and plan == copied
    assert counts["estimate_cost"] == 1


def test_a_plan_that_gets_a_note_waits_as_before_and_one_that_lacks_a_field_has_its_default(counts):
    x = jnp.ones((8, 8, 16, 16))
    function = shardfn.shard(conv, ((1, 1, 2, 1), (8, 1, 1, 1)))  # a workaround, and a note on it
    function(x, jnp.ones((8, 8, 3, 3)))
    assert counts["estimate_cost"] == 0
    plan = function.plan(x, jnp.ones((8, 8, 3, 3)))
    fields = plan.__getstate__()
    del fields["entries"], fields["cost"]
    other = object.__new__(type(plan))
    vars(other).update(fields)
    assert other.entries == "" and not hasattr(other, "cost") and other.diagnostics == plan.diagnostics


@pytest.mark.parametrize("level", [MEMORY, TIME])
def test_candidates_are_compared_at_the_levels_that_somebody_asks_for(counts, level):
    problem = planned_problem(jnp.matmul, S((64, 64), jnp.float32), S((64, 64), jnp.float32), device="h100:8").at(level)
    counts.clear()
    archive = Archive(problem)
    rows, columns = ((("a",), ()), ((), ())), (((), ()), ((), ("a",)))
    for name, specs in (("rows", rows), ("columns", columns), ("whole", (((), ()), ((), ())))):
        archive.evaluate(Proposal(name, (("a", 8),), specs))
    assert archive.best(level) is archive.ranked(level)[0]
    assert "facts_of" not in counts
    assert archive.best(COMMUNICATION) is archive.ranked(COMMUNICATION)[0]
    assert [each.name for each in archive.best_of_each_mesh(COMMUNICATION)] == [archive.best(COMMUNICATION).name]


@pytest.mark.parametrize(("size", "searches"), [(1024, 0), (8, 1)])
def test_search_is_repeated_where_workarounds_cost_more_than_the_tolerance(monkeypatch, size, searches):
    """An image is gathered, which costs little memory beside a large matrix."""
    again, search = [], planner.search
    monkeypatch.setattr(planner, "search", lambda posed: again.append(posed) or search(posed))
    plan = shardfn.plan(lambda x, k, w: (conv(x, k), w @ w), IMAGE, KERNEL, S((size, size), jnp.float32),
                        in_strategy=((1, 1, 2, 1), (8, 1, 1, 1), shardfn.AUTO), device="cpu:8", level="memory")  # fmt: skip
    assert len(again) == searches
    assert searches or any("shardfn gathers" in note for note in plan.diagnostics)

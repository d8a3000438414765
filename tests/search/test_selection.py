"""What is done to an answer once it is found."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.cost.devices.chips import CHIPS
from shardfn.cost.devices.links import links
from shardfn.search.constraint_reduction import shard_sliced_arguments
from shardfn.search.label_tables import ReshardingTable
from shardfn.search.level_costs import repeated_reshardings
from shardfn.search.mesh_solution import may_beat
from shardfn.search.objectives import Rank
from shardfn.search.problem import SearchCandidate, objective
from tests.search.problems import planned_problem

S = jax.ShapeDtypeStruct


def looked_up(table, index, x):
    """Each column of `index` is looked up; the batch is cut, so that a whole `index` is sliced before it is read."""
    return sum(table[index[:, i]] for i in range(2)) + x


def test_an_argument_that_is_sliced_before_it_is_read_is_laid_out_so():
    args = S((64, 8), jnp.float32), S((16, 2), jnp.int32), S((16, 8), jnp.float32)
    problem = planned_problem(looked_up, *args, device="cpu:8", level=2)
    axes, whole, batch = (("a", 8),), ((), ()), (("a",), ())
    for specs, wanted in (((whole, whole, batch), batch), ((whole, batch, batch), batch)):
        before = SearchCandidate("", axes, specs, {}, problem.evaluate(axes, specs, {}))
        after = shard_sliced_arguments(problem, before)
        assert after.specs == (whole, wanted, batch)
        assert objective(after.cost, problem) <= objective(before.cost, problem)
        assert (after.cost.memory.peak < before.cost.memory.peak) == (specs[1] == whole)


def test_promises_compare_the_level_s_aim():
    found = SimpleNamespace(peak=1, axes=(("a", 8),), space=SimpleNamespace(reshardings=()))
    found.solution = SimpleNamespace(cost=2.0, choice=())
    problem = SimpleNamespace(
        level=2, effort=SimpleNamespace(is_large=False), memory_limit=10, hardware=CHIPS["h100"].pod(8)
    )
    assert may_beat(problem, found, Rank(0.0, (2.5,), (0,)))
    assert not may_beat(problem, found, Rank(0.0, (1.5,), (0,)))
    problem.memory_limit = 0.5
    assert not may_beat(problem, found, Rank(0.0, (2.5,), (0,)))
    problem.memory_limit, problem.level = 10, 1
    assert not may_beat(problem, found, Rank(0.0, (2.5,), (0,))), "at level 1 the model and the flow count otherwise"


@pytest.mark.parametrize(
    ("ends", "again"), [([(0, 1), (0, 2), (0, 3)], 2), ([(0, 3), (1, 3), (2, 3)], 0), ([(0, 1), (2, 3)], 0)]
)
def test_what_is_moved_again_and_again_may_be_launched_once(ends, again):
    """The slices of one value move each by itself in the model; a flow moves the value, and launches one collective."""
    sent = np.array([[0.0, 64.0], [64.0, 0.0]])
    edges = tuple(ReshardingTable(*pair, sent, sent) for pair in ends)
    choice = tuple(int(node in {b for _, b in ends}) for node in range(4))
    space = SimpleNamespace(reshardings=edges)
    assert repeated_reshardings(space, choice) == again
    assert repeated_reshardings(space, (0, 0, 0, 0)) == 0, "nothing moves"
    hardware = CHIPS["h100"].pod(8)
    (link,) = links(hardware, (("a", 8),))
    found = SimpleNamespace(peak=1, axes=(("a", 8),), space=space, solution=SimpleNamespace(cost=2.0, choice=choice))
    problem = SimpleNamespace(level=2, effort=SimpleNamespace(is_large=False), memory_limit=10, hardware=hardware)
    best = 2.0 - 1.5 * link.latency_s
    assert may_beat(problem, found, Rank(0.0, (best,), (0,))) == (again > 1)


def test_where_a_plain_layout_wins_what_is_proved_of_the_model_is_said():
    """Of the memory of level 1 the model tells too little."""

    def norm(x, w):
        return (x - x.mean(0)) / x.std(0) @ w

    args = S((64, 64), jnp.float32), S((64, 8), jnp.float32)
    made = shardfn.plan(norm, *args, device="cpu:8", level=2)
    wins = (
        "the optimum of the cost model on the mesh 8 is proved; a baseline has the lower cost: w dim 1 sharded 8 ways"
    )
    assert made.policy.startswith(f"exact search at level 2, meshes tried: 8, 4x2; {wins}")
    least = shardfn.plan(norm, *args, device="cpu:8", level=1)
    assert "a baseline has the lower cost" in least.policy and "proved" not in least.policy

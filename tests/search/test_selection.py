"""What is done to an answer once it is found."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.cost.devices.chips import CHIPS
from shardfn.cost.devices.links import links
from shardfn.ir.model import OpConstraint
from shardfn.search import constraint_reduction, default_policy, effort, forget, selection
from shardfn.search.constraint_reduction import shard_sliced_arguments
from shardfn.search.label_tables import ReshardingTable
from shardfn.search.level_costs import repeated
from shardfn.search.objectives import Rank
from shardfn.search.problem import Memo, SearchCandidate, objective

S = jax.ShapeDtypeStruct


def looked_up(table, index, x):
    """Each column of `index` is looked up; the batch is cut, so that a whole `index` is sliced before it is read."""
    return sum(table[index[:, i]] for i in range(2)) + x


def test_an_argument_that_is_sliced_before_it_is_read_is_laid_out_so():
    problems = []
    shardfn.register_search("listening", lambda problem: problems.append(problem) or default_policy.search(problem))
    try:
        args = S((64, 8), jnp.float32), S((16, 2), jnp.int32), S((16, 8), jnp.float32)
        shardfn.plan(looked_up, *args, device="cpu:8", search_mode="listening", level=2)
    finally:
        forget("listening")
    (problem,) = problems
    axes, whole, batch = (("a", 8),), ((), ()), (("a",), ())
    for specs, wanted in (((whole, whole, batch), batch), ((whole, batch, batch), batch)):
        before = SearchCandidate("", axes, specs, {}, problem.evaluate(axes, specs, {}))
        after = shard_sliced_arguments(problem, before)
        assert after.specs == (whole, wanted, batch)
        assert objective(after.cost, problem) <= objective(before.cost, problem)
        assert (after.cost.memory.peak < before.cost.memory.peak) == (specs[1] == whole)


def test_what_promises_more_than_the_best_flow_so_far_is_priced_too(monkeypatch):
    """Of a large program one flow is priced, unless the model holds something else for better than it turned out."""
    monkeypatch.setattr("shardfn.search.effort.FLOWS", 1)
    monkeypatch.setattr("shardfn.search.effort.SMALL_OPS", 0)
    monkeypatch.setattr(selection, "estimate_holds", lambda *_: True)
    tried = []
    candidates = selection.candidates
    monkeypatch.setattr(
        selection, "candidates", lambda problem, one, *far: tried.append(one) or candidates(problem, one, *far)
    )

    def step(w, x):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    def plan():
        tried.clear()
        return shardfn.plan(step, S((512, 512), jnp.float32), S((256, 512), jnp.float32), device="cpu:8", level=2)

    plan()
    few = len(tried)
    monkeypatch.setattr(selection, "may_beat", lambda *_: True)
    plan()
    assert few <= len(tried) <= effort.MOST and len(tried) > 1


def test_promises_compare_the_level_s_aim():
    found = SimpleNamespace(peak=1, axes=(("a", 8),), space=SimpleNamespace(edges=()))
    found.solution = SimpleNamespace(cost=2.0, choice=())
    problem = SimpleNamespace(level=2, is_large=False, memory_limit=10, hardware=CHIPS["h100"].pod(8))
    assert selection.may_beat(problem, found, Rank(0.0, (2.5,), (0,)))
    assert not selection.may_beat(problem, found, Rank(0.0, (1.5,), (0,)))
    problem.memory_limit = 0.5
    assert not selection.may_beat(problem, found, Rank(0.0, (2.5,), (0,)))
    problem.memory_limit, problem.level = 10, 1
    assert not selection.may_beat(problem, found, Rank(0.0, (2.5,), (0,))), (
        "at level 1 the model and the flow count otherwise"
    )


@pytest.mark.parametrize(
    ("ends", "again"), [([(0, 1), (0, 2), (0, 3)], 2), ([(0, 3), (1, 3), (2, 3)], 0), ([(0, 1), (2, 3)], 0)]
)
def test_what_is_moved_again_and_again_may_be_launched_once(ends, again):
    """The slices of one value move each by itself in the model; a flow moves the value, and launches one collective."""
    sent = np.array([[0.0, 64.0], [64.0, 0.0]])
    edges = tuple(ReshardingTable(*pair, sent, sent) for pair in ends)
    choice = tuple(int(node in {b for _, b in ends}) for node in range(4))
    space = SimpleNamespace(edges=edges)
    assert repeated(space, choice) == again
    assert repeated(space, (0, 0, 0, 0)) == 0, "nothing moves"
    hardware = CHIPS["h100"].pod(8)
    (link,) = links(hardware, (("a", 8),))
    found = SimpleNamespace(peak=1, axes=(("a", 8),), space=space, solution=SimpleNamespace(cost=2.0, choice=choice))
    problem = SimpleNamespace(level=2, is_large=False, memory_limit=10, hardware=hardware)
    best = 2.0 - 1.5 * link.latency_s
    assert selection.may_beat(problem, found, Rank(0.0, (best,), (0,))) == (again > 1)


@pytest.mark.parametrize("operands", [True, False])
@pytest.mark.parametrize(("read_whole", "asked"), [(True, []), (False, [{}])])
def test_a_large_program_that_gathers_arguments_is_not_tried_without_what_holds_it(
    read_whole, asked, operands, monkeypatch
):
    """Propagation alone would hand the cut of the weights on: that flow costs much and wins nothing."""
    problems = []
    shardfn.register_search("listening", lambda problem: problems.append(problem) or default_policy.search(problem))
    try:
        shardfn.plan(jnp.matmul, S((16, 8), jnp.float32), S((8, 64), jnp.float32), device="h100:8",
                     search_mode="listening", level=2)  # fmt: skip
    finally:
        forget("listening")
    (problem,) = problems
    monkeypatch.setattr("shardfn.search.effort.LARGE_OPS", 0)
    axes, rows, columns, whole = (("a", 8),), (("a",), ()), ((), ("a",)), ((), ())
    dot = next(i for i, op in enumerate(problem.graph.ops) if op.name == "dot_general")
    specs, reads = ((rows, columns), (rows, whole)) if read_whole else ((rows, whole), (rows, whole))
    constraints = {dot: OpConstraint(reads if operands else (None, None), (rows,))}
    held = SearchCandidate("", axes, specs, constraints, problem.evaluate(axes, specs, constraints))
    asked_of = []
    partition = lambda axes, specs, pins, ends: asked_of.append(pins) or problem.partition(axes, specs, pins, ends)  # noqa: E731
    found = constraint_reduction.drop_redundant_constraints(
        dataclasses.replace(problem, partition=partition, memo=Memo()), held
    )
    assert asked_of == asked and bool(found.constraints) == read_whole


def test_where_a_plain_layout_wins_what_is_proved_of_the_model_is_said():
    """Of the memory of level 1 the model tells too little."""

    def norm(x, w):
        return (x - x.mean(0)) / x.std(0) @ w

    args = S((64, 64), jnp.float32), S((64, 8), jnp.float32)
    made = shardfn.plan(norm, *args, device="cpu:8", level=2)
    wins = (
        "the optimum of the cost model on the grid 8 is proved; a plain layout has the better flow: w dim 1 cut 8 ways"
    )
    assert made.policy.startswith(f"exact search at level 2, grids tried: 8, 4x2; {wins}")
    least = shardfn.plan(norm, *args, device="cpu:8", level=1)
    assert "a plain layout has the better flow" in least.policy and "proved" not in least.policy

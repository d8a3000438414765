"""The exact search: the price of changing a layout, and its plans against the simple policy's."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from examples.models import abstract, attention, mlp
from shardfn.cost.devices.hardware import resolve
from shardfn.ir.model import OpConstraint
from shardfn.search import BASELINES, GENERATORS
from shardfn.search.engine import run
from shardfn.search.labels import LEAST_SENT, LEAST_TIME, MeshModel, build, estimated_rank, resharding_cost
from shardfn.search.labels.mesh_model import spec_of_label
from shardfn.search.labels.op_labels import value_labels
from shardfn.search.problem import TIME, objective
from tests.search.problems import S, planned_problem, problem_of, two_layers

EXACT = {"search_mode": "dynamic_programming"}


def test_resharding_cost_is_that_of_its_collectives():
    mesh = MeshModel.on(resolve("h100:4"), (("a", 4),))
    labels = value_labels((8, 8), mesh.sizes)  # replicated, rows, columns
    sent, seconds = resharding_cost(labels, labels, 256.0, mesh)
    assert labels.tolist() == [[-1], [0], [1]]
    assert sent.tolist() == [[0, 0, 0], [192, 0, 48], [192, 48, 0]]
    assert (seconds > 0).tolist() == (sent > 0).tolist()
    narrow, _ = resharding_cost(labels, labels, 256.0, mesh, 0.5)
    assert narrow.tolist() == [[0, 0, 0], [96, 0, 48], [96, 48, 0]], "what is gathered alone travels narrow"


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2), (2, 4), (2, 2, 2)])
def test_resharding_cost_of_every_pair_is_what_the_program_sends(sizes):
    """Also where XLA finds no direct resharding: two dimensions that swap their axes are gathered first."""
    axes = tuple(zip("abc", sizes, strict=False))
    problem = planned_problem(jnp.sin, S((64, 64), jnp.float32), device=f"h100:{math.prod(sizes)}")
    labels = np.array(list(itertools.product((-1, 0, 1), repeat=len(axes))))
    if len(axes) == 3:
        labels = labels[::3]
    sent, seconds = resharding_cost(labels, labels, 64 * 64 * 4.0, MeshModel.on(problem.hardware, axes))
    specs = [spec_of_label(row, 2, [name for name, _ in axes]) for row in labels.tolist()]
    for i, j in itertools.product(range(len(specs)), repeat=2):
        cost = problem.evaluate(axes, (specs[i],), {0: OpConstraint((specs[j],), (specs[j],))})
        assert sent[i, j] == cost.bytes_sent, (specs[i], specs[j])
        assert (seconds[i, j] > 0) == (cost.communication_s > 0)


def test_resharding_cost_of_swapped_axes_is_an_all_to_all_and_a_permute():
    """As XLA does it, which compiles an exchange over the eight and a permute of all (seen for 512 CPU devices)."""
    mesh = MeshModel.on(resolve("h100:512"), (("a", 64), ("b", 8)))
    swapped, moved = (
        resharding_cost(np.array([[0, 1]]), np.array([to]), 512.0, mesh)[0].item() for to in ([1, 0], [0, 0])
    )
    assert (swapped, moved) == (7 / 8 + 1, 7 / 8)


def test_resharding_cost_on_many_axes_is_that_of_each_pair():
    mesh = MeshModel.on(resolve("h100:16"), tuple((name, 2) for name in "abcd"))
    labels = np.array([[0, 1, -1, -1], [-1, 0, 1, 2]])
    sent, _ = resharding_cost(labels, labels, 16.0, mesh)
    alone, _ = resharding_cost(labels[:1], labels[1:], 16.0, mesh)
    assert sent.diagonal().tolist() == [0, 0] and sent[0, 1] == alone.item() > 0


def test_resharding_cost_of_twelve_axes_is_that_of_the_one_they_make():
    """The numbers of their layouts do not fit into one word."""
    many = MeshModel.on(resolve("h100:4096"), tuple((name, 2) for name in "abcdefghijkl"))
    labels = np.array([[0] * 12, [-1] * 12, [1] * 12, [0] * 6 + [1] * 6, [1] * 6 + [0] * 6])
    sent, _ = resharding_cost(labels, labels, 4096.0, many)
    one = MeshModel.on(resolve("h100:4096"), (("a", 4096),))
    alone, _ = resharding_cost(labels[:3, :1], labels[:3, :1], 4096.0, one)
    assert sent[:3, :3].tolist() == alone.tolist()
    assert (sent == 0).tolist() == [[i == j or i == 1 for j in range(5)] for i in range(5)]


@pytest.mark.parametrize(("device", "part"), [("tpu-v5e:2x2", 0.5), ("h100:4", 1.0)])
def test_labels_of_f32_matmuls_on_a_tpu_gather_half_the_bytes(device, part):
    problem = problem_of(lambda x, w: jnp.tanh(x) @ w, (S((64, 64), jnp.float32), S((64, 64), jnp.float32)), device)
    space = build(problem.graph, MeshModel.on(problem.hardware, (("a", 4),)), {}, {}, {}, None, problem.facts)
    assert max(table.sent[np.isfinite(table.sent)].max() for table in space.reshardings) == part * 3 / 4 * 64 * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("make", [mlp.make, attention.make], ids=["mlp", "attention"])
def test_exact_plan_is_no_worse_than_propagation(make, level):
    function, args = abstract(make)
    options = {"device": "h100:8", "level": level}
    simple = shardfn.plan(function, *args, search_mode="sharding_propagation", **options)
    exact = shardfn.plan(function, *args, **EXACT, **options)
    problem = problem_of(function, args, device="h100:8", level=level)
    assert objective(exact.cost, problem) <= objective(simple.cost, problem)
    assert exact == shardfn.plan(function, *args, **EXACT, **options)  # deterministic


def test_exact_plan_shards_parameters_for_memory_and_not_for_time():
    args = (S((8192, 1024), jnp.float32), S((1024, 4096), jnp.float32), S((4096, 1024), jnp.float32))
    least, fastest = (shardfn.plan(two_layers, *args, level=level, device="tpu-v5e:8", **EXACT) for level in (1, 2))
    assert all(np.prod(d.strategy) == 8 for d in least.inputs)
    assert least.cost.memory.peak < fastest.cost.memory.peak
    assert least.cost.time_s > fastest.cost.time_s


@pytest.mark.parametrize("level", [0, 2])
def test_exact_plan_costs_what_the_model_allows(level):
    """At level 0 too, where the fastest strategies, which are solved for first, are those that send least."""
    args = (S((8192, 1024), jnp.float32), S((1024, 4096), jnp.float32), S((4096, 1024), jnp.float32))
    made = shardfn.plan(two_layers, *args, level=level, device="h100:8", **EXACT)
    assert "the plan has the solver's shardings" in made.policy
    assert made.gap < 0.05


@pytest.mark.parametrize("level", [0, 2])
def test_next_strategies_cost_more_time(level):
    args = (S((8192, 1024), jnp.float32), S((1024, 4096), jnp.float32), S((4096, 1024), jnp.float32))
    made = shardfn.plan(two_layers, *args, level=level, device="h100:8", **EXACT)
    texts = [d.runner_up for d in made.inputs]
    assert all(re.fullmatch(r"\(.*\): \+.*s by the search's estimate", text) for text in texts), texts


def test_estimated_time_of_strategies_does_not_depend_on_what_was_solved_for():
    args = (S((8192, 1024), jnp.float32), S((1024, 4096), jnp.float32), S((4096, 1024), jnp.float32))
    problem = planned_problem(two_layers, *args, level=TIME, device="h100:8")
    problem = dataclasses.replace(problem, tolerance=0.0)  # a proof would end it before the other objective's turn
    solutions = run(problem, GENERATORS[TIME], BASELINES).solutions
    fastest, least_sent = ([one for one in solutions if one.objective == o] for o in (LEAST_TIME, LEAST_SENT))
    same = [(a, b) for a in fastest for b in least_sent if (a.axes, a.solution.choice) == (b.axes, b.solution.choice)]
    assert same
    for a, b in same:
        assert estimated_rank(problem, b).aim[0] == pytest.approx(estimated_rank(problem, a).aim[0], rel=0.01)


def test_exact_plan_keeps_an_entry_and_the_values():
    x, w1, w2 = jnp.ones((16, 8)), jnp.ones((8, 32)) * 0.1, jnp.ones((32, 8))
    function = shardfn.shard(two_layers, (shardfn.AUTO, (1, 4), shardfn.AUTO), **EXACT)
    np.testing.assert_allclose(function(x, w1, w2), two_layers(x, w1, w2), rtol=1e-5)
    made = function.plan(x, w1, w2)
    assert made.decision("w1").strategy == (1, 4)
    assert made.decision("w1").source == "you"


def test_exact_plan_keeps_a_mesh():
    args = (S((64, 8), jnp.float32), S((8, 64), jnp.float32), S((64, 8), jnp.float32))
    layout = shardfn.mindspore.Layout((4, 2), ("rows", "columns"))
    made = shardfn.plan(two_layers, *args, in_strategy=(layout("rows", "None"), shardfn.AUTO, shardfn.AUTO),
                        device="h100:8", level=2, **EXACT)  # fmt: skip
    assert made.axes == (("rows", 4), ("columns", 2))
    assert made.inputs[0].strategy == (4, 1)


@pytest.mark.parametrize("devices", [6, 7, pytest.param(12, marks=pytest.mark.slow)])
def test_exact_plan_on_any_number_of_devices_spreads_the_work(devices):
    args = (S((84, 36), jnp.float32), S((36, 84), jnp.float32), S((84, 36), jnp.float32))
    made = shardfn.plan(two_layers, *args, device=f"h100:{devices}", level=2, **EXACT)
    unsharded = shardfn.plan(two_layers, *args, device="h100:1")
    assert made.cost.flops == pytest.approx(unsharded.cost.flops / devices, rel=0.01)
    assert np.prod(made.mesh.axis_sizes) == devices


def test_every_mode_with_a_tiny_time_limit_answers():
    function, args = abstract(mlp.make, batch=8192, d_in=1024, d_hidden=4096, d_out=1024, train=True)
    for mode in ("dynamic_programming", "recursive_programming", "auto"):
        made = shardfn.plan(function, *args, device="h100:8", level=2, search_mode=mode, time_limit=1e-3)
        assert all(np.prod(d.strategy) <= 8 for d in made.inputs)
        assert any(np.prod(d.strategy) > 1 for d in made.inputs)


def test_exact_plan_of_a_checkpointed_block_shards_each_array_in_its_own_way():
    """An optimization barrier passes several arrays on: one axis may shard all of them."""

    def loss(w, x):
        return (jax.checkpoint(two_layers)(x, *w) ** 2).mean()

    args = (S((64, 128), jnp.float32), S((128, 64), jnp.float32)), S((4096, 64), jnp.float32)
    sharded = ((1, 8), (1, 8))
    options = EXACT | {"device": "cpu:8", "level": 2}
    made = shardfn.plan(jax.grad(loss), *args, in_strategy=(sharded, shardfn.AUTO), **options)
    given = shardfn.plan(jax.grad(loss), *args, in_strategy=(sharded, (8, 1)), **options)
    assert made.cost.time_s <= given.cost.time_s

"""No plan is beaten by itself: what a memory limit below its own peak finds, or another objective, is in the search.

That is held of the default budget. A search within a limit goes on from the one without, with as much work again, so where
`budget="fast"` ended the first early it may find a plan that is better in both.
"""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from examples.models.families import FAMILIES
from shardfn.search.engine import Archive
from shardfn.search.generators import styles
from shardfn.search.moves.scattered_sums import scattered_sums
from shardfn.search.problem import Proposal, objective
from tests.search.problems import S, planned_problem, random_program
from tests.search.test_plans import PROGRAMS

NOISE = 1e-3
"""Searches stop looking where a plan is better by less."""


def mlp(params, x):
    return jnp.mean(jnp.square(jax.nn.relu(x @ params["up"]) @ params["down"]))


def step(params, x):
    """The step of docs/how-to/limit-memory.md."""
    value, grads = jax.value_and_grad(mlp)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def sizes(width, hidden, batch):
    params = {"up": S((width, hidden), jnp.float32), "down": S((hidden, width), jnp.float32)}
    return params, S((batch, width), jnp.float32)


DOCUMENTED = sizes(8192, 32768, 4096)
CASES = {
    **{name: (*case, "cpu:8") for name, case in PROGRAMS.items()},
    **{f"random program {seed}": (*random_program(seed)[:2], {}, "cpu:8") for seed in (1, 2, 3, 8, 9)},
    "documented step": (step, DOCUMENTED, {"donate_argnums": 0}, "tpu-v5e:4x4"),
    "wide step": (step, DOCUMENTED, {"donate_argnums": 0}, "h100:8"),
    "long step": (step, sizes(1024, 4096, 8192), {"donate_argnums": 0}, "tpu-v5e:4x4"),
    "gpt2": (*FAMILIES["gpt2"].on_paper(FAMILIES["gpt2"].small), {"donate_argnums": (0, 1)}, "h100:8"),
    "dlrm": (*FAMILIES["dlrm"].on_paper(FAMILIES["dlrm"].small), {"donate_argnums": 0}, "h100:8"),
}
FAST = {("mlp", 2), ("random program 2", 2), ("random program 8", 2)}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=[] if (name, level) in FAST else [pytest.mark.slow])
        for name in CASES
        for level in (0, 2)
    ],
)
def test_no_memory_limit_finds_a_plan_that_is_better_in_time_and_memory(name, level):
    function, args, options, device = CASES[name]
    own = shardfn.plan(function, *args, level=level, device=device, **options)
    limit = own.cost.memory.peak - 1
    less = shardfn.plan(function, *args, level=level, device=device, memory_limit=limit, **options)
    problem = own._answered.problem
    assert less.cost.memory.peak <= limit
    assert objective(less.cost, problem).aim[0] >= (1 - NOISE) * objective(own.cost, problem).aim[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurrent step", "look-up step", "documented step"])
def test_no_other_objective_finds_a_faster_plan(name):
    function, args, options, device = CASES[name]
    fastest, other = (shardfn.plan(function, *args, level=level, device=device, **options) for level in (2, 0))
    assert fastest.cost.time_s <= (1 + NOISE) * other.cost.time_s


def tensor_parallel(shards):
    """The candidate of the documented step with its hidden dimension sharded, and its problem."""
    problem = planned_problem(step, *DOCUMENTED, device=f"tpu-v5e:{shards}", donate_argnums=0)
    over = ("a",)
    proposal = Proposal("tensor parallel", (("a", shards),), ((over, ()), ((), over), ((), ())))
    return problem, problem.candidate(proposal, "test")


def test_sums_that_are_scattered_take_less_time_and_memory():
    problem, candidate = tensor_parallel(16)
    found = [problem.candidate(proposal, "test") for proposal in scattered_sums(problem, candidate)]
    assert len(found) == 2  # along either dimension of the sum
    for other in found:
        assert other.specs == candidate.specs and len(other.constraints) == 1
        assert other.cost.time_s < candidate.cost.time_s
        assert other.cost.memory.peak < candidate.cost.memory.peak


def test_sums_are_scattered_where_their_dimensions_divide_alone():
    problem = planned_problem(jnp.matmul, S((6, 64), jnp.float32), S((64, 32), jnp.float32), device="h100:8")
    sharded = Proposal("sum", (("a", 8),), (((), ("a",)), (("a",), ())))
    (other,) = scattered_sums(problem, problem.candidate(sharded, "test"))
    ((constraint,)) = other.constraints.values()
    assert constraint.results == (((), ("a",)),)
    unsharded = Proposal("nothing", (("a", 8),), (((), ()), ((), ())))
    assert not list(scattered_sums(problem, problem.candidate(unsharded, "test")))


def test_tensor_baselines_begin_with_the_dimensions_that_leave_the_fewest_partial_sums():
    problem = planned_problem(step, *sizes(1024, 4096, 8192), device="h100:16")
    first = next(styles.tensor_baselines(problem, Archive(problem)))
    hidden, sharded = first.specs[0][0], first.specs[1][1]  # of down and up
    assert hidden and hidden == sharded and not first.specs[0][1]


def test_tensor_baselines_continue_on_the_mesh_of_the_best_candidate():
    problem = planned_problem(step, *sizes(1024, 4096, 8192), device="h100:16", level=2)
    archive = Archive(problem)
    proposals = styles.tensor_baselines(problem, archive)
    assert [size for _, size in next(proposals).axes] == [4, 4]
    archive.evaluate(Proposal("good", (("a", 8), ("b", 2)), (((), ("b",)), (("b",), ()), (("a",), ()))))
    later = [[size for _, size in proposal.axes] for proposal in (next(proposals) for _ in range(4))]
    assert [8, 2] in later

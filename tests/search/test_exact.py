"""The solver's optimum of a function's choices is that of trying all of them."""

import pytest

from examples.models.families import FAMILIES
from shardfn.solver.labelling import total_cost
from shardfn.solver.solve import solve
from tests.marks import some_slow
from tests.search.problems import PROGRAMS, choices, problem_of, random_program
from tests.solver.exhaustive import exhaustive

MESHES = {"4": (("a", 4),), "2x2": (("a", 2), ("b", 2))}

WIDE = {"gpt2", "gpt2 scanned", "llama", "vit", "moe", "t5"}
SLOW = {("resnet", "2x2"), *((name, "4") for name in WIDE)}
"""Families that are too large to try on two axes, with 81 to 100 labels for each of 138 to 282 nodes: on one only."""


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_solve_of_small_programs_is_the_optimum(name, level, axes):
    labels = choices(problem_of(*PROGRAMS[name], level=level), axes)
    found = solve(labels)
    assert found.proved
    assert found.cost == pytest.approx(exhaustive(labels).cost, rel=1e-9)


@pytest.mark.parametrize("start", some_slow(range(0, 200, 20), range(180)))
def test_solve_of_200_random_programs_is_the_optimum(start):
    for seed in range(start, start + 20):
        function, args, steps = random_program(seed)
        problem = problem_of(function, args, level=2 * (seed % 3 != 0))
        for axes in MESHES.values():
            labels = choices(problem, axes)
            found = solve(labels)
            assert found.proved, (seed, steps)
            assert found.cost == pytest.approx(exhaustive(labels).cost, rel=1e-9), (seed, steps)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(n, g, marks=[pytest.mark.slow] * ((n, g) in SLOW))
        for n in FAMILIES
        for g in MESHES
        if g == "4" or n not in WIDE
    ],
)
def test_solve_of_every_family_is_the_optimum(name, mesh):
    problem = problem_of(*FAMILIES[name].on_paper(FAMILIES[name].tiny))
    labels = choices(problem, MESHES[mesh])
    found = solve(labels)
    assert found.proved
    assert total_cost(labels, found.choice) == found.cost
    assert exhaustive(labels, below=found.cost * (1 - 1e-9), most=500_000).choice == ()

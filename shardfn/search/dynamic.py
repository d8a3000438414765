"""The exact search: the best layout of every op under the cost model, on every grid of one or two axes.

Each grid's choices are a labelling problem that is solved to proven optimality. The winners' arguments go through
Shardy's flow, beside the simple policy's, and the best flow wins: what is not an argument or a result is left to
propagation, which can choose otherwise than the optimum did.
"""

from __future__ import annotations

import numpy as np

from shardfn.graph.model import Spec
from shardfn.search import propagation
from shardfn.search.labelling import Labelling, Table
from shardfn.search.problem import Answer, Axes, Problem
from shardfn.search.solve import Solution, solve
from shardfn.search.strategies import Grid, Node, Space, build

SECONDS = 60.0
"""After which a grid's search stops with what it has, and its gap."""

HOLDING = 0.1
"""Seconds charged for an argument that lies on a device, in passes over its memory: ties go to the smaller piece."""


def search(problem: Problem) -> Answer:
    """The cheapest layout at the problem's level."""
    simple = propagation.search(problem)
    if all(spec is not None for spec in problem.specs) or problem.devices == 1:
        return simple
    first = propagation.objective(problem.price(simple.axes, simple.specs), problem)
    rated: list[tuple[tuple[float, ...], int, Answer, Solution | None]] = [(first, 0, simple, None)]
    for axes in grids(problem):
        found = on_grid(problem, axes)
        if found is not None:
            specs, solution = found
            price = problem.price(axes, specs)
            rated.append((propagation.objective(price, problem), len(rated), Answer(axes, specs, (), ""), solution))
    rated.sort(key=lambda r: r[:2])
    _, _, best, solution = rated[0]
    if solution is None:
        return best
    proof = "proved" if solution.proved else f"within {solution.gap:.1%} of the optimum"
    tried = ", ".join("x".join(str(size) for _, size in answer.axes) for _, _, answer, s in rated if s is not None)
    grid = " x ".join(f"{name}={size}" for name, size in best.axes)
    reasons = tuple("" if given is not None else "the optimum of all ops together" for given in problem.specs)
    runner = f"{'x'.join(str(size) for _, size in rated[1][2].axes)} grid" if len(rated) > 1 else ""
    policy = f"exact search at level {problem.level}: grid {grid}, {proof} under the cost model; grids tried: {tried}"
    return Answer(best.axes, best.specs, reasons, policy, runner)


def grids(problem: Problem) -> list[Axes]:
    """The user's grid where a cut was given, else every split of the devices into at most two axes."""
    if problem.axes:
        return [problem.axes]
    n = problem.devices
    pairs = [(n // b, b) for b in range(1, n + 1) if n % b == 0 and b * b <= n]
    return [tuple((name, size) for name, size in zip("ab", pair, strict=True) if size > 1) for pair in pairs]


def on_grid(problem: Problem, axes: Axes) -> tuple[tuple[Spec, ...], Solution] | None:
    """The best layouts of the arguments on one grid; None where no labelling was found."""
    names = tuple(name for name, _ in axes)
    given = {v: spec for v, spec in zip(problem.inputs, problem.specs, strict=True) if spec is not None}
    sizes = tuple(size for _, size in axes)
    space = build(problem.graph, Grid(sizes, problem.chip), names, given, problem.results, problem.same_as)
    solution = solve(labelling_of(space, problem), SECONDS)
    if not solution.feasible:
        return None
    specs = []
    for value, shape, spec in zip(problem.inputs, problem.shapes, problem.specs, strict=True):
        node, layouts = space.layouts[value]
        chosen = layouts[solution.choice[node]]
        laid = tuple(tuple(n for n, d in zip(names, chosen, strict=True) if d == dim) for dim in range(len(shape)))
        specs.append(spec if spec is not None else laid)
    return tuple(specs), solution


def labelling_of(space: Space, problem: Problem) -> Labelling:
    """The cost of each label at the problem's level, in seconds (levels 0 and 2) or bytes (level 1)."""
    chip = problem.chip

    def cost(node: Node) -> np.ndarray:
        held = HOLDING * node.argument_bytes / chip.memory_bytes_s
        return {
            0: node.sent_s + 1e3 * node.compute_s + held,  # spread the work first, then save bytes
            1: node.argument_bytes + 0.1 * node.made_bytes + 1e3 * (node.sent_s + node.compute_s),
            2: node.sent_s + node.compute_s + held,
        }[problem.level]

    scale = 1e3 if problem.level == 1 else 1.0
    costs = tuple(cost(node) for node in space.nodes)
    return Labelling(
        costs,
        tuple(np.zeros(len(c)) for c in costs),
        np.zeros((len(costs), 2), np.int64),
        tuple(Table((edge.first, edge.second), edge.sent_s * scale) for edge in space.edges),
    )

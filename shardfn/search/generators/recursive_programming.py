"""The fast search: divide the devices again and again, each time with the best further strategy for every op.

A division takes the square root of the devices that are left, and decides one mesh axis of that size for all ops together, with
earlier axes fixed. So an op has few labels at a time, and 4,096 devices take four divisions. Nothing is decided twice. It knows
no bound of its gap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from shardfn.ir.divisors import divisors
from shardfn.ir.model import Axes
from shardfn.search.engine import Archive
from shardfn.search.generators.exact import solve_mesh
from shardfn.search.labels import FREE, MeshSolution, Objective
from shardfn.search.moves import fully_constrained
from shardfn.search.problem import MEMORY, Proposal, SearchProblem
from shardfn.solver.labelling import Array


def generate(level: int, problem: SearchProblem, archive: Archive) -> Iterator[Proposal]:
    """The generator of the recursive search for the objective of a level."""
    at = problem.at(level)
    one = divided(at, archive)
    if one is None:
        return
    archive.solutions.append(one)
    yield fully_constrained(at, one)


def divided(problem: SearchProblem, archive: Archive) -> MeshSolution | None:
    """The solution after deciding all axes one after the other; None where the given shardings leave none."""
    objective = Objective(problem.level, problem.level, is_sharded=problem.level == MEMORY)
    axes: Axes = problem.axes or tuple((f"x{i}", size) for i, size in enumerate(divisions(problem.devices)))
    chosen: Sequence[Array] | None = None
    found: MeshSolution | None = None
    for count in range(1, len(axes) + 1):
        found = solve_mesh(problem, objective, axes[:count], archive, chosen)
        if found is None:
            return None
        decided = zip(found.space.nodes, found.solution.choice, strict=True)
        chosen = [np.append(node.labels[label], FREE) for node, label in decided]
    return None if found is None else dataclasses.replace(found, is_exact=False)


def divisions(devices: int) -> list[int]:
    """The sizes of the axes: each time the least divisor of the devices left that is no less than their square root.

    >>> divisions(8), divisions(64), divisions(4096), divisions(6), divisions(7)
    ([4, 2], [8, 4, 2], [64, 8, 4, 2], [3, 2], [7])
    """
    found = []
    while devices > 1:
        size = next(d for d in divisors(devices) if d * d >= devices)
        found.append(size)
        devices //= size
    return found

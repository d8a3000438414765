"""Sharding propagation: from the user's cuts the layout spreads op by op, each next one with the least redistribution.

The ops nearest in program order to what is decided come first. Among labels that redistribute equally little, the one
that is cheapest by itself wins: it uses the axes that are left. The form is MindSpore's (its cuts spread by a search in
breadth over the costs of redistribution); where following dim classes alone has the better flow, that is the answer.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from shardfn.search import default_policy
from shardfn.search.constrained_candidates import candidate
from shardfn.search.constraint_reduction import drop_redundant_constraints
from shardfn.search.filters import narrowed
from shardfn.search.graph_facts import array_bytes
from shardfn.search.label_tables import LabelSpace, build
from shardfn.search.level_costs import labelling_of
from shardfn.search.mesh_solution import MeshSolution
from shardfn.search.problem import Answer, SearchProblem, objective
from shardfn.search.resharding_costs import Array, MeshModel, change, pieces
from shardfn.solver.labelling import Labelling, total_cost
from shardfn.solver.solve import Solution


@dataclasses.dataclass(frozen=True)
class SharedValue:
    """Two nodes that share a value: its layouts under the labels of each, and its bytes."""

    nodes: tuple[int, int]
    layouts: tuple[Array, Array]
    bytes: float


def search(problem: SearchProblem) -> Answer:
    """The cuts that were given, spread; without any, or with nothing open, as `following` has it."""
    followed = default_policy.search(problem)
    if not problem.is_open or not any(dim for spec in problem.specs if spec for dim in spec):
        return followed
    found = spread_labels(problem)
    if not math.isfinite(found.solution.cost):
        return followed
    made = drop_redundant_constraints(problem, candidate(problem, found))
    plain = problem.candidate("following dim classes", followed.axes, followed.specs, {})
    if objective(plain.cost, problem) <= objective(made.cost, problem):
        return followed
    reasons = tuple("" if given is not None else "least redistribution from the given cuts" for given in problem.specs)
    policy = "the given cuts spread op by op, with the least redistribution (no search)"
    return Answer(
        made.axes, made.specs, reasons, policy, source="propagated", constraints=made.constraints, others=(plain,)
    )


def spread_labels(problem: SearchProblem) -> MeshSolution:
    """A label for every node, spread from those that the user's cuts decide."""
    grid = MeshModel.on(problem.hardware, problem.axes)
    given = {v: spec for v, spec in zip(problem.inputs, problem.specs, strict=True) if spec is not None}
    space = build(problem.graph, grid, given, problem.results, problem.same_as, None, problem.facts)
    labels, _ = narrowed(labelling_of(space, problem), space, problem.graph, grid.sizes, problem.algorithm)
    near: dict[int, list[SharedValue]] = {}
    for join in shared_values(problem, space):
        for node in join.nodes:
            near.setdefault(node, []).append(join)
    chosen = {space.layouts[v][0]: 0 for v, spec in given.items() if any(spec)}
    frontier = sorted({other for node in chosen for other in _others(near, node)} - chosen.keys())
    while frontier:
        node = heapq.heappop(frontier)
        if node in chosen:
            continue
        chosen[node] = least(_redistributed(near.get(node, ()), node, chosen, grid, len(labels.costs[node])),
                             labels.costs[node])  # fmt: skip
        for other in _others(near, node):
            if other not in chosen:
                heapq.heappush(frontier, other)
    choice = filled(labels, chosen)
    return MeshSolution(
        problem.axes, space, labels, Solution(choice, total_cost(labels, choice), -math.inf, False, True), False
    )


def shared_values(problem: SearchProblem, space: LabelSpace) -> list[SharedValue]:
    """Where one node reads what another makes."""
    found = []
    for index, (node, wanted) in space.reads.items():
        for value, layouts in zip(problem.graph.ops[index].inputs, wanted, strict=True):
            if value in space.layouts and space.layouts[value][0] != node:
                owner, have = space.layouts[value]
                found.append(SharedValue((owner, node), (have, layouts), array_bytes(problem.graph.values[value])))
    return found


def least(redistributed: Array, cost: Array) -> int:
    """The label that redistributes least; among equals the cheapest, then the first.

    >>> least(np.array([0.0, 8.0, 0.0]), np.array([3.0, 1.0, 2.0]))
    2
    """
    allowed = np.isfinite(cost)
    return int(np.lexsort((cost, np.where(allowed, np.round(redistributed), np.inf)))[0])


def filled(labels: Labelling, chosen: dict[int, int]) -> tuple[int, ...]:
    """A label for the nodes that nothing reached, or that only stand between others: the cheapest beside those decided."""
    chosen = dict(chosen)
    near: dict[int, list[tuple[int, Array]]] = {}
    for table in labels.tables:
        first, second = table.nodes
        near.setdefault(first, []).append((second, table.cost))
        near.setdefault(second, []).append((first, table.cost.T))
    for node, cost in enumerate(labels.costs):
        if node not in chosen:
            beside = [table[:, chosen[other]] for other, table in near.get(node, ()) if other in chosen]
            chosen[node] = int(np.argmin(cost + sum(beside, np.zeros(len(cost)))))
    return tuple(chosen[node] for node in range(len(labels.costs)))


def _others(near: dict[int, list[SharedValue]], node: int) -> set[int]:
    return {other for join in near.get(node, ()) for other in join.nodes if other != node}


def _redistributed(
    near: Sequence[SharedValue], node: int, chosen: dict[int, int], grid: MeshModel, count: int
) -> Array:
    """For each label of a node the bytes that change place, slices too, towards all that is decided."""
    total = np.zeros(count)
    for join in near:
        place = join.nodes.index(node)
        other = join.nodes[1 - place]
        if other not in chosen:
            continue
        fixed = join.layouts[1 - place][chosen[other]][None]
        mine = join.layouts[place]
        before, after = (mine, fixed) if place == 0 else (fixed, mine)
        sent = change(before, after, join.bytes, grid)[0].reshape(-1)
        sliced = join.bytes / np.maximum(pieces(mine, grid.sizes), pieces(fixed, grid.sizes)[0])
        total += sent + np.where((mine != fixed).any(axis=1), sliced, 0.0)
    return total

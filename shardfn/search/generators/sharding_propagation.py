"""Sharding propagation: open arguments follow the given shardings, and the ops inside send least beside them, at every level.

The shardings spread op by op, each time with the least resharding; the ops nearest in program order to what is decided come
first. Among labels that reshard equally little, the cheapest wins, which uses the axes that are left. The form is MindSpore's,
which spreads strategies by a breadth-first search over resharding costs. Where following dimension groups alone is better, that
decides the arguments. Then the ops inside are solved: they read the arguments as they are sharded, as far as they can, and send
the least.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from shardfn.search.engine import Archive, run
from shardfn.search.generators import default_policy
from shardfn.search.generators.exact import label_space, solve_mesh
from shardfn.search.labels import (
    LEAST_SENT_BALANCED,
    LabelSpace,
    MeshModel,
    MeshSolution,
    Objective,
    filtered,
    labelling_of,
    resharding_cost,
    shard_count,
)
from shardfn.search.moves import constrained, fewer_constraints, fully_constrained
from shardfn.search.problem import COMMUNICATION, Answer, Proposal, SearchProblem, array_bytes
from shardfn.solver.labelling import Array, Labelling, total_cost
from shardfn.solver.solve import Solution

GIVEN_FIRST = 1e3
"""First the arguments are resharded as little as possible, then the least is sent."""


@dataclasses.dataclass(frozen=True)
class SharedValue:
    """Two nodes that share a value: its layouts under the labels of each, and its bytes."""

    nodes: tuple[int, int]
    layouts: tuple[Array, Array]
    bytes: float


def search(problem: SearchProblem) -> Answer:
    """Spread the given shardings; without any, or with nothing open, the answer of `default_policy`."""
    followed = spread(problem)
    if not problem.is_open or not problem.shards_given:
        return followed
    given = dataclasses.replace(problem.at(COMMUNICATION), specs=followed.specs)
    first = dataclasses.replace(_proposal(followed), name="arguments as they follow from the entries")
    archive = run(given, {}, {"entries spread": lambda *_: iter([first]), "least communication": _inside})
    best, *others = archive.ranked(COMMUNICATION)
    return dataclasses.replace(
        followed, constraints=best.constraints, result_specs=best.result_specs, others=(*others, *followed.others)
    )


def spread(problem: SearchProblem) -> Answer:
    """The arguments as they follow from the given shardings, with what the ops inside need for it."""
    followed = default_policy.search(problem)
    if not problem.is_open or not problem.shards_given:
        return followed
    problem = problem.at(COMMUNICATION)
    archive = Archive(problem)
    simple = archive.evaluate(_proposal(followed))
    for proposal in _spread(problem, label_space(problem, problem.axes, archive)):
        for fewer in fewer_constraints(problem, archive.evaluate(proposal)):
            archive.evaluate(fewer)
    best, *others = archive.ranked(COMMUNICATION)
    if best is simple:
        return followed
    reasons = tuple("" if given is not None else "least resharding from the given shardings" for given in problem.specs)
    policy = "the given shardings spread; the least communication of the ways tried (no search)"
    return Answer(
        best.axes, best.specs, reasons, policy, source="propagated", constraints=best.constraints, others=tuple(others)
    )


def follow_entries(problem: SearchProblem, archive: Archive) -> Iterator[Proposal]:
    """The generator of what follows from the given shardings alone: dimension groups that follow them, and their spread."""
    if problem.shards_given:
        yield _proposal(default_policy.search(problem))
        yield from _spread(problem, label_space(problem, problem.axes, archive))


def _proposal(answer: Answer) -> Proposal:
    return Proposal("following dimension groups", answer.axes, answer.specs, answer.constraints)


def _inside(problem: SearchProblem, archive: Archive) -> Iterator[Proposal]:
    charged = functools.partial(_charged, problem)
    found = solve_mesh(problem, LEAST_SENT_BALANCED, problem.axes, archive, charged=charged)
    if found is not None:
        yield from constrained(problem, found, archive)


def _charged(problem: SearchProblem, labels: Labelling, space: LabelSpace) -> Labelling:
    """Labels that reshard an argument where it is read cost `GIVEN_FIRST` times the seconds more: what is given is followed."""
    mesh = MeshModel.on(problem.hardware, problem.axes)
    arguments = {space.layouts[value][0] for value in problem.inputs}
    costs = list(labels.costs)
    for shared in shared_values(problem, space):
        owner, reader = shared.nodes
        if owner in arguments:
            seconds = resharding_cost(*shared.layouts, shared.bytes, mesh)[1]
            costs[reader] = costs[reader] + GIVEN_FIRST * seconds.min(axis=0)
    return dataclasses.replace(labels, costs=tuple(costs))


def _spread(problem: SearchProblem, space: LabelSpace) -> Iterator[Proposal]:
    found = spread_labels(problem, space)
    if math.isfinite(found.solution.cost):
        yield dataclasses.replace(fully_constrained(problem, found), name="entries spread with the least resharding")


def spread_labels(problem: SearchProblem, space: LabelSpace) -> MeshSolution:
    """A label for every node, spread from those that the given shardings decide.

    Args:
      problem: the level, and the shardings that were given.
      space: the choices on their mesh.
    """
    mesh = MeshModel.on(problem.hardware, problem.axes)
    labels, _ = filtered(labelling_of(space, problem), space, problem.graph, mesh.sizes, problem.algorithm)
    near: dict[int, list[SharedValue]] = {}
    for shared in shared_values(problem, space):
        for node in shared.nodes:
            near.setdefault(node, []).append(shared)
    given = (value for value, spec in zip(problem.inputs, problem.specs, strict=True) if spec and any(spec))
    chosen = {space.layouts[value][0]: 0 for value in given}
    chosen |= {space.layouts[v][0]: 0 for v in problem.inner if len(space.layouts[v][1]) == 1}
    frontier = sorted({other for node in chosen for other in _others(near, node)} - chosen.keys())
    while frontier:
        node = heapq.heappop(frontier)
        if node in chosen:
            continue
        chosen[node] = cheapest_label(_resharded(near.get(node, ()), node, chosen, mesh, len(labels.costs[node])),
                             labels.costs[node])  # fmt: skip
        for other in _others(near, node):
            if other not in chosen:
                heapq.heappush(frontier, other)
    choice = filled(labels, chosen)
    return MeshSolution(
        problem.axes, space, labels, Solution(choice, total_cost(labels, choice), -math.inf, False, True),
        Objective(problem.level, problem.level), is_exact=False,
    )  # fmt: skip


def shared_values(problem: SearchProblem, space: LabelSpace) -> list[SharedValue]:
    """The values that one node produces and another reads."""
    found = []
    for index, (node, wanted) in space.reads.items():
        for value, layouts in zip(problem.graph.ops[index].inputs, wanted, strict=True):
            if value in space.layouts and space.layouts[value][0] != node:
                owner, have = space.layouts[value]
                found.append(SharedValue((owner, node), (have, layouts), array_bytes(problem.graph.values[value])))
    return found


def cheapest_label(resharded: Array, cost: Array) -> int:
    """The label that reshards least; among equals the cheapest, then the first.

    >>> cheapest_label(np.array([0.0, 8.0, 0.0]), np.array([3.0, 1.0, 2.0]))
    2
    """
    allowed = np.isfinite(cost)
    return int(np.lexsort((cost, np.where(allowed, np.round(resharded), np.inf)))[0])


def filled(labels: Labelling, chosen: dict[int, int]) -> tuple[int, ...]:
    """The labels, with the cheapest ones for the nodes that nothing reached."""
    chosen = dict(chosen)
    near: dict[int, list[tuple[int, Array]]] = {}
    for table in labels.tables:
        first, second = table.nodes
        near.setdefault(first, []).append((second, table.cost))
        near.setdefault(second, []).append((first, table.cost.T))
    for node, cost in enumerate(labels.costs):
        if node not in chosen:
            between = [table[:, chosen[other]] for other, table in near.get(node, ()) if other in chosen]
            chosen[node] = int(np.argmin(cost + sum(between, np.zeros(len(cost)))))
    return tuple(chosen[node] for node in range(len(labels.costs)))


def _others(near: dict[int, list[SharedValue]], node: int) -> set[int]:
    return {other for shared in near.get(node, ()) for other in shared.nodes if other != node}


def _resharded(near: Sequence[SharedValue], node: int, chosen: dict[int, int], mesh: MeshModel, count: int) -> Array:
    """For each label of a node, the bytes that reshardings move, slices included, towards all decided nodes."""
    total = np.zeros(count)
    for shared in near:
        place = shared.nodes.index(node)
        other = shared.nodes[1 - place]
        if other not in chosen:
            continue
        fixed = shared.layouts[1 - place][chosen[other]][None]
        mine = shared.layouts[place]
        before, after = (mine, fixed) if place == 0 else (fixed, mine)
        sent = resharding_cost(before, after, shared.bytes, mesh)[0].reshape(-1)
        sliced = shared.bytes / np.maximum(shard_count(mine, mesh.sizes), shard_count(fixed, mesh.sizes)[0])
        total += sent + np.where((mine != fixed).any(axis=1), sliced, 0.0)
    return total

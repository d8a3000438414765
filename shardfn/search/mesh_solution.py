"""The solver's solution on one mesh: the sharding of each value, its estimated cost, and the next best strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from shardfn.cost.devices.links import links
from shardfn.ir.model import Axes, Spec
from shardfn.search.label_tables import LabelSpace
from shardfn.search.level_costs import repeated_reshardings, totals
from shardfn.search.objectives import Rank
from shardfn.search.problem import SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import spec_of_label, strategy_of
from shardfn.solver.labelling import CostTable, Labelling, peak_of
from shardfn.solver.solve import Solution

NEARLY = 1.05
"""An estimate holds if the partitioned program costs at most this multiple of it."""


@dataclasses.dataclass(frozen=True)
class MeshSolution:
    """The solution of the labelling on one mesh; `is_exact` if it considered all labels."""

    axes: Axes
    space: LabelSpace
    labels: Labelling
    solution: Solution
    is_exact: bool = True
    is_fully_sharded: bool = False
    """Whether every argument had to be in its smallest shards."""
    kind: int = 0
    """Which search found it at level 1, where the best of each kind are evaluated in turn."""

    @property
    def peak(self) -> float:
        """Estimated peak memory of one device in bytes."""
        return peak_of(self.labels, self.solution.choice)


def specs_of(problem: SearchProblem, found: MeshSolution) -> Callable[[int], Spec]:
    """The sharding of each value of the graph in a solution."""
    names = tuple(name for name, _ in found.axes)

    def spec(value: int) -> Spec:
        node, layouts = found.space.layouts[value]
        row = layouts[found.solution.choice[node]]
        return spec_of_label(row.tolist(), len(problem.graph.values[value].shape), names)

    return spec


def operand_specs(problem: SearchProblem, found: MeshSolution, index: int) -> tuple[Spec, ...]:
    """The shardings in which an op, by its index, reads its operands in a solution."""
    names = tuple(name for name, _ in found.axes)
    node, wanted = found.space.reads[index]
    ranks = (len(problem.graph.values[v].shape) for v in problem.graph.ops[index].inputs)
    rows = (layouts[found.solution.choice[node]].tolist() for layouts in wanted)
    return tuple(spec_of_label(row, rank, names) for row, rank in zip(rows, ranks, strict=True))


def transposed_mesh(axes: Axes, found: Sequence[MeshSolution]) -> MeshSolution | None:
    """The first solution on the mesh with the reversed sizes, whose axes use other links."""
    sizes = tuple(size for _, size in reversed(axes))
    return next((f for f in found if tuple(size for _, size in f.axes) == sizes), None)


def may_beat(problem: SearchProblem, found: MeshSolution, best: Rank, factor: float = 1.0) -> bool:
    """Whether a solution's estimate is better than the best candidate, at the levels where both are comparable.

    At level 2, repeated reshardings count one launch, and the estimate is multiplied by `factor`.
    """
    if problem.level == 1 or problem.effort.is_large or found.peak > problem.memory_limit:
        return False
    if problem.level == 2:
        latency_s = min(link.latency_s for link in links(problem.hardware, found.axes))
        repeats = repeated_reshardings(found.space, found.solution.choice)
        return factor * (found.solution.cost - latency_s * repeats) < best.aim[0]
    made = totals(found.space, found.solution.choice)
    return (problem.imbalance(made.flops, made.matrix_flops), made.sent) < best.aim


def estimate_holds(problem: SearchProblem, found: MeshSolution, made: SearchCandidate) -> bool:
    """Whether a candidate fits, and `matches_estimate`."""
    return problem.fits(made) and matches_estimate(problem, found, made)


def matches_estimate(problem: SearchProblem, found: MeshSolution, made: SearchCandidate) -> bool:
    """Whether a candidate sends and computes about as little as its solution's estimate.

    Estimates of memory are too rough for level 1: there only large programs, whose candidates are expensive, trust them.
    """
    if problem.level == 1:
        return problem.effort.is_large
    estimate, cost = totals(found.space, found.solution.choice), made.cost
    if problem.level == 2:
        more_s = cost.communication_s - estimate.sent_s
        return cost.flops <= NEARLY * estimate.flops and more_s <= (NEARLY - 1) * cost.time_s
    spread = problem.imbalance(estimate.flops, estimate.matrix_flops)
    return (problem.imbalance(cost.flops, cost.matrix_flops), cost.bytes_sent) <= (spread, NEARLY * estimate.sent)


def next_strategies(problem: SearchProblem, found: MeshSolution) -> tuple[str, ...]:
    """For each open argument the next best strategy, all else unchanged, and its additional cost by the estimate."""
    labels, choice, names = found.labels, found.solution.choice, tuple(name for name, _ in found.axes)
    near: dict[int, list[tuple[CostTable, int]]] = {}
    for table in labels.tables:
        for place, node in enumerate(table.nodes):
            near.setdefault(node, []).append((table, place))
    texts = []
    for value, shape, spec in zip(problem.inputs, problem.shapes, problem.specs, strict=True):
        node, layouts = found.space.layouts[value]
        total = labels.costs[node].copy()
        for table, place in near.get(node, ()):
            other = table.nodes[1 - place]
            total += table.cost[:, choice[other]] if place == 0 else table.cost[choice[other]]
        every = [strategy_of(spec_of_label(row.tolist(), len(shape), names), found.axes) for row in layouts]
        own_cost, own = total[choice[node]], every[choice[node]]
        total[[strategy == own for strategy in every]] = np.inf
        if spec is not None or not np.isfinite(total).any():
            texts.append("")
            continue
        at = int(np.argmin(total))
        more_us = (total[at] - own_cost) * 1e6
        texts.append(f"{every[at]}: {'+' if more_us >= 0 else ''}{more_us:,.1f} us by the search's estimate")
    return tuple(texts)

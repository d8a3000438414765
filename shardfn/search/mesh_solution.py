"""The best that a search found on one grid: where it lays each value, what it promises, and what the next best would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from shardfn.cost.devices.links import links
from shardfn.ir.model import Spec
from shardfn.search.label_tables import LabelSpace
from shardfn.search.level_costs import repeated, totals
from shardfn.search.objectives import Rank
from shardfn.search.problem import SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import Axes, spec_of_label, strategy_of
from shardfn.solver.labelling import CostTable, Labelling, peak_of
from shardfn.solver.solve import Solution

NEARLY = 1.05
"""Of what the model promises: a flow that costs no more than this much of it keeps it."""


@dataclasses.dataclass(frozen=True)
class MeshSolution:
    """The best on one grid; `is_exact` if the solution speaks of all choices on it."""

    axes: Axes
    space: LabelSpace
    labels: Labelling
    solution: Solution
    is_exact: bool = True
    is_in_pieces: bool = False
    """Whether all arguments were to be in the smallest pieces."""
    kind: int = 0
    """What it was looked for with: at level 1 the best of each kind are priced in turn, as the model does not tell of which
    one the flow holds least."""

    @property
    def peak(self) -> float:
        """Bytes that one device holds at most, by the model."""
        return peak_of(self.labels, self.solution.choice)


def specs_of(problem: SearchProblem, found: MeshSolution) -> Callable[[int], Spec]:
    """The layout of each value of the graph, as it was found."""
    names = tuple(name for name, _ in found.axes)

    def laid(value: int) -> Spec:
        node, layouts = found.space.layouts[value]
        row = layouts[found.solution.choice[node]]
        return spec_of_label(row.tolist(), len(problem.graph.values[value].shape), names)

    return laid


def operand_specs(problem: SearchProblem, found: MeshSolution, index: int) -> tuple[Spec, ...]:
    """The layouts in which an op, by its index, reads its operands, as it was found."""
    names = tuple(name for name, _ in found.axes)
    node, wanted = found.space.reads[index]
    ranks = (len(problem.graph.values[v].shape) for v in problem.graph.ops[index].inputs)
    rows = (layouts[found.solution.choice[node]].tolist() for layouts in wanted)
    return tuple(spec_of_label(row, rank, names) for row, rank in zip(rows, ranks, strict=True))


def decided_specs(problem: SearchProblem, found: MeshSolution) -> Callable[[int], Spec | None]:
    """The same, and None of what is no decision of its own."""
    laid = specs_of(problem, found)
    return lambda value: laid(value) if value in found.space.layouts else None


def mesh_text(axes: Axes) -> str:
    """A grid as people write it: 4x2."""
    return "x".join(str(size) for _, size in axes) or "1"


def transposed_mesh(axes: Axes, found: Sequence[MeshSolution]) -> MeshSolution | None:
    """What was found first on the grid with the sizes the other way round, if that was looked at too: between nodes and on a
    torus it has other links."""
    sizes = tuple(size for _, size in reversed(axes))
    return next((f for f in found if tuple(size for _, size in f.axes) == sizes), None)


def may_beat(problem: SearchProblem, found: MeshSolution, best: Rank, more: float = 1.0) -> bool:
    """Whether the model thinks that something is better than the best flow so far, at the levels where both count the same:
    of what it moves again and again, the launches may be one. At level 2 a flow takes `more` times what was promised."""
    if problem.level == 1 or problem.is_large or found.peak > problem.memory_limit:
        return False
    if problem.level == 2:
        latency_s = min(link.latency_s for link in links(problem.hardware, found.axes))
        return more * (found.solution.cost - latency_s * repeated(found.space, found.solution.choice)) < best.aim[0]
    made = totals(found.space, found.solution.choice)
    return (problem.idle(made), made.sent) < best.aim


def estimate_holds(problem: SearchProblem, found: MeshSolution, made: SearchCandidate) -> bool:
    """Whether a flow fits, and `matches_estimate`."""
    return made.cost.memory.peak <= problem.memory_limit and matches_estimate(problem, found, made)


def matches_estimate(problem: SearchProblem, found: MeshSolution, made: SearchCandidate) -> bool:
    """Whether a flow sends and works about as little as the model thought. Of memory the model tells too little to say, so
    that at level 1 only a large program, whose flows are dear, is trusted; and of what the chip does beside products it
    counts the same too little for all layouts."""
    if problem.level == 1:
        return problem.is_large
    promised, cost = totals(found.space, found.solution.choice), made.cost
    if problem.level == 2:
        more_s = cost.communication_s - promised.sent_s
        return cost.flops <= NEARLY * promised.flops and more_s <= (NEARLY - 1) * cost.time_s
    return (problem.idle(cost), cost.bytes_sent) <= (problem.idle(promised), NEARLY * promised.sent)


def runners_up(problem: SearchProblem, found: MeshSolution) -> tuple[str, ...]:
    """For each open argument the next best cut with all else as it is, and what it would cost more by the model."""
    labels, choice, names = found.labels, found.solution.choice, tuple(name for name, _ in found.axes)
    near: dict[int, list[tuple[CostTable, int]]] = {}
    for table in labels.tables:
        for place, node in enumerate(table.nodes):
            near.setdefault(node, []).append((table, place))
    told = []
    for value, shape, spec in zip(problem.inputs, problem.shapes, problem.specs, strict=True):
        node, layouts = found.space.layouts[value]
        total = labels.costs[node].copy()
        for table, place in near.get(node, ()):
            other = table.nodes[1 - place]
            total += table.cost[:, choice[other]] if place == 0 else table.cost[choice[other]]
        every = [strategy_of(spec_of_label(row.tolist(), len(shape), names), found.axes) for row in layouts]
        mine, own = total[choice[node]], every[choice[node]]
        total[[cuts == own for cuts in every]] = np.inf
        if spec is not None or not np.isfinite(total).any():
            told.append("")
            continue
        at = int(np.argmin(total))
        more = total[at] - mine
        told.append(f"{every[at]}: {'+' if more >= 0 else ''}{amount(more)} by the search's estimate")
    return tuple(told)


def amount(cost: float) -> str:
    """A cost of the model in words: seconds, at level 0 the bytes over the link's rate and the work beside them."""
    return f"{cost * 1e6:,.1f} us"

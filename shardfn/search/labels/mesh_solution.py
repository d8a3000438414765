"""The solver's solution on one mesh: the sharding of each value, its estimated cost, and the next best strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from shardfn.ir.model import Axes, Spec, mesh_sizes
from shardfn.ir.specs import strategy_of
from shardfn.search.labels.label_tables import LabelSpace
from shardfn.search.labels.level_costs import totals
from shardfn.search.labels.mesh_model import spec_of_label
from shardfn.search.problem import (
    COMMUNICATION,
    MEMORY,
    TIME,
    Figures,
    Proposal,
    Rank,
    SearchCandidate,
    SearchProblem,
    rank,
)
from shardfn.solver.labelling import CostTable, Labelling, peak_of
from shardfn.solver.solve import Solution
from shardfn.units import signed, time_text

ESTIMATE_REACHED = 0.01
"""No more constraints are tried where a candidate's cost differs from its solution's estimate by at most this part."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the solver is asked for: the least seconds, of which those of compute count by a weight.

    Memory has no cost of its own: it is found within a limit or in the smallest shards.
    """

    level: int
    """The objective of the plans that it is to find."""
    weight: float = 1.0
    """The weight of compute. Less than 1 lets a plan of level 0 use the share of compute that counts as balanced; much more
    shards all compute first, and holds less memory."""
    is_sharded: bool = False
    """Whether every argument is in its smallest shards."""


# What the exact search solves for.
LEAST_TIME = Objective(TIME)
LEAST_SENT = Objective(COMMUNICATION, weight=0.3)
LEAST_SENT_BALANCED = Objective(COMMUNICATION)
LEAST_SENT_IN_SMALLEST_SHARDS = Objective(MEMORY, weight=10.0, is_sharded=True)
LEAST_TIME_IN_LESS_MEMORY = Objective(MEMORY)


@dataclasses.dataclass(frozen=True)
class MeshSolution:
    """The solution of the labelling on one mesh; `is_exact` if it considered all labels."""

    axes: Axes
    space: LabelSpace
    labels: Labelling
    solution: Solution
    objective: Objective
    """What it was solved for."""
    is_exact: bool = True

    @property
    def bound(self) -> float:
        """No labelling of this mesh costs less, in the solver's seconds."""
        return self.solution.cost if self.solution.proved else self.solution.bound

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


@dataclasses.dataclass(frozen=True)
class SolvedProposal(Proposal):
    """A proposal that a solution decides, apart from which constraints it gets."""

    solution: MeshSolution = dataclasses.field(kw_only=True, compare=False, repr=False)


def transposed_mesh(axes: Axes, found: Sequence[MeshSolution]) -> MeshSolution | None:
    """The first solution on the mesh with the reversed sizes, whose axes use other links."""
    sizes = mesh_sizes(axes)[::-1]
    return next((f for f in found if mesh_sizes(f.axes) == sizes), None)


def estimated_rank(problem: SearchProblem, found: MeshSolution) -> Rank:
    """The rank of a solution at the problem's level by its estimate, in which a plan on fewer mesh axes wins ties."""
    sent_s, compute_s = totals(found.space, found.solution.choice)
    memory_bytes = problem.hardware.chip.memory_bytes
    figures = Figures(sent_s, compute_s, problem.facts.even_s(problem.devices), found.peak, memory_bytes)
    return rank(problem.level, problem.memory_limit, figures)._replace(ties=(len(found.axes),))


def is_reached(problem: SearchProblem, found: MeshSolution, candidate: SearchCandidate) -> bool:
    """Whether a candidate costs what its solution's estimate says (`ESTIMATE_REACHED`); if it costs less, the estimate is no
    bound."""
    estimate, rank = estimated_rank(problem, found).aim[0], problem.rank(candidate).aim[0]
    return problem.fits(candidate) and abs(rank - estimate) <= ESTIMATE_REACHED * estimate


def next_strategies(problem: SearchProblem, found: MeshSolution) -> tuple[str, ...]:
    """For each open argument the next best strategy, all else unchanged, and the seconds that it adds by the estimate."""
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
        texts.append(f"{every[at]}: {signed(time_text(float(total[at] - own_cost)))} by the search's estimate")
    return tuple(texts)

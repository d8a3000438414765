"""The exact search: the best layout of every op under the cost model, on every grid of up to three axes.

Each grid's choices are a labelling problem that is solved to proven optimality (`search.solve`). The winners go through
Shardy's flow with every decision held (`Pin`), and the best flow wins; then what propagation finds by itself is let go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from shardfn.graph.model import Flow, Graph, Op, Pin, Spec
from shardfn.search import propagation
from shardfn.search.filters import allowed, barred, narrowed
from shardfn.search.labelling import Labelling, Table
from shardfn.search.grid import Array, Axes, Grid, merged
from shardfn.search.problem import Answer, Candidate, Pins, Problem, objective
from shardfn.search.solve import Solution, solve
from shardfn.search.strategies import Edge, Node, Space, build, spec_of

HOLDING = 0.1
"""Seconds charged for an argument that lies on a device, in passes over its memory: ties go to the smaller piece."""

HELD_FIRST = frozenset({"dot_general", "convolution", "gather", "scatter", "reduce", "concatenate", "dynamic_slice"})
"""Ops whose layouts are decisions of their own; the others follow them."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The best on one grid; `is_exact` if the solution speaks of all choices on it."""

    axes: Axes
    space: Space
    solution: Solution
    is_exact: bool = True


def search(problem: Problem) -> Answer:
    """The cheapest layout at the problem's level."""
    if not problem.is_open:
        return propagation.search(problem)
    found = [f for axes in grids(problem) if (f := on_grid(problem, axes)) is not None]
    if found and not problem.axes and len(problem.graph.ops) <= LARGE:
        best = min(found, key=lambda f: f.solution.cost)
        found += [f for axes in finer(problem, best.axes) if (f := on_grid(problem, axes)) is not None]
    return answer_of(problem, found, "exact search")


def answer_of(problem: Problem, found: Sequence[Found], what: str) -> Answer:
    """The best of what was found, as its flow shows, with all that is to be said of it."""
    found = sorted(found, key=lambda f: (f.solution.cost, len(f.axes)))
    rated: list[tuple[tuple[float, ...], Candidate, Found]] = []
    for one in found[: _flows(problem.graph)]:
        made = candidate(problem, one)
        rated.append((objective(made.price, problem), made, one))
    if not rated:
        return propagation.search(problem)
    rated.sort(key=lambda r: r[0])
    _, best, at = rated[0]
    best = let_go(problem, best)
    others = tuple(c for _, c, _ in rated[1:])
    gap = at.solution.gap if at.is_exact else None
    proof = "no bound of how far from the optimum" if gap is None else (
        "proved" if at.solution.proved else f"within {gap:.1%} of the optimum")  # fmt: skip
    tried = ", ".join(shape(f.axes) for f in found)
    grid = " x ".join(f"{name}={size}" for name, size in best.axes)
    policy = f"{what} at level {problem.level}: grid {grid}, {proof} under the cost model; grids tried: {tried}"
    runner = f"{shape(others[0].axes)} grid" if others else ""
    reasons = tuple("" if given is not None else "the optimum of all ops together" for given in problem.specs)
    return Answer(best.axes, best.specs, reasons, policy, runner, pins=best.pins, gap=gap, others=others,
                  runners_up=runners_up(problem, at))  # fmt: skip


def shape(axes: Axes) -> str:
    """A grid as people write it: 4x2."""
    return "x".join(str(size) for _, size in axes) or "1"


def _flows(graph: Graph) -> int:
    """How many grids' flows are priced: fewer for larger programs, whatever the machine."""
    return max(1, min(4, 6000 // max(1, len(graph.ops))))


LARGE = 400
"""Ops from which grids of three axes are left out: they have up to 256 labels for each op."""


def grids(problem: Problem) -> list[Axes]:
    """The user's grid where a cut was given, else every split of the devices into one or two axes.

    The order of the axes matters only where their links differ: between nodes, or on a torus.
    """
    if problem.axes:
        return [problem.axes]
    return _distinct(problem, splits(problem.devices, 2))


def finer(problem: Problem, axes: Axes) -> list[Axes]:
    """The grids of three axes that divide an axis of a grid of two."""
    if len(axes) != 2:
        return []
    (_, a), (_, b) = axes
    return _distinct(problem, [(*s, b) for s in splits(a, 2)[1:]] + [(a, *s) for s in splits(b, 2)[1:]])


def _distinct(problem: Problem, sizes: Sequence[tuple[int, ...]]) -> list[Axes]:
    found: dict[tuple[int, ...], Axes] = {}
    for one in sizes:
        axes = tuple(zip("abc", one, strict=False))
        links = Grid.on(problem.hardware, axes).links
        is_even = len({(link.bytes_s, link.exchange_bytes_s) for link in links}) == 1
        found.setdefault(tuple(sorted(one, reverse=True)) if is_even else one, axes)
    return list(found.values())


def splits(n: int, most: int) -> list[tuple[int, ...]]:
    """Every way to write `n` as a product of up to `most` ordered sizes above 1, the fewest and largest first.

    >>> splits(8, 3)
    [(8,), (4, 2), (2, 4), (2, 2, 2)]
    """
    if most == 1 or n == 1:
        return [(n,)]
    found = [(n,)]
    for first in range(n // 2, 1, -1):
        if n % first == 0:
            found += [(first, *rest) for rest in splits(n // first, most - 1)]
    return sorted(found, key=lambda s: (len(s), [-size for size in s]))


def on_grid(problem: Problem, axes: Axes, chosen: Sequence[Array] | None = None) -> Found | None:
    """The optimum on one grid; None where no labelling was found."""
    given = {v: spec for v, spec in zip(problem.inputs, problem.specs, strict=True) if spec is not None}
    grid = Grid.on(problem.hardware, axes)
    space = build(problem.graph, grid, given, problem.results, problem.same_as, chosen, problem.facts)
    labels, lost = narrowed(labelling_of(space, problem), space, problem.graph, grid.sizes, problem.algorithm)
    solution = solve(labels, max(0.05, problem.seconds_left))
    if lost:
        solution = dataclasses.replace(solution, bound=solution.bound - lost, proved=False)
    return Found(axes, space, solution) if solution.feasible else None


def labelling_of(space: Space, problem: Problem) -> Labelling:
    """The cost of each label at the problem's level, in seconds (levels 0 and 2) or bytes (level 1)."""
    chip = problem.hardware.chip

    def cost(node: Node) -> np.ndarray:
        held = HOLDING * node.argument_bytes / chip.memory_bytes_s
        return {
            0: (node.sent + 1e-3 * node.argument_bytes) / chip.link_bytes_s + 1e3 * node.flops / chip.flops,
            1: node.argument_bytes + 1e3 * (node.sent_s + node.compute_s),
            2: node.sent_s + node.compute_s + held,
        }[problem.level]

    def between(edge: Edge) -> np.ndarray:
        return {0: edge.sent / chip.link_bytes_s, 1: 1e3 * edge.sent_s, 2: edge.sent_s}[problem.level]

    costs = [cost(node) for node in space.nodes]
    if problem.level == 1:
        for held in space.held:
            costs[held.node] = costs[held.node] + 0.1 * held.bytes
    return Labelling(
        tuple(costs),
        tuple(np.zeros(len(c)) for c in costs),
        np.zeros((len(costs), 2), np.int64),
        tuple(Table((edge.first, edge.second), between(edge)) for edge in space.edges),
    )


def candidate(problem: Problem, found: Found) -> Candidate:
    """The optimum on a grid with every decision held, priced by its flow."""
    names = tuple(name for name, _ in found.axes)

    def laid(value: int) -> Spec:
        node, layouts = found.space.layouts[value]
        row = layouts[found.solution.choice[node]]
        return spec_of(row.tolist(), len(problem.graph.values[value].shape), names)

    specs = tuple(spec if spec is not None else laid(value)[: len(shape)]
                  for value, spec, shape in zip(problem.inputs, problem.specs, problem.shapes, strict=True))  # fmt: skip
    pins: dict[int, Pin] = {}
    for index, op in enumerate(problem.graph.ops):
        if index in problem.can_hold and index in found.space.reads and op.name in HELD_FIRST:
            node, wanted = found.space.reads[index]
            label = found.solution.choice[node]
            operands = [spec_of(layouts[label].tolist(), len(problem.graph.values[v].shape), names)
                        for v, layouts in zip(op.inputs, wanted, strict=True)]  # fmt: skip
            pins[index] = Pin(tuple(operands), tuple(map(laid, op.outputs)))
    axes = found.axes
    if not problem.axes:
        axes, laid_out, pins = merged(axes, specs, pins)
        specs = tuple(laid_out)
    return Candidate(shape(axes), axes, specs, pins, problem.price(axes, specs, pins))


def let_go(problem: Problem, best: Candidate) -> Candidate:
    """The same without the pins that propagation does not need, if the flow stays as good."""
    if not best.pins:
        return best
    aim = objective(best.price, problem)
    free = problem.flow(best.axes, best.specs, {})
    alone = dataclasses.replace(best, pins={}, price=problem.price(best.axes, best.specs, {}))
    if objective(alone.price, problem) <= aim and not problem.algorithm.fully_use_devices:
        return alone  # but for that rule, which propagation does not know
    agreed = agreeing(problem.graph, free, best.pins)
    needed = {index: pin for index, pin in best.pins.items() if index not in agreed}
    fewer = dataclasses.replace(best, pins=needed, price=problem.price(best.axes, best.specs, needed))
    return fewer if objective(fewer.price, problem) <= aim else best


def agreeing(graph: Graph, flow: Flow, pins: Pins) -> frozenset[int]:
    """The pinned ops, by index, that a flow lays out as their pins want."""
    there: dict[tuple[object, ...], list[Op]] = {}
    for op in flow.graph.ops:
        there.setdefault(_like(flow.graph, op), []).append(op)
    here: dict[tuple[object, ...], list[int]] = {}
    for index, op in enumerate(graph.ops):
        here.setdefault(_like(graph, op), []).append(index)
    found = set()
    for key, indices in here.items():
        ops = there.get(key, [])
        if len(ops) == len(indices):
            for index, op in zip(indices, ops, strict=True):
                pin = pins.get(index)
                wanted = (*pin.operands, *pin.results) if pin else ()
                if pin and all(s is None or s == flow.specs[v]
                               for s, v in zip(wanted, (*op.inputs, *op.outputs), strict=True)):  # fmt: skip
                    found.add(index)
    return frozenset(found)


def _like(graph: Graph, op: Op) -> tuple[object, ...]:
    return op.name, op.where, tuple(graph.values[v].shape for v in (*op.inputs, *op.outputs))


def runners_up(problem: Problem, found: Found) -> tuple[str, ...]:
    """For each open argument the next best cut with all else as it is, and what it would cost more."""
    labels = labelling_of(found.space, problem)
    labels = barred(labels, allowed(found.space, problem.graph, tuple(n for _, n in found.axes), problem.algorithm))
    choice = found.solution.choice
    near: dict[int, list[tuple[Table, int]]] = {}
    for table in labels.tables:
        for place, node in enumerate(table.nodes):
            near.setdefault(node, []).append((table, place))
    told = []
    for value, shape_, spec in zip(problem.inputs, problem.shapes, problem.specs, strict=True):
        node, layouts = found.space.layouts[value]
        total = labels.costs[node].copy()
        for table, place in near.get(node, ()):
            other = table.nodes[1 - place]
            total += table.cost[:, choice[other]] if place == 0 else table.cost[choice[other]]
        mine = total[choice[node]]
        total[choice[node]] = np.inf
        if spec is not None or not np.isfinite(total).any():
            told.append("")
            continue
        at = int(np.argmin(total))
        cuts = cuts_of(layouts[at].tolist(), len(shape_), found.axes)
        more = total[at] - mine
        told.append(f"{cuts}: {'+' if more >= 0 else ''}{amount(more, problem.level)}")
    return tuple(told)


def cuts_of(row: Sequence[int], rank: int, axes: Axes) -> tuple[int, ...]:
    """How many ways each dim is cut.

    >>> cuts_of([0, -1], 2, (("a", 4), ("b", 2)))
    (4, 1)
    """
    return tuple(math.prod(size for (_, size), d in zip(axes, row, strict=True) if d == dim) for dim in range(rank))


def amount(cost: float, level: int) -> str:
    """A cost of the model in words: seconds, or bytes at level 1."""
    return f"{cost:,.0f} B" if level == 1 else f"{cost * 1e6:,.1f} us"



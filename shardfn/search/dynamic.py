"""The exact search: the best layout of every op under the cost model, on every grid of up to three axes.

Each grid's choices are a labelling problem that is solved to proven optimality (`search.solve`). The winners go through
Shardy's flow with every decision held (`Pin`), and the best flow wins; then what propagation finds by itself is let go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from shardfn.graph.model import Flow, Graph, Op, Pin, Spec
from shardfn.search import plain, propagation
from shardfn.search.filters import keeps, loosened, narrowed
from shardfn.search.labelling import Held, Labelling, Table, cost_of, peak_of
from shardfn.search.grid import Array, Axes, Grid, merged
from shardfn.search.peak import Peak, least_peak
from shardfn.search.problem import Answer, Candidate, Pins, Problem, objective
from shardfn.search.solve import Solution, solve
from shardfn.search.strategies import Edge, Node, Space, build, spec_of

SLACK, SLACKS = 1.02, (1.3,)
"""At level 1, how much above the least peak of the model the cheapest labelling is looked for: what is gathered for an op
takes memory too, which the model does not see and the flow does."""

STEPS, WITHIN = 40, 2.0
"""Steps towards the least peak, and seconds for one search within a limit."""

HOLDING = 0.1
"""Seconds charged for an argument that lies on a device, in passes over its memory: ties go to the smaller piece."""

PLAIN = 2000
"""Ops up to which the plain layouts are priced beside what was searched."""

HELD_FIRST = frozenset({"dot_general", "convolution", "gather", "scatter", "reduce", "concatenate", "dynamic_slice"})
"""Ops whose layouts are decisions of their own; the others follow them."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The best on one grid; `is_exact` if the solution speaks of all choices on it."""

    axes: Axes
    space: Space
    labels: Labelling
    solution: Solution
    is_exact: bool = True

    @property
    def peak(self) -> float:
        """Bytes that one device holds at most, by the model."""
        return peak_of(self.labels, self.solution.choice)


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
    """The best of what was found and of the plain layouts, as their flows show, with all that is to be said of it."""
    found = sorted(found, key=lambda f: (f.solution.cost, len(f.axes)))
    rated: list[tuple[tuple[float, ...], Candidate, Found | None]] = []
    for one in found[: _flows(problem.graph)]:
        made = candidate(problem, one)
        rated.append((objective(made.price, problem), made, one))
        for tighter in _tighter(problem, one, made):
            made = candidate(problem, tighter)
            rated.append((objective(made.price, problem), made, tighter))
    if len(problem.graph.ops) <= PLAIN or not rated:
        rated += [(objective(c.price, problem), c, None) for c in plain.candidates(problem)
                  if keeps(problem.flow(c.axes, c.specs, c.pins), problem.algorithm)]  # fmt: skip
    if not rated:
        return propagation.search(problem)
    rated.sort(key=lambda r: r[0])
    _, best, at = rated[0]
    others = tuple(c for _, c, _ in rated[1:])
    tried = ", ".join(shape(f.axes) for f in found)
    runner = f"{others[0].name}: {_figures(others[0])} against {_figures(best)}" if others else ""
    if at is None:
        reason = f"plain layout, better by its flow than the optimum of the cost model: {best.name}"
        policy = f"{what} at level {problem.level}, grids tried: {tried}; a plain layout has the better flow: {best.name}"
        reasons = tuple("" if given is not None else reason for given in problem.specs)
        return Answer(best.axes, best.specs, reasons, policy, runner, others=others)
    best = let_go(problem, best)
    gap = at.solution.gap if at.is_exact else None
    proof = "no bound of how far from the optimum" if gap is None else (
        "proved" if at.solution.proved else f"within {gap:.1%} of the optimum")  # fmt: skip
    grid = " x ".join(f"{name}={size}" for name, size in best.axes)
    policy = f"{what} at level {problem.level}: grid {grid}, {proof} under the cost model; grids tried: {tried}"
    reasons = tuple("" if given is not None else "the optimum of all ops together" for given in problem.specs)
    return Answer(best.axes, best.specs, reasons, policy, runner, pins=best.pins, gap=gap, others=others,
                  runners_up=runners_up(problem, at))  # fmt: skip


def _tighter(problem: Problem, found: Found, made: Candidate) -> Iterator[Found]:
    """Where the flow holds more than the model thought: what the model finds within a limit that allows for it."""
    if problem.level == 1:
        for slack in SLACKS:
            yield _within(found, slack * found.peak, problem)
    elif made.price.memory.peak > problem.memory_limit:
        share = problem.memory_limit / made.price.memory.peak
        for _ in range(2):
            found = _within(found, 0.98 * share * found.peak, problem)
            yield found


def _figures(c: Candidate) -> str:
    price = c.price
    return f"{price.bytes_sent:,} B sent, {price.memory.peak:,} B peak, {price.time_s * 1e6:,.1f} us modelled"


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
    """The optimum on one grid, within the memory limit where there is one; None where no labelling was found."""
    given = {v: spec for v, spec in zip(problem.inputs, problem.specs, strict=True) if spec is not None}
    grid = Grid.on(problem.hardware, axes)
    space = build(problem.graph, grid, given, problem.results, problem.same_as, chosen, problem.facts)
    labels, lost = narrowed(labelling_of(space, problem), space, problem.graph, grid.sizes, problem.algorithm)
    seconds = max(0.05, problem.seconds_left)
    if problem.level == 1:
        least = least_peak(labels, seconds, STEPS)
        if least is None:
            return None
        return _within(Found(axes, space, labels, _held(least, labels)), SLACK * least.peak, problem)
    found = Found(axes, space, labels, loosened(solve(labels, seconds), lost))
    if not math.isfinite(found.solution.cost):
        return None
    if found.peak <= problem.memory_limit:
        return found
    return _within(found, problem.memory_limit, problem)


def _within(found: Found, limit: float, problem: Problem) -> Found:
    """The cheapest labelling on a grid that holds at most `limit`, or one of the least peak where none does."""
    seconds = min(max(0.05, problem.seconds_left), WITHIN)
    solution = solve(dataclasses.replace(found.labels, limit=limit), seconds)
    if solution.feasible:
        return dataclasses.replace(found, solution=solution)
    least = least_peak(found.labels, seconds, STEPS)
    return found if least is None else dataclasses.replace(found, solution=_held(least, found.labels))


def _held(least: Peak, labels: Labelling) -> Solution:
    return Solution(least.choice, cost_of(labels, least.choice), -math.inf, False, False, 0.0)


def labelling_of(space: Space, problem: Problem) -> Labelling:
    """The cost of each label in seconds, at level 0 in bytes over the link's rate; what it holds in bytes."""
    chip = problem.hardware.chip

    def cost(node: Node) -> np.ndarray:
        if problem.level == 0:  # spread the work first, then save bytes
            return (node.sent + 1e-3 * node.argument_bytes) / chip.link_bytes_s + 1e3 * node.flops / chip.flops
        return node.sent_s + node.compute_s + HOLDING * node.argument_bytes / chip.memory_bytes_s

    costs = tuple(cost(node) for node in space.nodes)
    held = (*space.held, *space.copies) if problem.level == 1 else space.held
    end = max((h.end for h in held), default=1)
    arguments = [Held(v, 0, end, node.argument_bytes) for v, node in enumerate(space.nodes) if node.argument_bytes.any()]
    return Labelling(
        costs,
        tuple(np.zeros(len(c)) for c in costs),
        np.zeros((len(costs), 2), np.int64),
        tuple(
            Table((edge.first, edge.second), edge.sent_s if problem.level else edge.sent / chip.link_bytes_s)
            for edge in space.edges
        ),
        held=(*arguments, *(Held(h.node, h.start, h.end, h.bytes) for h in held)),
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
    alone = dataclasses.replace(best, pins={}, price=problem.price(best.axes, best.specs, {}))
    if objective(alone.price, problem) <= aim:
        return alone
    if len(problem.graph.ops) > PLAIN:  # a further flow costs more than the pins do
        return best
    agreed = agreeing(problem.graph, problem.flow(best.axes, best.specs, {}), best.pins)
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
    labels, choice = found.labels, found.solution.choice
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



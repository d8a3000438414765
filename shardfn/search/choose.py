"""From what was found on the grids to an answer: each is priced by Shardy's flow with every decision held (`Pin`), the best
flow wins, and what propagation finds by itself is let go."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from shardfn.cost.links import links
from shardfn.graph.model import Pin, Spec
from shardfn.search import plain, propagation
from shardfn.search.facts import bytes_of
from shardfn.search.filters import keeps
from shardfn.search.grid import Axes, merged
from shardfn.search.letgo import LARGE, PLAIN, as_sliced, let_go
from shardfn.search.levels import repeated, totals
from shardfn.search.polish import LINE, PRODUCTS, in_line
from shardfn.search.problem import Answer, Candidate, Pins, Problem, figures, objective
from shardfn.search.results import ends_of, held_as
from shardfn.search.room import fits_nowhere
from shardfn.search.solver.labelling import Labelling, Table, peak_of
from shardfn.search.solver.solve import Solution
from shardfn.search.strategies import Space, spec_of

MOST = 3
"""Of what was found, how much is priced by its flow beyond the first few, if it promises more than they turned out to hold."""

FAR, BACK = 2.0, 0.75
"""Of the time of the best flow so far: from there holding every decision does not make a flow the best. Of 60 plans of
programs of 500 ops and more the most that it saved was 38 %. And how far it brings a flow back towards what the model
promised: where anything was to be won, by two thirds at most."""

SHORT = 1.1
"""Of the time of the best flow so far, or of its promise where that is more: what was found for level 0 and promises no less
than that is not priced at level 2, as of 28 plans its flow took 1.8 to 109 times as long as the best."""

NEARLY = 1.05
"""Of what the model promises: a flow that costs no more than this much of it keeps it."""

LET_GO = 3
"""Of what was priced, where all flows disappoint, how much is let go of what it need not hold before the best is taken: of
what promises more than the best."""

KINDS = 3
"""Of what is found at level 1: see `Found.kind`."""

FOLLOWING = frozenset({"add", "multiply"})
"""Ops that follow an operand and can be held."""

TWICE = 2
"""How often what a flow lays out otherwise than was found is held: holding some of it moves the rest."""

HELD_FIRST = frozenset({"dot_general", "convolution", "gather", "scatter", "concatenate", "dynamic_slice"})
"""Ops whose layouts are decisions of their own, and that gain by being held; the others follow them. Held sums cut what
elementwise ops made, which is read whole elsewhere: of flows of eight models they made none better that was the best."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The best on one grid; `is_exact` if the solution speaks of all choices on it."""

    axes: Axes
    space: Space
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


Mend = Callable[[Problem, Found, Candidate], Iterable[Found]]
"""What to try instead of something found whose flow holds more than the limit."""

Turn = Callable[[Problem, Found], Iterable[Found]]
"""What else to try on the grid of something found whose flow breaks the model's promise."""


def answer_of(
    problem: Problem, found: Sequence[Found], what: str, mend: Mend, grids: Sequence[Axes] = (),
    untried: Sequence[Axes] = (), turn: Turn | None = None,
) -> Answer:  # fmt: skip
    """The best of what was found and of the plain layouts, as their flows show, with all that is to be said of it.

    After the time limit only the first thing found is priced.

    Args:
      problem: what is asked.
      found: best first; of large programs only the first few are priced.
      what: the name of the search.
      mend: what else to try where a flow holds more than the limit.
      grids: all that were looked at, those too of which nothing is in `found`.
      untried: those of them that nothing was left for.
      turn: what else to try where all flows break the model's promises.
    """
    rated: list[_Rated] = []
    is_small, is_large = len(problem.graph.ops) <= PLAIN, len(problem.graph.ops) > LARGE
    least, disappoints = plain.least(problem), True
    for count, one in enumerate(_in_turn(found)[: weighed(problem)]):
        if rated and problem.seconds_left <= 0:
            break
        is_left = bool(rated) and (count >= priced(problem) or fastest(problem, rated) < math.inf)
        if is_left and not promises(problem, one, min(r[0] for r in rated)):
            break
        made = min(candidates(problem, one, fastest(problem, rated)), key=lambda c: objective(c.price, problem))
        made = let_go(problem, made) if is_small else made
        # By how much a program is too large that fits nowhere is worth little.
        is_lost = made.price.memory.peak > problem.memory_limit and fits_nowhere(problem)
        is_kept = (works_as_found if is_lost else keeps_promise)(problem, one, made)
        disappoints = disappoints and not is_kept
        rated.append((objective(made.price, problem), made, one))
        if (is_small or weighs(problem, made)) and problem.seconds_left > 0:
            other = held_as(problem, made, one.axes, decided(problem, one))
            rated += [] if other is None else [(objective(other.price, problem), other, one)]
        if not is_large and (is_small or not is_kept or problem.level != 2):
            rated += _in_line(problem, one, made)
        is_over = least < problem.memory_limit < made.price.memory.peak and not (is_large and is_lost)
        if is_over and problem.seconds_left > 0:
            for other in mend(problem, one, made):
                rated += [(objective(c.price, problem), c, other) for c in candidates(problem, other)]
    if rated and (disappoints or not is_large) and problem.level != 1:
        rated += _otherwise(problem, found, rated, turn if not is_large else None, disappoints)
    if is_large and rated and disappoints:
        rated += [(objective(c.price, problem), c, None) for c in plain.of_batch(problem)]
    elif not is_large or not rated:
        peak = min((made.price.memory.peak for _, made, _ in rated), default=math.inf)
        simple = plain.candidates(problem, problem.level == 1, peak, fastest(problem, rated))
        rated += [(objective(c.price, problem), c, None) for c in simple]
    if not rated:
        return propagation.search(problem)
    rated.sort(key=lambda r: r[0])
    if disappoints and not is_small and not is_large:
        rated = _let_go(problem, rated)
    _, best, at = rated[0]
    best = as_sliced(problem, best)
    others = tuple(c for _, c, _ in rated[1:])
    looked = (*(f.axes for f in found), *(axes for axes in grids if axes not in untried))
    tried = ", ".join(dict.fromkeys(map(shape, looked)))
    if untried:
        bound = f"{problem.seconds:g} s" if problem.seconds_left <= 0 else "the work that a search may do"
        tried += f"; not in {bound}: {', '.join(map(shape, untried))}"
    elif problem.seconds_left <= 0:
        tried += f"; {problem.seconds:g} s were over before all was tried"
    runner = f"{others[0].name}: {figures(others[0].price)} against {figures(best.price)}" if others else ""
    if at is None:
        best = let_go(problem, best, is_last=True)
        reason = f"plain layout, better by its flow than the optimum of the cost model: {best.name}"
        policy = (
            f"{what} at level {problem.level}, grids tried: {tried}; a plain layout has the better flow: {best.name}"
        )
        reasons = tuple("" if given is not None else reason for given in problem.specs)
        return Answer(best.axes, best.specs, reasons, policy, runner, pins=best.pins, others=others, ends=best.ends)
    best = best if is_small else let_go(problem, best, is_last=True)
    gap = _gap(problem, at, found) if not untried and keeps_promise(problem, at, best) else None
    proof = "no bound of how far from the optimum" if gap is None else (
        "proved" if gap == 0 else f"within {gap:.1%} of the optimum")  # fmt: skip
    grid = " x ".join(f"{name}={size}" for name, size in best.axes)
    aside = f"; {LINE}" if best.name.endswith(LINE) else ""
    policy = f"{what} at level {problem.level}: grid {grid}, {proof} under the cost model; grids tried: {tried}{aside}"
    reasons = tuple("" if given is not None else "the optimum of all ops together" for given in problem.specs)
    return Answer(best.axes, best.specs, reasons, policy, runner, pins=best.pins, gap=gap, others=others, ends=best.ends,
                  runners_up=runners_up(problem, at))  # fmt: skip


_Rated = tuple[tuple[float, ...], Candidate, Found | None]


def fastest(problem: Problem, rated: Sequence[_Rated]) -> float:
    """The least modelled time so far of what fits, or of all where nothing can; at level 2 of programs that are not small,
    elsewhere infinite: there more is tried than that is sure to fail."""
    if problem.level != 2 or len(problem.graph.ops) <= PLAIN:
        return math.inf
    every = [made.price for _, made, _ in rated]
    fit = [price for price in every if price.memory.peak <= problem.memory_limit]
    if every and not fit and fits_nowhere(problem):
        fit = every
    return min((price.time_s for price in fit), default=math.inf)


def _otherwise(
    problem: Problem, found: Sequence[Found], rated: Sequence[_Rated], turn: Turn | None, disappoints: bool
) -> Iterator[_Rated]:
    """What was found for the other aim on the best grid, as it is and in line. Where all flows disappoint, also with the
    arguments in pieces, on the model's own best grid and that one's mirror image, and on the grid of one axis, which is
    priced then too; of small programs, whose flows cost little, on all grids whose flows were priced, whether they
    disappoint or not. At level 2 of others what was found for level 0 on the best grid alone, as long as all fits, and if
    it promises about as much."""
    at = {id(one): one for _, _, one in rated}
    (first, _, best), is_small = min(rated, key=lambda r: r[0]), len(problem.graph.ops) <= PLAIN
    is_over = any(made.price.memory.peak > problem.memory_limit for _, made, _ in rated)
    is_tight = is_over and not fits_nowhere(problem)
    is_clear = fastest(problem, rated) < math.inf
    single = [f for f in found if len(f.axes) == 1][:1] if disappoints or is_small else []
    tried = [f for f in single if id(f) not in at and not (is_clear and not promises(problem, f, first))]
    if turn is not None and problem.level == 2 and not is_small and not is_tight and best is not None:
        most = SHORT * max(fastest(problem, rated), best.solution.cost)
        tried += [one for one in itertools.islice(turn(problem, best), 1) if one.solution.cost < most]
    elif turn is not None:
        own = [f for f in found[:1] if f.peak <= problem.memory_limit] if disappoints and not is_small else []
        every = at.values() if is_small else (best, *own, *_mirrored(own, found))
        again = {id(f): f for f in (*every, *single) if f is not None}
        for f in again.values() if problem.seconds_left > 0 else ():
            tried += itertools.islice(turn(problem, f), None if f is best and disappoints and not is_small else 1)
    for one in tried:
        if problem.seconds_left > 0:
            made = min(candidates(problem, one, fastest(problem, rated)), key=lambda c: objective(c.price, problem))
            yield objective(made.price, problem), made, one
            if turn is not None:
                yield from _in_line(problem, one, made)


def _mirrored(some: Sequence[Found], found: Sequence[Found]) -> list[Found]:
    """The first found on the grids whose sizes are the other way round: their axes have other links."""
    sizes = {tuple(size for _, size in reversed(f.axes)) for f in some}
    return [f for f in found if tuple(size for _, size in f.axes) in sizes][:1]


def _in_line(problem: Problem, one: Found, made: Candidate) -> Iterator[_Rated]:
    if one.axes == made.axes and problem.seconds_left > 0:
        other = as_sliced(problem, in_line(problem, made, layout_of(problem, one)))
        if keeps(problem.flow_of(other), problem.algorithm):
            yield objective(other.price, problem), other, one


def _let_go(problem: Problem, rated: Sequence[_Rated]) -> list[_Rated]:
    """The same, best first, with the first few of what promises more than the best of them holds let go of its pins."""
    gone: dict[int, _Rated] = {}
    tried: set[int] = set()
    for at, (_, made, one) in enumerate(rated):
        if one is not None and id(one) not in tried and len(tried) < LET_GO and promises(problem, one, rated[0][0]):
            tried.add(id(one))
            made = let_go(problem, made)
            gone[at] = objective(made.price, problem), made, one
    return sorted((gone.get(at, row) for at, row in enumerate(rated)), key=lambda r: r[0])


def _gap(problem: Problem, at: Found, found: Sequence[Found]) -> float | None:
    """How far what was chosen may be from the optimum of all grids; at level 0, where costs are weighed on each grid by
    itself, of its own."""
    if not at.is_exact or problem.level == 1:
        return None
    if problem.level == 0:
        return at.solution.gap
    bound = min(f.solution.cost if f.solution.proved else f.solution.bound for f in found)
    gap = 1 - bound / at.solution.cost if at.solution.cost > 0 else 0.0
    return gap if gap > 1e-6 else 0.0


def promises(problem: Problem, found: Found, best: tuple[float, ...]) -> bool:
    """Whether the model thinks that something is better than the best flow so far, at the levels where both count the same:
    of what it moves again and again, the launches may be one."""
    if problem.level == 1 or len(problem.graph.ops) > LARGE or found.peak > problem.memory_limit:
        return False
    if problem.level == 2:
        latency_s = min(link.latency_s for link in links(problem.hardware, found.axes))
        return found.solution.cost - latency_s * repeated(found.space, found.solution.choice) < best[1]
    made = totals(found.space, found.solution.choice)
    return (problem.idle(made.flops), made.sent) < best[1:3]


def shape(axes: Axes) -> str:
    """A grid as people write it: 4x2."""
    return "x".join(str(size) for _, size in axes) or "1"


def weighed(problem: Problem) -> int:
    """How many of what was found may be priced: the first few, and what promises more than they turned out to hold."""
    return max(priced(problem), MOST if len(problem.graph.ops) <= LARGE else 1)


def priced(problem: Problem) -> int:
    """How many flows are priced: fewer for larger programs, whatever the machine; at level 1 one of each kind."""
    return max(KINDS if problem.level == 1 else 1, min(12, 2000 // max(1, len(problem.graph.ops))))


def _in_turn(found: Sequence[Found]) -> list[Found]:
    kinds = ([f for f in found if f.kind == kind] for kind in range(KINDS))
    return [f for row in itertools.zip_longest(*kinds) for f in row if f is not None]


def layout_of(problem: Problem, found: Found) -> Callable[[int], Spec]:
    """The layout of each value of the graph, as it was found."""
    names = tuple(name for name, _ in found.axes)

    def laid(value: int) -> Spec:
        node, layouts = found.space.layouts[value]
        row = layouts[found.solution.choice[node]]
        return spec_of(row.tolist(), len(problem.graph.values[value].shape), names)

    return laid


def decided(problem: Problem, found: Found) -> Callable[[int], Spec | None]:
    """The same, and None of what is no decision of its own."""
    laid = layout_of(problem, found)
    return lambda value: laid(value) if value in found.space.layouts else None


def candidates(problem: Problem, found: Found, best_s: float = math.inf) -> Iterator[Candidate]:
    """The optimum on a grid, priced by its flow: first with what products make held, and how they read their operands left
    to the compiler, which moves those in the way that is best for a product; and with every decision held, where the flow
    of the first does not keep what the model promised: not even to fit, if it did; and with all held that this flow lays
    out otherwise, where it does not either. Where another flow takes `best_s` seconds, these are left out if they cannot be
    expected to take less."""
    axes, specs, held = _held(problem, found)
    ops = problem.graph.ops
    pins = {
        index: pin if ops[index].name in FOLLOWING else Pin((None,) * len(pin.operands), pin.results)
        for index, pin in held.items()
        if ops[index].name in PRODUCTS | FOLLOWING
    }
    loose = Candidate(shape(axes), axes, specs, pins, problem.price(axes, specs, pins))
    yield loose
    is_over = loose.price.memory.peak > problem.memory_limit >= found.peak
    time_s = loose.price.time_s
    expected_s = time_s - BACK * max(0.0, time_s - found.solution.cost)
    if problem.seconds_left <= 0 or time_s > FAR * best_s or expected_s > best_s:
        return
    if not is_over and works_as_found(problem, found, loose):
        return
    full = candidate(problem, found)
    yield full
    if len(ops) <= LARGE and problem.seconds_left > 0 and not works_as_found(problem, found, full):
        yield from all_held(problem, found, full)


def keeps_promise(problem: Problem, found: Found, made: Candidate) -> bool:
    """Whether a flow fits, and `works_as_found`."""
    return made.price.memory.peak <= problem.memory_limit and works_as_found(problem, found, made)


def works_as_found(problem: Problem, found: Found, made: Candidate) -> bool:
    """Whether a flow sends and works about as little as the model thought. Of memory the model tells too little to say, so
    that at level 1 only a large program, whose flows are dear, is trusted; and of what the chip does beside products it
    counts the same too little for all layouts."""
    if problem.level == 1:
        return len(problem.graph.ops) > LARGE
    promised, price = totals(found.space, found.solution.choice), made.price
    if problem.level == 2:
        more_s = price.communication_s - promised.sent_s
        return price.flops <= NEARLY * promised.flops and more_s <= (NEARLY - 1) * price.time_s
    return (problem.idle(price.flops), price.bytes_sent) <= (problem.idle(promised.flops), NEARLY * promised.sent)


def candidate(problem: Problem, found: Found) -> Candidate:
    """The optimum on a grid with every decision held, priced by its flow."""
    axes, specs, pins = _held(problem, found)
    return Candidate(shape(axes), axes, specs, pins, problem.price(axes, specs, pins))


def all_held(problem: Problem, found: Found, full: Candidate) -> Iterator[Candidate]:
    """A candidate with its sums held as well, and what follows the decisions where its flow lays that out otherwise than was
    found; and the same once more."""
    axes, _, with_sums = _held(problem, found, HELD_FIRST | {"reduce"})
    pins = dict(with_sums)
    wanted = layout_of(problem, found)
    for _ in range(TWICE if axes == full.axes == found.axes else 0):
        there = problem.flow_of(full)
        laid = {op.site: [there.specs[v] for v in op.outputs] for op in there.graph.ops if op.site >= 0}
        pins |= {
            index: Pin((None,) * len(op.inputs), tuple(map(wanted, op.outputs)))
            for index, op in enumerate(problem.graph.ops)
            if index in problem.can_hold
            and index not in pins
            and all(v in found.space.layouts for v in op.outputs)
            and laid.get(op.site, ()) not in ((), [*map(wanted, op.outputs)])
        }
        if pins == full.pins or problem.seconds_left <= 0:
            return
        full = dataclasses.replace(full, pins=dict(pins), price=problem.price(full.axes, full.specs, pins))
        yield full


def _held(problem: Problem, found: Found, kinds: Collection[str] = HELD_FIRST) -> tuple[Axes, tuple[Spec, ...], Pins]:
    names, laid = tuple(name for name, _ in found.axes), layout_of(problem, found)
    specs = tuple(spec if spec is not None else laid(value)[: len(shape)]
                  for value, spec, shape in zip(problem.inputs, problem.specs, problem.shapes, strict=True))  # fmt: skip
    pins: dict[int, Pin] = {}
    for index, op in enumerate(problem.graph.ops):
        if index in problem.can_hold and index in found.space.reads and op.name in kinds:
            node, wanted = found.space.reads[index]
            label = found.solution.choice[node]
            operands = [spec_of(layouts[label].tolist(), len(problem.graph.values[v].shape), names)
                        for v, layouts in zip(op.inputs, wanted, strict=True)]  # fmt: skip
            pins[index] = Pin(tuple(operands), tuple(map(laid, op.outputs)))
    pins |= _broadcasts(problem, found, laid)
    axes = found.axes
    if not problem.axes:
        axes, laid_out, pins = merged(axes, specs, pins)
        specs = tuple(laid_out)
    return axes, specs, pins


def _broadcasts(problem: Problem, found: Found, laid: Callable[[int], Spec]) -> dict[int, Pin]:
    """Sums and products that read a broadcast of what lies in pieces which they do not read: held to how they read it, as
    else the pieces of a bias or a scale would become those of the activation that it meets."""
    names, values = tuple(name for name, _ in found.axes), problem.graph.values
    source = {op.outputs[0]: op.inputs[0] for op in problem.graph.ops if op.name == "broadcast_in_dim"}
    pins: dict[int, Pin] = {}
    for index, op in enumerate(problem.graph.ops):
        if op.name not in FOLLOWING or index not in problem.can_hold or index not in found.space.reads:
            continue
        node, wanted = found.space.reads[index]
        operands: list[Spec | None] = [None] * len(op.inputs)
        for position, (v, layouts) in enumerate(zip(op.inputs, wanted, strict=True)):
            root = v
            while root in source:
                root = source[root]
            if root != v and root in found.space.layouts:
                spec = spec_of(layouts[found.solution.choice[node]].tolist(), len(values[v].shape), names)
                if not {a for dim in laid(root) for a in dim} <= {a for dim in spec for a in dim}:
                    operands[position] = spec
        if any(spec is not None for spec in operands):
            pins[index] = Pin(tuple(operands), (None,) * len(op.outputs))
    return pins


def weighs(problem: Problem, made: Candidate) -> bool:
    """Whether the results that are open are a good part of what one device holds at the peak."""
    laid, sizes = ends_of(problem, made), {name: float(size) for name, size in made.axes}
    held = sum(
        bytes_of(problem.graph.values[end.value]) / math.prod(sizes.get(a, 1.0) for dim in laid[at] for a in dim)
        for at, end in problem.ends.items()
    )
    return held > (NEARLY - 1) * made.price.memory.peak


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
        mine, own = total[choice[node]], cuts_of(layouts[choice[node]].tolist(), len(shape_), found.axes)
        total[[cuts_of(row.tolist(), len(shape_), found.axes) == own for row in layouts]] = np.inf
        if spec is not None or not np.isfinite(total).any():
            told.append("")
            continue
        at = int(np.argmin(total))
        cuts = cuts_of(layouts[at].tolist(), len(shape_), found.axes)
        more = total[at] - mine
        told.append(f"{cuts}: {'+' if more >= 0 else ''}{amount(more)}")
    return tuple(told)


def cuts_of(row: Sequence[int], rank: int, axes: Axes) -> tuple[int, ...]:
    """How many ways each dim is cut.

    >>> cuts_of([0, -1], 2, (("a", 4), ("b", 2)))
    (4, 1)
    """
    return tuple(math.prod(size for (_, size), d in zip(axes, row, strict=True) if d == dim) for dim in range(rank))


def amount(cost: float) -> str:
    """A cost of the model in words: seconds, at level 0 the bytes over the link's rate and the work beside them."""
    return f"{cost * 1e6:,.1f} us"

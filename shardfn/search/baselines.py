"""Plain layouts that people write by hand, found by the dim classes: one class cut over all devices, or two on a grid of
two axes, and the same with what only the update reads, or all else, in pieces over the axes left. They stand beside the
search's own plans: among the finalists, at level 1, and wherever the program is small."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardfn.ir.model import OpConstraint, Spec
from shardfn.ir.op_traits import CONTRACTIONS, ELEMENTWISE
from shardfn.partition.resharding import divisors
from shardfn.search.filters import keeps_rules
from shardfn.search.graph_facts import array_bytes
from shardfn.search.problem import OpConstraints, SearchCandidate, SearchProblem, objective
from shardfn.search.resharding_costs import Axes

HASTY = 4
"""Layouts that are priced after the time limit at most, until one fits."""

FAR = 1.25
"""Of the time of the best flow so far: from there a layout is not laid out in pieces as well, which was worth up to 27 % of
programs of 500 ops and more that were far off anyway, and nothing of the others."""


def candidates(
    problem: SearchProblem, pairs: bool = True, below: float = math.inf, fastest: float = math.inf
) -> tuple[SearchCandidate, ...]:
    """The plain layouts of the heaviest dim classes, priced by their flow, best first; the user's own layouts stay.

    At level 1 those are priced first that promise the least memory, of large programs only the first few, and none that
    holds more than another in its arguments and results alone. After the time limit no more are priced. What the
    algorithm parameters rule out is left out.

    Args:
      problem: what is asked.
      pairs: whether grids of two axes are among them.
      below: bytes at the peak of what was found already.
      fastest: seconds that the best of it takes; where a layout takes much longer, its pieces are not priced.
    """
    if problem.axes or not problem.is_open:
        return ()
    every = {
        (one.axes, one.specs, tuple(one.constraints.items())): one for one in reversed(list(_layouts(problem, pairs)))
    }
    layouts = list(every.values())[::-1]
    if problem.level == 1:
        layouts.sort(key=lambda one: estimated_peak(problem, one))
        layouts = layouts[: problem.effort.plain_layouts]
    found: list[SearchCandidate] = []
    is_far: dict[object, bool] = {}
    for one in layouts:
        if problem.seconds_left <= 0:
            break
        cut = one.axes, *one.cut.items()
        if not is_far.get(cut) and (problem.level != 1 or held(problem, one) < below):
            made = problem.candidate(one.name, one.axes, one.specs, one.constraints)
            is_far.setdefault(cut, made.cost.time_s > FAR * fastest)
            if keeps_rules(problem.partitioned_of(made), problem.algorithm):
                found.append(made)
                below = min(below, made.cost.memory.peak)
    return tuple(sorted(found, key=lambda c: objective(c.cost, problem)))


def batch_baselines(problem: SearchProblem, every: bool = True) -> tuple[SearchCandidate, ...]:
    """The plain layouts with the batch cut over all devices, priced by their flow: data parallel, ZeRO-1 and fully sharded
    data parallel, or the last alone. None where nothing is a batch, or the grid is the user's."""
    if problem.axes or not problem.is_open:
        return ()
    found: dict[tuple[Spec, ...], SearchCandidate] = {}
    for one in _of_batch(problem):
        if (every or one.pieces is ArgumentSharding.ALL) and one.specs not in found and problem.seconds_left > 0:
            made = problem.candidate(one.name, one.axes, one.specs, one.constraints)
            if keeps_rules(problem.partitioned_of(made), problem.algorithm):
                found[one.specs] = made
    return tuple(found.values())


def _of_batch(problem: SearchProblem) -> Iterator[Baseline]:
    n = (("a", problem.devices),)
    for class_ in dict.fromkeys(problem.groups[i][0] for i in sorted(batch_arguments(problem)) if problem.groups[i]):
        if _fits(problem, class_, problem.devices):
            yield from _each(problem, n, {class_: "a"})


def hasty_baselines(problem: SearchProblem) -> tuple[SearchCandidate, ...]:
    """What stands beside an answer when the time limit is over: the first plain layout that fits the memory limit, of the
    batch before others. A few are priced whatever the time, so that a limit too short is no worse than data parallel."""
    if problem.axes or not problem.is_open:
        return ()
    found: list[SearchCandidate] = []
    for one in itertools.islice(itertools.chain(_of_batch(problem), _layouts(problem, pairs=False)), HASTY):
        made = problem.candidate(one.name, one.axes, one.specs, one.constraints)
        if keeps_rules(problem.partitioned_of(made), problem.algorithm):
            found.append(made)
            if made.cost.memory.peak <= problem.memory_limit:
                break
    return tuple(found)


def batch_arguments(problem: SearchProblem) -> frozenset[int]:
    """The arguments that no result takes the place of: a batch, not parameters."""
    kept = set(problem.same_as.values())
    return frozenset(i for i, value in enumerate(problem.inputs) if kept and value not in kept)


class ArgumentSharding(enum.Enum):
    """What is cut into pieces over the axes that a layout leaves, or the first of them: what elementwise ops alone read (as
    ZeRO-1 lays out an optimizer's state), or everything (as fully sharded data parallel lays out weights)."""

    STATE = "what only the update reads"
    SIZEABLE = "all else but small parameters"
    ALL = "all else"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A plain layout: dim classes cut over axes, all else whole or in pieces."""

    name: str
    axes: Axes
    cut: Mapping[int, str]
    specs: tuple[Spec, ...]
    constraints: OpConstraints
    pieces: ArgumentSharding | None = None


def held(problem: SearchProblem, layout: Baseline) -> int:
    """Bytes that arguments, and results that lie as they do or as the user said, take on one device."""
    sizes = dict(layout.axes)
    arguments = dict(zip(problem.inputs, layout.specs, strict=True))
    results = dict(problem.results) | {v: arguments[source] for v, source in problem.same_as.items()}

    def on_one(laid: Mapping[int, Spec]) -> int:
        return sum(
            math.ceil(array_bytes(problem.graph.values[v]) / math.prod(sizes[a] for dim in spec for a in dim))
            for v, spec in laid.items()
        )

    given = on_one({v: spec for v, spec in arguments.items() if v in problem.donated})
    return on_one(arguments) + max(0, on_one(results) - given)


def least(problem: SearchProblem) -> float:
    """Bytes that one device holds at least whatever the layout: an even share of the arguments, and of what results there
    are that do not take their place."""
    sizes = [array_bytes(problem.graph.values[v]) for v in problem.inputs]
    given = sum(size for v, size in zip(problem.inputs, sizes, strict=True) if v in problem.donated)
    results = sum(array_bytes(problem.graph.values[v]) for v in (*problem.results, *problem.same_as))
    return (sum(sizes) + max(0.0, results - given)) / problem.devices


def estimated_peak(problem: SearchProblem, layout: Baseline) -> float:
    """About what a layout holds at the peak: `held`, and the program's temporaries with their classes cut."""
    sizes, values = dict(layout.axes), problem.graph.values

    def ways(value: int) -> int:
        cut: dict[str, int] = {}
        for size, class_ in zip(values[value].shape, problem.value_groups[value], strict=True):
            axis = layout.cut.get(class_)
            if axis is not None and size % sizes[axis] == 0:
                cut.setdefault(axis, sizes[axis])
        return math.prod(cut.values())

    change: dict[int, float] = {}
    for place in problem.facts.places:
        size = place.bytes / min(map(ways, place.values), default=1)
        change[place.start] = change.get(place.start, 0.0) + size
        change[place.end + 1] = change.get(place.end + 1, 0.0) - size
    return held(problem, layout) + max(itertools.accumulate(change[tick] for tick in sorted(change)), default=0.0)


def _layouts(problem: SearchProblem, pairs: bool) -> Iterator[Baseline]:
    n = problem.devices
    open_ = {c for classes, spec in zip(problem.groups, problem.specs, strict=True) if spec is None for c in classes}
    heaviest = sorted(open_, key=lambda c: (-problem.group_bytes.get(c, 0), c))
    parts = divisors(n, n)[1:-1]
    most = problem.effort.plain_classes
    fit = list(itertools.islice((c for c in heaviest if any(_fits(problem, c, ways) for ways in (n, *parts))), most))
    paired = fit if pairs else []
    for c in fit:
        if _fits(problem, c, n):
            yield from _each(problem, (("a", n),), {c: "a"}, problem.level == 2)
    for first, second in itertools.permutations(paired, 2):
        for a in parts:
            if _fits(problem, first, a) and _fits(problem, second, n // a):
                yield from _each(problem, (("a", a), ("b", n // a)), {first: "a", second: "b"})


def _fits(problem: SearchProblem, class_: int, ways: int) -> bool:
    """Whether an open argument has a dim of a class that can be cut so many ways."""
    return any(map(any, _laid(problem, (("a", ways),), {class_: "a"})))


SMALL_SHARE = 1e-3
"""Of the bytes of all parameters and states: the smallest of them that hold no more than this together are small. A gather
of one costs its latency."""


def _each(problem: SearchProblem, axes: Axes, cut: Mapping[int, str], with_large: bool = False) -> Iterator[Baseline]:
    sizes, every = dict(axes), tuple(name for name, _ in axes)
    name = ", ".join(f"{_name(problem, c)} cut {sizes[axis]} ways" for c, axis in cut.items())
    yield Baseline(name, axes, cut, _laid(problem, axes, cut), {})
    constraints = _pins(problem, axes, cut)
    kinds = (
        [(ArgumentSharding.STATE, every[:1])] * any(is_optimizer_state(problem))
        + [(ArgumentSharding.SIZEABLE, every)] * with_large
        + [(ArgumentSharding.ALL, every[:1]), (ArgumentSharding.ALL, every)]
    )
    for pieces, over in dict.fromkeys(kinds):
        count = math.prod(sizes[axis] for axis in over)
        laid = _laid(problem, axes, cut, pieces, over)
        yield Baseline(f"{name}, {pieces.value} in {count} pieces", axes, cut, laid, constraints, pieces)


def _pins(problem: SearchProblem, axes: Axes, cut: Mapping[int, str]) -> OpConstraints:
    """Products and look-ups whose results have a dim of a class are held to its cut: pieces would lead propagation
    astray."""
    constraints: dict[int, OpConstraint] = {}
    for index, op in enumerate(problem.graph.ops):
        if index in problem.can_constrain and op.name in _PINNED:
            rows = [(problem.graph.values[v].shape, problem.value_groups[v]) for v in op.outputs]
            results = tuple(along(shape, classes, axes, cut, ()) for shape, classes in rows)
            if any(map(any, results)):
                constraints[index] = OpConstraint((None,) * len(op.inputs), results)
    return constraints


_PINNED = CONTRACTIONS | {"gather"}


def is_optimizer_state(problem: SearchProblem) -> tuple[bool, ...]:
    """Of each argument whether a result takes its place and elementwise ops alone read it: momentum, not parameters."""
    if problem.memo.state is None:
        read: dict[int, set[str]] = {value: set() for value in problem.inputs}
        for op in problem.graph.ops:
            for value in read.keys() & set(op.inputs):
                read[value].add(op.name)
        kept = set(problem.same_as.values())
        problem.memo.state = tuple(v in kept and read[v] <= ELEMENTWISE for v in problem.inputs)
    return problem.memo.state


def are_small_parameters(problem: SearchProblem) -> tuple[bool, ...]:
    """Of each argument whether it is a small one (`SMALL_SHARE`) of those that a result takes the place of."""
    kept = [i for i, value in enumerate(problem.inputs) if value in set(problem.same_as.values())]
    sizes = {i: array_bytes(problem.graph.values[problem.inputs[i]]) for i in kept}
    small, room = set[int](), SMALL_SHARE * sum(sizes.values())
    for i in sorted(kept, key=lambda i: (sizes[i], i)):
        room -= sizes[i]
        if room < 0:
            break
        small.add(i)
    return tuple(i in small for i in range(len(problem.inputs)))


def _name(problem: SearchProblem, class_: int) -> str:
    rows = zip(problem.names, problem.groups, strict=True)
    return next(f"{path} dim {classes.index(class_)}" for path, classes in rows if class_ in classes)


def _laid(
    problem: SearchProblem,
    axes: Axes,
    cut: Mapping[int, str],
    pieces: ArgumentSharding | None = None,
    over: Sequence[str] = (),
) -> tuple[Spec, ...]:
    into = [pieces is ArgumentSharding.ALL] * len(problem.inputs)
    if pieces is ArgumentSharding.STATE:
        into = list(is_optimizer_state(problem))
    elif pieces is ArgumentSharding.SIZEABLE:
        into = [not small for small in are_small_parameters(problem)]
    rows = zip(problem.specs, problem.shapes, problem.groups, into, strict=True)
    return tuple(
        s if s is not None else along(shape, classes, axes, cut, over if is_one else ())
        for s, shape, classes, is_one in rows
    )


def roomiest(spec: Sequence[Collection[str]], left: Sequence[int], size: int) -> int | None:
    """The dim that one more axis goes along: the largest that it divides, rather one that is whole; None where it divides none.

    Args:
      spec: the axes that cut each dim already.
      left: of each dim, the elements of a piece.
      size: of the axis.

    >>> roomiest((("a",), (), ()), (64, 8, 6), 2), roomiest((("a",), ()), (64, 7), 2), roomiest(((),), (7,), 2)
    (1, 0, None)
    """
    dims = [d for d, n in enumerate(left) if n and n % size == 0]
    return max(dims, key=lambda d: (not spec[d], left[d], -d), default=None)


def along(
    shape: Sequence[int], classes: Sequence[int], axes: Axes, cut: Mapping[int, str], over: Sequence[str]
) -> Spec:
    """Each class's first dim over its axis, where it divides; those of `over` that are left over the largest dims that they
    divide."""
    sizes = dict(axes)
    spec: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for class_, axis in cut.items():
        at = next((d for d, c in enumerate(classes) if c == class_ and left[d] and left[d] % sizes[axis] == 0), None)
        if at is not None:
            spec[at].append(axis)
            left[at] //= sizes[axis]
    used = {axis for dim in spec for axis in dim}
    for axis in (name for name in over if name not in used):
        at = roomiest(spec, left, sizes[axis])
        if at is not None:
            spec[at].append(axis)
            left[at] //= sizes[axis]
    order = [name for name, _ in axes]
    return tuple(tuple(sorted(dim, key=order.index)) for dim in spec)

"""The plans beside a plan: one array cut otherwise, all else as it is. Of a small program they are priced by their flow, and
taken as long as they are better: the model prices each op by itself, and which results propagation carries a layout to,
and how an op that is not held then lies, only the flow shows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from shardfn.ir.model import Spec
from shardfn.search import baselines
from shardfn.search.filters import keeps_rules
from shardfn.search.problem import SearchCandidate, SearchProblem, objective
from shardfn.search.resharding_costs import Axes, strategy_of
from shardfn.search.result_shardings import result_specs_of

WORTH = 1e-3
"""Of the modelled time: less is no reason to leave what was found with all ops together."""


def improve(problem: SearchProblem, start: SearchCandidate) -> SearchCandidate:
    """The best that changes of one open array after another lead to, with what is held inside as it is.

    Args:
      problem: what is asked.
      start: where to begin.
    """
    left = problem.effort.one_array_changes
    best, tried, at = start, {_key(start)}, -1
    found = True
    while found:
        found = False
        for array, other in one_array_changes(problem, best, at + 1):
            if left <= 0 or problem.seconds_left <= 0:
                return best
            if _key(other) in tried or (problem.level == 1 and _bytes_held(problem, other) >= best.cost.memory.peak):
                continue
            tried.add(_key(other))
            left -= 1
            made = problem.again(other)
            if _is_better(problem, made, best) and keeps_rules(problem.partitioned_of(made), problem.algorithm):
                best, found, at = made, True, array
                break
    return best


def one_array_changes(
    problem: SearchProblem, made: SearchCandidate, first: int = 0
) -> Iterator[tuple[int, SearchCandidate]]:
    """Each open argument and result in each other layout on the grid, not priced yet: in turn one of each array, beginning
    with array `first`, and of it what promises most; with the number of the array."""
    is_least = problem.level == 1
    now = dict(result_specs_of(problem, made)) | dict(made.result_specs)
    rows: list[Iterator[SearchCandidate]] = []
    for i, spec in enumerate(made.specs):
        if problem.specs[i] is None and problem.shapes[i]:
            rows.append(_arguments(made, i, _ordered(made.axes, problem.shapes[i], spec, is_least)))
    for at, end in problem.open_results.items():
        rows.append(_results(made, at, _ordered(made.axes, end.shape, now[at], is_least)))
    order = [n % len(rows) for n in range(first, first + len(rows))]
    for turn in itertools.zip_longest(*(rows[n] for n in order)):
        yield from ((n, other) for n, other in zip(order, turn, strict=True) if other is not None)


def _arguments(made: SearchCandidate, i: int, others: Sequence[Spec]) -> Iterator[SearchCandidate]:
    for spec in others:
        yield dataclasses.replace(made, specs=(*made.specs[:i], spec, *made.specs[i + 1 :]))


def _results(made: SearchCandidate, at: int, others: Sequence[Spec]) -> Iterator[SearchCandidate]:
    for spec in others:
        yield dataclasses.replace(made, result_specs={**made.result_specs, at: spec})


def changed_arrays(problem: SearchProblem, start: SearchCandidate, best: SearchCandidate) -> str:
    """The arrays that lie otherwise, and how they do: "`x` (8, 1), `result` (1, 4)"; the first few of them."""
    rows = zip(problem.names, start.specs, best.specs, strict=True)
    found = [(name, spec) for name, before, spec in rows if before != spec]
    found += [
        (problem.open_results[at].name, spec)
        for at, spec in best.result_specs.items()
        if start.result_specs.get(at) != spec
    ]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(f"`{name}` {strategy_of(spec, best.axes)}" for name, spec in found[:SHOWN]) + more


SHOWN = 3


@functools.lru_cache(maxsize=1 << 10)
def _ordered(axes: Axes, shape: tuple[int, ...], now: Spec, is_least: bool) -> tuple[Spec, ...]:
    """Whole first, but where the least memory is looked for, then what cuts most and fewest dims."""
    sizes = dict(axes)

    def promise(spec: Spec) -> tuple[object, ...]:
        cuts = [math.prod(sizes[a] for a in dim) for dim in spec]
        return any(spec) != is_least, -math.prod(cuts), sum(c > 1 for c in cuts), spec

    return tuple(sorted(layouts(shape, axes, now), key=promise))


def _bytes_held(problem: SearchProblem, made: SearchCandidate) -> int:
    return baselines.held(problem, baselines.Baseline("", made.axes, {}, made.specs, made.constraints))


def _is_better(problem: SearchProblem, made: SearchCandidate, best: SearchCandidate) -> bool:
    """Whether it is, if by seconds alone by a good part of them."""
    mine, least = objective(made.cost, problem), objective(best.cost, problem)
    if mine >= least:
        return False
    pairs = zip((mine.over, *mine.aim, *mine.ties), (least.over, *least.aim, *least.ties), strict=True)
    first = next(a for a, b in pairs if a != b)
    return first != made.cost.time_s or made.cost.time_s < (1 - WORTH) * best.cost.time_s


def _key(made: SearchCandidate) -> object:
    return made.axes, made.specs, tuple(sorted(made.result_specs.items()))


def layouts(shape: Sequence[int], axes: Axes, but: Spec) -> Iterator[Spec]:
    """The ways to put the axes of a grid on the dims of an array that they divide, but for one, up to their order.

    All of them, or, where there are more than `MANY`, those that put neighbouring axes on one dim.

    >>> list(layouts((4, 3), (("a", 2),), ((), ())))
    [(('a',), ())]
    """
    names, dims = [name for name, _ in axes], range(len(shape))
    known = {tuple(map(frozenset, but))}
    for choice in _choices(len(shape), len(axes)):
        spec = tuple(tuple(name for name, at in zip(names, choice, strict=True) if at == dim) for dim in dims)
        form = tuple(map(frozenset, spec))
        if form not in known and all(
            n and n % c == 0 for n, c in zip(shape, strategy_of(spec, axes), strict=True) if c > 1
        ):
            known.add(form)
            yield spec


MANY = 4096


def _choices(dims: int, axes: int) -> Iterator[tuple[int, ...]]:
    """For each axis the dim that it cuts, -1 for none."""
    if (dims + 1) ** axes <= MANY:
        yield from itertools.product(range(-1, dims), repeat=axes)
        return
    for dim in range(dims):
        for start, stop in itertools.combinations(range(axes + 1), 2):
            yield tuple(dim if start <= i < stop else -1 for i in range(axes))
    yield (-1,) * axes

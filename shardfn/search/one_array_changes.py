"""Local search: change the sharding of one array at a time, and keep each change that makes the evaluated cost better.

The label model prices each op by itself; only the partitioned program shows where propagation carries a sharding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from shardfn.ir.model import Axes, Spec
from shardfn.search import baselines
from shardfn.search.filters import keeps_rules
from shardfn.search.problem import SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import strategy_of
from shardfn.search.result_shardings import result_specs_of

WORTH = 1e-3
"""Part of the modelled time that a change must save."""

NAMED = 3
"""Changed arrays that a policy names."""

MOST_CHOICES = 4096
"""Ways to put axes on dimensions up to which all are tried; of more, those with neighbouring axes on one dimension."""


def improve(problem: SearchProblem, start: SearchCandidate) -> SearchCandidate:
    """The best candidate that changes of one open array after another lead to, with the same constraints."""
    left = problem.effort.one_array_changes
    best, tried, at = start, {_key(start)}, -1
    found = True
    while found:
        found = False
        for array, other in one_array_changes(problem, best, at + 1):
            if left <= 0 or problem.seconds_left <= 0:
                return best
            if _key(other) in tried or (
                problem.level == 1
                and baselines.resident_bytes(problem, other.axes, other.specs) >= best.cost.memory.peak
            ):
                continue
            tried.add(_key(other))
            left -= 1
            made = problem.changed(other)
            if _is_better(problem, made, best) and keeps_rules(problem.partitioned_of(made), problem.algorithm):
                best, found, at = made, True, array
                break
    return best


def one_array_changes(
    problem: SearchProblem, made: SearchCandidate, first: int = 0
) -> Iterator[tuple[int, SearchCandidate]]:
    """Each open argument and result in each other sharding on the mesh, not evaluated yet, with the number of the array.

    The arrays take turns, beginning with array `first`, each with its most promising sharding first.
    """
    for_memory = problem.level == 1
    now = {**result_specs_of(problem, made), **made.result_specs}
    rows: list[Iterator[SearchCandidate]] = []
    for i, (spec, shape) in enumerate(zip(made.specs, problem.shapes, strict=True)):
        if problem.specs[i] is None and shape:
            rows.append(map(functools.partial(_with_argument, made, i), _ordered(made.axes, shape, spec, for_memory)))
    for at, result in problem.open_results.items():
        others = _ordered(made.axes, result.shape, now[at], for_memory)
        rows.append(map(functools.partial(_with_result, made, at), others))
    order = [n % len(rows) for n in range(first, first + len(rows))]
    for turn in itertools.zip_longest(*(rows[n] for n in order)):
        yield from ((n, other) for n, other in zip(order, turn, strict=True) if other is not None)


def _with_argument(made: SearchCandidate, i: int, spec: Spec) -> SearchCandidate:
    return dataclasses.replace(made, specs=(*made.specs[:i], spec, *made.specs[i + 1 :]))


def _with_result(made: SearchCandidate, at: int, spec: Spec) -> SearchCandidate:
    return dataclasses.replace(made, result_specs={**made.result_specs, at: spec})


def changed_arrays(problem: SearchProblem, start: SearchCandidate, best: SearchCandidate) -> str:
    """The arrays with another sharding and their strategies: "`x` (8, 1), `result` (1, 4)"; the first few of them."""
    rows = zip(problem.names, start.specs, best.specs, strict=True)
    found = [(name, spec) for name, before, spec in rows if before != spec]
    results = {at: spec for at, spec in best.result_specs.items() if start.result_specs.get(at) != spec}
    found += [(problem.open_results[at].name, spec) for at, spec in results.items()]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(f"`{name}` {strategy_of(spec, best.axes)}" for name, spec in found[:NAMED]) + more


@functools.lru_cache(maxsize=1 << 10)
def _ordered(axes: Axes, shape: tuple[int, ...], now: Spec, for_memory: bool) -> tuple[Spec, ...]:
    """Replicated first, at level 1 last; then the most shards on the fewest dimensions."""

    def preference(spec: Spec) -> tuple[object, ...]:
        strategy = strategy_of(spec, axes)
        return any(spec) != for_memory, -math.prod(strategy), sum(c > 1 for c in strategy), spec

    return tuple(sorted(array_specs(shape, axes, now), key=preference))


def _is_better(problem: SearchProblem, made: SearchCandidate, best: SearchCandidate) -> bool:
    """Whether a candidate is better; if only by seconds, by at least `WORTH` of them."""
    mine, least = problem.rank(made), problem.rank(best)
    if mine >= least:
        return False
    pairs = zip((mine.over, *mine.aim, *mine.ties), (least.over, *least.aim, *least.ties), strict=True)
    first = next(a for a, b in pairs if a != b)
    return first != made.cost.time_s or made.cost.time_s < (1 - WORTH) * best.cost.time_s


def _key(made: SearchCandidate) -> object:
    return made.axes, made.specs, tuple(sorted(made.result_specs.items()))


def array_specs(shape: Sequence[int], axes: Axes, but: Spec) -> Iterator[Spec]:
    """The shardings of an array on a mesh whose axes divide its dimensions, up to the order of axes, except `but`.

    >>> list(array_specs((4, 3), (("a", 2),), ((), ())))
    [(('a',), ())]
    """
    names, dims = [name for name, _ in axes], range(len(shape))
    known = {tuple(map(frozenset, but))}
    for choice in _choices(len(shape), len(axes)):
        spec = tuple(tuple(name for name, at in zip(names, choice, strict=True) if at == dim) for dim in dims)
        form = tuple(map(frozenset, spec))
        shards = zip(shape, strategy_of(spec, axes), strict=True)
        if form not in known and all(n and n % c == 0 for n, c in shards if c > 1):
            known.add(form)
            yield spec


def _choices(dims: int, axes: int) -> Iterator[tuple[int, ...]]:
    """For each axis the dimension that it shards, -1 for none."""
    if (dims + 1) ** axes <= MOST_CHOICES:
        yield from itertools.product(range(-1, dims), repeat=axes)
        return
    for dim in range(dims):
        for start, stop in itertools.combinations(range(axes + 1), 2):
            yield tuple(dim if start <= i < stop else -1 for i in range(axes))
    yield (-1,) * axes

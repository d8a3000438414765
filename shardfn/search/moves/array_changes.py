"""Moves of the local search that change the sharding of one array, or of all arrays that are alike.

The label model costs each op by itself; only the partitioned program shows where propagation carries a sharding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from shardfn.ir.model import Axes, Spec
from shardfn.ir.specs import strategy_of
from shardfn.search.moves import baselines
from shardfn.search.moves.result_shardings import result_specs_of
from shardfn.search.problem import MEMORY, Proposal, SearchCandidate, SearchProblem

NAMED = 3
"""Changed arrays that a name lists."""

MOST_CHOICES = 4096
"""Ways to put axes on dimensions up to which all are tried; of more, those with neighbouring axes on one dimension."""


def one_array_changes(problem: SearchProblem, candidate: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """Each open argument and result in each other sharding on the mesh.

    The arrays take turns, each with its most promising sharding first. At level 1, proposals are left out whose arguments and
    results alone take as much memory as the candidate.

    Args:
      problem: the question.
      candidate: what to change.
      first: the array that begins, modulo their number.
    """
    now = {**result_specs_of(problem, candidate), **candidate.result_specs}
    rows = [_argument_rows(problem, candidate, (i,)) for i, _ in _open_arguments(problem)]
    for at, result in problem.open_results.items():
        others = _ordered(candidate.axes, result.shape, now[at], problem.level == MEMORY)
        rows.append(map(functools.partial(_with_result, problem, candidate, at), others))
    order = [n % len(rows) for n in range(first, first + len(rows))]
    for turn in itertools.zip_longest(*(rows[n] for n in order)):
        yield from (other for other in turn if other is not None and _may_hold_less(problem, other, candidate))


def alike_array_changes(problem: SearchProblem, candidate: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The same for open arguments of one shape and sharding together, such as a weight of all layers with its optimizer state.

    Batch arguments come first, then the smallest."""
    batch, found = baselines.batch_arguments(problem), dict[object, list[int]]()
    for i, shape in _open_arguments(problem):
        found.setdefault((shape, candidate.specs[i], i in batch), []).append(i)
    several = sorted(
        (members for members in found.values() if len(members) > 1),
        key=lambda m: (m[0] not in batch, len(m) * math.prod(problem.shapes[m[0]]), m),
    )
    rows = [_argument_rows(problem, candidate, tuple(members)) for members in several]
    for turn in itertools.zip_longest(*rows):
        yield from (other for other in turn if other is not None and _may_hold_less(problem, other, candidate))


def _open_arguments(problem: SearchProblem) -> list[tuple[int, tuple[int, ...]]]:
    return [(i, shape) for i, shape in enumerate(problem.shapes) if problem.specs[i] is None and shape]


def _argument_rows(problem: SearchProblem, candidate: SearchCandidate, members: tuple[int, ...]) -> Iterator[Proposal]:
    i = members[0]
    others = _ordered(candidate.axes, problem.shapes[i], candidate.specs[i], problem.level == MEMORY)
    return map(functools.partial(_with_arguments, problem, candidate, members), others)


def _with_arguments(
    problem: SearchProblem, candidate: SearchCandidate, members: tuple[int, ...], spec: Spec
) -> Proposal:
    specs = tuple(spec if i in members else own for i, own in enumerate(candidate.specs))
    return proposal_from(problem, candidate, specs=specs)


def _with_result(problem: SearchProblem, candidate: SearchCandidate, at: int, spec: Spec) -> Proposal:
    return proposal_from(problem, candidate, result_specs={**candidate.result_specs, at: spec})


CHANGED = "; changed by local search: "
"""What stands between the name of a candidate and the arrays that local search changed."""


def proposal_from(problem: SearchProblem, candidate: SearchCandidate, **changes: Any) -> Proposal:
    """A candidate with other shardings or constraints, as a proposal that says what is changed."""
    fields = {
        "axes": candidate.axes,
        "specs": candidate.specs,
        "constraints": candidate.constraints,
        "result_specs": candidate.result_specs,
    }
    other = Proposal(candidate.name, **{**fields, **changes}, origin=candidate.origin or candidate.generator)
    start = candidate.name.partition(CHANGED)[0]
    changed = changed_arrays(problem, candidate, other)
    return dataclasses.replace(other, name=f"{start}{CHANGED}{changed}" if changed else candidate.name)


def _may_hold_less(problem: SearchProblem, other: Proposal, candidate: SearchCandidate) -> bool:
    return (
        problem.level != MEMORY
        or baselines.resident_bytes(problem, other.axes, other.specs) < candidate.cost.memory.peak
    )


def changed_arrays(problem: SearchProblem, start: Proposal, best: Proposal) -> str:
    """The arrays with another sharding and their strategies: "`x` (8, 1), `result` (1, 4)"; the first few of them."""
    rows = zip(problem.names, start.specs, best.specs, strict=True)
    found = [(name, spec) for name, before, spec in rows if before != spec]
    results = {at: spec for at, spec in best.result_specs.items() if start.result_specs.get(at) != spec}
    found += [(problem.open_results[at].name, spec) for at, spec in results.items()]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(f"`{name}` {strategy_of(spec, best.axes)}" for name, spec in found[:NAMED]) + more


@functools.lru_cache(maxsize=1 << 10)
def _ordered(axes: Axes, shape: tuple[int, ...], now: Spec, for_memory: bool) -> tuple[Spec, ...]:
    """The other shardings of an array, the most promising first.

    Those that move the fewest axes come first. Among them the replicated one is first (`for_memory` last), then those with the
    most shards, on the fewest dimensions, the leading ones, whose shards are contiguous.
    """
    place = {axis: dim for dim, of in enumerate(now) for axis in of}

    def preference(spec: Spec) -> tuple[object, ...]:
        strategy = strategy_of(spec, axes)
        there = {axis: dim for dim, of in enumerate(spec) for axis in of}
        moved = sum(place.get(axis) != there.get(axis) for axis, _ in axes)
        used = [c > 1 for c in strategy]
        return moved, any(spec) != for_memory, -math.prod(strategy), sum(used), [not u for u in used], spec

    return tuple(sorted(array_specs(shape, axes, now), key=preference))


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

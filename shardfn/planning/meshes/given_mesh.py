"""Integer strategies on the axes of a given mesh: each dimension takes axes whose sizes multiply to its number of shards.

Tied dimensions take the same axes, or some of them. Dimensions of one value inside the function take different axes where the
mesh has them. An axis is never split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from shardfn.errors import Problem
from shardfn.frontend.strategy import Leaf
from shardfn.ir.dimension_groups import shared_elements
from shardfn.ir.model import Axes, Spec, mesh_text

SHOWN = 4
"""Strategies that an error lists."""


def place_on_axes(
    leaves: Sequence[Leaf],
    strategies: Sequence[tuple[int, ...] | None],
    specs: Sequence[Spec | None],
    axes: Axes,
    groups: Sequence[tuple[int, ...]],
    problems: list[Problem],
    values: Sequence[tuple[int, ...]] = (),
    sizes: Sequence[int] = (),
    instead: str = "",
) -> tuple[Spec | None, ...]:
    """The sharding of each array whose strategy is given by integers; the arrays with the fewest possible shardings first.

    Args:
      leaves: the arrays.
      strategies: that of each leaf to be placed; else None.
      specs: the shardings of the leaves that name axes; else None.
      axes: the mesh.
      groups: the dimension group of each dimension of each leaf.
      problems: receives the strategies that the mesh has no axes for.
      values: the dimension groups of every value inside the function.
      sizes: elements of each of these values.
      instead: another fix for a strategy that the mesh has no axes for.

    Returns:
      `specs`, with the shardings of the placed leaves.
    """
    found = list(specs)
    used: dict[int, list[tuple[str, ...]]] = {}
    for spec, of in zip(specs, groups, strict=True):
        _note(used, spec or (), of)
    shared = shared_elements(values, sizes or (1,) * len(values), {group for of in groups for group in of})
    options = {i: list(_specs(s, axes)) for i, s in enumerate(strategies) if s is not None and specs[i] is None}
    for i in sorted(options, key=lambda i: (len(options[i]), i)):
        if not options[i]:
            problems.append(_misfit(leaves[i], strategies[i] or (), axes, instead))
            continue
        found[i] = min(options[i], key=lambda spec: _cost(spec, groups[i], used, shared))
        _note(used, found[i] or (), groups[i])
    return tuple(found)


def _specs(strategy: Sequence[int], axes: Axes) -> Iterator[Spec]:
    """The shardings with a number of shards for each dimension, those over the first axes first.

    >>> list(_specs((2, 4), (("a", 2), ("b", 2), ("c", 2))))
    [(('a',), ('b', 'c')), (('b',), ('a', 'c')), (('c',), ('a', 'b'))]
    """
    if not strategy:
        yield ()
        return
    large = [axis for axis in axes if axis[1] > 1]
    for count in range(len(large) + 1):
        for chosen in itertools.combinations(large, count):
            if math.prod(size for _, size in chosen) == strategy[0]:
                rest = tuple(axis for axis in axes if axis not in chosen)
                for spec in _specs(strategy[1:], rest):
                    yield (tuple(name for name, _ in chosen), *spec)


def _note(used: dict[int, list[tuple[str, ...]]], spec: Spec, groups: Sequence[int]) -> None:
    for dim, group in zip(spec, groups):  # noqa: B905
        if dim:
            used.setdefault(group, []).append(dim)


def _cost(
    spec: Spec,
    groups: Sequence[int],
    used: Mapping[int, Sequence[tuple[str, ...]]],
    elements: Mapping[tuple[int, int], int],
) -> tuple[int, int]:
    """How often tied dimensions would be on other axes; then the elements of the values where two groups share an axis."""
    apart, shared = 0, 0
    for dim, group in zip(spec, groups, strict=True):
        mine = set(dim)
        apart += sum(not (mine <= set(other) or mine >= set(other)) for other in used.get(group, ()) if dim)
        for other, rows in used.items():
            if other != group and mine & {axis for row in rows for axis in row}:
                shared += elements.get((group, other), 0)
    return apart, shared


def _misfit(leaf: Leaf, strategy: Sequence[int], axes: Axes, instead: str) -> Problem:
    fits = sorted(_possible(leaf.shape, axes), key=lambda one: _distance(one, strategy))[:SHOWN]
    return Problem(f"{leaf.label} cannot be sharded {tuple(strategy)} on the mesh {mesh_text(axes)}", leaf.source,
                   "the mesh is given, and each dimension takes axes of its own whose sizes multiply to its number of shards",
                   f"write {' or '.join(map(str, fits))} there, or make a mesh with axes of these sizes{instead}")  # fmt: skip


def _possible(shape: Sequence[int], axes: Axes) -> set[tuple[int, ...]]:
    """All strategies of an array on a mesh."""
    found = set()
    for dims in itertools.product(
        range(len(shape) + 1), repeat=len(axes)
    ):  # the dimension of each axis; the last is none
        one = tuple(math.prod(n for (_, n), d in zip(axes, dims, strict=True) if d == at) for at in range(len(shape)))
        if all(size % n == 0 for size, n in zip(shape, one, strict=True)):
            found.add(one)
    return found


def _distance(one: Sequence[int], other: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True)), tuple(one)

"""The meshes that a search tries."""

from __future__ import annotations

from collections.abc import Sequence

from shardfn.cost.devices.links import are_alike, links
from shardfn.ir.divisors import divisors
from shardfn.ir.model import Axes
from shardfn.search.labels import MeshSolution, transposed_mesh
from shardfn.search.problem import SearchProblem


def meshes(problem: SearchProblem) -> list[Axes]:
    """The user's mesh where a sharding was given, else every split of the devices into one or two axes.

    The order of the axes matters only where their links differ: between nodes, or on a torus.
    """
    return [problem.axes] if problem.axes else _distinct(problem, splits(problem.devices, 2))


def three_axis_meshes(problem: SearchProblem, best: MeshSolution, found: Sequence[MeshSolution]) -> list[Axes]:
    """The meshes of three axes that divide an axis of the best mesh of two, or of its transpose where that was solved."""
    twin = transposed_mesh(best.axes, found)
    sizes: list[tuple[int, ...]] = []
    for axes in (best.axes, *([twin.axes] if twin is not None else ())):
        if len(axes) == 2:
            (_, a), (_, b) = axes
            sizes += [(*s, b) for s in splits(a, 2)[1:]] + [(a, *s) for s in splits(b, 2)[1:]]
    return _distinct(problem, sizes)


def _distinct(problem: SearchProblem, sizes: Sequence[tuple[int, ...]]) -> list[Axes]:
    found: dict[tuple[int, ...], Axes] = {}
    for one in sizes:
        axes = tuple(zip("abc", one, strict=False))
        is_even = are_alike(links(problem.hardware, axes))
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
    for first in divisors(n)[1:-1]:
        found += [(first, *rest) for rest in splits(n // first, most - 1)]
    return sorted(found, key=lambda s: (len(s), [-size for size in s]))

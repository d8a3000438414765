"""Plain layouts that people write by hand, found by the dim classes: one class cut over all devices, or two on a grid of
two axes, and the same with all else in pieces over the axes left (as FSDP lays out weights). They stand beside the
search's own plans: among the finalists, at level 1, and wherever the program is small."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from shardfn.cuts import divisors
from shardfn.graph.model import Spec
from shardfn.search.grid import Axes
from shardfn.search.problem import Candidate, Problem, objective

MOST = 3
"""Classes, the heaviest first."""


def candidates(problem: Problem, pairs: bool = True) -> tuple[Candidate, ...]:
    """The plain layouts of the heaviest dim classes, priced by their flow, best first; the user's own layouts stay.

    Args:
      problem: what is asked.
      pairs: whether grids of two axes are among them.
    """
    if problem.axes or not problem.is_open:
        return ()
    layouts = dict.fromkeys(_layouts(problem, pairs))
    found = [Candidate(name, axes, specs, {}, problem.price(axes, specs, {})) for name, axes, specs in layouts]
    return tuple(sorted(found, key=lambda c: objective(c.price, problem)))


def _layouts(problem: Problem, pairs: bool) -> Iterator[tuple[str, Axes, tuple[Spec, ...]]]:
    n = problem.devices
    open_ = {c for classes, spec in zip(problem.classes, problem.specs, strict=True) if spec is None for c in classes}
    heaviest = sorted(open_, key=lambda c: (-problem.weights.get(c, 0), c))
    fit = [c for c in heaviest if any(map(any, _laid(problem, (("a", n),), {c: "a"}, False)))][:MOST]
    for c in fit:
        yield from _both(problem, (("a", n),), {c: "a"})
    for first, second in itertools.permutations(fit if pairs else (), 2):
        for a in divisors(n, n)[1:-1]:
            yield from _both(problem, (("a", a), ("b", n // a)), {first: "a", second: "b"})


def _both(problem: Problem, axes: Axes, cut: Mapping[int, str]) -> Iterator[tuple[str, Axes, tuple[Spec, ...]]]:
    sizes = dict(axes)
    name = ", ".join(f"{_name(problem, c)} cut {sizes[axis]} ways" for c, axis in cut.items())
    yield name, axes, _laid(problem, axes, cut, False)
    yield f"{name}, all else in pieces", axes, _laid(problem, axes, cut, True)


def _name(problem: Problem, class_: int) -> str:
    rows = zip(problem.names, problem.classes, strict=True)
    return next(f"{path} dim {classes.index(class_)}" for path, classes in rows if class_ in classes)


def _laid(problem: Problem, axes: Axes, cut: Mapping[int, str], in_pieces: bool) -> tuple[Spec, ...]:
    rows = zip(problem.specs, problem.shapes, problem.classes, strict=True)
    return tuple(s if s is not None else _along(shape, classes, axes, cut, in_pieces) for s, shape, classes in rows)


def _along(shape: Sequence[int], classes: Sequence[int], axes: Axes, cut: Mapping[int, str], in_pieces: bool) -> Spec:
    """Each class's first dim over its axis, where it divides; what axes are left over the largest dims that they divide."""
    sizes = dict(axes)
    spec: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for class_, axis in cut.items():
        at = next((d for d, c in enumerate(classes) if c == class_ and left[d] and left[d] % sizes[axis] == 0), None)
        if at is not None:
            spec[at].append(axis)
            left[at] //= sizes[axis]
    used = {axis for dim in spec for axis in dim}
    for axis in (name for name, _ in axes if in_pieces and name not in used):
        dims = [d for d, size in enumerate(left) if size and size % sizes[axis] == 0]
        at = max(dims, key=lambda d: (not spec[d], left[d], -d), default=None)
        if at is not None:
            spec[at].append(axis)
            left[at] //= sizes[axis]
    order = [name for name, _ in axes]
    return tuple(tuple(sorted(dim, key=order.index)) for dim in spec)

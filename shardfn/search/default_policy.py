"""The first, simple policy: open arguments follow the cuts that are there; with none, one dim class is cut.

It tries each of the heaviest dim classes alone, over all devices, and keeps the one that is cheapest at the level asked for. It
never mixes two classes (no data x tensor parallel) and never cuts an argument for memory alone: the other searches do.
"""

from __future__ import annotations

import math

from shardfn.ir.model import Spec
from shardfn.search.problem import Answer, SearchProblem, figures, objective

MOST_CANDIDATES = 8


def search(problem: SearchProblem) -> Answer:
    """Follow the given cuts, or cut the cheapest single class."""
    if all(spec is not None for spec in problem.specs):
        given = tuple(spec for spec in problem.specs if spec is not None)
        axes = problem.axes or tuple(("a", n) for n in (problem.devices,) if n > 1)
        return Answer(axes, given, ("",) * len(given), "nothing was open")
    if any(dim for spec in problem.specs if spec for dim in spec):
        return follow(problem)
    return one_class(problem)


def follow(problem: SearchProblem) -> Answer:
    """Open arguments take the axes of the classes that others cut, as far as they divide."""
    sizes = dict(problem.axes)
    origin: dict[int, tuple[tuple[str, ...], str]] = {}
    for name, spec, classes in zip(problem.names, problem.specs, problem.groups, strict=True):
        for d, dim in enumerate(spec or ()):
            if dim and len(dim) > len(origin.get(classes[d], ((), ""))[0]):
                origin[classes[d]] = dim, f"{name} dim {d}"
    specs: list[Spec] = []
    reasons: list[str] = []
    for shape, spec, classes in zip(problem.shapes, problem.specs, problem.groups, strict=True):
        if spec is not None:
            specs.append(spec)
            reasons.append("")
            continue
        mine: list[tuple[str, ...]] = []
        why: list[str] = []
        for d, size in enumerate(shape):
            wanted, source = origin.get(classes[d], ((), ""))
            taken = {a for dim in mine for a in dim}
            usable = () if taken & set(wanted) else _dividing(wanted, sizes, size)
            mine.append(usable)
            if usable:
                why.append(f"dim {d} follows {source}")
        specs.append(tuple(mine))
        reasons.append("; ".join(why) or "whole: no dim of it is cut elsewhere")
    policy = "follow the given cuts (no search)"
    return Answer(problem.axes, tuple(specs), tuple(reasons), policy, source="propagated")


def _dividing(axes: tuple[str, ...], sizes: dict[str, int], size: int) -> tuple[str, ...]:
    """The longest major part of `axes` that divides `size`."""
    for end in range(len(axes), 0, -1):
        if size and size % math.prod(sizes[a] for a in axes[:end]) == 0:
            return axes[:end]
    return ()


def one_class(problem: SearchProblem) -> Answer:
    """Cut one dim class over as many devices as divide it; the cheapest at the level wins, ties go to the first."""
    open_ = {
        c
        for shape, classes, spec in zip(problem.shapes, problem.groups, problem.specs, strict=True)
        for c, n in zip(classes, shape, strict=True)
        if spec is None and n > 1
    }
    heaviest = sorted(open_, key=lambda c: (-problem.group_bytes[c], c))[:MOST_CANDIDATES]
    rated = []
    for class_ in sorted(heaviest):
        answer = _cut_class(problem, class_)
        if answer is not None:
            cost = problem.evaluate(*answer, {})
            rated.append((objective(cost, problem), len(rated), class_, answer, cost))
    if not rated:
        specs = tuple(spec if spec is not None else ((),) * len(s)
                      for spec, s in zip(problem.specs, problem.shapes, strict=True))  # fmt: skip
        whole = f"whole: no dim divides over {problem.devices} devices"
        axes = problem.axes or tuple(("a", n) for n in (problem.devices,) if n > 1)
        return Answer(axes, specs, tuple("" if s is not None else whole for s in problem.specs),
                      "replicate: nothing can be cut")  # fmt: skip
    rated.sort(key=lambda r: r[:2])
    _, _, class_, (axes, specs), cost = rated[0]
    what = _class_name(problem, class_)
    reasons = tuple(
        "" if given is not None else f"cuts {what}" if any(spec) else f"whole: it has no dim of {what}"
        for given, spec in zip(problem.specs, specs, strict=True)
    )
    runner = ""
    if len(rated) > 1:
        other = rated[1]
        runner = f"{_class_name(problem, other[2])}: {figures(other[4])} against {figures(cost)}"
    policy = f"cheapest of {len(rated)} single dim classes at level {problem.level}: {what}"
    return Answer(axes, specs, reasons, policy, runner)


def _cut_class(problem: SearchProblem, class_: int) -> tuple[tuple[tuple[str, int], ...], tuple[Spec, ...]] | None:
    """Grid and layouts with one class cut; on a grid that was given, over all its axes that divide."""
    dims = [(i, d) for i, classes in enumerate(problem.groups) for d, c in enumerate(classes)
            if c == class_ and problem.specs[i] is None and problem.shapes[i][d] > 1]  # fmt: skip
    pieces = problem.devices
    for i, d in dims:
        pieces = math.gcd(pieces, problem.shapes[i][d])
    if pieces == 1:
        return None
    axes = tuple(a for a in (("a", pieces), ("b", problem.devices // pieces)) if a[1] > 1)
    names: tuple[str, ...] = ("a",)
    if problem.axes:  # the user's own grid
        axes = problem.axes
        names = _dividing(tuple(n for n, _ in axes), dict(axes), pieces)
        if not names:
            return None
    first: dict[int, int] = {}
    for i, d in dims:
        first.setdefault(i, d)
    specs = tuple(
        spec if spec is not None else tuple(names if first.get(i) == d else () for d in range(len(problem.shapes[i])))
        for i, spec in enumerate(problem.specs)
    )
    return axes, specs


def _class_name(problem: SearchProblem, class_: int) -> str:
    for name, classes in zip(problem.names, problem.groups, strict=True):
        if class_ in classes:
            return f"{name} dim {classes.index(class_)}"
    return f"class {class_}"

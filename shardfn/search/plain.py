"""Plain layouts that people write by hand, found by the dim classes: one class cut over all devices, and the same with
all else in pieces over those devices (as FSDP lays out weights). They stand beside the search's own plans."""

from __future__ import annotations

from collections.abc import Iterator

from shardfn.graph.model import Spec
from shardfn.search.grid import Axes
from shardfn.search.problem import Candidate, Problem, objective

MOST = 3


def candidates(problem: Problem) -> tuple[Candidate, ...]:
    """The plain layouts of the heaviest dim classes, priced by their flow, best first; the user's own layouts stay."""
    if problem.axes or not problem.is_open:
        return ()
    found = [
        Candidate(name, axes, specs, {}, problem.price(axes, specs, {}))
        for name, axes, specs in dict.fromkeys(_layouts(problem))
    ]
    return tuple(sorted(found, key=lambda c: objective(c.price, problem)))


def _layouts(problem: Problem) -> Iterator[tuple[str, Axes, tuple[Spec, ...]]]:
    n = problem.devices
    axes = (("a", n),)
    open_ = {c for classes, spec in zip(problem.classes, problem.specs, strict=True) if spec is None for c in classes}
    heaviest = sorted(open_, key=lambda c: (-problem.weights.get(c, 0), c))
    cut = 0
    for class_ in heaviest:
        specs = tuple(spec if spec is not None else _along(classes, shape, class_, n)
                      for classes, shape, spec in zip(problem.classes, problem.shapes, problem.specs, strict=True))  # fmt: skip
        if not any(dim for spec, given in zip(specs, problem.specs, strict=True) if given is None for dim in spec):
            continue
        name = next(f"{path} dim {classes.index(class_)}"
                    for path, classes in zip(problem.names, problem.classes, strict=True) if class_ in classes)  # fmt: skip
        yield f"{name} cut {n} ways", axes, specs
        pieces = tuple(spec if given is not None or any(spec) else _largest(shape, n)
                       for spec, given, shape in zip(specs, problem.specs, problem.shapes, strict=True))  # fmt: skip
        yield f"{name} cut {n} ways, all else in pieces", axes, pieces
        cut += 1
        if cut == MOST:
            return


def _along(classes: tuple[int, ...], shape: tuple[int, ...], class_: int, n: int) -> Spec:
    """Whole but for the first dim of a class, where it divides."""
    at = next((d for d, c in enumerate(classes) if c == class_ and shape[d] and shape[d] % n == 0), None)
    return tuple(("a",) if d == at else () for d in range(len(shape)))


def _largest(shape: tuple[int, ...], n: int) -> Spec:
    """Cut along the largest dim that divides."""
    dims = [d for d, size in enumerate(shape) if size and size % n == 0]
    at = max(dims, key=lambda d: (shape[d], -d), default=None)
    return tuple(("a",) if d == at else () for d in range(len(shape)))

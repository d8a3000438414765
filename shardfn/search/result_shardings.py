"""Results whose layout is open, held as they were found: propagation reaches them from arguments alone, so that what a
function makes of no array, as parameters of a key, it would leave whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from shardfn.ir.model import OpConstraint, Spec
from shardfn.search import baselines
from shardfn.search.problem import ResultSpecs, SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import Axes, merge_axes


def constrain_results(
    problem: SearchProblem, made: SearchCandidate, axes: Axes, laid: Callable[[int], Spec | None]
) -> SearchCandidate | None:
    """The same with each open result laid out as it was found, where its flow lays it otherwise; None where it does not.

    Args:
      problem: what is asked.
      made: what was found, on `axes` or with some of them as one.
      axes: the grid that it was found on.
      laid: the layout of a value there; None of what is no decision, as zeros: it lies as another result of its shape, or in
        the smallest pieces.
    """
    result_specs = _wanted(problem, axes, laid)
    parts, sizes = _parts(axes, made.axes), dict(axes)
    now = {at: tuple(tuple(p for a in dim for p in parts.get(a, (a,))) for dim in spec)
           for at, spec in result_specs_of(problem, made).items()}  # fmt: skip
    result_specs = {
        at: spec
        for at, spec in result_specs.items()
        if spec != now[at] and fits(problem.open_results[at].shape, spec, sizes)
    }
    if not result_specs:
        return None
    fine = lambda spec: tuple(tuple(p for a in dim for p in parts[a]) for dim in spec)  # noqa: E731
    specs: list[Spec] = [fine(spec) for spec in made.specs]
    constraints = {
        i: OpConstraint(
            tuple(s if s is None else fine(s) for s in held.operands),
            tuple(s if s is None else fine(s) for s in held.results),
        )
        for i, held in made.constraints.items()
    }
    if not problem.axes:
        axes, every, constraints = merge_axes(axes, [*specs, *result_specs.values()], constraints)
        specs, result_specs = every[: len(specs)], dict(zip(result_specs, every[len(specs) :], strict=True))
    return problem.again(made, axes=axes, specs=tuple(specs), constraints=constraints, result_specs=result_specs)


def _wanted(problem: SearchProblem, axes: Axes, laid: Callable[[int], Spec | None]) -> dict[int, Spec]:
    found = {at: laid(end.value) for at, end in problem.open_results.items()}
    alike = {problem.open_results[at].shape: spec for at, spec in found.items() if spec is not None}
    every = [name for name, _ in axes]
    return {
        at: (spec or alike.get(end.shape) or baselines.along(end.shape, (), axes, {}, every))[: len(end.shape)]
        for (at, end), spec in zip(problem.open_results.items(), found.values(), strict=True)
    }


def result_specs_of(problem: SearchProblem, made: SearchCandidate) -> ResultSpecs:
    """How the flow of a candidate lays out the open results."""
    if not problem.open_results:
        return {}
    partitioned = problem.partitioned_of(made)
    return {
        at: partitioned.specs[partitioned.graph.outputs[end.at]][: len(end.shape)]
        for at, end in problem.open_results.items()
    }


def fits(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> bool:
    """Whether each dim is divided by its axes, as it must be of what a function takes and gives back.

    >>> fits((6, 4), (("a",), ()), {"a": 4}), fits((6, 4), ((), ("a",)), {"a": 4})
    (False, True)
    """
    cuts = (math.prod(sizes.get(a, 0) for a in dim) for dim in spec)
    return all(c == 1 or (n and c and n % c == 0) for n, c in zip(shape, cuts, strict=True))


def _parts(fine: Axes, axes: Axes) -> dict[str, tuple[str, ...]]:
    """For each axis the neighbouring ones of a finer grid that it is made of.

    >>> _parts((("a", 2), ("b", 2), ("c", 3)), (("a", 4), ("b", 3)))
    {'a': ('a', 'b'), 'b': ('c',)}
    """
    found, rest = {}, list(fine)
    for name, size in axes:
        taken: list[str] = []
        while rest and size > 1:
            part, n = rest.pop(0)
            taken.append(part)
            size //= n
        found[name] = tuple(taken)
    return found

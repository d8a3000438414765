"""An answer made better by its flow: the arguments' layouts are changed group by group, as long as that helps.

The model prices each op's layouts by themselves; Shardy carries the layout of a small argument on to all that it meets. What
that costs only the flow shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import OpConstraint, Spec
from shardfn.ir.op_traits import CONTRACTIONS
from shardfn.search import baselines
from shardfn.search.baselines import batch_arguments
from shardfn.search.problem import SearchCandidate, SearchProblem, objective
from shardfn.search.resharding_costs import Axes


def refine(problem: SearchProblem, start: SearchCandidate) -> SearchCandidate:
    """The best that changes of one group of arguments after another lead to, with nothing held inside.

    A group is open arguments of one shape and layout: a weight of all blocks, with what an optimizer keeps for it. Each is
    tried with fewer axes and with one more, at level 1 the other way round; what no result takes the place of, as a batch,
    also with its first dim alone cut, and before the others.

    Args:
      problem: what is asked.
      start: where to begin; what it holds inside is let go.
    """
    left = problem.effort.refinements
    best = problem.again(start, name=f"{start.name}, polished", constraints={})
    kinds = (more, fewer) if problem.level == 1 else (fewer, more)
    for kind in (*kinds, *kinds):
        for members in groups(problem, best.specs):
            i = members[0]
            for spec in kind(problem.shapes[i], best.specs[i], best.axes, i in batch_arguments(problem)):
                if left <= 0 or problem.seconds_left <= 0:
                    return best
                specs = tuple(spec if j in members else s for j, s in enumerate(best.specs))
                made = problem.again(start, name=f"{start.name}, polished", specs=specs, constraints={})
                left -= 1
                if objective(made.cost, problem) < objective(best.cost, problem):
                    best = made
    return best


def follow_products(problem: SearchProblem, made: SearchCandidate, laid: Callable[[int], Spec]) -> SearchCandidate:
    """The same with nothing held inside, and each open argument that no product reads laid out as its dims' classes are in
    most of what products make: biases, positions, a batch of indices.

    Args:
      problem: what is asked.
      made: what was found.
      laid: the layout of a value as it was found.
    """
    tied, values = problem.value_groups, problem.graph.values
    votes: dict[int, dict[tuple[str, ...], int]] = {}
    read: set[int] = set()
    for op in problem.graph.ops:
        if op.name in MAKERS:
            read.update(op.inputs)
            for v in op.outputs:
                for class_, dim in zip(tied[v], laid(v), strict=True):
                    of = votes.setdefault(class_, {})
                    of[dim] = of.get(dim, 0) + math.prod(values[v].shape)
    sizes = dict(made.axes)
    specs = list(made.specs)
    for i, (value, shape) in enumerate(zip(problem.inputs, problem.shapes, strict=True)):
        if problem.specs[i] is not None or (value in read and i not in batch_arguments(problem)):
            continue
        free, spec = set(sizes), []
        for n, class_ in zip(shape, tied[value], strict=False):
            dim = max(votes.get(class_, {(): 0}).items(), key=lambda item: item[1])[0]
            fits = free.issuperset(dim) and n % math.prod(sizes[a] for a in dim) == 0
            spec.append(dim if fits else ())
            free -= set(spec[-1])
        specs[i] = tuple(spec)
    return problem.again(made, name=f"{made.name}, {LINE}", specs=tuple(specs), constraints={}, follows_products=True)


LINE = "what no product reads in line with what products make"

MAKERS = CONTRACTIONS | {"gather", "scatter"}
"""Products and look-ups: what their results lie like is a decision, which sums and elementwise ops follow."""


def groups(problem: SearchProblem, specs: Sequence[Spec]) -> list[tuple[int, ...]]:
    """Open arguments of one shape and layout: those that come fresh with each call first, then the smallest."""
    found: dict[object, list[int]] = {}
    for i, (shape, spec) in enumerate(zip(problem.shapes, specs, strict=True)):
        if problem.specs[i] is None and shape:
            found.setdefault((shape, spec, i in batch_arguments(problem)), []).append(i)
    own = batch_arguments(problem)
    return sorted(
        map(tuple, found.values()), key=lambda m: (m[0] not in own, len(m) * math.prod(problem.shapes[m[0]]), m)
    )


def fewer(shape: Sequence[int], spec: Spec, axes: Axes, is_fresh: bool) -> Iterator[Spec]:
    """Other layouts of an array: whole, an axis less, and of one that is fresh the first dim alone cut.

    >>> list(fewer((8, 16), (("a",), ("b",)), (("a", 2), ("b", 2)), False))
    [((), ()), ((), ('b',)), (('a',), ())]
    """
    tried: dict[Spec, None] = {tuple(() for _ in spec): None}
    for axis in (axis for dim in spec for axis in dim):
        tried[tuple(tuple(a for a in dim if a != axis) for dim in spec)] = None
    for axis, size in axes if is_fresh else ():
        if shape[0] % size == 0:
            tried[((axis,), *((),) * (len(shape) - 1))] = None
    tried.pop(spec, None)
    yield from tried


def more(shape: Sequence[int], spec: Spec, axes: Axes, is_fresh: bool) -> Iterator[Spec]:
    """The layouts of an array with an axis more, on the largest dim that is free and divides.

    >>> list(more((8, 16), (("a",), ()), (("a", 2), ("b", 2)), False))
    [(('a',), ('b',))]
    """
    sizes = dict(axes)
    for axis in (axis for axis in sizes if not any(axis in dim for dim in spec)):
        yield from _more(shape, spec, axis, sizes)


def in_pieces(problem: SearchProblem, made: SearchCandidate, only_state: bool = False) -> SearchCandidate:
    """The same with the arguments that are no batch, or of these only what the update alone reads, cut over all axes that
    are left: a layout found for speed, laid out as fully sharded data parallel or ZeRO-1 would.

    What products make of a batch is held as it was.
    """
    sizes, specs = dict(made.axes), list(made.specs)
    for i, shape in enumerate(problem.shapes):
        if (
            problem.specs[i] is None
            and i not in batch_arguments(problem)
            and (baselines.is_optimizer_state(problem)[i] or not only_state)
        ):
            for axis in (axis for axis in sizes if not any(axis in dim for dim in specs[i])):
                specs[i] = next(iter(_more(shape, specs[i], axis, sizes)), specs[i])
    own = batch_arguments(problem)
    kept = {class_ for i, classes in enumerate(problem.groups) if i not in own for class_ in classes}
    batch = {class_ for i in own for class_ in problem.groups[i]} - kept
    partitioned = problem.partitioned_of(made)
    constraints: dict[int, OpConstraint] = {}
    for index, op, at in pairs(problem.graph, partitioned.graph):
        results = tuple(partitioned.specs[v] for v in at.outputs)
        is_whole = all(axis in sizes for spec in results for dim in spec for axis in dim)
        if (
            index in problem.can_constrain
            and op.name in MAKERS
            and is_whole
            and batch.intersection(problem.value_groups[op.outputs[0]])
        ):
            constraints[index] = OpConstraint((None,) * len(op.inputs), results)
    what = baselines.ArgumentSharding.STATE if only_state else baselines.ArgumentSharding.ALL
    name = f"{made.name}, {what.value} in pieces"
    return problem.again(made, name=name, specs=tuple(specs), constraints=constraints)


def _more(shape: Sequence[int], spec: Spec, axis: str, sizes: Mapping[str, int]) -> dict[Spec, None]:
    left = [n // math.prod(sizes[a] for a in dim) for n, dim in zip(shape, spec, strict=True)]
    at = baselines.roomiest(spec, left, sizes[axis])
    if at is None:
        return {}
    order = list(sizes)
    return {tuple(tuple(sorted((*dim, axis), key=order.index)) if d == at else dim for d, dim in enumerate(spec)): None}

"""Refine a candidate by evaluating changed argument shardings, group by group.

The label model prices each op by itself, but propagation carries the sharding of a small argument to all that it meets. Only
the partitioned program shows that cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Axes, OpConstraint, Spec
from shardfn.ir.op_traits import CONTRACTIONS
from shardfn.search import baselines
from shardfn.search.baselines import ArgumentSharding, batch_arguments
from shardfn.search.problem import SearchCandidate, SearchProblem
from shardfn.search.resharding_costs import used_axes

FOLLOWS_PRODUCTS = "arguments that no matmul reads follow the matmuls"

DECIDING_OPS = CONTRACTIONS | {"gather", "scatter"}
"""Products and look-ups: the sharding of their results is a decision, which sums and elementwise ops follow."""


def refine(problem: SearchProblem, start: SearchCandidate) -> SearchCandidate:
    """The best candidate that changes of one argument group after another lead to, without op constraints.

    Each group is tried with fewer axes and with one more, at level 1 the other way round. Batch arguments are also tried
    with only their first dimension sharded.
    """
    left, name = problem.effort.refinements, f"{start.name}, refined"
    best = problem.changed(start, name=name, constraints={})
    kinds = (one_more_axis, fewer_axes) if problem.level == 1 else (fewer_axes, one_more_axis)
    for kind in (*kinds, *kinds):
        for members in argument_groups(problem, best.specs):
            i = members[0]
            for spec in kind(problem.shapes[i], best.specs[i], best.axes, i in batch_arguments(problem)):
                if left <= 0 or problem.seconds_left <= 0:
                    return best
                specs = tuple(spec if j in members else s for j, s in enumerate(best.specs))
                made = problem.changed(start, name=name, specs=specs, constraints={})
                left -= 1
                best = min(best, made, key=problem.rank)
    return best


def follow_products(problem: SearchProblem, made: SearchCandidate, spec_of: Callable[[int], Spec]) -> SearchCandidate:
    """The candidate without constraints, and with each open argument that no product reads (biases, positions, a batch of
    indices) sharded the way its dimension groups are in most product results.

    Args:
      problem: the question.
      made: the candidate.
      spec_of: the sharding of a value in the solution.
    """
    groups, values = problem.value_groups, problem.graph.values
    votes: dict[int, dict[tuple[str, ...], int]] = {}
    read: set[int] = set()
    for op in problem.graph.ops:
        if op.name in DECIDING_OPS:
            read.update(op.inputs)
            for v in op.outputs:
                for group, dim in zip(groups[v], spec_of(v), strict=True):
                    of = votes.setdefault(group, {})
                    of[dim] = of.get(dim, 0) + math.prod(values[v].shape)
    sizes = dict(made.axes)
    specs = list(made.specs)
    for i, (value, shape) in enumerate(zip(problem.inputs, problem.shapes, strict=True)):
        if problem.specs[i] is not None or (value in read and i not in batch_arguments(problem)):
            continue
        free, spec = set(sizes), []
        for n, group in zip(shape, groups[value], strict=False):
            dim = max(votes.get(group, {(): 0}).items(), key=lambda item: item[1])[0]
            fits = free.issuperset(dim) and n % math.prod(sizes[a] for a in dim) == 0
            spec.append(dim if fits else ())
            free -= set(spec[-1])
        specs[i] = tuple(spec)
    name = f"{made.name}, {FOLLOWS_PRODUCTS}"
    return problem.changed(made, name=name, specs=tuple(specs), constraints={}, follows_products=True)


def argument_groups(problem: SearchProblem, specs: Sequence[Spec]) -> list[tuple[int, ...]]:
    """Open arguments of one shape and sharding, such as a weight of all layers with its optimizer state: batch arguments
    first, then the smallest."""
    batch, found = batch_arguments(problem), dict[object, list[int]]()
    for i, (shape, spec) in enumerate(zip(problem.shapes, specs, strict=True)):
        if problem.specs[i] is None and shape:
            found.setdefault((shape, spec, i in batch), []).append(i)
    size = {i: math.prod(shape) for i, shape in enumerate(problem.shapes)}
    return sorted(map(tuple, found.values()), key=lambda m: (m[0] not in batch, len(m) * size[m[0]], m))


def fewer_axes(shape: Sequence[int], spec: Spec, axes: Axes, is_batch: bool) -> Iterator[Spec]:
    """Shardings with fewer axes: replicated, or one axis less; for a batch also the first dimension alone sharded.

    >>> list(fewer_axes((8, 16), (("a",), ("b",)), (("a", 2), ("b", 2)), False))
    [((), ()), ((), ('b',)), (('a',), ())]
    """
    tried: dict[Spec, None] = {tuple(() for _ in spec): None}
    for axis in (axis for dim in spec for axis in dim):
        tried[tuple(tuple(a for a in dim if a != axis) for dim in spec)] = None
    for axis, size in axes if is_batch else ():
        if shape[0] % size == 0:
            tried[((axis,), *((),) * (len(shape) - 1))] = None
    tried.pop(spec, None)
    yield from tried


def one_more_axis(shape: Sequence[int], spec: Spec, axes: Axes, is_batch: bool) -> Iterator[Spec]:
    """Shardings with one more axis, on the dimension that `baselines.largest_dimension` gives.

    >>> list(one_more_axis((8, 16), (("a",), ()), (("a", 2), ("b", 2)), False))
    [(('a',), ('b',))]
    """
    sizes = dict(axes)
    for axis in (axis for axis in sizes if axis not in used_axes(spec)):
        yield from _with_axis(shape, spec, axis, sizes)


def fully_sharded(problem: SearchProblem, made: SearchCandidate, only_state: bool = False) -> SearchCandidate:
    """The candidate with parameters, or only optimizer state, sharded over all axes that are left, like FSDP or ZeRO-1.

    Constraints keep what products compute from a batch as it was.
    """
    sizes, specs, batch = dict(made.axes), list(made.specs), batch_arguments(problem)
    is_state = baselines.is_optimizer_state(problem)
    for i, shape in enumerate(problem.shapes):
        if problem.specs[i] is None and i not in batch and (is_state[i] or not only_state):
            for axis in (axis for axis in sizes if axis not in used_axes(specs[i])):
                specs[i] = next(_with_axis(shape, specs[i], axis, sizes), specs[i])
    kept = {group for i, groups in enumerate(problem.groups) if i not in batch for group in groups}
    batch_groups = {group for i in batch for group in problem.groups[i]} - kept
    partitioned = problem.partitioned_of(made)
    constraints: dict[int, OpConstraint] = {}
    for index, op, at in pairs(problem.graph, partitioned.graph):
        results = tuple(partitioned.specs[v] for v in at.outputs)
        if (
            index in problem.can_constrain
            and op.name in DECIDING_OPS
            and all(used_axes(spec) <= sizes.keys() for spec in results)
            and batch_groups.intersection(problem.value_groups[op.outputs[0]])
        ):
            constraints[index] = OpConstraint((None,) * len(op.inputs), results)
    what = ArgumentSharding.STATE if only_state else ArgumentSharding.ALL
    name = f"{made.name}, {what.value} fully sharded"
    return problem.changed(made, name=name, specs=tuple(specs), constraints=constraints)


def _with_axis(shape: Sequence[int], spec: Spec, axis: str, sizes: Mapping[str, int]) -> Iterator[Spec]:
    """The sharding with an axis more, where it divides a dimension."""
    left = [n // math.prod(sizes[a] for a in dim) for n, dim in zip(shape, spec, strict=True)]
    at = baselines.largest_dimension(spec, left, sizes[axis])
    if at is not None:
        order = list(sizes)
        yield tuple(tuple(sorted((*dim, axis), key=order.index)) if d == at else dim for d, dim in enumerate(spec))

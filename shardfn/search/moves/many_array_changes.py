"""Moves of the local search that change the shardings of many arrays at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Op, OpConstraint, Spec, axes_of
from shardfn.ir.specs import strategy_of
from shardfn.search.moves import baselines
from shardfn.search.moves.array_changes import proposal_from
from shardfn.search.moves.baselines import batch_arguments
from shardfn.search.moves.constrained import DECIDING_OPS
from shardfn.search.moves.result_shardings import fits
from shardfn.search.problem import Proposal, SearchCandidate, SearchProblem


def follow_matmuls(problem: SearchProblem, candidate: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The candidate without constraints, and with each open argument that no matmul or gather reads sharded as its dimension
    groups are in most of their results. Such arguments are biases, positions, a batch of indices."""
    groups, values, sizes = problem.value_groups, problem.graph.values, dict(candidate.axes)
    partitioned = problem.partitioned_of(candidate)
    votes: dict[int, dict[tuple[str, ...], int]] = {}
    read: set[int] = set()
    for _, op, there in pairs(problem.graph, partitioned.graph):
        if op.name in DECIDING_OPS:
            read.update(op.inputs)
            for v, w in zip(op.outputs, there.outputs, strict=True):
                for group, dim in zip(groups[v], partitioned.specs[w], strict=True):
                    if sizes.keys() >= set(dim):
                        of = votes.setdefault(group, {})
                        of[dim] = of.get(dim, 0) + math.prod(values[v].shape)
    specs = list(candidate.specs)
    for i, (value, shape) in enumerate(zip(problem.inputs, problem.shapes, strict=True)):
        if problem.specs[i] is not None or (value in read and i not in batch_arguments(problem)):
            continue
        free, spec = set(sizes), []
        for n, group in zip(shape, groups[value], strict=False):
            dim = max(votes.get(group, {(): 0}).items(), key=lambda item: item[1])[0]
            is_free = free.issuperset(dim) and n % math.prod(sizes[a] for a in dim) == 0
            spec.append(dim if is_free else ())
            free -= set(spec[-1])
        specs[i] = tuple(spec)
    yield proposal_from(problem, candidate, specs=tuple(specs), constraints={})


def sliced_arguments(problem: SearchProblem, candidate: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The candidate with each open argument that the program slices before any other use sharded like the slice."""
    partitioned = problem.partitioned_of(candidate)
    inputs = partitioned.graph.arguments(len(candidate.specs))
    readers: dict[int, list[Op]] = {value: [] for value in inputs}
    for op in partitioned.graph.ops:
        for value in set(op.inputs) & readers.keys():
            readers[value].append(op)
    sizes, specs = dict(candidate.axes), list(candidate.specs)
    for i, (value, shape) in enumerate(zip(inputs, problem.shapes, strict=True)):
        found = {partitioned.specs[op.outputs[0]][: len(shape)] for op in readers[value] if op.name == "all_slice"}
        if problem.specs[i] is None and len(found) == 1 and all(op.name == "all_slice" for op in readers[value]):
            (spec,) = found
            if fits(shape, spec, sizes):
                specs[i] = spec
    if tuple(specs) != candidate.specs:
        yield proposal_from(problem, candidate, specs=tuple(specs))


def fully_sharded(problem: SearchProblem, candidate: SearchCandidate, first: int = 0) -> Iterator[Proposal]:
    """The candidate with parameters, and with optimizer state alone, sharded over all axes left, as in FSDP and ZeRO-1."""
    yield _fully_sharded(problem, candidate, only_state=False)
    if any(baselines.is_optimizer_state(problem)):
        yield _fully_sharded(problem, candidate, only_state=True)


def _fully_sharded(problem: SearchProblem, candidate: SearchCandidate, only_state: bool) -> Proposal:
    """One of `fully_sharded`; constraints keep the shardings of matmuls that read the batch."""
    sizes, specs, batch = dict(candidate.axes), list(candidate.specs), batch_arguments(problem)
    is_state = baselines.is_optimizer_state(problem)
    for i, shape in enumerate(problem.shapes):
        if problem.specs[i] is None and i not in batch and (is_state[i] or not only_state):
            for axis in (axis for axis in sizes if axis not in axes_of(specs[i])):
                specs[i] = _with_axis(shape, specs[i], axis, sizes)
    kept = {group for i, groups in enumerate(problem.groups) if i not in batch for group in groups}
    batch_groups = {group for i in batch for group in problem.groups[i]} - kept
    partitioned = problem.partitioned_of(candidate)
    constraints: dict[int, OpConstraint] = {}
    for index, op, at in pairs(problem.graph, partitioned.graph):
        results = tuple(partitioned.specs[v] for v in at.outputs)
        if (
            index in problem.can_constrain
            and op.name in DECIDING_OPS
            and all(sizes.keys() >= set(axes_of(spec)) for spec in results)
            and batch_groups.intersection(problem.value_groups[op.outputs[0]])
        ):
            constraints[index] = OpConstraint((None,) * len(op.inputs), results)
    return proposal_from(problem, candidate, specs=tuple(specs), constraints=constraints)


def _with_axis(shape: Sequence[int], spec: Spec, axis: str, sizes: Mapping[str, int]) -> Spec:
    """The sharding with an axis more, where it divides a dimension."""
    left = [n // shards for n, shards in zip(shape, strategy_of(spec, sizes), strict=True)]
    at = baselines.largest_dimension(spec, left, sizes[axis])
    order = list(sizes)
    return tuple(tuple(sorted((*dim, axis), key=order.index)) if d == at else dim for d, dim in enumerate(spec))

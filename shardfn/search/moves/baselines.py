"""The parts of baseline plans: which arguments are the batch, parameters or optimizer state, and shardings by dimension group.

`styles` makes the plans.
"""

from __future__ import annotations

import collections
import enum
import math
from collections.abc import Collection, Mapping, Sequence

from shardfn.ir.model import Axes, OpConstraint, Spec
from shardfn.ir.op_traits import CONTRACTIONS, ELEMENTWISE
from shardfn.ir.specs import strategy_of
from shardfn.search.problem import OpConstraints, SearchProblem, array_bytes

SMALL_SHARE = 1e-3
"""The smallest parameters that together take at most this part of all parameter bytes are small: gathering one costs little but
its latency."""
SMALL_BYTES = 64 << 10
"""A parameter of fewer bytes is small too, as in `train.step`, unless such parameters would take more memory than a device's
shards of all."""


class ArgumentSharding(enum.Enum):
    """Which arguments a baseline shards over axes that its dimension groups leave free."""

    STATE = "optimizer state"
    SIZEABLE = "all but small parameters"
    ALL = "all arrays"


def are_meant(problem: SearchProblem) -> bool:
    """Whether there are baselines: something is open, and no entry of the user shards an array."""
    return problem.is_open and not any(dim for spec in problem.specs if spec for dim in spec)


def batch_arguments(problem: SearchProblem) -> frozenset[int]:
    """The arguments that no result aliases: a batch, not parameters; none if no result aliases any argument.

    All their dimensions are open to the search. `styles.batch_groups` asks which dimensions are the batch.
    """
    updated = problem.updated
    return frozenset(i for i, value in enumerate(problem.inputs) if updated and value not in updated)


def resident_bytes(problem: SearchProblem, axes: Axes, specs: Sequence[Spec]) -> int:
    """Bytes on one device of the arguments, and of the results that alias them or whose sharding the user gave."""
    arguments = dict(zip(problem.inputs, specs, strict=True))
    results = dict(problem.results) | {v: arguments[source] for v, source in problem.same_as.items()}

    def on_one(sharded: Mapping[int, Spec]) -> int:
        return sum(
            math.ceil(array_bytes(problem.graph.values[v]) / math.prod(strategy_of(spec, axes)))
            for v, spec in sharded.items()
        )

    given = on_one({v: spec for v, spec in arguments.items() if v in problem.donated})
    return on_one(arguments) + max(0, on_one(results) - given)


def matmul_constraints(problem: SearchProblem, axes: Axes, by_group: Mapping[int, tuple[str, ...]]) -> OpConstraints:
    """Constraints that keep the groups sharded in results of matmuls and gathers. Without them, sharded parameters would lead
    propagation to shard other dimensions."""
    constraints: dict[int, OpConstraint] = {}
    for index, op in enumerate(problem.graph.ops):
        if index in problem.can_constrain and op.name in CONTRACTIONS | {"gather"}:
            rows = [(problem.graph.values[v].shape, problem.value_groups[v]) for v in op.outputs]
            results = tuple(shard_groups(shape, groups, axes, by_group, ()) for shape, groups in rows)
            if any(map(any, results)):
                constraints[index] = OpConstraint((None,) * len(op.inputs), results)
    return constraints


def is_optimizer_state(problem: SearchProblem) -> tuple[bool, ...]:
    """For each argument whether a result aliases it and only elementwise ops read it: momentum, not parameters."""
    return tuple(
        v in problem.updated and one for v, one in zip(problem.inputs, _only_elementwise(problem), strict=True)
    )


def is_state_or_gradient(problem: SearchProblem) -> tuple[bool, ...]:
    """For each argument whether a result aliases it, or it has the shape of such an argument and only elementwise ops read it."""
    rows = list(zip(problem.inputs, problem.shapes, _only_elementwise(problem), strict=True))
    shapes = {shape for value, shape, _ in rows if value in problem.updated}
    return tuple(value in problem.updated or (one and shape in shapes) for value, shape, one in rows)


def _only_elementwise(problem: SearchProblem) -> tuple[bool, ...]:
    """For each argument whether only elementwise ops read it."""
    if problem.memo.only_elementwise is None:
        read: dict[int, set[str]] = {value: set() for value in problem.inputs}
        for op in problem.graph.ops:
            for value in read.keys() & set(op.inputs):
                read[value].add(op.name)
        problem.memo.only_elementwise = tuple(read[value] <= ELEMENTWISE for value in problem.inputs)
    return problem.memo.only_elementwise


def are_small_parameters(problem: SearchProblem, batch: Collection[int]) -> tuple[bool, ...]:
    """For each argument without a dimension of the batch whether it is small (`SMALL_SHARE`, `SMALL_BYTES`)."""
    sizes = {
        i: array_bytes(problem.graph.values[value])
        for i, (value, groups) in enumerate(zip(problem.inputs, problem.groups, strict=True))
        if not set(groups) & set(batch)
    }
    total, taken, limit = sum(sizes.values()), 0, 0
    for size, count in sorted(collections.Counter(sizes.values()).items()):
        taken += size * count
        share = max(SMALL_SHARE, 1 / problem.devices) if size < SMALL_BYTES else SMALL_SHARE
        if taken > share * total:
            break
        limit = size
    return tuple(sizes.get(i, limit + 1) <= limit for i in range(len(problem.inputs)))


def argument_specs(
    problem: SearchProblem,
    axes: Axes,
    by_group: Mapping[int, tuple[str, ...]],
    rest: ArgumentSharding | None = None,
    over: Sequence[str] = (),
) -> tuple[Spec, ...]:
    """The shardings of the arguments: as given, or by their groups, and of those that `rest` names over `over` too."""
    sharded = [rest is ArgumentSharding.ALL] * len(problem.inputs)
    if rest is ArgumentSharding.STATE:
        sharded = list(is_optimizer_state(problem))
    elif rest is ArgumentSharding.SIZEABLE:
        sharded = [not small for small in are_small_parameters(problem, by_group)]
    rows = zip(problem.specs, problem.shapes, problem.groups, sharded, strict=True)
    return tuple(
        s if s is not None else shard_groups(shape, groups, axes, by_group, over if is_one else ())
        for s, shape, groups, is_one in rows
    )


def largest_dimension(spec: Sequence[Collection[str]], left: Sequence[int], size: int) -> int | None:
    """The dimension to shard over one more axis: the largest that it divides, unsharded ones first; None if there is none.

    Args:
      spec: the axes that shard each dimension already.
      left: the elements of each dimension in a shard.
      size: of the axis.

    >>> largest_dimension((("a",), (), ()), (64, 8, 6), 2), largest_dimension((("a",), ()), (64, 7), 2)
    (1, 0)
    """
    dims = [d for d, n in enumerate(left) if n and n % size == 0]
    return max(dims, key=lambda d: (not spec[d], left[d], -d), default=None)


def shard_groups(
    shape: Sequence[int],
    groups: Sequence[int],
    axes: Axes,
    by_group: Mapping[int, tuple[str, ...]],
    over: Sequence[str],
) -> Spec:
    """A sharding with each group's first dimension over its axes, where they divide, and the free axes of `over` on the
    largest dimensions."""
    sizes = dict(axes)
    spec: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    used: set[str] = set()
    for group, own in by_group.items():
        ways = math.prod(sizes[axis] for axis in own)
        at = next((d for d, g in enumerate(groups) if g == group and left[d] and left[d] % ways == 0), None)
        if at is not None and not used & set(own):  # another group of the array may have them
            spec[at] += own
            left[at] //= ways
            used.update(own)
    for axis in (name for name in over if name not in used):
        at = largest_dimension(spec, left, sizes[axis])
        if at is not None:
            spec[at].append(axis)
            left[at] //= sizes[axis]
    order = [name for name, _ in axes]
    return tuple(tuple(sorted(dim, key=order.index)) for dim in spec)

"""Baseline plans that people write by hand: data parallel, ZeRO-1, FSDP, tensor parallel, and mixes on two mesh axes.

Each shards one dimension group over all devices, or two over a mesh of two axes, and the other arrays over the axes left.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardfn.cost.devices.links import are_alike, links
from shardfn.ir.model import Axes, OpConstraint, Spec
from shardfn.ir.op_traits import CONTRACTIONS, ELEMENTWISE
from shardfn.partition.resharding import divisors
from shardfn.search.default_policy import group_name
from shardfn.search.graph_facts import array_bytes
from shardfn.search.problem import OpConstraints, Proposal, SearchProblem

GROUPS = 3
"""Dimension groups that baselines shard, the largest first."""

SMALL_SHARE = 1e-3
"""The smallest parameters are small while they hold no more than this part of all parameter bytes together: gathering one
costs its latency."""


class ArgumentSharding(enum.Enum):
    """Which arguments a baseline shards over axes that its dimension groups leave free."""

    STATE = "optimizer state"
    SIZEABLE = "all but small parameters"
    ALL = "all arrays"


@dataclasses.dataclass(frozen=True)
class Baseline(Proposal):
    """Dimension groups sharded over axes, and all else unsharded or sharded as its name says."""

    by_group: Mapping[int, tuple[str, ...]] = dataclasses.field(kw_only=True, compare=False)


def batch_baselines(problem: SearchProblem) -> Iterator[Proposal]:
    """FSDP, data parallel and ZeRO-1 over all devices, for each batch; FSDP with small parameters replicated comes last.

    None where no argument is a batch or the user's entries shard arrays.
    """
    if not are_meant(problem):
        return
    axes = problem.axes or (("a", problem.devices),)
    every = tuple(name for name, _ in axes)
    batch = sorted(batch_arguments(problem))
    for group in dict.fromkeys(problem.groups[i][0] for i in batch if problem.groups[i]):
        if _divides(problem, group, problem.devices):
            plain, *others = _variants(problem, axes, {group: every}, with_large=True)
            *others, full = others
            yield from (full, plain, *others)


def plain_baselines(problem: SearchProblem) -> Iterator[Proposal]:
    """Each of the largest dimension groups sharded over all devices, and nothing else."""
    if are_meant(problem):
        axes = problem.axes or (("a", problem.devices),)
        for group in _largest_groups(problem):
            if _divides(problem, group, problem.devices):
                yield next(_variants(problem, axes, {group: tuple(name for name, _ in axes)}))


def group_baselines(problem: SearchProblem) -> Iterator[Proposal]:
    """The largest dimension groups sharded over all devices, and pairs of them over two axes: tensor parallelism and its mixes
    with the others. Of pairs, those with the least estimated memory come first."""
    if not are_meant(problem):
        return
    single, pairs = _single_groups(problem), list(_pairs_of_groups(problem))
    yield from single
    yield from sorted(pairs, key=lambda one: estimated_peak(problem, one))


def are_meant(problem: SearchProblem) -> bool:
    """Whether there are baselines: something is open, and no entry of the user shards an array."""
    return problem.is_open and not any(dim for spec in problem.specs if spec for dim in spec)


def batch_arguments(problem: SearchProblem) -> frozenset[int]:
    """The arguments that no result aliases: a batch, not parameters; none if no result aliases any argument.

    All their dimensions are open to the search. `styles.batch_groups` asks which dimensions are the batch.
    """
    kept = set(problem.same_as.values())
    return frozenset(i for i, value in enumerate(problem.inputs) if kept and value not in kept)


def resident_bytes(problem: SearchProblem, axes: Axes, specs: Sequence[Spec]) -> int:
    """Bytes on one device of the arguments, and of the results that alias them or whose sharding the user gave."""
    sizes = dict(axes)
    arguments = dict(zip(problem.inputs, specs, strict=True))
    results = dict(problem.results) | {v: arguments[source] for v, source in problem.same_as.items()}

    def on_one(sharded: Mapping[int, Spec]) -> int:
        return sum(
            math.ceil(array_bytes(problem.graph.values[v]) / math.prod(sizes[a] for dim in spec for a in dim))
            for v, spec in sharded.items()
        )

    given = on_one({v: spec for v, spec in arguments.items() if v in problem.donated})
    return on_one(arguments) + max(0, on_one(results) - given)


def least_resident_bytes(problem: SearchProblem) -> float:
    """A lower bound of `resident_bytes`: an even share of the arguments and of the results that do not reuse their memory."""
    sizes = [array_bytes(problem.graph.values[v]) for v in problem.inputs]
    given = sum(size for v, size in zip(problem.inputs, sizes, strict=True) if v in problem.donated)
    results = sum(array_bytes(problem.graph.values[v]) for v in (*problem.results, *problem.same_as))
    return (sum(sizes) + max(0.0, results - given)) / problem.devices


def estimated_peak(problem: SearchProblem, one: Baseline) -> float:
    """A rough estimate of the peak memory in bytes: `resident_bytes` and the program's temporaries, sharded by group."""
    sizes, values = dict(one.axes), problem.graph.values

    def shards(value: int) -> int:
        used: dict[str, int] = {}
        for size, group in zip(values[value].shape, problem.value_groups[value], strict=True):
            over = one.by_group.get(group, ())
            if over and size % math.prod(sizes[axis] for axis in over) == 0:
                used.update((axis, sizes[axis]) for axis in over)
        return math.prod(used.values())

    change: dict[int, float] = {}
    for place in problem.facts.places:
        size = place.bytes / min(map(shards, place.values), default=1)
        change[place.start] = change.get(place.start, 0.0) + size
        change[place.end + 1] = change.get(place.end + 1, 0.0) - size
    temporaries = max(itertools.accumulate(change[tick] for tick in sorted(change)), default=0.0)
    return resident_bytes(problem, one.axes, one.specs) + temporaries


def _largest_groups(problem: SearchProblem) -> list[int]:
    """The largest open dimension groups that can be sharded over all devices or over an axis of `_pairs_of_axes`."""
    open_ = {g for groups, spec in zip(problem.groups, problem.specs, strict=True) if spec is None for g in groups}
    largest = sorted(open_, key=lambda g: (-problem.group_bytes.get(g, 0), g))
    parts = {math.prod(dict(axes)[name] for name in first) for axes, first, _ in _pairs_of_axes(problem)}
    sizes = sorted({problem.devices, *parts})
    return list(itertools.islice((g for g in largest if any(_divides(problem, g, n) for n in sizes)), GROUPS))


def _single_groups(problem: SearchProblem) -> Iterator[Baseline]:
    axes = problem.axes or (("a", problem.devices),)
    for group in _largest_groups(problem):
        if _divides(problem, group, problem.devices):
            yield from _variants(problem, axes, {group: tuple(name for name, _ in axes)})


def _pairs_of_groups(problem: SearchProblem) -> Iterator[Baseline]:
    """The baselines of two groups. Which of them has the outer axis matters only where links differ."""
    for pair in itertools.combinations(_largest_groups(problem), 2):
        for axes, a, b in _pairs_of_axes(problem):
            size = math.prod(dict(axes)[name] for name in a)
            for first, second in (pair,) if are_alike(links(problem.hardware, axes)) else (pair, pair[::-1]):
                if _divides(problem, first, size) and _divides(problem, second, problem.devices // size):
                    yield from _variants(problem, axes, {first: a, second: b})


def _pairs_of_axes(problem: SearchProblem) -> Iterator[tuple[Axes, tuple[str, ...], tuple[str, ...]]]:
    """The meshes that two dimension groups can share, with the axes of each: two axes, or the given ones in two parts."""
    n, axes = problem.devices, tuple(axis for axis in problem.axes if axis[1] > 1)
    if not problem.axes:
        yield from (((("a", a), ("b", n // a)), ("a",), ("b",)) for a in divisors(n, n)[1:-1])
    for count in range(1, len(axes)):
        for part in itertools.combinations(axes, count):
            rest = tuple(name for name, _ in axes if name not in dict(part))
            yield problem.axes, tuple(dict(part)), rest


def _divides(problem: SearchProblem, group: int, size: int) -> bool:
    """Whether an axis of a size divides a dimension of a group in an open argument."""
    return any(map(any, argument_specs(problem, (("a", size),), {group: ("a",)})))


def _variants(
    problem: SearchProblem, axes: Axes, by_group: Mapping[int, tuple[str, ...]], with_large: bool = False
) -> Iterator[Baseline]:
    """The baselines of some groups: by themselves, and with other arguments sharded over free axes."""
    sizes, every = dict(axes), tuple(name for name, _ in axes)

    def ways(over: Sequence[str]) -> int:
        return math.prod(sizes[axis] for axis in over)

    name = ", ".join(f"{group_name(problem, g)} sharded {ways(over)} ways" for g, over in by_group.items())
    yield Baseline(name, axes, argument_specs(problem, axes, by_group), by_group=by_group)
    constraints = product_constraints(problem, axes, by_group)
    kinds = (
        [(ArgumentSharding.STATE, over) for over in by_group.values()] * any(is_optimizer_state(problem))
        + [(ArgumentSharding.SIZEABLE, every)] * with_large
        + [(ArgumentSharding.ALL, over) for over in (*by_group.values(), every)]
    )
    for rest, over in dict.fromkeys(kinds):
        specs = argument_specs(problem, axes, by_group, rest, over)
        yield Baseline(f"{name}, {rest.value} sharded over {ways(over)}", axes, specs, constraints, by_group=by_group)


def product_constraints(problem: SearchProblem, axes: Axes, by_group: Mapping[int, tuple[str, ...]]) -> OpConstraints:
    """Constraints that keep the groups sharded in results of products and look-ups: sharded parameters would lead
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
    if problem.memo.optimizer_state is None:
        read: dict[int, set[str]] = {value: set() for value in problem.inputs}
        for op in problem.graph.ops:
            for value in read.keys() & set(op.inputs):
                read[value].add(op.name)
        kept = set(problem.same_as.values())
        problem.memo.optimizer_state = tuple(v in kept and read[v] <= ELEMENTWISE for v in problem.inputs)
    return problem.memo.optimizer_state


def are_small_parameters(problem: SearchProblem) -> tuple[bool, ...]:
    """For each argument whether it is a small parameter (`SMALL_SHARE`)."""
    kept = [i for i, value in enumerate(problem.inputs) if value in set(problem.same_as.values())]
    sizes = {i: array_bytes(problem.graph.values[problem.inputs[i]]) for i in kept}
    small, left = set[int](), SMALL_SHARE * sum(sizes.values())
    for i in sorted(kept, key=lambda i: (sizes[i], i)):
        left -= sizes[i]
        if left < 0:
            break
        small.add(i)
    return tuple(i in small for i in range(len(problem.inputs)))


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
        sharded = [not small for small in are_small_parameters(problem)]
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

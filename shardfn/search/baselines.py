"""Baseline plans that people write by hand: data parallel, ZeRO-1, FSDP, tensor parallel, and mixes on two mesh axes.

Each shards one dimension group over all devices, or two over a mesh of two axes, and the other arrays over the axes left.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from shardfn.ir.model import Axes, OpConstraint, Spec
from shardfn.ir.op_traits import CONTRACTIONS, ELEMENTWISE
from shardfn.partition.resharding import divisors
from shardfn.search.default_policy import group_name
from shardfn.search.filters import keeps_rules
from shardfn.search.graph_facts import array_bytes
from shardfn.search.problem import OpConstraints, SearchCandidate, SearchProblem

AFTER_LIMIT = 4
"""Baselines evaluated after the time limit at most, until one fits."""

FAR = 1.25
"""A baseline that takes this multiple of the best time is not tried with more arrays sharded. Measured gain from doing so in
programs of 500 ops and more: none that mattered."""

SMALL_SHARE = 1e-3
"""The smallest parameters are small while they hold no more than this part of all parameter bytes together: gathering one
costs its latency."""


class ArgumentSharding(enum.Enum):
    """Which arguments a baseline shards over axes that its dimension groups leave free."""

    STATE = "optimizer state"
    SIZEABLE = "all but small parameters"
    ALL = "all arrays"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Dimension groups sharded over axes (`by_group`), all else unsharded or sharded as `rest` says."""

    name: str
    axes: Axes
    by_group: Mapping[int, tuple[str, ...]]
    specs: tuple[Spec, ...]
    constraints: OpConstraints
    rest: ArgumentSharding | None = None


def evaluated_baselines(
    problem: SearchProblem, pairs: bool = True, below: float = math.inf, fastest: float = math.inf
) -> tuple[SearchCandidate, ...]:
    """The baselines of the largest dimension groups, best first; shardings that the user gave stay.

    At level 1, those with the least estimated memory come first, for large programs only a few of them, and none whose
    arguments and results alone exceed the best peak. After the time limit no more are evaluated.

    Args:
      problem: the question.
      pairs: whether meshes of two axes are among them.
      below: the least peak memory so far in bytes.
      fastest: the best modelled time so far in seconds.
    """
    if not _are_meant(problem):
        return ()
    every = {(one.axes, one.specs, tuple(one.constraints.items())): one for one in reversed(list(_all(problem, pairs)))}
    baselines = list(every.values())[::-1]
    if problem.level == 1:
        baselines.sort(key=lambda one: estimated_peak(problem, one))
        baselines = baselines[: problem.effort.max_baselines]
    found: list[SearchCandidate] = []
    is_far: dict[object, bool] = {}
    for one in baselines:
        if problem.seconds_left <= 0:
            break
        key = one.axes, *one.by_group.items()
        if not is_far.get(key) and (problem.level != 1 or resident_bytes(problem, one.axes, one.specs) < below):
            made = _evaluated(problem, one)
            is_far.setdefault(key, made.cost.time_s > FAR * fastest)
            if keeps_rules(problem.partitioned_of(made), problem.algorithm):
                found.append(made)
                below = min(below, made.cost.memory.peak)
    return tuple(sorted(found, key=problem.rank))


def batch_baselines(problem: SearchProblem, every: bool = True) -> tuple[SearchCandidate, ...]:
    """The baselines that shard the batch over all devices: data parallel, ZeRO-1 and FSDP, or FSDP alone.

    None where no argument is a batch or the user's entries shard arrays.
    """
    if not _are_meant(problem):
        return ()
    found: dict[tuple[Spec, ...], SearchCandidate] = {}
    for one in _of_batch(problem):
        if (every or one.rest is ArgumentSharding.ALL) and one.specs not in found and problem.seconds_left > 0:
            made = _evaluated(problem, one)
            if keeps_rules(problem.partitioned_of(made), problem.algorithm):
                found[one.specs] = made
    return tuple(found.values())


def hasty_baselines(problem: SearchProblem) -> tuple[SearchCandidate, ...]:
    """The first few baselines up to one that fits, whatever the time: a time limit that is too short still gives an answer
    no worse than data parallel."""
    if not _are_meant(problem):
        return ()
    found: list[SearchCandidate] = []
    for one in itertools.islice(itertools.chain(_of_batch(problem), _all(problem, pairs=False)), AFTER_LIMIT):
        made = _evaluated(problem, one)
        if keeps_rules(problem.partitioned_of(made), problem.algorithm):
            found.append(made)
            if problem.fits(made):
                break
    return tuple(found)


def _are_meant(problem: SearchProblem) -> bool:
    """Whether there are baselines: something is open, and no entry of the user shards an array."""
    return problem.is_open and not any(dim for spec in problem.specs if spec for dim in spec)


def _evaluated(problem: SearchProblem, one: Baseline) -> SearchCandidate:
    return problem.candidate(one.name, one.axes, one.specs, one.constraints)


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


def _of_batch(problem: SearchProblem) -> Iterator[Baseline]:
    batch = sorted(batch_arguments(problem))
    axes = problem.axes or (("a", problem.devices),)
    for group in dict.fromkeys(problem.groups[i][0] for i in batch if problem.groups[i]):
        if _divides(problem, group, problem.devices):
            yield from _variants(problem, axes, {group: tuple(name for name, _ in axes)})


def _all(problem: SearchProblem, pairs: bool) -> Iterator[Baseline]:
    n = problem.devices
    open_ = {g for groups, spec in zip(problem.groups, problem.specs, strict=True) if spec is None for g in groups}
    largest = sorted(open_, key=lambda g: (-problem.group_bytes.get(g, 0), g))
    pairs_of_axes = list(_pairs_of_axes(problem))
    parts = sorted({math.prod(dict(axes)[name] for name in first) for axes, first, _ in pairs_of_axes})
    fit: Iterable[int] = (g for g in largest if any(_divides(problem, g, size) for size in (n, *parts)))
    fit = list(itertools.islice(fit, problem.effort.baseline_groups))
    for group in fit:
        if _divides(problem, group, n):
            axes = problem.axes or (("a", n),)
            yield from _variants(problem, axes, {group: tuple(name for name, _ in axes)}, problem.level == 2)
    for first, second in itertools.permutations(fit if pairs else (), 2):
        for axes, a, b in pairs_of_axes:
            size = math.prod(dict(axes)[name] for name in a)
            if _divides(problem, first, size) and _divides(problem, second, n // size):
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
    first = next(iter(by_group.values()))
    yield Baseline(name, axes, by_group, argument_specs(problem, axes, by_group), {})
    constraints = product_constraints(problem, axes, by_group)
    kinds = (
        [(ArgumentSharding.STATE, first)] * any(is_optimizer_state(problem))
        + [(ArgumentSharding.SIZEABLE, every)] * with_large
        + [(ArgumentSharding.ALL, first), (ArgumentSharding.ALL, every)]
    )
    for rest, over in dict.fromkeys(kinds):
        specs = argument_specs(problem, axes, by_group, rest, over)
        yield Baseline(f"{name}, {rest.value} sharded over {ways(over)}", axes, by_group, specs, constraints, rest)


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

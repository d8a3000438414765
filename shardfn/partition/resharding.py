"""Resharding: the collectives with which XLA turns one sharding of an array into another."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from shardfn.ir.divisors import primes
from shardfn.ir.model import Spec, axis_name, axis_part
from shardfn.partition.tile_assignment import DeviceGroup, ReshardingStep


def resharding_steps(
    before: Spec, after: Spec, sizes: Mapping[str, int], group_axes: frozenset[str] = frozenset()
) -> tuple[ReshardingStep, ...]:
    """The collectives that reshard one array.

    Args:
      before: its sharding, in axes split by `split_axes`.
      after: the sharding wanted.
      sizes: of the axes, in mesh order.
      group_axes: axes that tell groups of devices apart, for a reshard within each group. They stay where they are, as
        the major axes of their dimensions.

    >>> [step.kind for step in resharding_steps((("a",), ()), ((), ("a",)), {"a": 2})]
    ['all-to-all']
    >>> [step.kind for step in resharding_steps((("a",), ()), (("b",), ()), {"a": 2, "b": 2})]
    ['collective-permute']
    """
    return _cached_steps(before, after, tuple(sizes.items()), group_axes)


def steps_without_alltoall(
    before: Spec, after: Spec, sizes: Mapping[str, int], group_axes: frozenset[str] = frozenset()
) -> tuple[ReshardingStep, ...]:
    """`resharding_steps`, by `gathered_between` where XLA would use an all-to-all: gather, then slice.

    >>> [step.kind for step in steps_without_alltoall((("a",), ()), ((), ("a",)), {"a": 2})]
    ['all-gather', '']
    """
    path = resharding_steps(before, after, sizes, group_axes)
    if all(step.kind != "all-to-all" for step in path):
        return path
    between = gathered_between(before, after)
    return (*resharding_steps(before, between, sizes, group_axes), *resharding_steps(between, after, sizes, group_axes))


def gathered_between(before: Spec, after: Spec) -> Spec:
    """The finest sharding that each device reaches by gathering, and leaves by taking its shard.

    >>> gathered_between((("a", "b"), ()), (("a",), ("b",)))
    (('a',), ())
    """
    return tuple(
        tuple(a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(now, to, strict=False)))
        for now, to in zip(before, after, strict=True)
    )


@functools.lru_cache(1 << 14)
def _cached_steps(
    before: Spec, after: Spec, sizes: tuple[tuple[str, int], ...], group_axes: frozenset[str]
) -> tuple[ReshardingStep, ...]:
    kept = [tuple(a for a in axes if a in group_axes) for axes in before]
    devices = DeviceGroup({a: n for a, n in sizes if a not in group_axes})
    now, to = (devices.tile([a for a in axes if a not in group_axes] for axes in spec) for spec in (before, after))
    path = devices.path(now, to)
    if not group_axes:
        return tuple(path)
    return tuple(s._replace(after=tuple((*k, *axes) for k, axes in zip(kept, s.after, strict=True))) for s in path)


def emitted_steps(
    step: ReshardingStep, before: Spec, shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[ReshardingStep, ...]:
    """An all-gather as XLA emits it, by the sizes of the array; another step as it is.

    Shards of a dimension with at most half as many elements as shards are written into zeros and all-reduced. First go
    the dimensions with one element, then the dimensions that are gathered, then the others.

    >>> step = ReshardingStep("all-gather", ("a",), ((),))
    >>> [emitted_steps(step, (("a",),), (n,), {"a": 8})[0].kind for n in (4, 5)]
    ['all-reduce', 'all-gather']
    """
    single: list[int] = []
    few: list[int] = []
    many: list[int] = []
    removed = [tuple(a for a in axes if a not in kept) for axes, kept in zip(before, step.after, strict=True)]
    for d, axes in enumerate(removed if step.kind == "all-gather" else ()):
        if axes:
            elements = -(-shape[d] // math.prod(sizes[a] for a in step.after[d]))
            is_few = 0 < 2 * elements <= math.prod(sizes[a] for a in axes)
            (single if elements == 1 else few if is_few else many).append(d)
    if not single and not few:
        return (step,)
    found, spec = [], list(before)
    each = [("all-reduce", single, single), ("all-gather", many, many), *(("all-reduce", few, [d]) for d in few[::-1])]
    for kind, replicated, along in each:
        for d in replicated:
            spec[d] = step.after[d]
        if along:
            axes = tuple(a for d in along for a in removed[d])
            found.append(ReshardingStep(kind, axes, tuple(spec), step.is_last_resort))
    return tuple(found)


# ---- axes in parts


def split_axes(axes: Mapping[str, int], used: Iterable[str]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Split every mesh axis into the smallest parts that a sharding can need.

    Args:
      axes: the mesh.
      used: names that shardings use: axes, and parts of them (`a:(2)4`).

    Returns:
      The size of every part, and the parts of every name in row-major order. Parts are prime, and begin and end where a
      used name does.

    >>> split_axes({"a": 4}, [])
    ({'a:(1)2': 2, 'a:(2)2': 2}, {'a': ('a:(1)2', 'a:(2)2')})
    """
    sizes: dict[str, int] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for axis in axes:
        mine = {name: axis_part(name, axes)[1:] for name in (axis, *used) if axis_name(name) == axis}
        bounds = {bound for low, n in mine.values() for bound in (low, low * n)}
        found: list[tuple[int, int]] = []
        for low, high in itertools.pairwise(sorted(bounds)):
            for prime in primes(high // low):
                found.append((low, prime))
                low *= prime
        named = {(axis if len(found) < 2 else f"{axis}:({low}){n}"): (low, n) for low, n in found}
        sizes |= {name: n for name, (_, n) in named.items()}
        for name, (low, n) in mine.items():
            parts[name] = tuple(part for part, (at, _) in named.items() if low <= at < low * n)
    return sizes, parts


def joined_axes(axes: Sequence[str], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Join neighbouring parts of one axis, and give complete axes their own name.

    >>> joined_axes(("a:(1)2", "a:(2)2", "b:(2)2"), {"a": 4, "b": 4})
    ('a', 'b:(2)2')
    """
    found: list[tuple[str, int, int]] = []
    for name in axes:
        axis, low, size = axis_part(name, mesh)
        if found and found[-1][0] == axis and found[-1][1] * found[-1][2] == low:
            found[-1] = axis, found[-1][1], found[-1][2] * size
        else:
            found.append((axis, low, size))
    return tuple(axis if size == mesh.get(axis) else f"{axis}:({low}){size}" for axis, low, size in found)

"""From one layout of an array to another: the collectives in between, as XLA chooses them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from shardfn.graph.model import Spec, axis_size


@dataclasses.dataclass(frozen=True)
class Step:
    """One collective of a move, or none where pieces are only cut smaller (`kind` is empty), and the layout after it."""

    kind: str
    axes: tuple[str, ...]
    after: Spec


def steps(before: Spec, after: Spec, sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """What it takes to lay one array out anew: cutting is free and comes first, then exchanges, then gathering.

    The axes are prime parts (`split_axes`); `sizes` are theirs.

    >>> [step.kind for step in steps((("a",), ()), ((), ("a",)), {"a": 2})]
    ['all-to-all']
    >>> [step.kind for step in steps((("a",), ()), (("b",), ()), {"a": 2, "b": 2})]
    ['collective-permute']
    """
    if _pieces(before, sizes) == _pieces(after, sizes):
        return () if before == after else (Step("collective-permute", tuple(flat(before)), after),)
    found: list[Step] = []
    here = [list(axes) for axes in before]
    had = set(flat(before))
    gone = had - set(flat(after))
    if gone and any(a in had and a not in before[d] for d, axes in enumerate(after) for a in axes):
        # Gathering and exchanging at once: one whole dim is gathered first, or, where no dim is it, everything.
        dim = next((d for d, axes in enumerate(before) if set(axes) == gone), None)
        rest = tuple(() if dim in (None, d) else axes for d, axes in enumerate(before))
        first = before[dim] if dim is not None else tuple(flat(before))
        return (Step("all-gather", first, rest), *steps(rest, after, sizes))
    for dim, axes in enumerate(after):
        shared = _shared(here[dim], axes)
        leaving, coming = here[dim][shared:], list(axes[shared:])
        n = min(len(leaving), len(coming))
        alike = [sizes[a] for a in leaving[:n]] == [sizes[a] for a in coming[:n]]
        if n and alike and not had.intersection(coming) and gone.issuperset(leaving):  # other devices take the pieces
            here[dim] += coming[n:]
            if coming[n:]:
                found.append(Step("", tuple(coming[n:]), _spec(here)))
            here[dim][shared : shared + n] = coming[:n]
            found.append(Step("collective-permute", tuple(leaving), _spec(here)))
        shared = _shared(here[dim], axes)
        fresh = list(itertools.takewhile(lambda a: a not in had, axes[shared:]))
        if fresh and shared == len(here[dim]):
            here[dim] += fresh
            found.append(Step("", tuple(fresh), _spec(here)))
    for dim, target in itertools.permutations(range(len(after)), 2):
        shared, start = _shared(here[dim], after[dim]), _shared(here[target], after[target])
        leaving = here[dim][shared:]
        moving = list(itertools.takewhile(leaving.__contains__, after[target][start:]))
        if not moving or start < len(here[target]):
            continue
        staying = [a for a in leaving if a not in moving]
        if staying and leaving != [*staying, *moving]:
            here[dim][shared:] = [*staying, *moving]
            found.append(Step("collective-permute", tuple(leaving), _spec(here)))
        here[dim][shared:] = staying
        here[target] += moving
        found.append(Step("all-to-all", tuple(moving), _spec(here)))
    kept = [_shared(now, axes) for now, axes in zip(here, after, strict=True)]
    gathered = tuple(a for now, n in zip(here, kept, strict=True) for a in now[n:])
    if gathered:
        here = [now[:n] for now, n in zip(here, kept, strict=True)]
        found.append(Step("all-gather", gathered, _spec(here)))
    if _spec(here) != after:
        missing = tuple(a for now, axes in zip(here, after, strict=True) for a in axes[len(now) :])
        found.append(Step("", missing, after))
    return tuple(found)


def flat(spec: Spec) -> list[str]:
    """All axes of a layout, dim by dim.

    >>> flat((("a", "b"), (), ("c",)))
    ['a', 'b', 'c']
    """
    return [a for dim in spec for a in dim]


def _spec(dims: Sequence[Sequence[str]]) -> Spec:
    return tuple(map(tuple, dims))


def _pieces(spec: Spec, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[a] for a in dim) for dim in spec]


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many axes two cuts of a dim have in common, from the major end."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))  # noqa: B905


# ---- axes in parts


def split_axes(axes: Mapping[str, int], used: Iterable[str]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Take every axis apart into the smallest parts that a layout can need.

    Args:
      axes: the grid.
      used: names that layouts use: axes, and parts of them (`a:(2)4`).

    Returns:
      The size of every part, and the parts of every name, in row-major order. Parts are prime, and begin and end where
      a used name does.

    >>> split_axes({"a": 4}, [])
    ({'a:(1)2': 2, 'a:(2)2': 2}, {'a': ('a:(1)2', 'a:(2)2')})
    """
    sizes: dict[str, int] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for axis, size in axes.items():
        mine = [name for name in used if name.partition(":")[0] == axis and name != axis]
        bounds = {1, size}.union(*({_start(name), _start(name) * axis_size(name, axes)} for name in mine))
        found: list[tuple[int, int]] = []
        for low, high in itertools.pairwise(sorted(bounds)):
            for prime in primes(high // low):
                found.append((low, prime))
                low *= prime
        named = {(axis if len(found) < 2 else f"{axis}:({low}){n}"): (low, n) for low, n in found}
        sizes |= {name: n for name, (_, n) in named.items()}
        for name in (axis, *mine):
            low = _start(name)
            high = low * axis_size(name, axes)
            parts[name] = tuple(part for part, (at, _) in named.items() if low <= at < high)
    return sizes, parts


def joined_axes(axes: Sequence[str], grid: Mapping[str, int]) -> tuple[str, ...]:
    """Put neighbouring parts of one axis together again, whole ones under the axis's own name.

    >>> joined_axes(("a:(1)2", "a:(2)2", "b:(2)2"), {"a": 4, "b": 4})
    ('a', 'b:(2)2')
    """
    found: list[tuple[str, int, int]] = []
    for name in axes:
        axis, low, size = name.partition(":")[0], _start(name), axis_size(name, grid)
        if found and found[-1][0] == axis and found[-1][1] * found[-1][2] == low:
            found[-1] = axis, found[-1][1], found[-1][2] * size
        else:
            found.append((axis, low, size))
    return tuple(axis if size == grid.get(axis) else f"{axis}:({low}){size}" for axis, low, size in found)


def _start(name: str) -> int:
    part = name.partition(":(")[2]
    return int(part.partition(")")[0]) if part else 1


def primes(n: int) -> list[int]:
    """The prime factors of `n`, smallest first.

    >>> primes(24)
    [2, 2, 2, 3]
    """
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p = p + 1 if p * p <= n else n
    return found

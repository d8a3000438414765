"""A sharding as XLA's partitioner sees it, a tile assignment within a group of devices, and the path from one to
another.

XLA decides by the number of shards along each dimension, not by mesh axes. Where only the numbers agree, devices change
places.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardfn.ir.model import Spec, axes_of


class TileAssignment(NamedTuple):
    """By dimension the axes that shard it, major to minor; `rest` are the axes along which devices are replicas, in
    mesh order.
    """

    dims: Spec
    rest: tuple[str, ...]

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds everything."""
        return not any(self.dims)

    @property
    def is_partially_replicated(self) -> bool:
        """Whether it is sharded, but not over all axes."""
        return bool(self.rest) and not self.is_replicated


class ReshardingStep(NamedTuple):
    """One collective of a reshard, or a local slice if `kind` is empty, and the sharding after it.

    `is_last_resort`: XLA gathers everything because it knows no other path ("involuntary full rematerialization").
    """

    kind: str
    axes: tuple[str, ...]
    after: Spec
    is_last_resort: bool = False


ReshardingPath = list[ReshardingStep]


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """A group of devices: the sizes of its axes in mesh order, all of them prime."""

    sizes: Mapping[str, int]
    known: dict[Spec, tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """The cache of `counts`."""

    def count(self, axes: Iterable[str]) -> int:
        """Devices along `axes`."""
        sizes, n = self.sizes, 1  # a loop is faster than `math.prod`: this runs hundreds of thousands of times
        for a in axes:
            n *= sizes[a]
        return n

    def counts(self, tile: TileAssignment) -> tuple[int, ...]:
        """Number of shards along each dimension."""
        dims = tile.dims
        if dims not in self.known:
            self.known[dims] = tuple([self.count(axes) if axes else 1 for axes in dims])
        return self.known[dims]

    def tile(self, dims: Iterable[Iterable[str]]) -> TileAssignment:
        """The tile assignment with its dimensions sharded so."""
        sharded = tuple(map(tuple, dims))
        used = set().union(*sharded)
        return TileAssignment(sharded, tuple([a for a in self.sizes if a not in used]))

    def without(self, axes: Iterable[str]) -> DeviceGroup:
        """The devices of one group, where the devices along `axes` are in different groups."""
        return DeviceGroup({a: n for a, n in self.sizes.items() if a not in set(axes)})

    def split(self, axes: Sequence[str], counts: Sequence[int]) -> list[tuple[str, ...]] | None:
        """`axes`, in order, as parts of so many devices; None where an axis would have to be split."""
        found: list[tuple[str, ...]] = []
        at = 0
        for count in counts:
            begin = at
            while at < len(axes) and self.count(axes[begin:at]) < count:
                at += 1
            if self.count(axes[begin:at]) != count:
                return None
            found.append(tuple(axes[begin:at]))
        return found

    # ---- resharding from one tile assignment to another

    def path(self, now: TileAssignment, to: TileAssignment) -> ReshardingPath:
        """The steps with which XLA reshards an array."""
        found = self._path(now, to, is_last=True)
        assert found is not None
        return found

    def _path(self, now: TileAssignment, to: TileAssignment, is_last: bool = False) -> ReshardingPath | None:
        """None where only gathering everything is left, unless this `is_last`."""
        if now.dims == to.dims:
            return []
        if self.is_permuted(now, to):
            return [ReshardingStep("collective-permute", axes_of(now.dims), to.dims)]
        pairs = self.exchanges(now, to)
        if pairs is not None:
            return self._exchange(now, to, pairs)
        found = None
        if now.is_partially_replicated and not to.is_replicated:
            found = self._slice(now, to) or self._shifted(now, to)
        if found is None and not now.is_replicated and to.is_partially_replicated:
            found = self._gather(now, to) or self._shifted(now, to)
        if found is not None:
            return found
        if now.is_replicated:
            return [ReshardingStep("", axes_of(to.dims), to.dims)]
        replicated = ((),) * len(now.dims)
        gathered = ReshardingStep("all-gather", axes_of(now.dims), replicated, not to.is_replicated)
        if to.is_replicated:
            return [gathered]
        found = self._by_parts(now, to)
        if found is None:
            found = self._among_equals(now, to, is_last)
        if found is None and is_last:
            found = [gathered, ReshardingStep("", axes_of(to.dims), to.dims)]
        return found

    def is_permuted(self, now: TileAssignment, to: TileAssignment) -> bool:
        """Whether only the devices of the shards differ."""
        return self.counts(now) == self.counts(to) and now.dims != to.dims and not now.is_replicated

    def exchanges(self, now: TileAssignment, to: TileAssignment) -> list[tuple[int, int]] | None:
        """The all-to-alls between the two shardings as (from, to) dimensions; None where they do not lead there."""
        before, after = self.counts(now), self.counts(to)
        if now.is_replicated or to.is_replicated or math.prod(before) != math.prod(after):
            return None
        have: dict[int, list[int]] = {}
        want: dict[int, list[int]] = {}
        for d, (a, b) in enumerate(zip(before, after, strict=True)):
            if a != b:
                have.setdefault(a, []).append(d)
                want.setdefault(b, []).append(d)
        if {n: len(dims) for n, dims in have.items()} != {n: len(dims) for n, dims in want.items()}:
            return None
        pairs: list[tuple[int, int]] = []
        while have:
            n = min(have)
            d = have[n][-1]
            wanted = after[d]
            if wanted == n:
                _drop(have, n, d)
                continue
            if wanted % n:
                return None
            fits = [e for e in have[wanted] if (after[e] != 1 if n == 1 else after[e] == n)]
            e = fits[0] if fits else have[wanted][-1]
            pairs.append((e, d))
            have[n][-1] = e
            _drop(have, wanted, e)
        return pairs

    def _exchange(self, now: TileAssignment, to: TileAssignment, pairs: Sequence[tuple[int, int]]) -> ReshardingPath:
        dims, found, seen, apart = list(now.dims), [], set[int](), []
        together: list[str] = []
        for pair in sorted(pairs, key=lambda pair: pair[1]):  # exchanges that share no dimension are one all-to-all
            if seen.isdisjoint(pair):
                seen.update(pair)
            else:
                apart.append(pair)
        at_once = [pair for pair in sorted(pairs, key=lambda pair: pair[1]) if pair not in apart]
        if len(at_once) < 2:
            at_once, apart = [], list(pairs)
        for i, (source, target) in enumerate((*at_once, *apart)):
            keeps = self.count(dims[target])
            parts = self.split(dims[source], (keeps, self.count(dims[source]) // keeps))
            if parts is None:
                return [
                    ReshardingStep("all-gather", axes_of(now.dims), ((),) * len(now.dims), is_last_resort=True),
                    ReshardingStep("", axes_of(to.dims), to.dims),
                ]
            dims[source], dims[target] = parts[0], (*dims[target], *parts[1])
            together += parts[1]
            if i >= len(at_once) - 1:
                found.append(ReshardingStep("all-to-all", tuple(together), tuple(dims)))
                together = []
        return self._then_permute(found, to)

    def _then_permute(self, path: ReshardingPath, to: TileAssignment) -> ReshardingPath:
        """With a final collective-permute, if shards have to change places."""
        here = path[-1].after
        return path if here == to.dims else [*path, ReshardingStep("collective-permute", axes_of(here), to.dims)]

    def _finer(self, coarse: TileAssignment, fine: TileAssignment) -> TileAssignment | None:
        """A sharding with the shard counts of `fine` that only subdivides shards of `coarse`; `fine` itself if it
        does.
        """
        before, after = self.counts(coarse), self.counts(fine)
        if not coarse.is_partially_replicated or any(b % a for a, b in zip(before, after, strict=True)):
            return None
        if all(f[: len(c)] == c for c, f in zip(coarse.dims, fine.dims, strict=True)):
            return fine
        more = [b // a for a, b in zip(before, after, strict=True)]
        parts = self.split(coarse.rest, [n for n in more if n > 1])
        if parts is None:
            return None
        added = iter(parts)
        return self.tile((*c, *(next(added) if n > 1 else ())) for c, n in zip(coarse.dims, more, strict=True))

    def _slice(self, now: TileAssignment, to: TileAssignment) -> ReshardingPath | None:
        between = self._finer(now, to)
        if between is None:
            return None
        return self._then_permute([ReshardingStep("", _new(now, between), between.dims)], to)

    def _gather(self, now: TileAssignment, to: TileAssignment) -> ReshardingPath | None:
        between = self._finer(to, now)
        if between is None:
            return None
        first = (
            [] if between.dims == now.dims else [ReshardingStep("collective-permute", axes_of(now.dims), between.dims)]
        )
        return [*first, ReshardingStep("all-gather", _new(to, between), to.dims)]

    def _shifted(self, now: TileAssignment, to: TileAssignment) -> ReshardingPath | None:
        """From shards along some dimensions to the same along the dimensions after them, or back."""
        partial, full = (now, to) if now.is_partially_replicated else (to, now)
        if full.is_partially_replicated or full.is_replicated or partial.dims[0]:
            return None
        order = (*partial.dims[1:], partial.rest)
        if order != full.dims:
            return None
        last = max(d for d, axes in enumerate(full.dims) if axes)
        if self.count(full.dims[last]) != self.count(partial.rest):
            return None
        between = self.tile(() if d == last else axes for d, axes in enumerate(full.dims))
        pairs = self.exchanges(*((now, between) if now is partial else (between, to)))
        if pairs is None:
            return None
        if now is partial:
            return [*self._exchange(now, between, pairs), *self.path(between, to)]
        return [*self.path(now, between), *self._exchange(between, to, pairs)]

    def _by_parts(self, now: TileAssignment, to: TileAssignment) -> ReshardingPath | None:
        """Through an intermediate sharding: one dimension is seen as two, or is gathered, or is sharded further."""
        split = self._dim_in_two(now, to)
        if split is not None:
            d, count = split
            parts = [self.split(t.dims[d], (count, self.count(t.dims[d]) // count)) for t in (now, to)]
            if None in parts:
                return None
            major_minor = [p for p in parts if p is not None]
            wide = [
                self.tile((*t.dims[:d], p[1], p[0], *t.dims[d + 1 :]))
                for t, p in zip((now, to), major_minor, strict=True)
            ]
            path = self._path(wide[0], wide[1])
            if path is None:
                return None
            return [s._replace(after=(*s.after[:d], (*s.after[d + 1], *s.after[d]), *s.after[d + 2 :])) for s in path]
        if to.is_partially_replicated:
            have = 1 if not now.is_partially_replicated else self.count(now.rest)
            for d, axes in enumerate(now.dims):
                if axes and self.count(axes) * have == self.count(to.rest):
                    between = self.tile(() if e == d else a for e, a in enumerate(now.dims))
                    rest = self._path(between, to)
                    return None if rest is None else [*self.path(now, between), *rest]
        if now.is_partially_replicated and not to.is_partially_replicated:
            n = self.count(now.rest)
            for d, axes in enumerate(now.dims):
                if not axes and to.dims[d] and self.count(to.dims[d]) % n == 0:
                    between = self.tile(now.rest if e == d else a for e, a in enumerate(now.dims))
                    rest = self._path(between, to)
                    return None if rest is None else [*self.path(now, between), *rest]
        return None

    def _dim_in_two(self, now: TileAssignment, to: TileAssignment) -> tuple[int, int] | None:
        """The dimension whose shards are to be seen as those of two dimensions, and the number of the major ones."""
        if self.count(now.rest) != self.count(to.rest):
            return None
        pairs = list(enumerate(zip(self.counts(now), self.counts(to), strict=True)))
        ones = [(a, b) for _, (a, b) in pairs if a != b and min(a, b) == 1]
        more = [(d, a, b) for d, (a, b) in pairs if a != b and min(a, b) > 1 and max(a, b) % min(a, b) == 0]
        for d, a, b in more:
            if any(a * c == b * e for c, e in ones):
                return d, min(a, b)
        return next(((d, b) for d, a, b in more if a > b), None)

    def _among_equals(self, now: TileAssignment, to: TileAssignment, is_last: bool) -> ReshardingPath | None:
        """Group devices by the dimensions with as many shards before and after, and reshard the rest inside each
        group.
        """
        equal = [d for d, (a, b) in enumerate(zip(self.counts(now), self.counts(to), strict=True)) if a == b > 1]
        if not equal:
            return None
        group = tuple(a for d in equal for a in now.dims[d])
        wanted = GroupedTiles.of(to, equal).aligned(GroupedTiles.of(now, equal), self)
        if wanted is None:
            return None
        inner = self.without(group)
        inside = inner._path(inner.tile(_emptied(now.dims, equal)), inner.tile(wanted.inner), is_last=True)
        if inside is None:
            return None
        path = [s._replace(after=tuple((*now.dims[d], *axes) if d in equal else axes for d, axes in enumerate(s.after)))
                for s in inside]  # fmt: skip
        here = self.tile(path[-1].after) if path else now
        rest = self._path(here, to, is_last)
        return None if rest is None else [*path, *rest]


@dataclasses.dataclass(frozen=True)
class GroupedTiles:
    """A sharding with its devices in groups: by dimension the axes that tell groups apart, and the sharding inside a
    group.

    `order`: the axes inside a group in the order in which its devices are counted.
    """

    groups: Mapping[int, tuple[str, ...]]
    inner: Spec
    order: tuple[str, ...]

    @staticmethod
    def of(tile: TileAssignment, dims: Sequence[int]) -> GroupedTiles:
        """Groups by the shards along `dims`; the dimension after the last stands for replicas."""
        every = (*tile.dims, tile.rest)
        inner = _emptied(every, dims)
        return GroupedTiles({d: every[d] for d in dims}, inner[:-1], axes_of(inner))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that tell groups apart."""
        return axes_of(self.groups.values())

    def aligned(self, other: GroupedTiles, devices: DeviceGroup, any_order: bool = False) -> GroupedTiles | None:
        """The same sharding in the groups of `other`; where the groups differ, devices change places."""
        mine, theirs = self.axes, other.axes
        parts = devices.split(theirs, [devices.count(axes) for axes in self.groups.values()])
        if parts is None:
            return None
        groups = dict(zip(self.groups, parts, strict=True))
        if mine == theirs or (any_order and {*mine} == {*theirs}):
            return GroupedTiles(groups, self.inner, other.order)
        if [devices.sizes[a] for a in self.order] != [devices.sizes[a] for a in other.order]:
            return None
        new = dict(zip(self.order, other.order, strict=True))
        return GroupedTiles(groups, tuple(tuple(new[a] for a in axes) for axes in self.inner), other.order)

    @property
    def spec(self) -> Spec:
        """The sharding over all devices."""
        return tuple((*self.groups.get(d, ()), *axes) for d, axes in enumerate(self.inner))


def _emptied(dims: Sequence[tuple[str, ...]], which: Sequence[int]) -> Spec:
    return tuple(() if d in which else axes for d, axes in enumerate(dims))


def _new(coarse: TileAssignment, fine: TileAssignment) -> tuple[str, ...]:
    return tuple(a for c, f in zip(coarse.dims, fine.dims, strict=True) for a in f[len(c) :])


def _drop(dims: dict[int, list[int]], n: int, d: int) -> None:
    dims[n].remove(d)
    if not dims[n]:
        del dims[n]

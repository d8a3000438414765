"""A layout as XLA's partitioner sees it, among a group of devices, and the road from one to another.

A `Tile` says for each dim which axes cut it, and which axes of the group are left: along these, devices hold the same.
XLA decides by how many pieces there are along each dim, not by axes: where only those agree, devices change places.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardfn.ir.model import Spec


class Tile(NamedTuple):
    """For each dim the axes that cut it, major to minor; and those that do not cut it, in the order of the grid."""

    dims: Spec
    rest: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return not any(self.dims)

    @property
    def is_partial(self) -> bool:
        """Whether it is cut, but not over all axes."""
        return bool(self.rest) and not self.is_whole


class Step(NamedTuple):
    """One collective of a move, or none where pieces are only cut smaller (`kind` is empty), and the layout after it.

    `is_last_resort`: everything is gathered, because XLA knows no other way ("involuntary full rematerialization").
    """

    kind: str
    axes: tuple[str, ...]
    after: Spec
    is_last_resort: bool = False


Road = list[Step]


@dataclasses.dataclass(frozen=True)
class Devices:
    """A group of devices: the sizes of its axes, in the order of the grid. All are prime parts."""

    sizes: Mapping[str, int]
    known: dict[Spec, tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """`counts` that were asked for: of one layout it is asked again and again."""

    def count(self, axes: Iterable[str]) -> int:
        """Devices along `axes`."""
        sizes, n = self.sizes, 1  # a loop: it is asked for hundreds of thousands of times
        for a in axes:
            n *= sizes[a]
        return n

    def counts(self, tile: Tile) -> tuple[int, ...]:
        """How many pieces there are along each dim."""
        dims = tile.dims
        if dims not in self.known:
            self.known[dims] = tuple([self.count(axes) if axes else 1 for axes in dims])
        return self.known[dims]

    def tile(self, dims: Iterable[Iterable[str]]) -> Tile:
        """The layout with its dims cut so."""
        cut = tuple(map(tuple, dims))
        used = set().union(*cut)
        return Tile(cut, tuple([a for a in self.sizes if a not in used]))

    def without(self, axes: Iterable[str]) -> Devices:
        """The devices of one group, if those along `axes` are in different groups."""
        return Devices({a: n for a, n in self.sizes.items() if a not in set(axes)})

    def split(self, axes: Sequence[str], counts: Sequence[int]) -> list[tuple[str, ...]] | None:
        """`axes`, in order, in parts of so many devices; None where axes would have to be broken."""
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

    # ---- the road from one layout to another

    def road(self, now: Tile, to: Tile) -> Road:
        """What XLA does to lay an array out anew."""
        found = self._road(now, to, is_last=True)
        assert found is not None
        return found

    def _road(self, now: Tile, to: Tile, is_last: bool = False) -> Road | None:
        """None where all there is would be to gather everything, unless that `is_last`."""
        if now.dims == to.dims:
            return []
        if self.is_permuted(now, to):
            return [Step("collective-permute", _flat(now), to.dims)]
        pairs = self.exchanges(now, to)
        if pairs is not None:
            return self._exchange(now, to, pairs)
        found = None
        if now.is_partial and not to.is_whole:
            found = self._cut(now, to) or self._shifted(now, to)
        if found is None and not now.is_whole and to.is_partial:
            found = self._gather(now, to) or self._shifted(now, to)
        if found is not None:
            return found
        if now.is_whole:
            return [Step("", _flat(to), to.dims)]
        whole = ((),) * len(now.dims)
        gathered = Step("all-gather", _flat(now), whole, not to.is_whole)
        if to.is_whole:
            return [gathered]
        found = self._by_parts(now, to)
        if found is None:
            found = self._among_equals(now, to, is_last)
        if found is None and is_last:
            found = [gathered, Step("", _flat(to), to.dims)]
        return found

    def is_permuted(self, now: Tile, to: Tile) -> bool:
        """Whether only the places of the pieces differ."""
        return self.counts(now) == self.counts(to) and now.dims != to.dims and not now.is_whole

    def exchanges(self, now: Tile, to: Tile) -> list[tuple[int, int]] | None:
        """Pairs of dims, from and to, between which pieces are exchanged; None where that does not lead there."""
        before, after = self.counts(now), self.counts(to)
        if now.is_whole or to.is_whole or math.prod(before) != math.prod(after):
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

    def _exchange(self, now: Tile, to: Tile, pairs: Sequence[tuple[int, int]]) -> Road:
        dims, found, seen, apart = list(now.dims), [], set[int](), []
        together: list[str] = []
        for pair in sorted(pairs, key=lambda pair: pair[1]):  # those that touch no dim twice go at once
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
                    Step("all-gather", _flat(now), ((),) * len(now.dims), is_last_resort=True),
                    Step("", _flat(to), to.dims),
                ]
            dims[source], dims[target] = parts[0], (*dims[target], *parts[1])
            together += parts[1]
            if i >= len(at_once) - 1:
                found.append(Step("all-to-all", tuple(together), tuple(dims)))
                together = []
        return self._then(found, to)

    def _then(self, road: Road, to: Tile) -> Road:
        """The same number of pieces everywhere: they may have to change places at the end."""
        here = road[-1].after
        return road if here == to.dims else [*road, Step("collective-permute", _flat(Tile(here, ())), to.dims)]

    def _finer(self, coarse: Tile, fine: Tile) -> Tile | None:
        """A layout with as many pieces as `fine` of which each lies in one piece of `coarse`: `fine` itself if it can."""
        before, after = self.counts(coarse), self.counts(fine)
        if not coarse.is_partial or any(b % a for a, b in zip(before, after, strict=True)):
            return None
        if all(f[: len(c)] == c for c, f in zip(coarse.dims, fine.dims, strict=True)):
            return fine
        more = [b // a for a, b in zip(before, after, strict=True)]
        parts = self.split(coarse.rest, [n for n in more if n > 1])
        if parts is None:
            return None
        added = iter(parts)
        return self.tile((*c, *(next(added) if n > 1 else ())) for c, n in zip(coarse.dims, more, strict=True))

    def _cut(self, now: Tile, to: Tile) -> Road | None:
        between = self._finer(now, to)
        if between is None:
            return None
        return self._then([Step("", _new(now, between), between.dims)], to)

    def _gather(self, now: Tile, to: Tile) -> Road | None:
        between = self._finer(to, now)
        if between is None:
            return None
        first = [] if between.dims == now.dims else [Step("collective-permute", _flat(now), between.dims)]
        return [*first, Step("all-gather", _new(to, between), to.dims)]

    def _shifted(self, now: Tile, to: Tile) -> Road | None:
        """From pieces along some dims to the same along the dims after them, the last of which goes, or back."""
        partial, full = (now, to) if now.is_partial else (to, now)
        if full.is_partial or full.is_whole or partial.dims[0]:
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
            return [*self._exchange(now, between, pairs), *self.road(between, to)]
        return [*self.road(now, between), *self._exchange(between, to, pairs)]

    def _by_parts(self, now: Tile, to: Tile) -> Road | None:
        """Through a layout in which the pieces of one dim are told as pieces of two, or one dim is gathered, or cut."""
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
            road = self._road(wide[0], wide[1])
            if road is None:
                return None
            return [s._replace(after=(*s.after[:d], (*s.after[d + 1], *s.after[d]), *s.after[d + 2 :])) for s in road]
        if to.is_partial:
            have = 1 if not now.is_partial else self.count(now.rest)
            for d, axes in enumerate(now.dims):
                if axes and self.count(axes) * have == self.count(to.rest):
                    between = self.tile(() if e == d else a for e, a in enumerate(now.dims))
                    rest = self._road(between, to)
                    return None if rest is None else [*self.road(now, between), *rest]
        if now.is_partial and not to.is_partial:
            n = self.count(now.rest)
            for d, axes in enumerate(now.dims):
                if not axes and to.dims[d] and self.count(to.dims[d]) % n == 0:
                    between = self.tile(now.rest if e == d else a for e, a in enumerate(now.dims))
                    rest = self._road(between, to)
                    return None if rest is None else [*self.road(now, between), *rest]
        return None

    def _dim_in_two(self, now: Tile, to: Tile) -> tuple[int, int] | None:
        """The dim whose pieces are to be told as those of two dims, and how many of them are the major ones."""
        if self.count(now.rest) != self.count(to.rest):
            return None
        pairs = list(enumerate(zip(self.counts(now), self.counts(to), strict=True)))
        ones = [(a, b) for _, (a, b) in pairs if a != b and min(a, b) == 1]
        more = [(d, a, b) for d, (a, b) in pairs if a != b and min(a, b) > 1 and max(a, b) % min(a, b) == 0]
        for d, a, b in more:
            if any(a * c == b * e for c, e in ones):
                return d, min(a, b)
        return next(((d, b) for d, a, b in more if a > b), None)

    def _among_equals(self, now: Tile, to: Tile, is_last: bool) -> Road | None:
        """Devices are taken in groups by the dims that have as many pieces before and after; the rest moves inside."""
        equal = [d for d, (a, b) in enumerate(zip(self.counts(now), self.counts(to), strict=True)) if a == b > 1]
        if not equal:
            return None
        group = tuple(a for d in equal for a in now.dims[d])
        wanted = Grouped.of(to, equal).aligned(Grouped.of(now, equal), self)
        if wanted is None:
            return None
        inner = self.without(group)
        inside = inner._road(inner.tile(_emptied(now.dims, equal)), inner.tile(wanted.inner), is_last=True)
        if inside is None:
            return None
        road = [s._replace(after=tuple((*now.dims[d], *axes) if d in equal else axes for d, axes in enumerate(s.after)))
                for s in inside]  # fmt: skip
        here = self.tile(road[-1].after) if road else now
        rest = self._road(here, to, is_last)
        return None if rest is None else [*road, *rest]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A layout with its devices in groups: the axes that tell groups apart, dim by dim, and the layout inside one.

    `order`: the axes inside a group in the order in which its devices are counted.
    """

    groups: Mapping[int, tuple[str, ...]]
    inner: Spec
    order: tuple[str, ...]

    @staticmethod
    def of(tile: Tile, dims: Sequence[int]) -> Grouped:
        """Groups by the pieces along `dims`; the dim after the last is that along which devices hold the same."""
        every = (*tile.dims, tile.rest)
        inner = _emptied(every, dims)
        return Grouped({d: every[d] for d in dims}, inner[:-1], tuple(a for axes in inner for a in axes))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that tell groups apart."""
        return tuple(a for axes in self.groups.values() for a in axes)

    def aligned(self, other: Grouped, devices: Devices, any_order: bool = False) -> Grouped | None:
        """The same layout in the groups of `other`. Where these are others, devices change places."""
        mine, theirs = self.axes, other.axes
        parts = devices.split(theirs, [devices.count(axes) for axes in self.groups.values()])
        if parts is None:
            return None
        groups = dict(zip(self.groups, parts, strict=True))
        if mine == theirs or (any_order and {*mine} == {*theirs}):
            return Grouped(groups, self.inner, other.order)
        if [devices.sizes[a] for a in self.order] != [devices.sizes[a] for a in other.order]:
            return None
        new = dict(zip(self.order, other.order, strict=True))
        return Grouped(groups, tuple(tuple(new[a] for a in axes) for axes in self.inner), other.order)

    @property
    def spec(self) -> Spec:
        """The layout among all devices."""
        return tuple((*self.groups.get(d, ()), *axes) for d, axes in enumerate(self.inner))


def _emptied(dims: Sequence[tuple[str, ...]], which: Sequence[int]) -> Spec:
    return tuple(() if d in which else axes for d, axes in enumerate(dims))


def _flat(tile: Tile) -> tuple[str, ...]:
    return tuple(a for axes in tile.dims for a in axes)


def _new(coarse: Tile, fine: Tile) -> tuple[str, ...]:
    return tuple(a for c, f in zip(coarse.dims, fine.dims, strict=True) for a in f[len(c) :])


def _drop(dims: dict[int, list[int]], n: int, d: int) -> None:
    dims[n].remove(d)
    if not dims[n]:
        del dims[n]

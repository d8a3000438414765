"""A matmul within a group of devices: the terms in which `partition.dot_general` decides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from shardfn.ir.model import DimFactors, Spec, axes_of
from shardfn.partition.sharded_op import Reshard
from shardfn.partition.tile_assignment import DeviceGroup, GroupedTiles, TileAssignment

LEFT, RIGHT, OUT = 0, 1, 2
"""The operands and the result."""

Places = tuple[tuple[int, int, int], ...]
"""Dimensions by their position in both operands and the result, -1 where absent."""


class Roles(NamedTuple):
    """The dimensions of a matmul by role; `own` are those that the left and the right operand share with the result."""

    batch: Places
    own: tuple[Places, Places]
    contracted: Places


def roles_of(rows: Sequence[DimFactors]) -> Roles:
    """The dimensions of a matmul by role, from the sharding rule of both operands and the result."""
    places = [{f: d for d, dim in enumerate(dims) for f in dim} for dims in rows]
    every = dict.fromkeys(f for dims in rows for dim in dims for f in dim)
    found = [tuple(place.get(f, -1) for place in places) for f in every]

    def where(*key: bool) -> Places:
        return tuple((a, b, c) for a, b, c in found if (a >= 0, b >= 0, c >= 0) == key)

    yes, no = True, False
    return Roles(where(yes, yes, yes), (where(yes, no, yes), where(no, yes, yes)), where(yes, yes, no))


Fixed = Mapping[int, tuple[str, ...]]
"""By dimension, the axes by which groups shard a tensor."""


class Sum(NamedTuple):
    """A reduction of the result."""

    axes: tuple[tuple[str, ...], ...]
    """Grouped by the dimension that they shard."""
    sharded: Mapping[int, tuple[str, ...]]
    """How they shard the result afterwards."""
    rows_per_byte: float = 0.0
    """As that of a `Reshard`."""


@dataclasses.dataclass(frozen=True)
class GroupedDot:
    """A matmul within a group of devices.

    `tiles` are the shardings within the group of both operands and the result. `fixed` says how groups shard each of
    them. `group_axes` tell the groups apart. `sums` are the reductions that the result of each device goes through
    first.
    """

    every: DeviceGroup
    devices: DeviceGroup
    tiles: tuple[TileAssignment, ...]
    fixed: tuple[Spec, ...]
    group_axes: frozenset[str]
    roles: Roles
    shapes: tuple[tuple[int, ...], ...]
    bits: tuple[int, ...]
    sums: tuple[Sum, ...] = ()
    prefers_collective_matmul: bool = False
    """Whether it groups by the dimensions of one operand as libtpu does (`_better_side`)."""

    def spec(self, side: int, tile: TileAssignment) -> Spec:
        """A sharding within the group as one over all devices."""
        return tuple((*f, *axes) for f, axes in zip(self.fixed[side], tile.dims, strict=True))

    def reshards(self, *tiles: tuple[int, TileAssignment]) -> list[tuple[int, Reshard]]:
        """The reshards of operands to the given shardings, one after the other; those that change nothing are left
        out.
        """
        here = {side: self.tiles[side].dims for side, _ in tiles}
        found = []
        for side, tile in tiles:
            if here[side] != tile.dims:
                found.append((side, Reshard(self.spec(side, tile), self.group_axes)))
            here[side] = tile.dims
        return found

    def replicated(self, side: int) -> TileAssignment:
        """The replicated sharding of an operand or the result."""
        return self.devices.tile(((),) * len(self.shapes[side]))

    def shards(self, side: int, dims: Places) -> int:
        """Number of shards of these dimensions within the group."""
        return math.prod(self.devices.count(self.tiles[side].dims[d[side]]) for d in dims)

    def elements(self, side: int) -> int:
        """Elements of a tensor within the group."""
        return _elements(self.shapes[side], self.fixed[side], self.every)

    def local_bits(self, side: int) -> int:
        """Bits of a tensor on one device."""
        return _elements(self.shapes[side], self.spec(side, self.tiles[side]), self.every) * self.bits[side]

    def matmul_rows_per_byte(self, side: int, dims: Places, sent: int) -> float:
        """`Reshard.rows_per_byte`, where these dimensions of an operand are the rows and `sent` is gathered or scattered.

        None of a product with a vector, which XLA multiplies and adds up without a matmul.
        """
        if any(math.prod(self.shapes[of][d[of]] for d in self.roles.own[of]) == 1 for of in (LEFT, RIGHT)):
            return 0.0
        sharded = self.spec(side, self.tiles[side])
        rows = math.prod(-(-self.shapes[side][d[side]] // self.every.count(sharded[d[side]])) for d in dims)
        return rows * self.devices.count(self.devices.sizes) * 8 / self.bits[sent]

    def across(self, source: int, target: int, tile: TileAssignment | None = None) -> TileAssignment | None:
        """Carry a sharding from one tensor to another along shared dimensions; None where it shards a dimension that
        is not shared.
        """
        dims = (tile or self.tiles[source]).dims
        both = [d for d in (*self.roles.batch, *self.roles.own[0], *self.roles.own[1], *self.roles.contracted)
                if d[source] >= 0 and d[target] >= 0]  # fmt: skip
        known = {d[source] for d in both}
        if any(axes and d not in known for d, axes in enumerate(dims)):
            return None
        to = {d[target]: dims[d[source]] for d in both}
        return self.devices.tile(to.get(d, ()) for d in range(len(self.shapes[target])))

    def reshard_dims(self, side: int, dims: Places, counts: Sequence[int]) -> TileAssignment | None:
        """A tensor's sharding with other shard counts along some dimensions, and its devices in the same order."""
        tile = self.tiles[side]
        wanted = [*self.devices.counts(tile), self.devices.count(tile.rest)]
        for d, n in zip(dims, counts, strict=True):
            wanted[d[side]] = n
        return self.reshaped(tile, wanted)

    def reshaped(self, tile: TileAssignment, counts: Sequence[int]) -> TileAssignment | None:
        """The same device order with these shard counts; the last count is that of replicas."""
        every = axes_of((*tile.dims, tile.rest))
        if math.prod(counts) != self.devices.count(every):
            return None
        parts = self.devices.split(every, counts)
        return None if parts is None else self.devices.tile(parts[:-1])

    def inner(self, axes: Sequence[str], parts: Sequence[GroupedTiles], *sums: Sum) -> Self:
        """The same matmul inside one of the groups along `axes`; `parts` are the tensors in these groups."""
        devices = self.devices.without(axes)
        fixed = tuple(
            tuple((*old, *part.groups.get(d, ())) for d, old in enumerate(spec))
            for spec, part in zip(self.fixed, parts, strict=True)
        )
        return dataclasses.replace(
            self, devices=devices, tiles=tuple(devices.tile(part.inner) for part in parts), fixed=fixed,
            group_axes=self.group_axes | {*axes}, sums=(*self.sums, *sums),
        )  # fmt: skip

    def matching(self, tile: TileAssignment, groups: GroupedTiles) -> list[int] | None:
        """The dimensions that tell these groups apart; the one after the last stands for replicas."""
        every = (*tile.dims, tile.rest) if tile.rest else tile.dims
        if tile.is_replicated or not groups.axes:
            return None
        if not groups.order:
            return [d for d, axes in enumerate(every) if axes]
        dims = [d for d, axes in enumerate(every) if groups.order[-1] not in axes]
        return dims if {a for d in dims for a in every[d]} == {*groups.axes} else None


def _elements(shape: Sequence[int], spec: Spec, devices: DeviceGroup) -> int:
    return math.prod(-(-n // devices.count(axes)) for n, axes in zip(shape, spec, strict=True))

"""How XLA's partitioner shards a matmul (`dot_general`).

XLA splits the devices into groups while operands and result agree about some dimension, and decides again inside a
group:

1. by batch dimensions;
2. by a dimension that one operand shares with the result;
3. by contracting dimensions that both operands shard, followed by an all-reduce.

When nothing agrees any more, XLA gathers the operands. The exception is an operand whose contracting dimension is
sharded over all devices: XLA then reduces the result if it is smaller.

Two tensors "agree" if they have the same number of shards. XLA first tries this without moving shards between groups,
then with. A mesh axis that shards neither operand rules out the exception, so unused axes decide how a matmul runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from shardfn.ir.model import DimFactors, Spec, axes_of, dtype_bits
from shardfn.partition.grouped_dot import LEFT, OUT, RIGHT, Fixed, GroupedDot, Places, Sum, roles_of
from shardfn.partition.sharded_op import OpPartitioning, Reshard, ShardedOp
from shardfn.partition.tile_assignment import DeviceGroup, GroupedTiles, TileAssignment


def dot(op: ShardedOp, prefers_collective_matmul: bool = False) -> OpPartitioning:
    """dot_general: shardings of the operands, reductions, and the path of the result to the sharding wanted."""
    values = (*op.operands, *op.results)
    return _partition_dot(
        (*op.rule.operands, *op.rule.results),
        tuple(v.shape for v in values),
        tuple(dtype_bits(v.dtype) for v in values),
        (*op.operand_specs, *op.result_specs),
        tuple(op.sizes.items()),
        prefers_collective_matmul,
    )


def dot_on_tpu(op: ShardedOp) -> OpPartitioning:
    """`dot` as libtpu does it, which prefers collective matmuls."""
    return dot(op, prefers_collective_matmul=True)


@functools.lru_cache(1 << 14)
def _partition_dot(
    rows: tuple[DimFactors, ...],
    shapes: tuple[tuple[int, ...], ...],
    bits: tuple[int, ...],
    specs: tuple[Spec, ...],
    sizes: tuple[tuple[str, int], ...],
    prefers_collective_matmul: bool,
) -> OpPartitioning:
    devices = DeviceGroup(dict(sizes))
    tiles = tuple(map(devices.tile, specs))
    fixed = tuple(((),) * len(spec) for spec in specs)
    every = _Dot(
        devices, devices, tiles, fixed, frozenset(), roles_of(rows), shapes, bits,
        prefers_collective_matmul=prefers_collective_matmul,
    )  # fmt: skip
    found = every.partition()
    paths = tuple(tuple(reshard for side, reshard in found.reshards if side == which) for which in (LEFT, RIGHT))
    operand_specs = tuple(path[-1].to if path else spec for path, spec in zip(paths, specs, strict=False))
    return OpPartitioning(operand_specs, (found.result_spec,), paths, tuple(found.result_path))


@dataclasses.dataclass
class _Result:
    """The decision in one group. `reshards` are those of the operands, each with its operand."""

    reshards: list[tuple[int, Reshard]]
    result_spec: Spec
    result_path: list[Reshard]


class _Dot(GroupedDot):
    """The decisions of one group of devices; the first that is possible wins."""

    def partition(self) -> _Result:
        """The decision of this group, with those of the groups inside it."""
        for only_as_is in (True, False):
            found = (
                self.at_once(False)
                or self.by_batch(only_as_is)
                or self.by_own(only_as_is)
                or self.by_contracted(only_as_is)
                or self.by_rest()
                or self.at_once(True)
            )
            if found:
                return found
        dims: list[list[tuple[str, ...]]] = [[()] * len(shape) for shape in self.shapes]
        for side in (LEFT, RIGHT):
            for d in (*self.roles.batch, *self.roles.own[side]):
                dims[side][d[side]] = self.tiles[OUT].dims[d[OUT]]
        return self.done(self.devices.tile(dims[LEFT]), self.devices.tile(dims[RIGHT]), self.tiles[OUT])

    def done(
        self, left: TileAssignment, right: TileAssignment, result_spec: TileAssignment, is_summed: bool = False
    ) -> _Result:
        """The operands are sharded so and the result is computed so; it is reduced where a contracting dimension is
        sharded.
        """
        made = self.spec(OUT, result_spec)
        sharded_axes = [set(axes_of(reduction.sharded.values())) for reduction in self.sums]

        def before(n: int) -> Spec:
            later = set[str]().union(*sharded_axes[n:])
            return tuple(tuple(a for a in axes if a not in later) for axes in made)

        result_path = []
        for n, (parts, _, rows) in enumerate(self.sums):
            result_path += [Reshard(before(n), self.group_axes, axes) for axes in parts[:-1]]
            result_path.append(Reshard(before(n + 1), self.group_axes, parts[-1], rows))
        if is_summed:
            result_path += [
                Reshard(made, self.group_axes, axes)
                for d in reversed(self.roles.contracted)
                if (axes := left.dims[d[LEFT]])
            ]
        wanted = self.spec(OUT, self.tiles[OUT])
        if wanted != made:
            result_path.append(Reshard(wanted, self.group_axes))
        return _Result(self.reshards((LEFT, left), (RIGHT, right)), before(0), result_path)

    def at_once(self, may_move: bool) -> _Result | None:
        """All devices of the group share one batch dimension, one dimension of an operand, or the contracting one."""
        left, right, out = self.tiles
        if out.is_partially_replicated:
            return None
        n, roles = self.devices.count(self.devices.sizes), self.roles
        lb, rb, ob = (self.shards(side, roles.batch) for side in (LEFT, RIGHT, OUT))
        to_right, to_left = self.across(LEFT, RIGHT), self.across(RIGHT, LEFT)
        left_out, right_out = self.across(LEFT, OUT), self.across(RIGHT, OUT)
        if lb == rb == n and to_right == right and left_out:
            return self.done(left, right, left_out)
        if lb == ob == n and left_out == out and to_right:
            return self.done(left, to_right, out)
        if rb == ob == n and right_out == out and to_left:
            return self.done(to_left, right, out)
        lc, rc = self.shards(LEFT, roles.contracted), self.shards(RIGHT, roles.contracted)
        if lc == rc == n and to_left and to_right:
            if not (may_move or out.is_replicated):
                return None
            sides = (to_left, right) if self.elements(LEFT) < self.elements(RIGHT) else (left, to_right)
            return self.done(*sides, self.replicated(OUT), is_summed=True)
        for side, to_out in enumerate((left_out, right_out)):
            if to_out == out and self.shards(side, roles.own[side]) == n == self.shards(OUT, roles.own[side]):
                sides = (left, self.replicated(RIGHT)) if side == LEFT else (self.replicated(LEFT), right)
                found, other = self.done(*sides, out), 1 - side
                if n in (self.shards(other, dims) for dims in (roles.contracted, roles.own[other], roles.batch)):
                    rows = self.matmul_rows_per_byte(side, roles.own[side], other)
                    found.reshards = [
                        (which, reshard._replace(rows_per_byte=rows)) for which, reshard in found.reshards
                    ]
                return found
        if may_move:
            for dims in (roles.batch, *roles.own):
                if self.shards(OUT, dims) == n:
                    has_dims = [dims[0][side] >= 0 for side in (LEFT, RIGHT)]
                    one = self.across(OUT, LEFT) if has_dims[LEFT] else self.replicated(LEFT)
                    two = self.across(OUT, RIGHT) if has_dims[RIGHT] else self.replicated(RIGHT)
                    return self.done(one, two, out) if one and two else None
        if not out.is_replicated:
            return None
        if rc == n and left.is_replicated and to_left and self.elements(RIGHT) > self.elements(OUT):
            return self.done(to_left, right, out, is_summed=True)
        if lc == n and right.is_replicated and to_right and self.elements(LEFT) > self.elements(OUT):
            return self.done(left, to_right, out, is_summed=True)
        return None

    def by_batch(self, only_as_is: bool) -> _Result | None:
        """Groups by batch dimensions, for which at least one operand has as many shards as the result."""
        dims, right = self.roles.batch, self.tiles[RIGHT]
        lb, rb, ob = (self.shards(side, dims) for side in (LEFT, RIGHT, OUT))
        if ob == 1 or ob not in (lb, rb):
            return None
        by = [GroupedTiles.of(tile, [d[side] for d in dims]) for side, tile in enumerate(self.tiles)]
        is_alike = all(self.shards(LEFT, (d,)) == self.shards(RIGHT, (d,)) for d in dims)
        if is_alike and only_as_is:
            moved = by[RIGHT].aligned(by[LEFT], self.devices)
            is_alike = moved is not None and moved.spec == right.dims
        if is_alike:
            smaller, larger = (RIGHT, LEFT) if self.local_bits(LEFT) > self.local_bits(RIGHT) else (LEFT, RIGHT)
            aligned = by[smaller].aligned(by[larger], self.devices)
            as_left = self.reshard_dims(OUT, dims, [self.shards(LEFT, (d,)) for d in dims])
            if aligned is None or as_left is None:
                return None
            by[smaller] = aligned
            result = GroupedTiles.of(as_left, [d[OUT] for d in dims]).aligned(by[LEFT], self.devices)
            if result is None:
                return None
            by[OUT] = result
        else:
            for side in (LEFT, RIGHT):
                found = self._as_result(side, by[OUT], only_as_is)
                if found is None:
                    return None
                by[side] = found
        tiles = [self.devices.tile(grouped.spec) for grouped in by]
        return self.in_groups(by[OUT].axes, by, (LEFT, tiles[LEFT]), (RIGHT, tiles[RIGHT]))

    def in_groups(
        self,
        axes: Sequence[str],
        parts: Sequence[GroupedTiles],
        *before: tuple[int, TileAssignment],
        sums: Iterable[Sum] = (),
    ) -> _Result:
        """The decision in the groups along `axes`, after the operands are resharded; then the result is resharded."""
        found = self.inner(axes, parts, *sums).partition()
        found.reshards[:0] = self.reshards(*before)
        if parts[OUT].spec != self.tiles[OUT].dims:
            found.result_path.append(Reshard(self.spec(OUT, self.tiles[OUT]), self.group_axes))
        return found

    def _as_result(self, side: int, result: GroupedTiles, only_as_is: bool) -> GroupedTiles | None:
        """An operand in the groups of the result's batch dimensions; its other dimensions are gathered where that
        frees devices.
        """
        tile, dims, roles = self.tiles[side], self.roles.batch, self.roles
        own = [d[side] for d in dims]
        if tile.is_replicated:
            groups = dict(zip(own, result.groups.values(), strict=True))
            return GroupedTiles(groups, tile.dims, result.order)
        counts = [*self.devices.counts(tile), self.devices.count(tile.rest)]
        for d in dims:
            counts[d[side]] = self.shards(OUT, (d,))
        total = self.devices.count(self.devices.sizes)
        too_many, left_over = divmod(math.prod(counts), total)
        if left_over or too_many == 0:
            return None
        if too_many > 1:
            contracted, other = (self.shards(s, roles.contracted) for s in (side, 1 - side))
            if tile.is_partially_replicated and counts[-1] % too_many == 0:
                counts[-1] //= too_many
            elif too_many == self.shards(side, roles.own[side]) and (too_many != contracted or contracted == other):
                for d in roles.own[side]:
                    counts[d[side]] = 1
            elif too_many == contracted:
                for d in roles.contracted:
                    counts[d[side]] = 1
            else:
                return None
        new = self.reshaped(tile, counts)
        found = new and GroupedTiles.of(new, own).aligned(result, self.devices)
        return None if found is None or (only_as_is and found.spec != tile.dims) else found

    def by_own(self, only_as_is: bool) -> _Result | None:
        """Groups by the dimensions that one operand shares with the result; the other operand is gathered along these
        axes.
        """
        roles, out = self.roles, self.tiles[OUT]
        have = [self.shards(side, roles.own[side]) for side in (LEFT, RIGHT)]
        want = [self.shards(OUT, roles.own[side]) for side in (LEFT, RIGHT)]
        fits = [side for side in (LEFT, RIGHT) if have[side] == want[side] > 1]
        if len(fits) == 2:
            fits = [self._better_side(have)]
        if fits:
            side, dims = fits[0], roles.own[fits[0]]
        else:
            sharded = [side for side in (LEFT, RIGHT) if have[side] > 1 and want[side] > 1]
            if not sharded:
                return None
            side = sharded[0]
            dims = tuple(d for d in roles.own[side] if self.shards(side, (d,)) == self.shards(OUT, (d,)) > 1)
        if not dims:
            return None
        result = GroupedTiles.of(out, [d[OUT] for d in dims])
        resharded = self.reshard_dims(side, dims, [self.shards(OUT, (d,)) for d in dims])
        mine = resharded and GroupedTiles.of(resharded, [d[side] for d in dims]).aligned(result, self.devices)
        if mine is None or (only_as_is and mine.spec != self.tiles[side].dims):
            return None
        other = 1 - side
        found = self._gathered(other, self.tiles[other], result, side)
        if found is None and not self.tiles[other].is_replicated:
            likely = self._implied_tiles(other, side)
            found = self._gathered(other, likely, result, side)
            found = found and ([likely, *found[0]], found[1])
        tiles, inside = found or ([self.replicated(other)], self.replicated(other).dims)
        theirs = GroupedTiles({}, inside, ())
        parts = (mine, theirs, result) if side == LEFT else (theirs, mine, result)
        resharded = (side, self.devices.tile(mine.spec)), *((other, tile) for tile in tiles)
        return self.in_groups(result.axes, parts, *resharded)

    def _better_side(self, have: Sequence[int]) -> int:
        """The operand by whose own dimensions the devices are grouped, where either would do.

        libtpu takes the one whose groups can gather it in a collective matmul; if both can, the larger; if neither, the right
        one. Other backends make the gather of the other operand small.

        `have` counts the shards of each operand's own dimensions.
        """
        is_smaller = have[LEFT] * self.local_bits(RIGHT) < have[RIGHT] * self.local_bits(LEFT)
        if self.prefers_collective_matmul:
            every = self.devices.count(self.devices.sizes)
            left, right = (
                every == have[LEFT] * have[RIGHT] == have[side] * self.shards(side, self.roles.contracted)
                for side in (LEFT, RIGHT)
            )
            return LEFT if left and (is_smaller or not right) else RIGHT
        return LEFT if is_smaller else RIGHT

    def _implied_tiles(self, side: int, other: int) -> TileAssignment:
        """The sharding of an operand that the result and the other operand imply; in a conflict, the one with more
        shards.
        """
        by_result: list[tuple[str, ...]] = [()] * len(self.shapes[side])
        by_other = list(by_result)
        for d in (*self.roles.batch, *self.roles.own[side]):
            by_result[d[side]] = self.tiles[OUT].dims[d[OUT]]
        for d in (*self.roles.batch, *self.roles.contracted):
            by_other[d[side]] = self.tiles[other].dims[d[other]]
        one, two = self.devices.tile(by_result), self.devices.tile(by_other)
        both = [a or b for a, b in zip(by_result, by_other, strict=True)]
        every = axes_of(both)
        clash = any(a and b and a != b for a, b in zip(by_result, by_other, strict=True))
        if not clash and len(every) == len({*every}):
            return self.devices.tile(both)
        more = math.prod(self.devices.counts(two)) > math.prod(self.devices.counts(one))
        return two if more else one

    def _gathered(
        self, side: int, tile: TileAssignment, groups: GroupedTiles, other: int
    ) -> tuple[list[TileAssignment], Spec] | None:
        """The shardings through which an operand goes until each group has all it needs, and its sharding in a group."""
        n, group, rank = self.devices.count(groups.axes), {*groups.axes}, len(tile.dims)
        if tile.is_partially_replicated and self.devices.count(tile.rest) % n == 0:
            if group <= {*tile.rest}:
                return [], tile.dims
            for d in reversed(range(rank)):
                if group <= {*tile.dims[d]}:  # all-to-all between the axes of this dim and the others
                    swapped = self.devices.tile(tile.rest if e == d else axes for e, axes in enumerate(tile.dims))
                    return [swapped], swapped.dims
            parts = self.devices.split(tile.rest, (n, self.devices.count(tile.rest) // n))
            if parts is None:
                return None
            order = axes_of((*tile.dims, parts[1]))
            moved = GroupedTiles({rank: parts[0]}, tile.dims, order).aligned(groups, self.devices, any_order=True)
            return moved and ([self.devices.tile(moved.inner)], moved.inner)
        dims = self.matching(tile, groups)
        if dims is None:
            dims = self._dims_to_gather(side, other, n)
        if dims is None or tile.is_replicated:
            return None
        found = GroupedTiles.of(tile, dims).aligned(groups, self.devices, any_order=True)
        if found is None:
            return None
        first = [] if tile.is_partially_replicated else [self.devices.tile(found.spec)]
        return [*first, self.devices.tile(found.inner)], found.inner

    def _dims_to_gather(self, side: int, other: int, n: int) -> list[int] | None:
        """The dimensions along which an operand is gathered because its devices are in other groups."""
        roles = self.roles
        contracted = self.shards(side, roles.contracted)
        own = self.shards(side, roles.own[side])
        may_contracted = contracted == n and own == self.shards(OUT, roles.own[side])
        may_own = own == n and self.shards(other, roles.contracted) == contracted
        if may_contracted and may_own:
            may_contracted = self.local_bits(side) <= self.local_bits(OUT)
        if may_contracted:
            return [d[side] for d in roles.contracted]
        return [d[side] for d in roles.own[side]] if may_own else None

    def by_contracted(self, only_as_is: bool) -> _Result | None:
        """Groups by contracting dimensions that both operands shard equally; the partial results of the groups are
        reduced.
        """
        dims = self.roles.contracted
        have = [self.shards(side, dims) for side in (LEFT, RIGHT)]
        found = self._summed(dims, only_as_is) if have[LEFT] == have[RIGHT] > 1 else None
        if found is None and min(have) > 1:
            some = tuple(d for d in dims if self.shards(LEFT, (d,)) == self.shards(RIGHT, (d,)) > 1)
            found = self._summed(some, only_as_is) if some else None
        return found

    def _summed(self, dims: Places, only_as_is: bool) -> _Result | None:
        smaller, larger = (RIGHT, LEFT) if self.local_bits(LEFT) > self.local_bits(RIGHT) else (LEFT, RIGHT)
        resharded = self.reshard_dims(smaller, dims, [self.shards(larger, (d,)) for d in dims])
        lead = GroupedTiles.of(self.tiles[larger], [d[larger] for d in dims])
        moved = resharded and GroupedTiles.of(resharded, [d[smaller] for d in dims]).aligned(lead, self.devices)
        if moved is None or (only_as_is and moved.spec != self.tiles[smaller].dims):
            return None
        operands = (moved, lead) if smaller == LEFT else (lead, moved)
        result, sums = self._result_of(operands, lead)
        n = self.devices.count(self.devices.sizes)
        if self.devices.count(lead.axes) == n in (self.shards(OUT, own) for own in self.roles.own):
            rows = self.matmul_rows_per_byte(larger, self.roles.contracted, OUT)
            sums = [reduction._replace(rows_per_byte=rows) for reduction in sums]
        resharded = smaller, self.devices.tile(moved.spec)
        return self.in_groups(lead.axes, (*operands, result), resharded, sums=sums)

    def _result_of(self, by: Sequence[GroupedTiles], lead: GroupedTiles) -> tuple[GroupedTiles, list[Sum]]:
        """The result in the groups, as the reduction shards it, and the axes of the reduction."""
        out, n, rank = self.tiles[OUT], self.devices.count(lead.axes), len(self.tiles[OUT].dims)
        has_room = out.is_partially_replicated and self.devices.count(out.rest) % n == 0
        plain = [Sum(_parts(by[LEFT].groups), {})]
        if not out.is_replicated and not has_room:
            sharded = [side for side in (LEFT, RIGHT) if any(by[side].inner)]
            if len(sharded) == 1:  # the result takes the operand's sharding, and is sharded further at the end
                contracted = {d[sharded[0]] for d in self.roles.contracted}
                kept = self.devices.tile(() if d in contracted else axes for d, axes in enumerate(by[sharded[0]].spec))
                coarse = self.across(sharded[0], OUT, kept)
                if coarse and all(f[: len(c)] == c for c, f in zip(coarse.dims, out.dims, strict=True)):
                    out = coarse
                    has_room = out.is_partially_replicated and self.devices.count(out.rest) % n == 0
        if has_room:
            parts = self.devices.split(out.rest, (n, self.devices.count(out.rest) // n))
            first, last = parts or ((), ())
            order = axes_of((*out.dims, last))
            moved = GroupedTiles({rank: first}, out.dims, order).aligned(lead, self.devices, any_order=True)
            if moved:
                return GroupedTiles({}, moved.inner, ()), plain
        dims = self.matching(out, lead)
        if dims is not None:
            grouped = GroupedTiles.of(out, dims)
        else:
            kinds = (self.roles.own[LEFT], self.roles.own[RIGHT], self.roles.batch)
            counts = (math.prod(self.devices.count(out.dims[d[OUT]]) for d in places) for places in kinds)
            fits = next((places for places, count in zip(kinds, counts, strict=True) if count == n), ())
            dims = [d[OUT] for d in fits]
            grouped = GroupedTiles.of(out, dims).aligned(lead, self.devices) if dims else None
        if grouped is None:
            return GroupedTiles({}, self.replicated(OUT).dims, ()), plain
        sharded_axes = {d: axes for d, axes in grouped.groups.items() if d < rank and axes}
        result = GroupedTiles(sharded_axes, grouped.inner, ())
        if not sharded_axes:
            return result, plain
        sums = [Sum(_parts(sharded_axes), sharded_axes)]
        if grouped.groups.get(rank):
            sums.append(Sum((grouped.groups[rank],), {}))
        return result, sums

    def by_rest(self) -> _Result | None:
        """Replicated operands: devices that hold the same shard of the result compute the same."""
        left, right, out = self.tiles
        if not (left.is_replicated and right.is_replicated and out.is_partially_replicated):
            return None
        return self.in_groups(out.rest, [GroupedTiles({}, tile.dims, ()) for tile in self.tiles])


def _parts(groups: Fixed) -> tuple[tuple[str, ...], ...]:
    return tuple(axes for axes in reversed([*groups.values()]) if axes)

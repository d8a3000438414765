"""How XLA's partitioner shards a convolution along dimensions without a window, as a matmul."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardfn.ir.model import Spec, axes_of, dtype_bits
from shardfn.partition.sharded_op import OpPartitioning, Reshard, ShardedOp, grouped


def partition_convolution(op: ShardedOp) -> OpPartitioning:
    """Decide for each mesh axis, from the dimension it shards in both operands and the result.

    The rules, in order:

    1. Both operands shard the same contracting or batch dimension: partial sums, or nothing to do.
    2. The result's own dimension: an operand with that dimension is sharded so, the other one is gathered.
    3. One operand shards a contracting dimension: the other is sharded too if gathering costs more than reducing the
       result.
    4. Otherwise the axis is gathered.
    """
    rows = (*zip(op.rule.operands, op.operand_specs, strict=True), (op.rule.results[0], op.result_specs[0]))
    left, right, out = (op.by_axis(dims, spec) for dims, spec in rows)
    in_left, in_right, in_out = ({f for dim in dims for f in dim} for dims, _ in rows)
    placed: tuple[dict[str, int], ...] = ({}, {}, {})
    lhs, rhs, res = placed
    reduced: dict[int, list[str]] = {}
    undecided: list[str] = []
    for axis in dict.fromkeys((*left, *right, *out)):
        a, b, c = left.get(axis), right.get(axis), out.get(axis)
        if a is not None and a == b:
            lhs[axis] = rhs[axis] = a
            if a in in_out:
                res[axis] = a
            else:
                reduced.setdefault(a, []).append(axis)
        elif c is not None:
            for side, factors in zip(placed, (in_left, in_right, in_out), strict=True):
                if c in factors:
                    side[axis] = c
        else:
            undecided.append(axis)
    contracted = (in_left & in_right) - in_out
    for i, (has, lacks) in enumerate(((left, right), (right, left))):
        if not undecided or not all(has.get(a) in contracted and a not in lacks for a in undecided):
            continue
        if any(placed[i].get(axis) != factor and axis not in undecided for axis, factor in has.items()):
            continue  # it is gathered for another axis, and then wholly
        gathered, added = (
            math.prod(v.shape) // op.shards(list(side))
            for v, side in ((op.operands[i], placed[i]), (op.results[0], res))
        )
        if gathered > added:
            for axis in undecided:
                lhs[axis] = rhs[axis] = has[axis]
                reduced.setdefault(has[axis], []).append(axis)
            break
    orders = ({**left, **out}, {**right, **out}, {**out, **left, **right})
    specs = [op.spec(dims, grouped(side, order)) for (dims, _), side, order in zip(rows, placed, orders, strict=True)]
    first = _first_groups(op, (left, right), res) or set(axes_of(reduced.values()))
    group_axes = tuple(_within(first, op.operand_specs[i], specs[i]) for i in (0, 1))
    detours = tuple(_detour(op, op.operand_specs[i], specs[i], first) for i in (0, 1))
    specs, over_idle = _reduced_over_idle(op, specs, detours)
    reduced |= over_idle
    paths = tuple(
        (*map(Reshard, detour), Reshard(spec, groups))
        for detour, spec, groups in zip(detours, specs, group_axes, strict=False)
    )
    path = op.reductions(specs[2], reduced.values())
    return OpPartitioning((specs[0], specs[1]), (specs[2],), paths, path)


def _detour(op: ShardedOp, have: Spec, want: Spec, groups: set[str]) -> tuple[Spec, ...]:
    """Intermediate shardings of an operand that is to be gathered over `groups`, over axes that do not shard it.

    XLA takes this path where those devices can be split into as many groups.
    """
    idle = [a for a in op.sizes if not any(a in axes for axes in have)]
    dims = [d for d, axes in enumerate(have) if groups.intersection(axes)]
    if len(dims) != 1 or set(have[dims[0]]) != groups or want[dims[0]] or op.shards(idle) % op.shards(list(groups)):
        return ()
    kept = list(have[dims[0]])
    finer = [*kept, *idle[len(kept) :]]
    return tuple(
        tuple(tuple(sharded) if d == dims[0] else axes for d, axes in enumerate(have)) for sharded in (finer, idle)
    )


def _reduced_over_idle(
    op: ShardedOp, specs: list[Spec], via: tuple[tuple[Spec, ...], ...]
) -> tuple[list[Spec], dict[int, list[str]]]:
    """Keep a contracting dimension on the idle axes of its path where gathering would move more than reducing.

    Takes and returns the shardings of both operands and the result, and returns the axes to reduce over by factor.
    """
    for i, detour in enumerate(via):
        dim, idle = next(((d, axes) for d, axes in enumerate(detour[-1] if detour else ()) if axes), (0, ()))
        factors, others = op.rule.operands[i][dim], op.rule.operands[1 - i]
        result = math.prod(op.results[0].shape) // op.shards(axes_of(specs[2]))
        if not idle or factors not in others or factors in op.rule.results[0]:
            continue
        if {*axes_of(specs[1 - i]), *axes_of(specs[2])} & {*idle} or math.prod(op.operands[i].shape) <= result:
            continue
        changed = [*specs]
        changed[i] = detour[-1]
        changed[1 - i] = tuple(idle if d == others.index(factors) else axes for d, axes in enumerate(specs[1 - i]))
        return changed, {factors[0]: list(idle)}
    return specs, {}


def _first_groups(op: ShardedOp, has: tuple[Mapping[str, int], Mapping[str, int]], res: Mapping[str, int]) -> set[str]:
    """The axes of the device groups into which XLA splits a matmul first; the rest is resharded inside a group.

    They shard a batch dimension, or else a dimension that one operand shares with the result. Of two such dimensions
    XLA takes the one that gathers less of the other operand.
    """
    every = [{f for dim in dims for f in dim} for dims in op.rule.operands]
    batch = {a for a, f in res.items() if f in every[0] and f in every[1]}
    if batch:
        return batch
    offers = []
    for i, axes in enumerate(has):
        own = every[i] - every[1 - i]
        before, after = ({a for a, f in side.items() if f in own} for side in (axes, res))
        if before and before == after:
            other, spec = op.operands[1 - i], op.operand_specs[1 - i]
            local = math.prod(-(-n // op.shards(sharded)) for n, sharded in zip(other.shape, spec, strict=True))
            offers.append((op.shards(list(before)) * local * dtype_bits(other.dtype), -i, before))
    return min(offers, default=(0, 0, set()))[2]


def _within(groups: set[str], have: Spec, want: Spec) -> frozenset[str]:
    """The groups inside which an operand is resharded: those that shard it, where another axis changes too."""
    changed = {a for old, new in zip(have, want, strict=True) for a in {*old} ^ {*new}}
    return frozenset(groups) if groups.intersection(axes_of(want)) and changed - groups else frozenset()

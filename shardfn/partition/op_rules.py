"""How XLA's SPMD partitioner works on one op for given shardings: one function per rule.

`OpTraits.rule` names the rule of each kind of op and `rule_for` resolves it. A rule returns the shardings in which
operands are read and results are made, and the collectives that remain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from shardfn.ir.model import DimFactors, Spec, Value, axes_of, dtype_bits
from shardfn.ir.op_traits import OP_TRAITS
from shardfn.partition.dot_general import dot
from shardfn.partition.halo_exchange import halo_permutes, rotation_permutes
from shardfn.partition.matmul import partition_contraction
from shardfn.partition.sharded_op import (
    GatheredWindow,
    HaloExchange,
    OpPartitioning,
    Reshard,
    ShardedOp,
    grouped,
    replicated,
)


@functools.cache
def rule_for(op: str, platform: str) -> Callable[[ShardedOp], OpPartitioning]:
    """The partitioning rule of a kind of op."""
    row = OP_TRAITS.get(op)
    if row is None or not row.rule:
        return follow_result
    names = {"cpu": (), "tpu": (row.tpu_rule, row.gpu_rule)}.get(platform, (row.gpu_rule,))
    return _RULES[next(filter(None, names), row.rule)]


# ---- the rules


def replicate(op: ShardedOp) -> OpPartitioning:
    """Every device computes the whole op."""
    return OpPartitioning(tuple(map(replicated, op.operands)), tuple(map(replicated, op.results)))


def follow_result(op: ShardedOp) -> OpPartitioning:
    """Operands are sharded as the results: elementwise ops, broadcasts, transposes. In a conflict the first result
    dimension wins.
    """
    factors: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()
    for dims, spec in zip(op.rule.results, op.result_specs, strict=True):
        for factor, axes in op.factors(dims, spec).items():
            if factor not in factors and used.isdisjoint(axes):
                factors[factor] = axes
                used.update(axes)
    return op.from_factors({f: axes for f, axes in factors.items() if f not in op.rule.replicated})


def triangular_solve(op: ShardedOp) -> OpPartitioning:
    """Batch dimensions stay sharded, and so do the columns that the result shares with the right-hand sides."""
    matrix, sides = ({f for dim in dims for f in dim} for dims in op.rule.operands)
    factors = op.factors(op.rule.results[0], op.result_specs[0])
    is_sharded = (sides - op.rule.replicated) | (sides - matrix)
    return op.from_factors({f: axes for f, axes in factors.items() if f in is_sharded})


def barrier(op: ShardedOp) -> OpPartitioning:
    """Result i is operand i."""
    return OpPartitioning(op.result_specs, op.result_specs)


def reshape(op: ShardedOp) -> OpPartitioning:
    """Sharded as the result where the operand can be; else as the operand; else replicated."""
    (source,), (target,) = op.rule.operands, op.rule.results
    for mine, spec, other in ((target, op.result_specs[0], source), (source, op.operand_specs[0], target)):
        factors = op.factors(mine, spec)
        found = op.spec(other, factors)
        sharded = sum(map(len, spec))
        if sum(map(len, factors.values())) == sharded == sum(map(len, found)):
            return OpPartitioning((found,), (spec,)) if mine is target else OpPartitioning((spec,), (found,))
    return replicate(op)


def reduce(op: ShardedOp) -> OpPartitioning:
    """Reduces the operand as it is sharded, then all-reduces over the sharded dimensions, the last one first.

    A reduction of several arrays at once (argmax) gathers its partial results instead.
    """
    factors = op.factors(op.rule.operands[0], op.operand_specs[0])
    sharded = [f for dim in reversed(op.rule.operands[0]) for f in dim if f in op.rule.reduction and f in factors]
    partial = tuple(factors[f] for f in sharded)
    found = op.from_factors(factors)
    if len(op.results) > 1:
        return dataclasses.replace(found, gathered_axes=sum(partial, ()))
    return dataclasses.replace(found, result_path=op.reductions(found.result_specs[0], partial))


def gather(op: ShardedOp) -> OpPartitioning:
    """Sharded as `_indexed` says. Where rows of the table are sharded, each device reads its own rows, and an
    all-reduce follows.
    """
    factors, kinds = _indexed(op, op.rule.results[0], op.results[0])
    index = op.spec(op.rule.operands[1], factors)
    table, moved = _to_idle(op, factors, kinds)
    made = op.spec(op.rule.results[0], factors)
    return OpPartitioning((table, index), (made,), result_path=op.reductions(made, [[*kinds["table"], *moved]]))


def scatter(op: ShardedOp) -> OpPartitioning:
    """As `gather`, with the updates in place of the result. Where these are sharded and the table is not, an
    all-reduce follows for each dimension of the index, the last one first. Updates that replace rows have no sum:
    XLA gives them and the index one sharding, then gathers both.
    """
    if len(op.operands) != 3:
        return replicate(op)
    has_sum, read = bool(op.graph_op.combines), op.rule.operands[1:]
    factors, kinds = _indexed(op, op.rule.operands[2], op.operands[2], is_by_index=has_sum)
    table, _ = _to_idle(op, factors, kinds)
    found = [op.spec(dims, factors) for dims in read]
    one = None if has_sum else _one_sharding(op, factors)
    paths = (
        ()
        if one is None
        else ((), *((Reshard(op.spec(d, one)), Reshard(to)) for d, to in zip(read, found, strict=True)))
    )
    sharded = [f for dim in reversed(op.rule.operands[1]) for f in dim if f in factors]
    partial = ([a for a in factors[f] if a in kinds["index"]] for f in sharded)
    return OpPartitioning((table, *found), (table,), paths, op.reductions(table, partial))


def _one_sharding(op: ShardedOp, factors: Mapping[int, Sequence[str]]) -> dict[int, Sequence[str]] | None:
    """`factors`, and the sharding of the index, or else of the updates, along the dimensions that these two share."""
    in_table, in_index, in_updates = ({f for dim in dims for f in dim} for dims in op.rule.operands)
    used = {a for axes in factors.values() for a in axes}
    for dims, spec in zip(op.rule.operands[1:], op.operand_specs[1:], strict=True):
        found = {f: a for f, a in op.factors(dims, spec).items() if f in (in_index & in_updates) - in_table}
        if found and used.isdisjoint(sum(found.values(), ())):
            return {**factors, **found}
    return None


def _to_idle(
    op: ShardedOp, factors: Mapping[int, Sequence[str]], kinds: Mapping[str, Sequence[str]]
) -> tuple[Spec, list[str]]:
    """The table's sharding, and the idle axes that take over rows from axes which the index needs."""
    spec = list(op.spec(op.rule.operands[0], factors))
    taken = {*kinds["index"], *kinds["all"]}
    used = {a for spec in op.operand_specs for a in axes_of(spec)}
    idle = [a for a in op.sizes if a not in used]
    found: list[str] = []
    for d, axes in enumerate(op.operand_specs[0]):
        lost = op.shards([a for a in axes if a in taken])
        while idle and not spec[d] and lost % op.shards([*found, idle[0]]) == 0:
            found.append(idle.pop(0))
        if found:
            spec[d] = tuple(found)
            break
    return tuple(spec), found


def _indexed(
    op: ShardedOp, rows: DimFactors, written: Value, is_by_index: bool = True
) -> tuple[dict[int, list[str]], dict[str, list[str]]]:
    """gather and scatter: the sharding that touches the fewest bytes, chosen again for the axes that remain.

    `rows` are what is read (the result) or written (the updates). An axis can shard a dimension of all three, a
    `window` dimension that the table shares with the rows, the rows of the `table`, or, if `is_by_index`, the `index`.
    """
    table, index = op.rule.operands[:2]
    in_table, in_index, in_rows = ({f for dim in dims for f in dim} for dims in (table, index, rows))
    fits = {
        "all": in_table & in_index & in_rows,
        "window": (in_table & in_rows) - in_index,
        "table": in_table - in_rows - in_index,
        "index": (in_index & in_rows) - in_table if is_by_index else set[int](),
    }
    by_table, by_index = (op.by_axis(d, spec) for d, spec in zip((table, index), op.operand_specs, strict=False))
    sizes = [math.prod(v.shape) * dtype_bits(v.dtype) // 8 for v in (*op.operands[:2], written)]
    decided: dict[str, int] = {}
    kinds: dict[str, list[str]] = {kind: [] for kind in fits}
    left = dict.fromkeys((*by_table, *by_index))
    while left:
        offers: list[tuple[int, int, str, dict[str, int]]] = []
        for order, (kind, factors) in enumerate(fits.items()):
            sources = {"all": (by_index, by_table), "index": (by_index,)}.get(kind, (by_table,))
            found = {a: s[a] for s in sources for a in left if s.get(a) in factors}
            if found:
                ways = op.shards([*found, *decided])
                sharded = {"all": (0, 0, 0), "window": (ways, 1, ways), "table": (ways, 1, 1), "index": (1, ways, ways)}
                touched = sum(size // n for size, n in zip(sizes, sharded[kind], strict=True) if n)
                offers.append((touched, order, kind, found))
        if not offers:
            break
        _, _, kind, found = min(offers, key=lambda offer: offer[:2])
        decided |= found
        kinds[kind] += found
        for axis in found:
            del left[axis]
    return grouped(decided, decided), kinds


def windowed(op: ShardedOp) -> OpPartitioning:
    """slice, pad, reduce_window, select_and_scatter: sharded as the result, with a halo exchange."""
    spec = op.result_specs[0]
    rank = len(op.results[0].shape)
    return _with_halos(
        op, OpPartitioning(tuple(spec if len(v.shape) == rank else replicated(v) for v in op.operands), (spec,))
    )


def convolve(op: ShardedOp) -> OpPartitioning:
    """As a matmul whose image may be sharded along height or width, with a halo exchange."""
    return _with_halos(op, partition_contraction(op))


def convolve_on_tpu(op: ShardedOp) -> OpPartitioning:
    """libtpu gathers window dimensions for a kernel gradient of groups with several channels."""
    shape = op.graph_op.convolution
    if shape and shape.in_batches:
        made = op.results[0].shape
        if any(which == 2 and made[dim] > groups for which, dim, groups in shape.grouped):
            spatial = zip(op.operand_specs, (shape.image, shape.kernel), strict=True)
            specs = [tuple(() if d in dims else axes for d, axes in enumerate(spec)) for spec, dims in spatial]
            op = dataclasses.replace(op, operand_specs=tuple(specs))
    return convolve(op)


def convolve_in_groups(op: ShardedOp) -> OpPartitioning:
    """A convolution in groups of several channels is replicated."""
    shape = op.graph_op.convolution
    if shape and not shape.in_batches:
        for which, dim, groups in shape.grouped:
            if which == 0 and groups < op.operands[0].shape[dim]:
                return replicate(op)
    return convolve(op)


def _with_halos(op: ShardedOp, found: OpPartitioning) -> OpPartitioning:
    """Add the halo exchanges of a windowed op. Where a halo is as large as the operand, the dimension is gathered, and
    each device slices its part.
    """
    halos: list[HaloExchange] = []
    gathered: list[GatheredWindow] = []
    operand_specs = list(found.operand_specs)
    sizes: dict[int, int] = {}
    for window in op.graph_op.window_dims:
        other, spec = op.results[0], found.result_specs[0]
        if window.over >= 0:
            other, spec = op.operands[window.over], found.operand_specs[window.over]
        axes = found.operand_specs[window.operand][window.dim]
        if not axes or axes != spec[window.out_dim]:
            continue
        shards = op.shards(axes)
        size, out_size = op.operands[window.operand].shape[window.dim], other.shape[window.out_dim]
        rows = halo_permutes(size, out_size, shards, window)
        read = (-(-out_size // shards) - 1) * window.stride + window.extent
        if rows is None and (op.graph_op.name != "reduce_window" or window.spacing > 1):
            return replicate(op)
        if rows is None:
            gathered.append(GatheredWindow(window.operand, window.dim, read, axes))
            spec = operand_specs[window.operand]
            operand_specs[window.operand] = (*spec[: window.dim], (), *spec[window.dim + 1 :])
        elif rows:
            halos.append(HaloExchange(window.operand, window.dim, rows, tuple(sizes.items())))
        sizes[window.dim] = (read - 1) // window.spacing + 1
    return dataclasses.replace(
        found, operand_specs=tuple(operand_specs), halos=tuple(halos), gathered_windows=tuple(gathered)
    )


def concatenate(op: ShardedOp) -> OpPartitioning:
    """Along a sharded dimension it is computed along another one, like a sort."""
    shapes = zip(op.operands[0].shape, op.results[0].shape, strict=True)
    return _along_other_dim(op, next((d for d, (a, b) in enumerate(shapes) if a != b), None))


def sort(op: ShardedOp) -> OpPartitioning:
    """A sort along a sharded dimension is resharded to another dimension that divides, and back; without one it is
    replicated.
    """
    dims = enumerate(op.rule.results[0])
    return _along_other_dim(op, next((d for d, dim in dims if op.rule.replicated.intersection(dim)), None))


def _along_other_dim(op: ShardedOp, along: int | None) -> OpPartitioning:
    spec = op.result_specs[0]
    if along is not None and spec[along]:
        sizes = enumerate(op.results[0].shape)
        fits = (d for d, n in sizes if d != along and n % op.shards((*spec[d], *spec[along])) == 0)
        to = next(fits, None)
        if to is None:
            return replicate(op)
        moved = {along: (), to: (*spec[to], *spec[along])}
        spec = tuple(moved.get(d, axes) for d, axes in enumerate(spec))
    return OpPartitioning((spec,) * len(op.operands), (spec,) * len(op.results))


def rotate(op: ShardedOp) -> OpPartitioning:
    """roll: each shard sends rows to the next ones."""
    spec, (window,) = op.result_specs[0], op.graph_op.window_dims
    shards, size = op.shards(spec[window.dim]), op.operands[0].shape[window.dim]
    if size % shards:
        return replicate(op)
    rows = min(window.low, size - window.low)
    halos = (HaloExchange(0, window.dim, rotation_permutes(rows, -(-size // shards))),) if shards > 1 else ()
    return OpPartitioning((spec,), (spec,), halos=halos)


def reverse(op: ShardedOp) -> OpPartitioning:
    """The shards along a reversed dimension change places."""
    spec = op.result_specs[0]
    return OpPartitioning(
        (spec,), (spec,), reversed_operands=(0,) if any(spec[window.dim] for window in op.graph_op.window_dims) else ()
    )


def dynamic_slice(op: ShardedOp) -> OpPartitioning:
    """The sliced dimensions are gathered; if the result is to be sharded along one, the op is replicated."""
    spec, shapes = op.result_specs[0], zip(op.operands[0].shape, op.results[0].shape, strict=True)
    if any(axes and a != b for axes, (a, b) in zip(spec, shapes, strict=True)):
        return replicate(op)
    return OpPartitioning((spec, *map(replicated, op.operands[1:])), (spec,))


def dynamic_update_slice(op: ShardedOp) -> OpPartitioning:
    """Single rows are written where they belong; a longer slice along a sharded dimension gathers that dimension."""
    shapes = list(zip(op.operands[0].shape, op.operands[1].shape, strict=True))
    base = tuple(() if b not in (1, a) else axes for axes, (a, b) in zip(op.result_specs[0], shapes, strict=True))
    new = tuple(() if a != b else axes for axes, (a, b) in zip(base, shapes, strict=True))
    return OpPartitioning((base, new, *map(replicated, op.operands[2:])), (base,))


_RULES: dict[str, Callable[[ShardedOp], OpPartitioning]] = {
    rule.__name__: rule
    for rule in (
        replicate, follow_result, triangular_solve, barrier, reshape, reduce, dot, gather, scatter, windowed, convolve_on_tpu,
        convolve_in_groups, concatenate, sort, rotate, reverse, dynamic_slice, dynamic_update_slice,
    )
}  # fmt: skip
"""By the names in `OpTraits.rule`."""

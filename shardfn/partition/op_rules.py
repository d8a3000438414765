"""How XLA's SPMD partitioner works on one op for given shardings: one function per rule.

`OpTraits.rule` names the rule of each kind of op and `rule_for` resolves it. A rule returns the shardings in which
operands are read and results are made, and the collectives that remain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from shardfn.ir.model import DimFactors, Spec, Value, WindowDim, axes_of, dtype_bits
from shardfn.ir.op_traits import OP_TRAITS
from shardfn.partition.convolution import partition_convolution
from shardfn.partition.dot_general import dot, dot_on_tpu
from shardfn.partition.halo_exchange import halo_permutes, positions_read, rotation_permutes, rows_read
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
    """Operands are sharded as the results: broadcasts, transposes. In a conflict the first result
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


def follow_batch(op: ShardedOp) -> OpPartitioning:
    """As `follow_result`, with an unsharded last dimension."""
    specs = [(*spec[:-1], ()) for spec in op.result_specs]
    return follow_result(dataclasses.replace(op, result_specs=tuple(specs)))


def elementwise(op: ShardedOp) -> OpPartitioning:
    """Several operands that are sharded alike are combined as they are (JAX 0.10.2 and 0.12.0.1). Otherwise operands are
    sharded as the result.
    """
    first, *others = (spec if any(spec) else () for spec in op.operand_specs)
    if others and all(spec == first for spec in others):
        spec = first or replicated(op.results[0])
        return OpPartitioning(op.operand_specs, (spec,) * len(op.results))
    return follow_result(op)


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
    """The sharding of a gather or scatter that touches the fewest bytes, chosen again for the axes that remain.

    `rows` are what is read (the result) or written (the updates). An axis can shard a dimension of all three, a
    `window` dimension that the table shares with the rows, if `is_by_index` the `index`, or the rows of the `table`.
    An axis of the index shards all three only if it does not shard the table otherwise. A dimension of which several elements,
    but not all, are read or written at once is gathered.
    """
    table, index = op.rule.operands[:2]
    in_table, in_index, in_rows = ({f for dim in dims for f in dim} for dims in (table, index, rows))
    in_table -= _in_part(op, rows, written, in_index)
    fits = {
        "all": in_table & in_index & in_rows,
        "window": (in_table & in_rows) - in_index,
        "index": (in_index & in_rows) - in_table if is_by_index else set[int](),
        "table": in_table - in_rows - in_index,
    }
    by_table, by_index = (op.by_axis(d, spec) for d, spec in zip((table, index), op.operand_specs, strict=False))
    free = {axis: dim for axis, dim in by_index.items() if by_table.get(axis, dim) in fits["all"]}
    sizes = [math.prod(v.shape) * dtype_bits(v.dtype) // 8 for v in (*op.operands[:2], written)]
    decided: dict[str, int] = {}
    kinds: dict[str, list[str]] = {kind: [] for kind in fits}
    left = dict.fromkeys((*by_table, *by_index))
    while left:
        offers: list[tuple[int, int, str, dict[str, int]]] = []
        for order, (kind, factors) in enumerate(fits.items()):
            sources = {"all": (free, by_table), "index": (by_index,)}.get(kind, (by_table,))
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


def _in_part(op: ShardedOp, rows: DimFactors, written: Value, in_index: set[int]) -> set[int]:
    """The factors of the table's dimensions of which each row takes several elements, but not all: Shardy wants them replicated,
    like the dimensions of the rows that stand for them, in the same order. Of one element, XLA asks which device has it.
    """
    alone = op.rule.replicated - in_index
    table = [f for dim in op.rule.operands[0] for f in dim if f in alone]
    sizes = [(f, n) for dim, n in zip(rows, written.shape, strict=True) for f in dim if f in alone]
    shared, others = {f: n for f, n in sizes if f in table}, iter([n for f, n in sizes if f not in table])
    return {f for f in table if (shared[f] if f in shared else next(others, 0)) != 1}


def windowed(op: ShardedOp) -> OpPartitioning:
    """slice, pad, reduce_window: sharded as the result, a slice as its operand where that has more shards, with a halo
    exchange.

    An operand whose window dimensions are unsharded is sliced on each device. Where the halo exchange would send too
    much, the operand is gathered along all window dimensions first.
    """
    spec, found = op.result_specs[0], op.operand_specs[0]
    if op.graph_op.name == "slice" and op.shards(axes_of(found)) > op.shards(axes_of(spec)):
        spec = found
    moved = [w for w in op.graph_op.window_dims if not w.is_trivial(op.operands[0].shape, op.results[0].shape)]
    gathered = tuple(() if any(w.dim == d for w in moved) else axes for d, axes in enumerate(spec))
    alike = len(op.results)  # a `reduce_window` of several operands has a result of each
    specs, others = (spec,) * alike, tuple(map(replicated, op.operands[alike:]))
    if op.graph_op.name == "slice" or found not in (gathered, replicated(op.operands[0])):
        exchanged = _with_halos(op, OpPartitioning((*specs, *others), specs))
        if exchanged:
            return exchanged
        found = gathered
    parts = []
    for window in moved:
        if axes := spec[window.dim]:
            rows = positions_read(window, op.results[0].shape[window.dim], op.shards(axes))
            parts.append(GatheredWindow(window.operand, window.dim, rows, axes))
    return OpPartitioning((*(found,) * alike, *others), specs, gathered_windows=tuple(parts))


def select_and_scatter(op: ShardedOp) -> OpPartitioning:
    """Sharded as the result, with a halo exchange."""
    spec = op.result_specs[0]
    rank = len(op.results[0].shape)
    found = OpPartitioning(tuple(spec if len(v.shape) == rank else replicated(v) for v in op.operands), (spec,))
    return _with_halos(op, found) or replicate(op)


def convolve(op: ShardedOp) -> OpPartitioning:
    """As a matmul whose image may be sharded along height or width, with a halo exchange."""
    return _with_halos(op, partition_convolution(op)) or replicate(op)


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


def _with_halos(op: ShardedOp, found: OpPartitioning) -> OpPartitioning | None:
    """Add the halo exchanges of a windowed op; None where XLA finds them too large."""
    halos: list[HaloExchange] = []
    sizes: dict[int, int] = {}
    operand = 0
    for window in op.graph_op.window_dims:
        if window.operand != operand:
            operand, sizes = window.operand, {}
        over, spec = _windows_counted_along(op, window, found.result_specs[0], found.operand_specs)
        axes = found.operand_specs[window.operand][window.dim]
        if not axes or axes != spec[window.out_dim]:
            continue
        size, out_size = op.operands[window.operand].shape[window.dim], over.shape[window.out_dim]
        shards = op.shards(axes)
        rows = halo_permutes(size, out_size, shards, window)
        if rows is None:
            return None
        if rows:
            halos.append(HaloExchange(window.operand, window.dim, rows, tuple(sizes.items())))
        sizes[window.dim] = rows_read(window, out_size, shards)
    return dataclasses.replace(found, halos=tuple(halos))


def _windows_counted_along(
    op: ShardedOp, window: WindowDim, result_spec: Spec, operand_specs: Sequence[Spec]
) -> tuple[Value, Spec]:
    """The value whose dimension counts the windows, the result or another operand, with its sharding."""
    return (op.results[0], result_spec) if window.over < 0 else (op.operands[window.over], operand_specs[window.over])


def concatenate(op: ShardedOp) -> OpPartitioning:
    """Along a sharded dimension it is computed along another one, like a sort."""
    shapes = zip(op.operands[0].shape, op.results[0].shape, strict=True)
    return _along_other_dim(op, next((d for d, (a, b) in enumerate(shapes) if a != b), None))


def sort(op: ShardedOp) -> OpPartitioning:
    """A sort along a sharded dimension is resharded to another dimension that divides, and back; without one the
    dimension is gathered.
    """
    dims = enumerate(op.rule.results[0])
    return _along_other_dim(op, next((d for d, dim in dims if op.rule.replicated.intersection(dim)), None))


def _along_other_dim(op: ShardedOp, along: int | None) -> OpPartitioning:
    spec = op.result_specs[0]
    if along is not None and spec[along]:
        sizes = enumerate(op.results[0].shape)
        fits = (d for d, n in sizes if d != along and n % op.shards((*spec[d], *spec[along])) == 0)
        to = next(fits, along)
        moved = {along: (), to: (*spec[to], *spec[along]) if to != along else ()}
        spec = tuple(moved.get(d, axes) for d, axes in enumerate(spec))
    return OpPartitioning((spec,) * len(op.operands), (spec,) * len(op.results))


def rotate(op: ShardedOp) -> OpPartitioning:
    """roll: each shard sends rows to the next ones."""
    spec, (window,) = op.result_specs[0], op.graph_op.window_dims
    shards, size = op.shards(spec[window.dim]), op.operands[0].shape[window.dim]
    if size % shards:
        return replicate(op)
    shift = size - window.low if 2 * window.low >= size else -window.low
    halos = (HaloExchange(0, window.dim, rotation_permutes(shift, size // shards)),) if shards > 1 else ()
    return OpPartitioning((spec,), (spec,), halos=halos)


def reverse(op: ShardedOp) -> OpPartitioning:
    """The shards along a reversed dimension change places."""
    spec = op.result_specs[0]
    return OpPartitioning(
        (spec,), (spec,), reversed_operands=(0,) if any(spec[window.dim] for window in op.graph_op.window_dims) else ()
    )


def dynamic_slice(op: ShardedOp) -> OpPartitioning:
    """The sliced dimensions are gathered. If the result is to be sharded along one of them, the op is replicated."""
    spec, shapes = op.result_specs[0], zip(op.operands[0].shape, op.results[0].shape, strict=True)
    if any(axes and a != b for axes, (a, b) in zip(spec, shapes, strict=True)):
        return replicate(op)
    return OpPartitioning((spec, *map(replicated, op.operands[1:])), (spec,))


def dynamic_update_slice(op: ShardedOp) -> OpPartitioning:
    """If it writes single rows along every sharded dimension that it writes in part, each device writes the rows in its shard.

    Otherwise the dimensions that it writes in part are gathered, in the sharding of the operand or of the result, whichever has
    more shards.
    """
    given, spec = op.operand_specs[0], op.result_specs[0]
    shapes = list(zip(op.operands[0].shape, op.operands[1].shape, strict=True))
    row = tuple(() if a != b else axes for axes, (a, b) in zip(spec, shapes, strict=True))
    if spec == row or any(b not in (1, a) for axes, (a, b) in zip(spec, shapes, strict=True) if axes):
        if spec != replicated(op.results[0]) and op.shards(axes_of(given)) > op.shards(axes_of(spec)):
            spec = given
        spec = row = tuple(() if a != b else axes for axes, (a, b) in zip(spec, shapes, strict=True))
    return OpPartitioning((spec, row, *map(replicated, op.operands[2:])), (spec,))


_RULES: dict[str, Callable[[ShardedOp], OpPartitioning]] = {
    rule.__name__: rule
    for rule in (
        replicate, follow_result, follow_batch, elementwise, triangular_solve, barrier, reshape, reduce, dot, dot_on_tpu, gather,
        scatter, windowed,
        select_and_scatter, convolve_on_tpu,
        convolve_in_groups, concatenate, sort, rotate, reverse, dynamic_slice, dynamic_update_slice,
    )
}  # fmt: skip
"""By the names in `OpTraits.rule`."""

"""How XLA's SPMD partitioner works on one op for given shardings: one function per rule.

`OpTraits.rule` names the rule of each kind of op and `rule_for` resolves it. A rule returns the shardings in which
operands are read and results are made, and the collectives that remain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from shardfn.ir.model import DimFactors, Spec, Value, dtype_bits
from shardfn.ir.op_traits import OP_TRAITS
from shardfn.partition.dot_general import dot
from shardfn.partition.halo_exchange import halo_permutes, rotation_permutes
from shardfn.partition.matmul import partition_contraction
from shardfn.partition.sharded_op import Factors, HaloExchange, OpPartitioning, ShardedOp, grouped, replicated


def partition_op(case: ShardedOp, platform: str) -> OpPartitioning:
    """How XLA's partitioner shards an op on `platform`."""
    return rule_for(case.op.name, platform)(case)


@functools.cache
def rule_for(op: str, platform: str) -> Callable[[ShardedOp], OpPartitioning]:
    """The partitioning rule of a kind of op."""
    row = OP_TRAITS.get(op)
    if row is None or not row.rule:
        return follow_result
    names = {"cpu": (), "tpu": (row.tpu_rule, row.gpu_rule)}.get(platform, (row.gpu_rule,))
    return _RULES[next(filter(None, names), row.rule)]


# ---- the rules


def replicate(case: ShardedOp) -> OpPartitioning:
    """Every device computes the whole op."""
    return OpPartitioning(tuple(map(replicated, case.operands)), tuple(map(replicated, case.results)))


def follow_result(case: ShardedOp) -> OpPartitioning:
    """Operands are sharded as the results: elementwise ops, broadcasts, transposes. In a conflict the first result
    dimension wins.
    """
    factors: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()
    for dims, spec in zip(case.rule.results, case.want, strict=True):
        for factor, axes in case.factors(dims, spec).items():
            if factor not in factors and used.isdisjoint(axes):
                factors[factor] = axes
                used.update(axes)
    return case.from_factors({f: axes for f, axes in factors.items() if f not in case.rule.replicated})


def triangular_solve(case: ShardedOp) -> OpPartitioning:
    """Batch dimensions stay sharded, and so do the columns that the result shares with the right-hand sides."""
    matrix, sides = ({f for dim in dims for f in dim} for dims in case.rule.operands)
    factors = case.factors(case.rule.results[0], case.want[0])
    is_sharded = (sides - case.rule.replicated) | (sides - matrix)
    return case.from_factors({f: axes for f, axes in factors.items() if f in is_sharded})


def barrier(case: ShardedOp) -> OpPartitioning:
    """Result i is operand i."""
    return OpPartitioning(case.want, case.want)


def reshape(case: ShardedOp) -> OpPartitioning:
    """Sharded as the result where the operand can be; else as the operand; else replicated."""
    (source,), (target,) = case.rule.operands, case.rule.results
    for mine, spec, other in ((target, case.want[0], source), (source, case.have[0], target)):
        factors = case.factors(mine, spec)
        found = case.spec(other, factors)
        sharded = sum(map(len, spec))
        if sum(map(len, factors.values())) == sharded == sum(map(len, found)):
            return OpPartitioning((found,), (spec,)) if mine is target else OpPartitioning((spec,), (found,))
    return replicate(case)


def reduce(case: ShardedOp) -> OpPartitioning:
    """Reduces the operand as it is sharded, then all-reduces over the sharded dimensions, the last one first.

    A reduction of several arrays at once (argmax) gathers its partial results instead.
    """
    factors = case.factors(case.rule.operands[0], case.have[0])
    sharded = [f for dim in reversed(case.rule.operands[0]) for f in dim if f in case.rule.reduction and f in factors]
    partial = tuple(factors[f] for f in sharded)
    if len(case.results) == 1:
        return dataclasses.replace(case.from_factors(factors), reduced=partial)
    return dataclasses.replace(case.from_factors(factors), gathered_axes=sum(partial, ()))


def gather(case: ShardedOp) -> OpPartitioning:
    """Sharded as `_indexed` says. Where rows of the table are sharded, each device reads its own rows, and an
    all-reduce follows.
    """
    factors, kinds = _indexed(case, case.rule.results[0], case.results[0])
    index = case.spec(case.rule.operands[1], factors)
    table, moved = _to_idle(case, factors, kinds)
    rest = tuple(replicated(v) for v in case.operands[2:])
    return OpPartitioning(
        (table, index, *rest), (case.spec(case.rule.results[0], factors),), _group((*kinds["table"], *moved))
    )


def scatter(case: ShardedOp) -> OpPartitioning:
    """As `gather`, with the updates in place of the result. Where these are sharded and the table is not, an
    all-reduce follows for each dimension of the index, the last one first.
    """
    if len(case.operands) != 3:
        return replicate(case)
    factors, kinds = _indexed(case, case.rule.operands[2], case.operands[2])
    table, _ = _to_idle(case, factors, kinds)
    operand_specs = (table, *(case.spec(dims, factors) for dims in case.rule.operands[1:]))
    sharded = [f for dim in reversed(case.rule.operands[1]) for f in dim if f in factors]
    partial = (_group([a for a in factors[f] if a in kinds["index"]]) for f in sharded)
    return OpPartitioning(operand_specs, (table,), sum(partial, ()))


def _to_idle(case: ShardedOp, factors: Factors, kinds: Mapping[str, Sequence[str]]) -> tuple[Spec, list[str]]:
    """The table's sharding, and the idle axes that take over rows from axes which the index needs."""
    spec = list(case.spec(case.rule.operands[0], factors))
    taken = {*kinds["index"], *kinds["all"]}
    used = {a for spec in case.have for axes in spec for a in axes}
    idle = [a for a in case.sizes if a not in used]
    found: list[str] = []
    for d, axes in enumerate(case.have[0]):
        lost = case.shards([a for a in axes if a in taken])
        while idle and not spec[d] and lost % case.shards([*found, idle[0]]) == 0:
            found.append(idle.pop(0))
        if found:
            spec[d] = tuple(found)
            break
    return tuple(spec), found


def _group(axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return (tuple(axes),) if axes else ()


def _indexed(case: ShardedOp, rows: DimFactors, written: Value) -> tuple[dict[int, list[str]], dict[str, list[str]]]:
    """gather and scatter: the sharding that touches the fewest bytes, chosen again for the axes that remain.

    `rows` are what is read (the result) or written (the updates). An axis can shard a dimension of all three, a
    `window` dimension that the table shares with the rows, the rows of the `table`, or the `index`.
    """
    table, index = case.rule.operands[:2]
    in_table, in_index, in_rows = ({f for dim in dims for f in dim} for dims in (table, index, rows))
    fits = {
        "all": in_table & in_index & in_rows,
        "window": (in_table & in_rows) - in_index,
        "table": in_table - in_rows - in_index,
        "index": (in_index & in_rows) - in_table,
    }
    by_table, by_index = (case.by_axis(d, spec) for d, spec in zip((table, index), case.have, strict=False))
    sizes = [math.prod(v.shape) * dtype_bits(v.dtype) // 8 for v in (*case.operands[:2], written)]
    decided: dict[str, int] = {}
    kinds: dict[str, list[str]] = {kind: [] for kind in fits}
    left = dict.fromkeys((*by_table, *by_index))
    while left:
        offers: list[tuple[int, int, str, dict[str, int]]] = []
        for order, (kind, factors) in enumerate(fits.items()):
            sources = {"all": (by_index, by_table), "index": (by_index,)}.get(kind, (by_table,))
            found = {a: s[a] for s in sources for a in left if s.get(a) in factors}
            if found:
                ways = case.shards([*found, *decided])
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


def windowed(case: ShardedOp) -> OpPartitioning:
    """slice, pad, reduce_window, select_and_scatter: sharded as the result, with a halo exchange."""
    spec = case.want[0]
    rank = len(case.results[0].shape)
    return _with_halos(
        case, OpPartitioning(tuple(spec if len(v.shape) == rank else replicated(v) for v in case.operands), (spec,))
    )


def convolve(case: ShardedOp) -> OpPartitioning:
    """As a matmul whose image may be sharded along height or width, with a halo exchange."""
    return _with_halos(case, partition_contraction(case))


def convolve_on_tpu(case: ShardedOp) -> OpPartitioning:
    """libtpu gathers window dimensions for a kernel gradient of groups with several channels."""
    shape = case.op.convolution
    if shape and shape.in_batches:
        made = case.results[0].shape
        if any(which == 2 and made[dim] > groups for which, dim, groups in shape.grouped):
            sharded = zip(case.have[:2], (shape.image, shape.kernel), strict=True)
            have = [tuple(() if d in space else axes for d, axes in enumerate(spec)) for spec, space in sharded]
            case = dataclasses.replace(case, have=(*have, *case.have[2:]))
    return convolve(case)


def convolve_in_groups(case: ShardedOp) -> OpPartitioning:
    """A convolution in groups of several channels is replicated."""
    shape = case.op.convolution
    if shape and not shape.in_batches:
        for which, dim, groups in shape.grouped:
            if which == 0 and groups < case.operands[0].shape[dim]:
                return replicate(case)
    return convolve(case)


def _with_halos(case: ShardedOp, found: OpPartitioning) -> OpPartitioning:
    """Add the halo exchanges of a windowed op. Where a halo is as large as the operand, the dimension is gathered, and
    each device slices its part.
    """
    halos: list[HaloExchange] = []
    windows: list[tuple[int, int, int, tuple[str, ...]]] = []
    operand_specs = list(found.operand_specs)
    sizes: dict[int, int] = {}
    for window in case.op.window_dims:
        other, spec = case.results[0], found.result_specs[0]
        if window.over >= 0:
            other, spec = case.operands[window.over], found.operand_specs[window.over]
        axes = found.operand_specs[window.operand][window.dim]
        if not axes or axes != spec[window.out_dim]:
            continue
        shards = case.shards(axes)
        size, out_size = case.operands[window.operand].shape[window.dim], other.shape[window.out_dim]
        rows = halo_permutes(size, out_size, shards, window)
        read = (-(-out_size // shards) - 1) * window.stride + window.extent
        if rows is None and (case.op.name != "reduce_window" or window.spacing > 1):
            return replicate(case)
        if rows is None:
            windows.append((window.operand, window.dim, read, axes))
            spec = operand_specs[window.operand]
            operand_specs[window.operand] = (*spec[: window.dim], (), *spec[window.dim + 1 :])
        elif rows:
            halos.append(HaloExchange(window.operand, window.dim, rows, tuple(sizes.items())))
        sizes[window.dim] = (read - 1) // window.spacing + 1
    return dataclasses.replace(found, operand_specs=tuple(operand_specs), halos=tuple(halos), windows=tuple(windows))


def concatenate(case: ShardedOp) -> OpPartitioning:
    """Along a sharded dimension it is computed along another one, like a sort."""
    shapes = zip(case.operands[0].shape, case.results[0].shape, strict=True)
    return _along_other_dim(case, next((d for d, (a, b) in enumerate(shapes) if a != b), None))


def sort(case: ShardedOp) -> OpPartitioning:
    """A sort along a sharded dimension is resharded to another dimension that divides, and back; without one it is
    replicated.
    """
    dims = enumerate(case.rule.results[0])
    return _along_other_dim(case, next((d for d, dim in dims if case.rule.replicated.intersection(dim)), None))


def _along_other_dim(case: ShardedOp, along: int | None) -> OpPartitioning:
    spec = case.want[0]
    if along is not None and spec[along]:
        sizes = enumerate(case.results[0].shape)
        fits = (d for d, n in sizes if d != along and n % case.shards((*spec[d], *spec[along])) == 0)
        to = next(fits, None)
        if to is None:
            return replicate(case)
        moved = {along: (), to: (*spec[to], *spec[along])}
        spec = tuple(moved.get(d, axes) for d, axes in enumerate(spec))
    return OpPartitioning((spec,) * len(case.operands), (spec,) * len(case.results))


def rotate(case: ShardedOp) -> OpPartitioning:
    """roll: each shard sends rows to the next ones."""
    spec, (window,) = case.want[0], case.op.window_dims
    shards, size = case.shards(spec[window.dim]), case.operands[0].shape[window.dim]
    if size % shards:
        return replicate(case)
    rows = min(window.low, size - window.low)
    halos = (HaloExchange(0, window.dim, rotation_permutes(rows, -(-size // shards))),) if shards > 1 else ()
    return OpPartitioning((spec,), (spec,), halos=halos)


def reverse(case: ShardedOp) -> OpPartitioning:
    """The shards along a reversed dimension change places."""
    spec = case.want[0]
    return OpPartitioning(
        (spec,), (spec,), reversed_operands=(0,) if any(spec[window.dim] for window in case.op.window_dims) else ()
    )


def dynamic_slice(case: ShardedOp) -> OpPartitioning:
    """The sliced dimensions are gathered; if the result is to be sharded along one, the op is replicated."""
    spec, shapes = case.want[0], zip(case.operands[0].shape, case.results[0].shape, strict=True)
    if any(axes and a != b for axes, (a, b) in zip(spec, shapes, strict=True)):
        return replicate(case)
    return OpPartitioning((spec, *map(replicated, case.operands[1:])), (spec,))


def dynamic_update_slice(case: ShardedOp) -> OpPartitioning:
    """Single rows are written where they belong; a longer slice along a sharded dimension gathers that dimension."""
    shapes = list(zip(case.operands[0].shape, case.operands[1].shape, strict=True))
    base = tuple(() if b not in (1, a) else axes for axes, (a, b) in zip(case.want[0], shapes, strict=True))
    new = tuple(() if a != b else axes for axes, (a, b) in zip(base, shapes, strict=True))
    return OpPartitioning((base, new, *map(replicated, case.operands[2:])), (base,))


_RULES: dict[str, Callable[[ShardedOp], OpPartitioning]] = {
    rule.__name__: rule
    for rule in (
        replicate, follow_result, triangular_solve, barrier, reshape, reduce, dot, gather, scatter, windowed, convolve_on_tpu,
        convolve_in_groups, concatenate, sort, rotate, reverse, dynamic_slice, dynamic_update_slice,
    )
}  # fmt: skip
"""By the names in `OpTraits.rule`."""

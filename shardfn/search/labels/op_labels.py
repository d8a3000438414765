"""The strategies of one op on a mesh: a label gives every axis to one factor of the op's sharding rule, or to none.

A factor that is summed over can be sharded in two ways: every device gets the sum (all-reduce), or its shard of the sum
along a factor of the result (reduce-scatter).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from shardfn.ir.model import ShardingRule
from shardfn.solver.labelling import Array

MOST_LABELS = 256
"""Labels of a node, for each mesh."""

BASE = 100
"""An axis that shards factor `f` for the work and factor `g` of the result has the code `(f + 1) * BASE + g`. For a factor that
is kept, `g` is `f`; for one that is summed over, the factor along which the sum is scattered, or -1."""

FREE = -99
"""A column of a label that is still to be decided."""
NOWHERE = 64
"""A dimension number that no tensor has: a new dimension of a broadcast."""


def divides(choice: Sequence[int], sizes: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether the axes divide `sizes[choice[i]]`, all together; -1 shards nothing.

    >>> divides((0, 0), (8,), (4, 2)), divides((0, 0), (4,), (4, 2))
    (True, False)
    """
    left = list(sizes)
    for at, size in zip(choice, axes, strict=True):
        if at >= 0:
            if left[at] % size:
                return False
            left[at] //= size
    return True


def value_labels(shape: tuple[int, ...], axes: tuple[int, ...], row: Sequence[int] | np.ndarray | None = None) -> Array:
    """Every way to give each axis to a dimension that it divides, or to none: [labels, axes].

    With a `row`, only its `FREE` column varies.

    >>> value_labels((4, 3), (2,)).tolist()
    [[-1], [0]]
    """
    options = [-1, *(d for d, n in enumerate(shape) if n > 1)]
    found = [c for c in _choices(options, len(axes), row) if divides(c, shape, axes)]
    return np.array(_fewer(found), np.int16).reshape(-1, len(axes))


def given_labels(
    wanted: Sequence[int],
    free: Sequence[int],
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    row: np.ndarray | None = None,
) -> Array:
    """A given label, and those that shard `free` dimensions over axes that it leaves.

    >>> given_labels([0, -1], [1], (4, 6), (2, 2)).tolist()
    [[0, -1], [0, 1]]
    """
    own = np.array([wanted], np.int16)
    if not free:
        return own
    every = value_labels(shape, axes, row)
    kept = every[((every == own) | ((own < 0) & np.isin(every, free))).all(axis=1)]
    return kept if len(kept) else own


def op_codes(
    rule: ShardingRule, axes: tuple[int, ...], scattered: int, row: Sequence[int] | np.ndarray | None = None
) -> Array:
    """The labels of an op by its rule, [labels, axes], as `decoded` reads them; -1 shards nothing.

    Sums may be reduce-scattered along the `scattered` largest factors of the result; `row` as in `value_labels`.
    """
    shardable = [f for f, n in enumerate(rule.sizes) if n > 1 and f not in rule.replicated]
    pairs = [(f, -1 if f in rule.reduction else f) for f in shardable]
    result_factors: list[int] = []
    if scattered and len(rule.results) == 1:
        every = sorted((f for f, _ in factor_dims(rule.results[0], rule.sizes)), key=lambda f: -rule.sizes[f])
        result_factors = [f for f in every if f in shardable]
        able = every[:scattered]
        pairs += [(f, g) for f in shardable if f in rule.reduction for g in shardable if g in able]
    found = []
    for choice in _choices([-1, *((f + 1) * BASE + g for f, g in pairs)], len(axes), row):
        work = [(c + 1) // BASE - 1 for c in choice]
        out = [c - (f + 1) * BASE for c, f in zip(choice, work, strict=True)]
        if row is None and result_factors:
            out = outside(work, out, result_factors)
        if divides(work, rule.sizes, axes) and divides(out, rule.sizes, axes):
            found.append(tuple(_code(f, g) for f, g in zip(work, out, strict=True)))
    return np.array(_fewer(list(dict.fromkeys(found))), np.int16).reshape(-1, len(axes))


def _code(factor: int, end: int) -> int:
    return -1 if factor < 0 else (factor + 1) * BASE + end


def outside(work: Sequence[int], out: Sequence[int], result_factors: Sequence[int]) -> list[int]:
    """The factor of the result that each axis shards. A sum cannot be scattered along a factor that a later axis shards too;
    it takes the next of the `result_factors` for which that holds, or none.

    >>> outside((2, 0), (0, 0), (0, 1)), outside((0, 2), (0, 0), (0, 1)), outside((2, 0), (0, 0), (0,))
    ([1, 0], [0, 0], [-1, 0])
    """
    found = list(out)
    for at, (factor, end) in enumerate(zip(work, out, strict=True)):
        if factor != end >= 0 and end in work[at + 1 :]:
            rest = result_factors[result_factors.index(end) + 1 :]
            found[at] = next((g for g in rest if g not in work[at + 1 :]), -1)
    return found


def _choices(options: Sequence[int], axes: int, row: Sequence[int] | np.ndarray | None) -> Iterator[tuple[int, ...]]:
    if row is None:
        return itertools.product(options, repeat=axes)
    return itertools.product(*(options if column == FREE else (int(column),) for column in row))


def decoded(codes: Array) -> tuple[Array, Array]:
    """Labels of an op as the factor that each axis shards for the work, and the one that it shards of the result.

    >>> [part.tolist() for part in decoded(np.array([-1, 2 * BASE + 1, 3 * BASE - 1, 3 * BASE + 0]))]
    [[-1, 1, 2, 2], [-1, 1, -1, 0]]
    """
    work = ((codes + 1) // BASE - 1).astype(np.int16)
    return work, (codes - (work + 1) * BASE).astype(np.int16)


def _fewer(found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """At most `MOST_LABELS`: the one that shards nothing, and those that leave the fewest axes unused."""
    if len(found) <= MOST_LABELS:
        return found

    order = sorted(range(1, len(found)), key=lambda i: (sum(c < 0 for c in found[i]), i))
    return [found[0], *(found[i] for i in sorted(order[: MOST_LABELS - 1]))]


def factor_dims(dims: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(factor, dimension) for the factors of a tensor that can be sharded: the major one of each dimension."""
    majors = ((next((f for f in factors if sizes[f] > 1), None), dim) for dim, factors in enumerate(dims))
    return tuple((factor, dim) for factor, dim in majors if factor is not None)


def factors_to_dims(factors: Array, pairs: Sequence[tuple[int, int]], count: int) -> Array:
    """Factors as the dimensions of one tensor; a factor that it lacks shards nothing there."""
    table = np.full(count + 1, -1, np.int16)
    for factor, dim in pairs:
        table[factor] = dim
    return table[factors]


def dims_to_factors(
    layouts: Array, pairs: Sequence[tuple[int, int]], rule: ShardingRule, axes: tuple[int, ...]
) -> Array:
    """Layouts of an operand as the factors that are sharded; -1 where the op cannot keep the sharding."""
    table = np.full(NOWHERE + 2, -1, np.int16)
    for factor, dim in pairs:
        if factor not in rule.replicated:
            table[dim] = factor
    factors = table[layouts]
    for row in factors:
        left = list(rule.sizes)
        for axis, factor in enumerate(row):
            if factor >= 0:
                if left[factor] % axes[axis]:
                    row[axis] = -1
                else:
                    left[factor] //= axes[axis]
    return factors

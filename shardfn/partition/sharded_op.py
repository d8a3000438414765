"""What a partitioning rule takes, an op with its shardings, and what it returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardfn.ir.model import DimFactors, Op, ShardingRule, Spec, Value
from shardfn.partition.halo_exchange import HaloPermute

Factors = Mapping[int, Sequence[str]]
"""For each factor of a sharding rule, the axes that shard it."""


@dataclasses.dataclass(frozen=True)
class HaloExchange:
    """Rows along `dim` of an operand that shards send each other, one collective-permute each.

    `sizes` are the local sizes of other dimensions at that point.
    """

    operand: int
    dim: int
    halo_permutes: tuple[HaloPermute, ...]
    sizes: tuple[tuple[int, int], ...] = ()


class Reshard(NamedTuple):
    """One part of a value's path: reduce it over `reduced`, then reshard it to `to`, within the groups of
    `group_axes`.
    """

    to: Spec
    group_axes: frozenset[str] = frozenset()
    reduced: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OpPartitioning:
    """How XLA partitions one op: the shardings that it reads and makes, and the collectives that remain.

    - `reduced`: axes over which results are partial sums, in groups that are reduced one after the other.
    - `gathered_axes`: axes over which the partial results of a reduction of several arrays are gathered.
    - `reversed_operands`: operands whose shards change places.
    - `group_axes`: by operand, the axes of the device groups within which it is resharded.
    - `via`: by operand, the reshards on the way.
    - `result_path`: the reshards of the result; without them it goes to the wanted sharding at once.
    - `windows`: operands that are gathered, and of which each device reads a part.
    """

    operand_specs: tuple[Spec, ...]
    result_specs: tuple[Spec, ...]
    reduced: tuple[tuple[str, ...], ...] = ()
    gathered_axes: tuple[str, ...] = ()
    halos: tuple[HaloExchange, ...] = ()
    reversed_operands: tuple[int, ...] = ()
    group_axes: tuple[frozenset[str], ...] = ()
    via: tuple[tuple[Reshard, ...], ...] = ()
    result_path: tuple[Reshard, ...] = ()
    windows: tuple[tuple[int, int, int, tuple[str, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class ShardedOp:
    """The input of a partitioning rule: one op with the propagated shardings of its operands and results."""

    op: Op
    rule: ShardingRule
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    have: tuple[Spec, ...]
    want: tuple[Spec, ...]
    sizes: Mapping[str, int]

    def shards(self, axes: Sequence[str]) -> int:
        """Number of devices along `axes`."""
        return math.prod(self.sizes[a] for a in axes)

    def factors(self, dims: DimFactors, spec: Spec) -> dict[int, tuple[str, ...]]:
        """The factors that a sharding shards. The major factors of a compound dimension come first."""
        found: dict[int, tuple[str, ...]] = {}
        for dim, axes in zip(dims, spec, strict=True):
            rest = list(axes)
            for i, factor in enumerate(dim):
                taken: list[str] = []
                while rest and (len(dim) == 1 or self.rule.sizes[factor] % self.shards([*taken, rest[0]]) == 0):
                    taken.append(rest.pop(0))
                if taken:
                    found[factor] = tuple(taken)
                if i + 1 < len(dim) and self.shards(taken) != self.rule.sizes[factor]:
                    break  # a minor factor is contiguous only where the major ones have shards of one element
        return found

    def spec(self, dims: DimFactors, factors: Factors) -> Spec:
        """The sharding of one tensor whose factors are sharded so, as far as dimensions can express it."""
        spec: list[tuple[str, ...]] = []
        for dim in dims:
            axes: list[str] = []
            for factor in dim:
                axes += factors.get(factor, ())
                if self.shards(factors.get(factor, ())) != self.rule.sizes[factor]:
                    break
            spec.append(tuple(axes))
        return tuple(spec)

    def by_axis(self, dims: DimFactors, spec: Spec) -> dict[str, int]:
        """By axis, the factor that it shards."""
        return {axis: factor for factor, axes in self.factors(dims, spec).items() for axis in axes}

    def from_factors(self, factors: Factors) -> OpPartitioning:
        """All operands and results with their factors sharded so."""
        rule = self.rule
        operand_specs, result_specs = (
            tuple(self.spec(dims, factors) for dims in row) for row in (rule.operands, rule.results)
        )
        return OpPartitioning(operand_specs, result_specs)


def replicated(value: Value) -> Spec:
    """The replicated sharding of a value."""
    return ((),) * len(value.shape)


def grouped(placed: Mapping[str, int], order: Mapping[str, int]) -> dict[int, list[str]]:
    """By factor, the axes placed on it: those in `order` first."""
    found: dict[int, list[str]] = {}
    for axis in (*(a for a in order if a in placed), *(a for a in placed if a not in order)):
        found.setdefault(placed[axis], []).append(axis)
    return found

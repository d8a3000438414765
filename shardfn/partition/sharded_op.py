"""What a partitioning rule takes, an op with its shardings, and what it returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
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
    """One part of a value's path: reduce it over `reduced`, then reshard it to `to`, within the device groups that
    `group_axes` tell apart.
    """

    to: Spec
    group_axes: frozenset[str] = frozenset()
    reduced: tuple[str, ...] = ()
    rows_per_byte: float = 0.0
    """Rows of the matmul over all devices of the group, for each byte of an element of the operand or sum before it is
    converted to be sent; 0 where no collective matmul is possible (`collective_matmul`)."""


class GatheredWindow(NamedTuple):
    """An operand that is gathered along `dim`, of which each device along `axes` then slices the `rows` that it reads."""

    operand: int
    dim: int
    rows: int
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OpPartitioning:
    """How XLA partitions one op: the shardings that it reads and makes, and the collectives that remain.

    - `operand_paths`: by operand, the reshards to its sharding; empty for one reshard over all devices.
    - `result_path`: the reductions and reshards of the result; without them it goes to the wanted sharding at once.
    - `gathered_axes`: axes over which the partial results of a reduction of several arrays are gathered.
    - `reversed_operands`: operands whose shards change places.
    """

    operand_specs: tuple[Spec, ...]
    result_specs: tuple[Spec, ...]
    operand_paths: tuple[tuple[Reshard, ...], ...] = ()
    result_path: tuple[Reshard, ...] = ()
    gathered_axes: tuple[str, ...] = ()
    halos: tuple[HaloExchange, ...] = ()
    reversed_operands: tuple[int, ...] = ()
    gathered_windows: tuple[GatheredWindow, ...] = ()


@dataclasses.dataclass(frozen=True)
class ShardedOp:
    """The input of a partitioning rule: one op with the propagated shardings of its operands and results."""

    graph_op: Op
    rule: ShardingRule
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    operand_specs: tuple[Spec, ...]
    result_specs: tuple[Spec, ...]
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

    def reductions(self, partial: Spec, groups: Iterable[Sequence[str]]) -> tuple[Reshard, ...]:
        """The path of a result whose partial sums are reduced over one group of axes after the other.

        The last reduction may scatter towards the sharding that is wanted.
        """
        *first, last = [(), *(tuple(axes) for axes in groups if axes)]
        path = [Reshard(partial, reduced=axes) for axes in first if axes]
        return (*path, Reshard(self.result_specs[0], reduced=last)) if last else ()


def replicated(value: Value) -> Spec:
    """The replicated sharding of a value."""
    return ((),) * len(value.shape)


def grouped(placed: Mapping[str, int], order: Mapping[str, int]) -> dict[int, list[str]]:
    """By factor, the axes placed on it: those in `order` first."""
    found: dict[int, list[str]] = {}
    for axis in (*(a for a in order if a in placed), *(a for a in placed if a not in order)):
        found.setdefault(placed[axis], []).append(axis)
    return found

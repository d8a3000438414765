"""One op with the layouts of what it reads and makes, and a way to work on it: the words of `graph.ways`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardfn.ir.model import DimFactors, Op, ShardingRule, Spec, Value
from shardfn.partition.halo_exchange import HaloPermute

Factors = Mapping[int, Sequence[str]]
"""For each factor of a rule, the axes that cut it."""


@dataclasses.dataclass(frozen=True)
class HaloExchange:
    """Rows along `dim` of an operand that pieces send each other, one permutation each.

    `sizes` are the sizes that a piece has along other dims by then.
    """

    operand: int
    dim: int
    halo_permutes: tuple[HaloPermute, ...]
    sizes: tuple[tuple[int, int], ...] = ()


class Reshard(NamedTuple):
    """One part of the way of a value: it is added up over `reduced`, then laid out as `to`.

    `group_axes`: the axes of the groups of devices within which that is done.
    """

    to: Spec
    group_axes: frozenset[str] = frozenset()
    reduced: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OpPartitioning:
    """How one op is worked on: how its operands must lie, how its results lie then, and what remains to be done.

    `reduced`: axes over which the results are partial sums, in groups that are added up one after the other.
    `gathered_axes`: axes over which the partial results of a reduction of several arrays are gathered.
    `reversed_operands`: operands whose pieces change places (a reversal). `group_axes`: for each operand, the axes of the
    groups of devices within which it is laid out anew; what another op wants in other groups is another move. `via`:
    for each operand, what it goes through on the way to what is wanted. `result_path`: what the result goes through to lie as it
    is wanted; where it is not said, it goes there at once.
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
    """What a way is chosen from: one op with the layouts that propagation gave its operands and results."""

    op: Op
    rule: ShardingRule
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    have: tuple[Spec, ...]
    want: tuple[Spec, ...]
    sizes: Mapping[str, int]

    def shards(self, axes: Sequence[str]) -> int:
        """Devices along `axes`."""
        return math.prod(self.sizes[a] for a in axes)

    def factors(self, dims: DimFactors, spec: Spec) -> dict[int, tuple[str, ...]]:
        """The factors that a layout of one tensor cuts. Of a compound dim the major factors are cut first."""
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
                    break  # a minor factor is contiguous only where the major ones are cut to single elements
        return found

    def spec(self, dims: DimFactors, factors: Factors) -> Spec:
        """The layout of one tensor whose factors are cut so, as far as it can be said in dims."""
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
        """For each axis of a layout, the factor that it cuts."""
        return {axis: factor for factor, axes in self.factors(dims, spec).items() for axis in axes}

    def laid(self, factors: Factors) -> OpPartitioning:
        """All operands and results with their factors cut so."""
        rule = self.rule
        operand_specs, result_specs = (
            tuple(self.spec(dims, factors) for dims in row) for row in (rule.operands, rule.results)
        )
        return OpPartitioning(operand_specs, result_specs)


def replicated(value: Value) -> Spec:
    """The layout of a value that every device holds all of."""
    return ((),) * len(value.shape)


def grouped(placed: Mapping[str, int], order: Mapping[str, int]) -> dict[int, list[str]]:
    """For each factor the axes that are placed on it, in the order of `order`; then the rest."""
    found: dict[int, list[str]] = {}
    for axis in (*(a for a in order if a in placed), *(a for a in placed if a not in order)):
        found.setdefault(placed[axis], []).append(axis)
    return found

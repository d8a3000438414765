"""One op with the layouts of what it reads and makes, and a way to work on it: the words of `graph.ways`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardfn.ir.model import Dims, Op, Rule, Spec, Value
from shardfn.partition.halo_exchange import Fetch

Factors = Mapping[int, Sequence[str]]
"""For each factor of a rule, the axes that cut it."""


@dataclasses.dataclass(frozen=True)
class Edge:
    """Rows along `dim` of an operand that pieces send each other, one permutation each.

    `sizes` are the sizes that a piece has along other dims by then.
    """

    operand: int
    dim: int
    fetches: tuple[Fetch, ...]
    sizes: tuple[tuple[int, int], ...] = ()


class Leg(NamedTuple):
    """One part of the way of a value: it is added up over `summed`, then laid out as `to`.

    `inside`: the axes of the groups of devices within which that is done.
    """

    to: Spec
    inside: frozenset[str] = frozenset()
    summed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Way:
    """How one op is worked on: how its operands must lie, how its results lie then, and what remains to be done.

    `summed`: axes over which the results are partial sums, in groups that are added up one after the other.
    `collected`: axes over which the partial results of a reduction of several arrays are gathered. `turned`: operands
    whose pieces change places (a reversal). `inside`: for each operand, the axes of the
    groups of devices within which it is laid out anew; what another op wants in other groups is another move. `through`:
    for each operand, what it goes through on the way to what is wanted. `back`: what the result goes through to lie as it
    is wanted; where it is not said, it goes there at once.
    """

    wants: tuple[Spec, ...]
    gives: tuple[Spec, ...]
    summed: tuple[tuple[str, ...], ...] = ()
    collected: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = ()
    turned: tuple[int, ...] = ()
    inside: tuple[frozenset[str], ...] = ()
    through: tuple[tuple[Leg, ...], ...] = ()
    back: tuple[Leg, ...] = ()
    windows: tuple[tuple[int, int, int, tuple[str, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """What a way is chosen from: one op with the layouts that propagation gave its operands and results."""

    op: Op
    rule: Rule
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    have: tuple[Spec, ...]
    want: tuple[Spec, ...]
    sizes: Mapping[str, int]

    def pieces(self, axes: Sequence[str]) -> int:
        """Devices along `axes`."""
        return math.prod(self.sizes[a] for a in axes)

    def factors(self, dims: Dims, spec: Spec) -> dict[int, tuple[str, ...]]:
        """The factors that a layout of one tensor cuts. Of a compound dim the major factors are cut first."""
        found: dict[int, tuple[str, ...]] = {}
        for dim, axes in zip(dims, spec, strict=True):
            rest = list(axes)
            for i, factor in enumerate(dim):
                taken: list[str] = []
                while rest and (len(dim) == 1 or self.rule.sizes[factor] % self.pieces([*taken, rest[0]]) == 0):
                    taken.append(rest.pop(0))
                if taken:
                    found[factor] = tuple(taken)
                if i + 1 < len(dim) and self.pieces(taken) != self.rule.sizes[factor]:
                    break  # a minor factor is contiguous only where the major ones are cut to single elements
        return found

    def spec(self, dims: Dims, factors: Factors) -> Spec:
        """The layout of one tensor whose factors are cut so, as far as it can be said in dims."""
        spec: list[tuple[str, ...]] = []
        for dim in dims:
            axes: list[str] = []
            for factor in dim:
                axes += factors.get(factor, ())
                if self.pieces(factors.get(factor, ())) != self.rule.sizes[factor]:
                    break
            spec.append(tuple(axes))
        return tuple(spec)

    def by_axis(self, dims: Dims, spec: Spec) -> dict[str, int]:
        """For each axis of a layout, the factor that it cuts."""
        return {axis: factor for factor, axes in self.factors(dims, spec).items() for axis in axes}

    def laid(self, factors: Factors) -> Way:
        """All operands and results with their factors cut so."""
        rule = self.rule
        wants, gives = (tuple(self.spec(dims, factors) for dims in row) for row in (rule.operands, rule.results))
        return Way(wants, gives)


def whole(value: Value) -> Spec:
    """The layout of a value that every device holds all of."""
    return ((),) * len(value.shape)


def grouped(placed: Mapping[str, int], order: Mapping[str, int]) -> dict[int, list[str]]:
    """For each factor the axes that are placed on it, in the order of `order`; then the rest."""
    found: dict[int, list[str]] = {}
    for axis in (*(a for a in order if a in placed), *(a for a in placed if a not in order)):
        found.setdefault(placed[axis], []).append(axis)
    return found

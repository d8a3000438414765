"""Dimension groups: which dimensions of which values are tied, by union-find over the sharding rules."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from shardfn.ir.model import DimFactors, Graph, ShardingRule


@dataclasses.dataclass(frozen=True)
class DimensionGroups:
    """`of[value][dim]` is the group of a dimension, numbered by first appearance over the function's inputs."""

    of: tuple[tuple[int, ...], ...]
    count: int
    places: tuple[int, ...]
    """For each group the first one that has the same rows in other places: movement, such as a slice or an update, ties none."""

    def placed(self, value: int) -> tuple[int, ...]:
        """For each dimension of a value its group in `places`."""
        return tuple([self.places[group] for group in self.of[value]])

    def members(self, values: tuple[int, ...]) -> dict[int, list[tuple[int, int]]]:
        """For each group that meets `values`: its (position in `values`, dim) pairs, in order."""
        found: dict[int, list[tuple[int, int]]] = {}
        for position, value in enumerate(values):
            for dim, group in enumerate(self.of[value]):
                found.setdefault(group, []).append((position, dim))
        return found


def dimension_groups(graph: Graph) -> DimensionGroups:
    """Tie the dimensions that a program treats as one.

    Two dimensions are tied where a factor of a sharding rule stands alone in both and their sizes agree. A dimension of
    several factors (`b*t` after a reshape) is tied through its major one. Factors that need replication tie only `places`.
    Values that hold the same array (loop carries, branches) are tied dimension by dimension, and so are an array and its
    shard in a `shard_map`.
    """
    first = [0]
    for value in graph.values:
        first.append(first[-1] + len(value.shape))
    parent = list(range(first[-1]))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def tie(i: int, j: int) -> None:
        a, b = find(i), find(j)
        if a != b:
            parent[max(a, b)] = min(a, b)

    known: dict[int, list[tuple[int, int, int, int, bool]]] = {}
    moved: list[tuple[int, int]] = []
    for op in graph.ops:
        if op.rule is None:
            continue
        parts = known.get(id(op.rule))
        if parts is None:
            parts = known[id(op.rule)] = list(_parts(op.rule))
        seen: dict[int, int] = {}
        begun: dict[int, int] = {}
        inputs, outputs, operands = op.inputs, op.outputs, len(op.rule.operands)
        for position, dim, factor, alone, is_replicated in parts:
            values, at = (inputs, position) if position < operands else (outputs, position - operands)
            if at >= len(values):
                continue
            size = graph.values[values[at]].shape[dim]
            if size == 1:
                continue
            here = first[values[at]] + dim
            is_moved = is_replicated or (alone and size != alone)  # a slice or a pad: not the same dim any more
            if begun.setdefault(factor, here) != here and (is_moved or factor not in seen):
                moved.append((begun[factor], here))
            if not is_moved:
                tie(seen.setdefault(factor, here), here)
    for a, b in (*graph.ties, *graph.manual):
        for dim in range(min(len(graph.values[a].shape), len(graph.values[b].shape))):
            tie(first[a] + dim, first[b] + dim)

    numbers: dict[int, int] = {}
    order = [*graph.inputs, *graph.outputs, *range(len(graph.values))]
    for value in order:
        for dim in range(len(graph.values[value].shape)):
            numbers.setdefault(find(first[value] + dim), len(numbers))
    of = tuple(
        tuple(numbers[find(first[v] + d)] for d in range(len(value.shape))) for v, value in enumerate(graph.values)
    )
    for i, j in moved:
        tie(i, j)
    least: dict[int, int] = {}
    places = tuple([least.setdefault(find(i), number) for i, number in numbers.items()])
    return DimensionGroups(of, len(numbers), places)


def shared_elements(
    values: Sequence[tuple[int, ...]], sizes: Sequence[int], groups: Collection[int]
) -> Counter[tuple[int, int]]:
    """By ordered pair of groups, the elements of the values that have a dimension of each: batch and hidden dimension share
    activations, the hidden dimensions of two layers share none.

    Args:
      values: the groups of each value's dimensions.
      sizes: elements of each value.
      groups: those whose pairs are wanted.

    >>> dict(shared_elements([(0, 1), (1, 2), (1, 0)], [8, 4, 2], {0, 1}))
    {(0, 1): 10, (1, 0): 10}
    """
    wanted = frozenset(groups)
    rows: Counter[tuple[int, ...]] = Counter()
    for row, size in zip(values, sizes, strict=True):
        rows[tuple(sorted(wanted.intersection(row)))] += size
    found: Counter[tuple[int, int]] = Counter()
    for row, size in rows.items():
        found.update(dict.fromkeys(itertools.permutations(row, 2), size))
    return found


def corresponding(rule: ShardingRule, source: DimFactors, target: DimFactors) -> dict[int, tuple[int, int]]:
    """For each dimension of one value of an op the dimension of another one that it is tied to, and its major factor's size.

    >>> merged = ShardingRule((((0,), (1,), (2,)),), (((0, 1), (2,)),), (4, 8, 16))  # a reshape
    >>> corresponding(merged, merged.results[0], merged.operands[0])
    {0: (0, 4), 1: (2, 16)}
    """
    at = {factor: dim for dim, factor in _leading(target, rule.sizes)}
    return {dim: (at[factor], rule.sizes[factor]) for dim, factor in _leading(source, rule.sizes) if factor in at}


def _parts(rule: ShardingRule) -> Iterator[tuple[int, int, int, int, bool]]:
    """(operand or result, dim, its major factor, the factor's size where it stands alone, else 0, whether it needs replication)
    of what a rule ties."""
    for position, dims in enumerate((*rule.operands, *rule.results)):
        for dim, factor in _leading(dims, rule.sizes):
            alone = len(dims[dim]) == 1
            if alone or factor not in rule.permuted | rule.replicated:
                yield position, dim, factor, rule.sizes[factor] if alone else 0, factor in rule.replicated


def _leading(dims: DimFactors, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(dim, its major factor that is larger than 1) for every dim that has one."""
    found = ((dim, next((f for f in factors if sizes[f] > 1), None)) for dim, factors in enumerate(dims))
    return [(dim, factor) for dim, factor in found if factor is not None]

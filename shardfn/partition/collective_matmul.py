"""Collective matmul: libtpu sends shards of an operand, or of the result, while it multiplies the shards that have arrived.

An all-gather before a matmul, or a reduce-scatter after it, becomes a loop of collective-permutes around a ring, each with a part
of the matmul (Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
ASPLOS 2023; XLA calls it a windowed einsum). libtpu does so where

- every device of the group holds different rows of one operand and of the result, and the other operand is sharded as often in
  dimensions of one role (contracted, own or batch); or the contracted dimension is sharded over the group, and the result over
  own dimensions of one operand (`dot_general`);
- no other op needs the same gather (`alone_in_matmuls`);
- it expects to gain: while `n` devices compute for `t` seconds and communicate for `c`, the loop takes `max(t, c)` and two
  shards more, `2·c/n`. It gains if `t > 2·c/n`, that is, if the rows of the matmul over all devices exceed a number of the
  chip's for each byte of an element (`Chip.collective_matmul_rows`). It never gains for two devices, nor for a square of 2 x 2
  (`is_square_of_four`), where a gather uses twice the links of the loop.

Seen in libtpu 0.0.42 for v4, v5e, v5p and v6e.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from shardfn.ir.model import Graph
from shardfn.ir.partitioned import Communication
from shardfn.partition.rebuild import resolved_chains

FEWEST_DEVICES, MOST_DEVICES = 3, 32
"""The smallest and the largest group in which libtpu makes one."""

SHARDS_IN_LOOP = {"all-gather": 4, "reduce-scatter": 7}
"""The shards that the loop holds at once instead of the gathered operand, or of the sum before it is scattered. Between four
devices, where the loop has one iteration, it holds one for each permute."""


def shards_held(kind: str, permutes: int) -> int:
    """The shards that a collective matmul holds at once.

    >>> shards_held("all-gather", 3), shards_held("all-gather", 9), shards_held("reduce-scatter", 9)
    (3, 4, 7)
    """
    return min(permutes, SHARDS_IN_LOOP[kind])


def sends_both_ways(n: int) -> bool:
    """Whether a collective matmul between `n` devices sends in both directions of the ring.

    >>> sends_both_ways(6), sends_both_ways(8)
    (False, True)
    """
    return n % 4 == 0


def collective_matmul_permutes(kind: str, n: int, is_square: bool = False) -> int:
    """How many collective-permutes of one shard replace an all-gather or reduce-scatter; 0 where libtpu makes none.

    To send in both directions (`sends_both_ways`) takes two shards more than a gather does, in one direction one shard more. A
    gather between four devices has one iteration, which leaves out its last two permutes.

    Args:
      kind: `all-gather` or `reduce-scatter`.
      n: devices in the group.
      is_square: whether they are `is_square_of_four`.

    >>> [collective_matmul_permutes("all-gather", n) for n in (2, 3, 4, 6, 8, 32, 64)]
    [0, 3, 3, 6, 9, 33, 0]
    >>> [collective_matmul_permutes("reduce-scatter", n) for n in (4, 6, 8)]
    [5, 6, 9]
    """
    if not FEWEST_DEVICES <= n <= MOST_DEVICES or is_square:
        return 0
    if not sends_both_ways(n):
        return n
    return n - 1 if kind == "all-gather" and n == 4 else n + 1


def is_square_of_four(axes: Sequence[str], sizes: Mapping[str, int], torus: Sequence[int]) -> bool:
    """Whether groups along some axes span two dimensions of a torus that have two places each.

    Args:
      axes: the axes of a group.
      sizes: of all axes of the mesh, in row-major order.
      torus: its dimensions, the last one fastest.

    >>> mesh = {"a": 4, "b": 2}
    >>> [is_square_of_four(["a"], mesh, torus) for torus in ((2, 4), (4, 2), (2, 2, 2))]
    [False, False, True]
    """
    if math.prod(sizes[a] for a in axes) != 4:
        return False
    devices = [0]
    for axis, step in zip(sizes, _strides(list(sizes.values())), strict=True):
        if axis in axes:
            devices = [device + step * n for device in devices for n in range(sizes[axis])]
    places = (len({device // step % n for device in devices}) for n, step in zip(torus, _strides(torus), strict=True))
    return sum(count == n == 2 for count, n in zip(places, torus, strict=True)) == 2


def _strides(sizes: Sequence[int]) -> list[int]:
    """How far apart neighbours along each dimension are in row-major order."""
    return [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]


def alone_in_matmuls(graph: Graph, communications: Sequence[Communication]) -> list[Communication]:
    """The communications; a gather that more than one op needs is part of no matmul.

    A matmul reads an array and its transpose alike, so gathers of both are one.
    """
    if not any(c.matmul_permutes for c in communications):
        return list(communications)
    source = resolved_chains({op.outputs[0]: op.inputs[0] for op in graph.ops if op.name == "transpose"})
    count = collections.Counter[int]()
    for c in communications:
        if c.kind == "all-gather":
            count[source.get(c.operand, c.operand)] += graph.read_counts[c.result]
    return [
        dataclasses.replace(c, matmul_permutes=0)
        if c.kind == "all-gather" and c.matmul_permutes and count[source.get(c.operand, c.operand)] > 1
        else c
        for c in communications
    ]

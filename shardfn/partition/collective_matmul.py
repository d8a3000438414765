"""Collective matmul: libtpu sends the shards of an operand, or of a sum, while it multiplies those that are there.

An all-gather before a matmul, or a reduce-scatter behind it, becomes a loop of collective-permutes in a ring, each with a part of
the matmul (Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
ASPLOS 2023; XLA calls it a windowed einsum). XLA does so where

- all devices of a group shard the rows of one operand and of the result, and the other operand in one role (`dot_general`), or
  all shard the contracted dimension, and the result along one operand's rows;
- no other op needs the same gather;
- it expects to gain: while `n` devices compute for `t` seconds and communicate for `c`, the loop takes `max(t, c)` and two
  shards more, `2·c/n`. It gains if `t > 2·c/n`, that is, if the rows of the matmul over all devices exceed a number of the
  chip's for each byte of an element (`Chip.collective_matmul_rows`), and never for two devices.

Seen in libtpu 0.0.42 for v4, v5e, v5p and v6e.
"""

from __future__ import annotations

FEWEST, MOST = 3, 32
"""The devices between which libtpu makes a collective matmul."""


SHARDS_IN_LOOP = {"all-gather": 4, "reduce-scatter": 7}
"""The shards that the loop holds at once in the place of the gathered operand, or of the sum before it is scattered. Between four
devices, where the loop has one iteration, it holds one for each permute."""


def shards_held(kind: str, permutes: int) -> int:
    """The shards that a collective matmul holds at once.

    >>> shards_held("all-gather", 3), shards_held("all-gather", 9), shards_held("reduce-scatter", 9)
    (3, 4, 7)
    """
    return min(permutes, SHARDS_IN_LOOP[kind])


def collective_matmul_permutes(kind: str, n: int) -> int:
    """The collective-permutes, of one shard each, in the place of an all-gather or reduce-scatter; 0 where libtpu makes none.

    Groups of a multiple of four devices send in both directions of the ring, which takes two shards more than a gather does. The
    only iteration of a gather between four devices is without the last two.

    >>> [collective_matmul_permutes("all-gather", n) for n in (2, 3, 4, 6, 8, 32, 64)]
    [0, 3, 3, 6, 9, 33, 0]
    >>> [collective_matmul_permutes("reduce-scatter", n) for n in (4, 6, 8)]
    [5, 6, 9]
    """
    if not FEWEST <= n <= MOST:
        return 0
    if n % 4:
        return n
    return n - 1 if kind == "all-gather" and n == 4 else n + 1

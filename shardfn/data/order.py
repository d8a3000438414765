"""The order of shuffled records: a permutation whose values are computed one batch at a time, and are equal on every process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VERSION = 1
"""Part of the state of an iterator: another permutation under the same seed needs another number."""

ROUNDS = 8
"""Rounds of the network. Four make it pseudorandom; more help where a half has few bits."""

HALF_BITS = 3
"""Fewest bits of a half, so that few records have many orders."""

_FACTORS = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93], np.uint64)
"""Odd numbers with irregular bits; a product with one of them mixes the lower bits into the upper ones."""


def permuted(numbers: np.ndarray, count: int, key: Sequence[int]) -> np.ndarray:
    """The images of numbers under a permutation of `range(count)`, in memory that depends on `numbers` alone.

    A Feistel network permutes the numbers of an even number of bits, here the fewest that hold `count`. A number that it
    takes out of `range(count)` goes through it again until it is back, four times on average at most from 16 records on.

    Args:
      numbers: ints from 0 to `count - 1`, of any shape.
      count: how many numbers the permutation has.
      key: ints from 0 to 2**32 - 1 that choose the permutation. The choice depends on no release of NumPy.

    Returns:
      The images, as `int64`, of the shape of `numbers`.

    >>> permuted(np.arange(10), 10, (7, 0)).tolist() == permuted(np.arange(10), 10, (7, 1)).tolist()
    False
    >>> sorted(permuted(np.arange(10), 10, (7, 0)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = max(HALF_BITS, -(-(count - 1).bit_length() // 2))
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    found = np.array(numbers, np.uint64)
    left_out = np.ones(found.shape, bool)
    while left_out.any():
        found[left_out] = _network(found[left_out], half, keys)
        left_out = found >= count
    return found.astype(np.int64)


def _network(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers of `2 * half` bits."""
    left, right = values >> np.uint64(half), values & np.uint64((1 << half) - 1)
    for key in keys:
        mixed = (right ^ key) * _FACTORS[0]
        mixed = (mixed ^ mixed >> np.uint64(32)) * _FACTORS[1]
        left, right = right, left ^ mixed >> np.uint64(64 - half)
    return left << np.uint64(half) | right

"""The tiles in which a TPU stores arrays: padded bytes, and the dimensions that tiles span."""

from __future__ import annotations

import itertools
import math

LANES, SUBLANES = 128, 8
"""A tile of `f32` or `bf16` (libtpu's `T(8,128)`)."""

LARGEST_ROW = 1024
"""Elements of the tile of a vector: `T(1024)`, and the powers of two below it down to `LANES`."""


def tiled_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes of an array in whole tiles, with the two tiled dimensions chosen to waste least.

    Args:
      shape: of the array on one device.
      bits: of one element.

    >>> tiled_bytes((32, 8, 32), 32), tiled_bytes((64, 32), 32), tiled_bytes((512, 256), 32), tiled_bytes((), 32)
    (131072, 16384, 524288, 512)
    """
    if len(shape) < 2:
        n = math.prod(shape)
        tile = min(LARGEST_ROW, max(LANES, 1 << max(0, n - 1).bit_length()))
        return -(-n // tile) * tile * bits // 8
    return _tiling(shape, bits)[0]


def row_major_tiled_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes of an array in whole tiles of its last two dimensions, as before libtpu chooses layouts.

    >>> row_major_tiled_bytes((4096, 64), 32), tiled_bytes((4096, 64), 32), row_major_tiled_bytes((512, 3, 3, 512), 32)
    (2097152, 1048576, 25165824)
    """
    if len(shape) < 2:
        return tiled_bytes(shape, bits)
    *outer, row, column = shape
    rows = _sublanes(bits)
    return math.prod(outer) * -(-row // rows) * rows * -(-column // LANES) * LANES * bits // 8


def _sublanes(bits: int) -> int:
    """The most elements along the sublanes of a tile."""
    return SUBLANES if bits in (16, 32) else SUBLANES * max(1, 32 // bits)


def tiled_dims(shape: tuple[int, ...], bits: int) -> tuple[int, int]:
    """The two dimensions in the tiles of an array of rank 2 or more: along the sublanes, and along the lanes.

    >>> tiled_dims((8, 32, 256), 32), tiled_dims((64, 32), 32), tiled_dims((128, 16, 64), 16)
    ((1, 2), (1, 0), (2, 0))
    """
    return _tiling(shape, bits)[1]


def _tiling(shape: tuple[int, ...], bits: int) -> tuple[int, tuple[int, int]]:
    """Bytes, and the dimensions along sublanes and lanes; of equal choices the last dimensions, lanes first."""
    most = _sublanes(bits)
    total, least, found = math.prod(shape), math.inf, (0, 0)
    for column, row in itertools.permutations(reversed(range(len(shape))), 2):
        tile = min(most, 1 << max(0, shape[row] - 1).bit_length())
        padded = -(-shape[row] // tile) * tile * -(-shape[column] // LANES) * LANES
        size = padded * (total // max(1, shape[row] * shape[column]))
        if size < least:
            least, found = size, (row, column)
    return int(least) * bits // 8, found

"""How a TPU stores arrays: in tiles, or row by row where a gather or a scatter needs it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from shardfn.ir.model import Graph, dtype_bits
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.tpu_padding import LANES, tiled_bytes

MAX_ROW_MAJOR_BYTES = 112 * 2**20
"""Padded bytes up to which libtpu stores an array row by row: about the VMEM of a v5e that arrays may use (libtpu
0.0.42).
"""


def row_major_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes of an array stored row by row, as gathers and scatters need it, with the last dimension padded to `LANES`.

    Above `MAX_ROW_MAJOR_BYTES` the array stays in tiles.

    >>> row_major_bytes((1024, 64), 32), tiled_bytes((1024, 64), 32), row_major_bytes((2**20, 64), 32)
    (524288, 262144, 268435456)
    """
    if len(shape) < 2:
        return tiled_bytes(shape, bits)
    padded = math.prod(shape[:-1]) * -(-shape[-1] // LANES) * LANES * bits // 8
    return padded if padded <= MAX_ROW_MAJOR_BYTES else tiled_bytes(shape, bits)


def row_growth(columns: np.ndarray, size: np.ndarray) -> np.ndarray:
    """How much arrays grow that are stored row by row: rows padded to whole lanes; 1 above
    `MAX_ROW_MAJOR_BYTES`.

    Args:
      columns: elements of a row.
      size: bytes without padding.

    >>> row_growth(np.array([64, 96, 64]), np.array([2**18, 2**18, 2**28])).round(3).tolist()
    [2.0, 1.333, 1.0]
    """
    grown = np.ceil(columns / LANES) * LANES / columns
    return np.where(size * grown <= MAX_ROW_MAJOR_BYTES, grown, 1.0)


def row_major_and_narrow_bytes(partitioned: PartitionedProgram, narrow: Iterable[int]) -> dict[int, int]:
    """Bytes of values that take less than their elements, as `bf16` in the place of `f32`, or more, as row-major tables."""
    found = {v: partitioned.element_bytes(v) // 2 for v in narrow}
    for v in scattered_values(partitioned.graph):
        found[v] = row_major_bytes(partitioned.local_shape(v), dtype_bits(partitioned.graph.values[v].dtype))
    return found


def scattered_values(graph: Graph) -> frozenset[int]:
    """Values that are scattered into, and their all-reduces; results are excluded. They are stored row by row."""
    rows: set[int] = set()
    for op in graph.ops:
        if op.name == "scatter" or (op.name == "all_reduce" and rows.issuperset(op.inputs)):
            rows.update(op.outputs)
    return frozenset(rows.difference(graph.outputs))


def gathered_arguments(graph: Graph) -> frozenset[int]:
    """Arguments that are gathered from, of which a copy is stored row by row."""
    return frozenset(op.inputs[0] for op in graph.ops if op.name == "gather").intersection(graph.inputs)

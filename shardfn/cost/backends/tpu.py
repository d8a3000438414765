"""TPU memory: row-major tables, and the arrays that the compiler keeps in vector memory (VMEM)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from shardfn.ir.model import Graph
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


MAX_STAY_RATIO = 8
"""An array stays in VMEM between accesses for as long as copying all of VMEM takes, times this: libtpu's
`xla_vf_vmem_max_overlap_to_mem_size_async_copy_ratio`.
"""


PREFETCH_RATIO = 2
"""An argument is prefetched this many copy times before its reader: libtpu's
`xla_vf_vmem_preferred_overlap_to_async_copy_ratio`.
"""


@dataclasses.dataclass(frozen=True)
class FastMemoryRequest:
    """A request for VMEM from `start` to `end`, both included."""

    start: int
    end: int
    bytes: int
    accesses: float
    """Reads and writes by ops that are bound by memory; for others VMEM gains nothing."""


def assign_fast_memory(claims: Sequence[FastMemoryRequest], room: float) -> list[bool]:
    """Which requests XLA's memory space assignment grants.

    Requests with the largest gain come first: accesses times the root of the size. A request is granted for all of its
    life or not at all. Fragmentation is ignored.

    >>> assign_fast_memory([FastMemoryRequest(0, 2, 60, 1), FastMemoryRequest(1, 3, 60, 2), FastMemoryRequest(3, 4, 40, 0)], 100)
    [False, True, True]
    """
    used = np.zeros(max((claim.end for claim in claims), default=0) + 1)
    found = [False] * len(claims)
    for i in sorted(range(len(claims)), key=lambda i: (-claims[i].accesses * claims[i].bytes ** 0.5, -claims[i].bytes)):
        claim = claims[i]
        taken = used[claim.start : claim.end + 1]
        if claim.bytes <= room and (not taken.size or taken.max() + claim.bytes <= room):
            taken += claim.bytes
            found[i] = True
    return found


def residency_intervals(gaps: Sequence[float], longest: float) -> list[tuple[int, int]]:
    """Merge accesses of an array that are close enough for it to stay in VMEM.

    Args:
      gaps: seconds from the end of each access to the start of the next.
      longest: the longest gap within one interval, in seconds.

    Returns:
      The first and the last access of each interval, by index.

    >>> residency_intervals([1.0, 8.0, 1.0, 10.0], 2.0)
    [(0, 1), (2, 3), (4, 4)]
    """
    found = [(0, 0)]
    for i, gap in enumerate(gaps, 1):
        found.append((i, i))
        if gap <= longest:
            found[-2:] = [(found[-2][0], i)]
    return found

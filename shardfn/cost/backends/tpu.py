"""What a TPU does with memory of its own kind: rows of tables, and the vector memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from shardfn.ir.model import Graph
from shardfn.partition.tpu_padding import LANES, tiled_bytes

MAX_ROW_MAJOR_BYTES = 112 * 2**20
"""Bytes of padded rows up to which an array lies row by row: about what the vector memory of a v5e has for arrays. Of steps of
one table, libtpu 0.0.42 copied none whose rows would have taken 537 MB or 2.1 GB."""


def row_major_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes of an array laid out row by row, as lookups and scatters need it: a last dim below `LANES` is padded to that; but
    for what would be larger than `MAX_ROW_MAJOR_BYTES`, which stays as it is.

    >>> row_major_bytes((1024, 64), 32), tiled_bytes((1024, 64), 32), row_major_bytes((2**20, 64), 32)
    (524288, 262144, 268435456)
    """
    if len(shape) < 2:
        return tiled_bytes(shape, bits)
    padded = math.prod(shape[:-1]) * -(-shape[-1] // LANES) * LANES * bits // 8
    return padded if padded <= MAX_ROW_MAJOR_BYTES else tiled_bytes(shape, bits)


def scattered_values(graph: Graph) -> frozenset[int]:
    """What is scattered to, and what comes of adding that up; but for results: it lies row by row."""
    rows: set[int] = set()
    for op in graph.ops:
        if op.name == "scatter" or (op.name == "all_reduce" and rows.issuperset(op.inputs)):
            rows.update(op.outputs)
    return frozenset(rows.difference(graph.outputs))


def gathered_arguments(graph: Graph) -> frozenset[int]:
    """Arguments that are looked up in, of which a copy lies row by row."""
    return frozenset(op.inputs[0] for op in graph.ops if op.name == "gather").intersection(graph.inputs)


MAX_STAY_RATIO = 8
"""An array stays in the vector memory from one access to the next for as long as it takes to copy all of that memory so
often: libtpu's `xla_vf_vmem_max_overlap_to_mem_size_async_copy_ratio`."""


PREFETCH_RATIO = 2
"""How often an argument could be copied in the time before its reader in which it is fetched: libtpu's
`xla_vf_vmem_preferred_overlap_to_async_copy_ratio`."""


@dataclasses.dataclass(frozen=True)
class FastMemoryRequest:
    """What would lie in the vector memory from `start` to `end`, both included."""

    start: int
    end: int
    bytes: int
    accesses: float
    """How often it is written or read by ops whose time is that of their memory; by others nothing is gained."""


def assign_fast_memory(claims: Sequence[FastMemoryRequest], room: float) -> list[bool]:
    """Which claims get the place they ask for, as XLA's memory space assignment gives it.

    First comes what gains most: the time of its accesses over the root of its size. Each has its place for all of its life
    or none. How places lie side by side is left out: all that is free counts as one.

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
    """The accesses of an array, put together where so little time lies between them that it stays in the vector memory.

    Args:
      gaps: seconds from the end of each access to the beginning of the next one.
      longest: the most that they may be within one stretch.

    Returns:
      The first and the last access of each stretch, by index.

    >>> residency_intervals([1.0, 8.0, 1.0, 10.0], 2.0)
    [(0, 1), (2, 3), (4, 4)]
    """
    found = [(0, 0)]
    for i, gap in enumerate(gaps, 1):
        found.append((i, i))
        if gap <= longest:
            found[-2:] = [(found[-2][0], i)]
    return found

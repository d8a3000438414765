"""How XLA's GPU backend sorts: by CUB's radix sort, by a kernel that keeps the first few, or by comparisons.

`SortRewriter` and `TopkSpecializer` of XLA decide; their conditions were seen in programs that JAX 0.10.2 compiled for an absent
H100.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardfn.cost.backends.library_call import UNKNOWN, LibraryCall
from shardfn.ir.model import Op, dtype_bits
from shardfn.ir.op_traits import SLICES
from shardfn.ir.partitioned import PartitionedProgram

_SMALL_SORT = 16385
"""Elements below which a sort by comparisons was measured."""

_RADIX_ROWS = {
    8: ((1, 1300), (9, 1300)),
    16: ((1, 512), (13, 2**16), (15, 2**15), (17, 2**14), (19, 2**13), (34, 2**12), (67, 2**11)),
    32: ((1, 22000), (27, 2**17), (32, 2**16), (39, 2**15), (45, 2**14), (53, 2**13)),
    64: ((1, 2**17), (56, 2**17), (71, 2**16), (93, 2**15), (355, 2**14)),
}
"""By bits of a key, from how many rows on CUB sorts rows that are longer than a number of elements, on a Hopper or Blackwell GPU:
first for a single row (`IsCubSortFasterOnH100`; other GPUs differ a little)."""

_MOST_PACKED = 2**31
"""Bytes of keys, and of values with their places, up to which floats are sorted with their places by CUB."""


def is_radix(bits: int, rows: int, row: int) -> bool:
    """Whether XLA leaves the sort of some rows to CUB.

    >>> is_radix(32, 1, 2**20), is_radix(32, 64, 2**16), is_radix(32, 4096, 4096), is_radix(32, 8, 2**18)
    (True, True, False, False)
    """
    single, *several = _RADIX_ROWS.get(bits, ((1, math.inf),))
    if rows == 1:
        return row > single[1] or bits == 8
    if bits == 32 and 89 <= rows <= 132 and row > 2**12:  # a row for each multiprocessor
        return True
    return any(rows >= least and row > longer for least, longer in several)


def radix_passes(bits: int, rows: int) -> tuple[int, int]:
    """Passes over the keys, and how often a pass reads a key: CUB's radix sort by segments takes 6 bits a pass after a pass that
    counts, and 4 bits of 8-bit keys (`DeviceSegmentedRadixSort`); that of a single row takes 8 bits, and counts once (Adinets and
    Merrill, "Onesweep", 2022).

    >>> radix_passes(32, 512), radix_passes(32, 1), radix_passes(8, 2)
    ((6, 2), (4, 1), (2, 2))
    """
    return (-(-bits // 8), 1) if rows == 1 else (-(-bits // (6 if bits > 8 else 4)), 2)


class _Rows(NamedTuple):
    """What is sorted on one device."""

    elements: int
    row: int
    bits: int
    """Of a key."""

    @property
    def rows(self) -> int:
        return self.elements // max(1, self.row)

    @property
    def is_radix(self) -> bool:
        return is_radix(self.bits, self.rows, self.row)

    def radix(self, value_bytes: int, copied_bytes: float = 0.0, made_bytes: float = 0.0) -> LibraryCall:
        """CUB's sort of keys with values of `value_bytes`; its work buffer is as large as both.

        Args:
          value_bytes: of the value that goes with a key.
          copied_bytes: read and written to make keys and values, and to take them apart again.
          made_bytes: of the arrays for that.
        """
        key = self.bits // 8
        passes, reads = radix_passes(self.bits, self.rows)
        one = 2 * (key + value_bytes) + (reads - 1) * key
        sort = ("sort", float(self.elements * one * passes))
        parts = (sort, ("memory", copied_bytes)) if copied_bytes else (sort,)
        return LibraryCall(parts, self.elements * (key + value_bytes) + made_bytes)

    def by_comparisons(self, arrays: int, has_places: bool) -> LibraryCall:
        """XLA's bitonic sort, in place. It is stable by the places of the elements, which are a further array."""
        bits = math.ceil(math.log2(max(2, self.row)))
        rounds, places = bits * (bits + 1) / 2, 0.0 if has_places else 4.0 * self.elements
        if self.elements < _SMALL_SORT:
            return LibraryCall((("bitonic sort", rounds),), places, in_place=True)
        return LibraryCall((("comparison sort", rounds * self.elements * arrays),), places, in_place=True)


def _is_places(partitioned: PartitionedProgram, v: int) -> bool:
    """Whether a value counts the elements of each row."""
    ops, makers = partitioned.graph.ops, partitioned.graph.makers
    while (at := makers.get(v, -1)) >= 0 and (partitioned.is_view(ops[at]) or ops[at].name in _REPEATED):
        v = ops[at].inputs[0]
    return at >= 0 and ops[at].name == "iota"


_REPEATED = SLICES | {"broadcast_in_dim"}


def sort(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """CUB sorts rows of the last dim by one key: alone, or integers with one array, or floats with their places. Keys of floats
    are integers of the same order, which a pass makes first, with the floats beside them."""
    if op.rule is None or len(op.rule.replicated) != 1:
        return UNKNOWN
    (factor,) = op.rule.replicated
    along = next(d for d, dim in enumerate(op.rule.operands[0]) if factor in dim)
    values = [partitioned.graph.values[v] for v in op.inputs]
    shape = partitioned.local_shape(op.inputs[0])
    rows = _Rows(math.prod(shape), shape[along], dtype_bits(values[0].dtype))
    key, is_float = rows.bits // 8, values[0].dtype.startswith(("f", "bf"))
    has_places = any(_is_places(partitioned, v) for v in op.inputs)
    if along == len(shape) - 1 and len(values) <= 2 and not op.combines and rows.is_radix:
        size = rows.elements
        if len(values) == 1:
            keys = float(size * key)
            return rows.radix(key, 2 * keys, 2 * keys) if is_float else rows.radix(0)
        if not is_float:
            return rows.radix(dtype_bits(values[1].dtype) // 8)
        if has_places and size * (key + _PACKED) <= _MOST_PACKED:
            made = float(size * (key + _PACKED))
            return rows.radix(_PACKED, 2 * made + 2.0 * size * (key + 4), made + size * (_PACKED - 4))
    return rows.by_comparisons(len(values), has_places)


_PACKED = 8
"""Bytes of a float and its place together."""


def top_k(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """A kernel keeps up to 16 of a row of at least 1,024 floats; else all of each row is sorted with its places, which a pass
    makes first."""
    shape, value = partitioned.local_shape(op.inputs[0]), partitioned.graph.values[op.inputs[0]]
    row, kept, is_float = shape[-1], partitioned.local_shape(op.outputs[0])[-1], value.dtype in ("f32", "bf16")
    if kept <= 16 and is_float and len(shape) <= 2 and row >= 1024:
        return LibraryCall((("top_k of few", float(partitioned.local_bytes(op.inputs[0]))),))
    return _sorted_with_places(partitioned, op)


def _sorted_with_places(partitioned: PartitionedProgram, op: Op) -> LibraryCall:
    shape, value = partitioned.local_shape(op.inputs[0]), partitioned.graph.values[op.inputs[0]]
    rows = _Rows(math.prod(shape), shape[-1], dtype_bits(value.dtype))
    keys, places = float(partitioned.local_bytes(op.inputs[0])), 4.0 * rows.elements
    if rows.is_radix:
        return rows.radix(4, places, keys + 2 * places)
    call = rows.by_comparisons(2, has_places=True)
    return call._replace(work_bytes=keys + places, in_place=False)


def approximate_top_k(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """XLA's GPU backend sorts all of each row with its places, as for `top_k` of many."""
    return _sorted_with_places(partitioned, op)

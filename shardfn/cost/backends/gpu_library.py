"""What XLA's GPU backend leaves to libraries or makes of many kernels: their bytes, FLOPs and work buffers.

Each rule has its source; rates are those of `Chip.kind_rates`. A call of a kind without a rate is not modelled: `Cost` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from shardfn.cost.devices.chips import Chip
from shardfn.ir.model import Op, dtype_bits
from shardfn.ir.op_traits import LIBRARY
from shardfn.ir.partitioned import PartitionedProgram


class LibraryCall(NamedTuple):
    """The kernels of one op on one device."""

    parts: tuple[tuple[str, float], ...]
    """By kind of kernel (`KINDS`) its work: bytes or FLOPs."""
    work_bytes: float = 0.0
    """Memory that it needs beside its operands and results."""

    def is_known(self, chip: Chip) -> bool:
        """Whether a chip has the rates of all its kinds."""
        return bool(self.parts) and all(chip.kind_rate(kind) is not None for kind, _ in self.parts)

    def seconds(self, chip: Chip, flops_s: float) -> float:
        """Modelled seconds.

        Args:
          chip: what it runs on; it has the rates of all kinds.
          flops_s: the chip's rate of FLOPs of this op's dtype.
        """
        total = 0.0
        for kind, work in self.parts:
            base = {
                "memory": chip.memory_bytes_s,
                "elements": chip.vector_flops or chip.flops,
                "matmul": flops_s,
                "launches": 1 / (chip.launch_s or 1e-6),
            }
            total += work / (base[KINDS[kind]] * (chip.kind_rate(kind) or 1.0))
        return total


UNKNOWN = LibraryCall(())
"""The call of an op whose time has no rule that was checked."""


KINDS = {
    "memory": "memory",
    "matmul": "matmul",
    "sort": "memory",
    "bitonic sort": "launches",
    "fft": "memory",
    "cholesky": "elements",
    "triangular solve of a vector": "memory",
    "reduction": "elements",
    "2D convolution": "matmul",
    "3D convolution": "matmul",
    "3D weight gradient": "matmul",
}
"""What a kind's work is: bytes of memory, FLOPs of elements or of matmuls, or rounds that take a part of a kernel's launch.
`Chip.kind_rates` has the part of the chip's rate of that which the kind reaches; "memory" and "matmul" reach all."""

_SMALL_SORT = 16385
"""Elements from which a sort is CUB's (`SortRewriter` of XLA); smaller ones are one bitonic kernel."""


def radix_passes(bits: int, rows: int) -> tuple[int, int]:
    """Passes over the keys, and how often a pass reads a key: CUB's radix sort by segments takes 6 bits a pass after a pass that
    counts, and 4 bits of 8-bit keys (`DeviceSegmentedRadixSort`); that of a single row takes 8 bits, and counts once (Adinets and
    Merrill, "Onesweep", 2022).

    >>> radix_passes(32, 512), radix_passes(32, 1), radix_passes(8, 2)
    ((6, 2), (4, 1), (2, 2))
    """
    return (-(-bits // 8), 1) if rows == 1 else (-(-bits // (6 if bits > 8 else 4)), 2)


def _radix_sort(partitioned: PartitionedProgram, op: Op, along: int, key: int, payload_bytes: int) -> LibraryCall:
    shape, bits = partitioned.local_shape(op.inputs[0]), dtype_bits(partitioned.graph.values[op.inputs[0]].dtype)
    elements = math.prod(shape)
    passes, key_reads = radix_passes(bits, elements // max(1, shape[along]))
    one = 2 * (key + payload_bytes) + (key_reads - 1) * key
    return LibraryCall((("sort", float(elements * one * passes)),), float(elements * (key + payload_bytes)))


def _sort(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """Floats alone are sorted by integer keys of the same order, which a pass makes first, with the floats beside them."""
    values = [partitioned.graph.values[v] for v in op.inputs]
    if op.rule is None or len(op.rule.replicated) != 1:
        return UNKNOWN
    (factor,) = op.rule.replicated
    along = next(d for d, dim in enumerate(op.rule.operands[0]) if factor in dim)
    shape = partitioned.local_shape(op.inputs[0])
    if math.prod(shape) < _SMALL_SORT:
        rounds = math.ceil(math.log2(max(2, shape[along])))
        return LibraryCall((("bitonic sort", rounds * (rounds + 1) / 2),))
    if len(values) > 2:
        return UNKNOWN
    key = dtype_bits(values[0].dtype) // 8
    makes_keys = len(values) == 1 and values[0].dtype.startswith(("f", "bf"))
    payload = dtype_bits(values[1].dtype) // 8 if len(values) > 1 else key * makes_keys
    call = _radix_sort(partitioned, op, along, key, payload)
    if not makes_keys:
        return call
    keys = float(partitioned.local_bytes(op.inputs[0]))
    return LibraryCall((*call.parts, ("memory", 2 * keys)), call.work_bytes + 2 * keys)


def _top_k(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """All of each row is sorted with its indices, which a pass makes first; up to 16 have a kernel (`TopkSpecializer`)."""
    shape, value = partitioned.local_shape(op.inputs[0]), partitioned.graph.values[op.inputs[0]]
    if partitioned.local_shape(op.outputs[0])[-1] <= 16 or math.prod(shape) < _SMALL_SORT:
        return UNKNOWN
    call = _radix_sort(partitioned, op, len(shape) - 1, dtype_bits(value.dtype) // 8, 4)
    keys, places = partitioned.local_bytes(op.inputs[0]), 4.0 * math.prod(shape)
    return LibraryCall((*call.parts, ("memory", places)), call.work_bytes + keys + 2 * places)


def _fft(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """cuFFT: a kernel for each dim up to 4,096 long, two beyond, each of which reads and writes the complex array, of a real one
    the half that is kept. An inverse one is scaled by a further pass (`FftThunk`)."""
    if op.rule is None:
        return UNKNOWN
    taken, made = op.inputs[0], op.outputs[0]
    values = partitioned.graph.values
    longest = [*map(max, partitioned.local_shape(taken), partitioned.local_shape(made))]
    passes = sum(1 if longest[d] <= 4096 else 2 for d in op.transformed)
    own, other = float(partitioned.local_bytes(taken)), float(partitioned.local_bytes(made))
    held = max(partitioned.local_bytes(v) for v in (taken, made) if values[v].dtype.startswith("complex"))
    scaled = 2 * other if op.combines.startswith("I") else 0.0
    return LibraryCall((("fft", own + other + 2.0 * held * (passes - 1) + scaled),))


def _cholesky(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """cuSOLVER's `potrf` of one matrix: n³ / 3 FLOPs (Golub and Van Loan), most of their time in panels."""
    shape = partitioned.local_shape(op.inputs[0])
    if math.prod(shape[:-2]) != 1 or partitioned.graph.values[op.inputs[0]].dtype != "f32":
        return UNKNOWN
    return LibraryCall((("cholesky", shape[-1] ** 3 / 3.0),))


def _solve(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """cuBLAS's `trsv` of one right-hand side, which reads the matrix once."""
    matrix, sides = (partitioned.local_shape(v) for v in op.inputs[:2])
    if math.prod(matrix[:-2]) != 1 or math.prod(sides) != matrix[-1]:
        return UNKNOWN
    return LibraryCall((("triangular solve of a vector", float(partitioned.local_bytes(op.inputs[0]))),))


def _ragged_dot(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """Every row is multiplied by the matrix of every expert: of each expert there is a copy of the rows, zero where the row is
    another's, and the copies are stored and contracted (`RaggedDotRewriter`). `flops` count each row once."""
    experts = max(partitioned.local_shape(v)[0] for v in (op.inputs[1], op.outputs[0]) if _is_stack(partitioned, v))
    masked = float(experts * partitioned.local_bytes(op.inputs[0]))
    return LibraryCall((("memory", masked), ("matmul", flops * experts)), masked)


def _is_stack(partitioned: PartitionedProgram, v: int) -> bool:
    return len(partitioned.local_shape(v)) == 3


def _convolution(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """cuDNN's convolutions. Those in three dimensions copy the image and the result to have channels last, and back. There is no
    checked rate of those in one dimension or in groups."""
    form = op.convolution
    if form is None:
        return None
    if len(form.image) == 2 and not form.grouped:
        return LibraryCall((("2D convolution", flops),))
    if len(form.image) != 3 or form.grouped:
        return UNKNOWN
    image, kernel, result = op.inputs[0], partitioned.local_shape(op.inputs[1]), op.outputs[0]
    is_gradient = math.prod(kernel[d] for d in form.kernel) > math.prod(
        partitioned.local_shape(result)[d] for d in form.result
    )
    channels = [n for d, n in enumerate(kernel) if d not in form.kernel]
    copied = float(partitioned.local_bytes(image) + partitioned.local_bytes(op.inputs[1] if is_gradient else result))
    if not is_gradient and 1 in channels:
        copied = 0.0
    kind = "3D weight gradient" if is_gradient else "3D convolution"
    return LibraryCall(((kind, flops), ("memory", 2.0 * copied)), copied)


def _reduce(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """The elements of a reduction, which its operand's bytes hide unless the operand is computed inside. A warp takes several
    rows of 16 or fewer at half the rate; short rows of other lengths are no rows to XLA (`RowReductionGetRowsPerWarp`)."""
    shape = partitioned.local_shape(op.inputs[0])
    reduced, row = {d for _, d in op.reduced}, 1
    for d in reversed(range(len(shape))):
        if d not in reduced:
            break
        row *= shape[d]
    if 1 < row < 32 and 32 % row:
        return None
    is_short = 1 < row < 32
    return LibraryCall((("reduction", math.prod(shape) * (1.0 + is_short)),))


def _unknown(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    return UNKNOWN


Rule = Callable[[PartitionedProgram, Op, float], LibraryCall | None]
"""From an op and its FLOPs to its call; None for an op that is a kernel like others."""

GPU_LIBRARY: dict[str, Rule] = {
    "sort": _sort,
    "top_k": _top_k,
    "fft": _fft,
    "cholesky": _cholesky,
    "custom_call cusolver_potrf_ffi": _cholesky,
    "triangular_solve": _solve,
    "ragged_dot": _ragged_dot,
    "convolution": _convolution,
    "reduce": _reduce,
}
"""The rules, by op."""

UNCHECKED: dict[str, Rule] = dict.fromkeys((*LIBRARY.difference(("rng", "rng_bit_generator")), "ragged_dot"), _unknown)
"""Ops of which nothing was measured on a TPU."""

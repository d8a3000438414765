"""What XLA's GPU backend leaves to libraries or makes of many kernels: their bytes, FLOPs and work buffers.

Each rule has its source; rates are those of `Chip.kind_rates`. A call of a kind without a rate is not modelled: `Cost` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardfn.cost.backends.gpu_sorts import approximate_top_k, sort, top_k
from shardfn.cost.backends.library_call import UNKNOWN, LibraryCall
from shardfn.ir.model import Op
from shardfn.ir.op_traits import LIBRARY
from shardfn.ir.partitioned import PartitionedProgram


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
    masked = float(sum(masked_rows(partitioned, op).values()))
    return LibraryCall((("memory", masked), ("matmul", flops * _experts(partitioned, op))), masked)


def masked_rows(partitioned: PartitionedProgram, op: Op) -> dict[int, int]:
    """The operands of a ragged matmul that are stored for each expert, with the bytes of all. The gradient of the matrices
    contracts the rows of both operands."""
    rows = op.inputs[: 1 + _is_stack(partitioned, op.outputs[0])]
    return {v: _experts(partitioned, op) * partitioned.local_bytes(v) for v in rows}


def _experts(partitioned: PartitionedProgram, op: Op) -> int:
    return max(partitioned.local_shape(v)[0] for v in (op.inputs[1], op.outputs[0]) if _is_stack(partitioned, v))


def _is_stack(partitioned: PartitionedProgram, v: int) -> bool:
    return len(partitioned.local_shape(v)) == 3


def _convolution(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """cuDNN's convolutions. Those in three dimensions copy the image and the result to have channels last, and back. There is no
    checked rate of those in one dimension or in groups. Where an image has holes, it is padded with them, and they are multiplied
    (`ConvPaddingLegalization`), but for the gradient of a convolution with strides, whose kernel is reversed."""
    form = op.convolution
    if form is None:
        return None
    holes = math.prod(w.spacing for w in op.window_dims if w.over < 0)
    if holes > 1 and not _is_reversed(partitioned, op.inputs[1]):
        padded = float(holes * partitioned.local_bytes(op.inputs[0]))
        if len(form.image) != 2 or form.grouped:
            return UNKNOWN._replace(work_bytes=padded)
        return LibraryCall((("2D convolution", flops * holes), ("memory", padded)), padded)
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


def _is_reversed(partitioned: PartitionedProgram, v: int) -> bool:
    ops, makers = partitioned.graph.ops, partitioned.graph.makers
    while (at := makers.get(v, -1)) >= 0 and (partitioned.is_view(ops[at]) or ops[at].name in ("transpose", "convert")):
        v = ops[at].inputs[0]
    return at >= 0 and ops[at].name == "reverse"


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


def _gather(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """The rows that a gather reads."""
    return LibraryCall((("gather", float(partitioned.local_bytes(op.outputs[0]))),))


def _scatter(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """The rows that a scatter reads and writes where it puts its updates."""
    return LibraryCall((("scatter", 2.0 * partitioned.local_bytes(op.inputs[-1])),))


def _windowed(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """A cumulative sum or its like, whose window is as long as the array: XLA adds up pieces first, and then in each piece, so it
    reads the array twice. Other windows are a kernel like others."""
    shape = partitioned.local_shape(op.inputs[0])
    if not any(w.extent >= shape[w.dim] > 1 and w.stride == 1 for w in op.window_dims):
        return None
    read, made = (sum(map(partitioned.local_bytes, side)) for side in (op.inputs, op.outputs))
    return LibraryCall((("cumulative reduction", 2.0 * read + made),))


def _pooling_gradient(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    """XLA finds the place of the largest element of each window, an index array for each dim, and scatters to those."""
    found = 4.0 * (1 + len(partitioned.local_shape(op.inputs[1]))) * math.prod(partitioned.local_shape(op.inputs[1]))
    moved = sum(map(partitioned.local_bytes, (*op.inputs[:2], *op.outputs))) + 2 * found
    return LibraryCall((("pooling gradient", moved),), found)


def _unknown(partitioned: PartitionedProgram, op: Op, flops: float) -> LibraryCall | None:
    return UNKNOWN


def own_order(partitioned: PartitionedProgram, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The operands that a library reads in an order of its own, and the results that it leaves in one, by position: solvers
    have matrices column by column, and cuDNN reads channels last, but in three dimensions before the spatial ones. XLA transposes
    arguments and results of the program for them. An operand that a call writes over is not among them: its copy is the result.
    """
    if op.name == "triangular_solve":
        return (0,), (0,) if _is_matrix(partitioned, op.outputs[0]) else ()
    if op.name.startswith(SOLVERS):
        return (), tuple(at for at, v in enumerate(op.outputs) if _is_matrix(partitioned, v))
    if form := op.convolution:
        shapes = [partitioned.local_shape(v) for v in (*op.inputs[:2], op.outputs[0])]
        spatial = form.image, form.kernel, form.result
        moved = [_is_moved(shape, dims) for shape, dims in zip(shapes, spatial, strict=True)]
        return tuple(at for at in (0, 1) if moved[at]), (0,) if moved[2] else ()
    return (), ()


SOLVERS = ("custom_call cusolver_", "custom_call cusparse_")
"""How the names of custom calls begin that solve by a library; they write over their first operand."""


def _is_matrix(partitioned: PartitionedProgram, v: int) -> bool:
    return min((1, 1, *partitioned.local_shape(v))[-2:]) > 1


def _is_moved(shape: Sequence[int], spatial: Sequence[int]) -> bool:
    """Whether the channels of an image are where cuDNN does not read them: last in three dimensions, or not last in fewer."""
    channels = max(d for d in range(len(shape)) if d not in spatial)
    is_last = channels == len(shape) - 1
    return shape[channels] > 1 and is_last == (len(spatial) == 3)


Rule = Callable[[PartitionedProgram, Op, float], LibraryCall | None]
"""From an op and its FLOPs to its call; None for an op that is a kernel like others."""

GPU_LIBRARY: dict[str, Rule] = {
    "sort": sort,
    "top_k": top_k,
    "custom_call ApproxTopK": approximate_top_k,
    "fft": _fft,
    "cholesky": _cholesky,
    "custom_call cusolver_potrf_ffi": _cholesky,
    "triangular_solve": _solve,
    "ragged_dot": _ragged_dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "reduce_window": _windowed,
    "select_and_scatter": _pooling_gradient,
    "gather": _gather,
    "scatter": _scatter,
}
"""The rules, by op."""

HAS_BUFFERS = frozenset(
    name for name, rule in GPU_LIBRARY.items() if rule not in (_reduce, _windowed, _gather, _scatter)
)
"""The ops that need memory beside their operands and results, or have these in an order of their own."""

UNCHECKED: dict[str, Rule] = dict.fromkeys((*LIBRARY.difference(("rng", "rng_bit_generator")), "ragged_dot"), _unknown)
"""Ops of which nothing was measured on a TPU."""

"""FLOPs, memory traffic and time of one device, from local shapes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardfn.cost.backends.cpu import all_groups
from shardfn.cost.backends.loop_copies import loop_copies
from shardfn.cost.devices.chips import Chip
from shardfn.cost.fusion_walk import FusionPlan
from shardfn.cost.platforms import backend_of, fuse, kernels
from shardfn.ir.model import Graph, Op, WindowDim, is_gpu
from shardfn.ir.op_traits import CONTRACTIONS, EXPENSIVE, HAS_COST, OP_TRAITS, PARTIAL_READS, UNTIMED, UPDATES
from shardfn.ir.partitioned import PartitionedProgram


def _last(partitioned: PartitionedProgram, op: Op) -> int:
    shape = partitioned.local_shape(op.inputs[0]) if op.inputs else ()
    return shape[-1] if shape else 1


def _depth(partitioned: PartitionedProgram, op: Op) -> int:
    depth = 1
    for i, d in op.reduced:
        depth *= partitioned.local_shape(op.inputs[i])[d]
    return depth


def _convolution(partitioned: PartitionedProgram, op: Op, out: int) -> float:
    groups = all_groups(partitioned, op) if partitioned.platform == "cpu" else 1
    return 2.0 * _on_image(partitioned, op, out * _depth(partitioned, op)) * groups


def _fft(partitioned: PartitionedProgram, op: Op, out: int) -> float:
    shape = partitioned.local_shape(op.outputs[0])
    return out * 5 * sum(math.log2(max(2, shape[d])) for d in op.transformed or [-1])


def _factored(partitioned: PartitionedProgram, op: Op, count: int) -> float:
    """`count` k² (m - k / 3) FLOPs for each m x k matrix of a stack, m ≥ k: LU with a count of 1, Householder's QR with 2."""
    *stack, rows, columns = partitioned.local_shape(op.inputs[0])
    large, small = max(rows, columns), min(rows, columns)
    return count * math.prod(stack) * small**2 * (large - small / 3)


FLOPS: dict[str, Callable[[PartitionedProgram, Op, int], float]] = {
    "none": lambda partitioned, op, out: 0.0,
    "per_element": lambda partitioned, op, out: float(out * _depth(partitioned, op)),
    "contraction": lambda partitioned, op, out: float(out * _depth(partitioned, op) * 2),
    "convolution": _convolution,
    # Comparison sort; radix-2 FFT; Golub and Van Loan, "Matrix Computations", for linear algebra. Those of `top_k` and of a
    # random number are rough.
    "sort": lambda partitioned, op, out: out * math.log2(max(2, _last(partitioned, op))),
    "top_k": lambda partitioned, op, out: (
        out * (_last(partitioned, op) / max(1, partitioned.local_shape(op.outputs[0])[-1]) * 2)
    ),
    "fft": _fft,
    "cholesky": lambda partitioned, op, out: out * (_last(partitioned, op) / 3),
    "ragged_dot": lambda partitioned, op, out: (
        2.0 * math.prod(partitioned.local_shape(op.inputs[0])) * partitioned.local_shape(op.outputs[0])[-1]
    ),
    "triangular_solve": lambda partitioned, op, out: out * float(_last(partitioned, op)),
    "lu": lambda partitioned, op, out: _factored(partitioned, op, 1),
    "qr": lambda partitioned, op, out: _factored(partitioned, op, 2),
    "library_solve": lambda partitioned, op, out: (
        float(math.prod(partitioned.local_shape(op.inputs[1]))) * partitioned.local_shape(op.inputs[0])[-1]
    ),
    "rng_bit_generator": lambda partitioned, op, out: out * 10.0,
}
"""FLOPs of one op on one device, once, from the elements of its largest result. `OpTraits.flops` names the row."""

LIBRARY = {
    "potrf": "cholesky", "trsm": "library_solve", "getrf": "lu", "geqrf": "qr", "orgqr": "qr", "ungqr": "qr",
    "LuDecomposition": "lu", "Qr": "qr", "ProductOfElementaryHouseholderReflectors": "qr",
}  # fmt: skip
"""The row of a call of LAPACK, cuSOLVER or cuBLAS, by the routine, and of XLA's own on a TPU."""

FACTORS = frozenset(LIBRARY.values())


@functools.cache
def _row(name: str) -> str:
    """The row of `FLOPS` of an op.

    >>> _row("custom_call lapack_spotrf_ffi"), _row("custom_call cusolver_getrf_ffi"), _row("custom_call Qr"), _row("add")
    ('cholesky', 'lu', 'qr', 'per_element')
    """
    traits = OP_TRAITS.get(name)
    if traits is not None and traits.flops:
        return traits.flops
    routine = re.fullmatch(r"custom_call (?:(?:lapack_[sdcz]|cusolver_|cublas_)(\w+?)(?:_batched)?_ffi|(\w+))", name)
    return LIBRARY.get(routine[1] or routine[2], "per_element") if routine else "per_element"


def op_flops(partitioned: PartitionedProgram, op: Op) -> float:
    """FLOPs of one op on one device, once: 2 for a multiply-add, 1 for an element; a loop's ops run `op.trips` times."""
    if not op.outputs:
        return 0.0
    out = max(map(partitioned.local_elements, op.outputs))
    return FLOPS[_row(op.name)](partitioned, op, out)


def matrix_flops(partitioned: PartitionedProgram) -> float:
    """FLOPs of matmuls and convolutions on one device in one call: those that a compiled program reports."""
    return sum(op_flops(partitioned, op) * op.trips for op in partitioned.graph.ops if op.name in CONTRACTIONS)


def _on_image(partitioned: PartitionedProgram, op: Op, reached: int) -> int:
    """How many of the `reached` elements of a convolution's windows are elements of the image, not padding or holes.

    Along a sharded dimension a halo fills the window, and all elements count.
    """
    windows = [window for window in op.window_dims if window.over < 0]
    for window, kernel in zip(windows, (window for window in op.window_dims if window.over >= 0), strict=True):
        size = partitioned.local_shape(op.inputs[0])[window.dim]
        out = partitioned.local_shape(op.outputs[0])[window.out_dim]
        if out and size == partitioned.graph.values[op.inputs[0]].shape[window.dim]:
            found, every = hits(size, out, window, kernel.stride)
            reached = reached * found // every
    return reached


@functools.lru_cache(4096)
def hits(size: int, out: int, window: WindowDim, apart: int) -> tuple[int, int]:
    """How many window positions along one dimension fall on an element of the operand, and how many there are.

    Args:
      size: elements of the operand.
      out: elements of the result.
      window: offset, extent and spacing of the window.
      apart: distance between the positions of a window.

    >>> hits(4, 4, WindowDim(0, 0, 0, low=-1, extent=3), 1)  # two of twelve are on padding
    (10, 12)
    """
    starts = np.arange(out) * window.stride + window.low
    at = starts[:, None] + np.arange(0, window.extent, apart)
    found = (at >= 0) & (at <= (size - 1) * window.spacing) & (at % window.spacing == 0)
    return int(found.sum()), found.size


@dataclasses.dataclass(frozen=True)
class Work:
    """One call on one device: FLOPs, bytes between it and its memory, seconds, and the ops without a cost rule."""

    flops: float
    bytes_moved: float
    seconds: float
    unmodelled_ops: tuple[str, ...]


def work(partitioned: PartitionedProgram, chip: Chip, fusion: FusionPlan | None = None) -> Work:
    """The work of one device in one call, without collectives.

    A kernel (`platforms.kernels`), with what is fused into its ops, takes its launch and the larger of its FLOPs over the
    chip's rate and its bytes over the memory's rate (the roofline: Williams, Waterman, Patterson 2009). Matmuls run at the
    rate of their operands' dtype and of the precision asked for, other ops at the vector units' rate. An op without a rule
    is charged for its bytes, and listed.
    """
    fusion = fusion or fuse(partitioned)
    ops = partitioned.graph.ops
    total = moved = seconds = 0.0
    unmodelled_ops = dict.fromkeys(_named("associative_scan", where) for where in associative_scans(partitioned))
    for run in kernel_runs(partitioned, chip, fusion):
        for op in map(ops.__getitem__, run.kernel):
            if has_own_time(op) and not is_modelled(partitioned, op, chip):
                unmodelled_ops.setdefault(_named(op.name, op.where))
        total += run.flops * run.trips
        moved += run.bytes_moved * run.trips
        seconds += run.total_s
    return Work(total, moved, seconds, tuple(unmodelled_ops))


def _named(name: str, where: str) -> str:
    return f"{name} ({where})" if where else name


def associative_scans(partitioned: PartitionedProgram) -> list[str]:
    """Where a GPU's program has associative scans: trees of strided slices and pads. XLA computes more of their levels again in
    several kernels than are modelled; one H100 took twice the time."""
    if not is_gpu(partitioned.platform):
        return []
    steps = collections.Counter(
        op.where
        for op in partitioned.graph.ops
        if op.name in ("slice", "pad") and any(w.stride > 1 or w.spacing > 1 for w in op.window_dims)
    )
    return [where for where, count in steps.items() if count >= _LEVELS]


_LEVELS = 8
"""Strided slices and pads of one line that are no single step, such as the halves of an image or their gradient."""


class KernelRun(NamedTuple):
    """One run of a kernel on one device, with its launch; all zeros where nothing in it takes time."""

    kernel: Sequence[int]
    """Its ops."""
    flops: float
    bytes_moved: float
    seconds: float
    trips: int
    """Runs in one call."""
    is_memory_bound: bool
    """Whether its bytes take at least as long as its FLOPs."""

    @property
    def total_s(self) -> float:
        """Seconds of all its runs in one call."""
        return self.seconds * self.trips


def kernel_runs(partitioned: PartitionedProgram, chip: Chip, fusion: FusionPlan) -> Iterator[KernelRun]:
    """The kernels of a program in its order."""
    ops = partitioned.graph.ops
    copied = loop_copies(partitioned, fusion) if is_gpu(partitioned.platform) else {}
    for kernel in kernels(partitioned, fusion):
        if kernel[0] in copied:
            sizes, trips = zip(
                *((partitioned.local_bytes(seen), trips) for seen, _, trips in copied[kernel[0]]), strict=True
            )
            moved = 2.0 * sum(sizes)
            yield KernelRun(
                kernel, 0.0, moved, moved / chip.memory_bytes_s + len(sizes) * chip.launch_s, trips[0], True
            )
            continue
        timed = [i for i in kernel if has_own_time(ops[i])]
        flops, moved, seconds = once(partitioned, timed, chip, fusion)
        launched_s = seconds + chip.launch_s if timed else 0.0
        is_memory_bound = moved / chip.memory_bytes_s >= seconds
        yield KernelRun(kernel, flops, moved, launched_s, ops[(timed or kernel)[0]].trips, is_memory_bound)


def once(
    partitioned: PartitionedProgram, kernel: Sequence[int], chip: Chip, fusion: FusionPlan
) -> tuple[float, float, float]:
    """FLOPs, bytes and seconds of one run of a kernel, without its launch.

    Args:
      partitioned: the program.
      kernel: those of the kernel's ops that have time of their own; what is fused into them is added. Zeros if there are none.
      chip: its rates.
      fusion: how XLA fuses the ops.
    """
    graph = partitioned.graph
    rules, flops, time, library_s = backend_of(partitioned.platform).library, 0.0, 0.0, 0.0
    for at in dict.fromkeys(n for i in kernel for n in (i, *(fusion.inside[i] or ()))):
        step = graph.ops[at]
        if step.name != "add_parts":
            count = op_flops(partitioned, step)
            flops += count
            speed = rate(graph, step, chip)
            call = rules[step.name](partitioned, step, count) if step.name in rules else None
            library_s += call.seconds(chip, speed) if call else 0.0
            time += 0.0 if call and call.is_known(chip) else count / speed
    read = sum(size for size, _, _ in reads(partitioned, kernel, fusion).values())
    size = read + sum(_written(partitioned, graph.ops[i], fusion) for i in kernel)
    return flops, size, max(time, library_s, size / chip.memory_bytes_s)


def is_modelled(partitioned: PartitionedProgram, op: Op, chip: Chip) -> bool:
    """Whether there is a rule for the time of an op on a chip, with a rate that was measured where it needs one."""
    if op.name == "reduce":  # its kind has a rate on each chip
        return True
    rule = backend_of(partitioned.platform).library.get(op.name)
    call = rule(partitioned, op, op_flops(partitioned, op)) if rule else None
    return op.name in HAS_COST if call is None else call.is_known(chip)


def has_own_time(op: Op) -> bool:
    """Whether an op that runs by itself takes time of its own."""
    return op.name not in UNTIMED


def rate(graph: Graph, op: Op, chip: Chip) -> float:
    """FLOP/s of an op. Special functions use an eighth of the lanes (CUDA C++ Programming Guide: 16 of 128)."""
    # The factors of a library are mostly matmuls: at their rate the time is a lower bound.
    if op.name in CONTRACTIONS or op.name == "ragged_dot" or (op.name not in OP_TRAITS and _row(op.name) in FACTORS):
        return chip.rate(graph.values[op.inputs[0]].dtype, op.precision, _contracts_rows(op))
    lanes = chip.vector_flops or chip.flops
    return lanes / 8 if op.name in EXPENSIVE else lanes


def _contracts_rows(op: Op) -> bool:
    """Whether a matmul contracts the rows of both operands, as a weight's gradient does: neither has its contracting dimension
    last."""
    return op.name == "dot_general" and op.rule is not None and all(op.rule.matmul_roles(s)[-1:] != [2] for s in (0, 1))


def _written(partitioned: PartitionedProgram, op: Op, fusion: FusionPlan) -> float:
    size_of = _size_of(partitioned)
    if op.name in UPDATES and op.inputs:
        filled = (
            0 if op.inputs[0] in fusion.stored else size_of(op.inputs[0])
        )  # the operand, if it is computed in the same buffer first
        return filled + 2.0 * size_of(op.inputs[UPDATES[op.name]])
    return float(sum(map(size_of, op.outputs)))


def reads(
    partitioned: PartitionedProgram, kernel: Sequence[int], fusion: FusionPlan
) -> dict[int, tuple[float, Op, int]]:
    """What the ops of a kernel and those fused into them read from memory, each value once: bytes, and the op and operand that
    read the most.
    """
    size_of = _size_of(partitioned)
    read: dict[int, tuple[float, Op, int]] = {}
    seen: dict[int, int] = {}
    made: set[int] = set()
    for at in (n for i in kernel for n in (*(fusion.inside[i] or ()), i)):
        step = partitioned.graph.ops[at]
        if fusion.inside[at] is None and partitioned.is_view(step):  # its reader tells how much of it is read
            seen[step.outputs[0]] = seen.get(step.inputs[0], step.inputs[0])
            continue
        for position, v in enumerate(step.inputs):
            v = seen.get(v, v)
            if v not in fusion.stored or v in made:
                continue
            size = size_of(v)
            if position == 0 and step.name == "gather" and size > _CACHED and is_gpu(partitioned.platform):
                size = size_of(step.outputs[0]) + (read[v][0] if v in read else 0.0)
            elif position == 0 and step.name in PARTIAL_READS:
                size = min(size, size_of(step.outputs[0]))
            elif position == 0 and step.name in UPDATES:
                size = 0
            if v not in read or size > read[v][0]:
                read[v] = size, step, position
        made.update(step.outputs)
    return read


_CACHED = 2**25
"""Bytes of a table beyond which a GPU reads each row that is gathered from memory: less than the cache of any preset."""


def _size_of(partitioned: PartitionedProgram) -> Callable[[int], float]:
    """Local bytes of a value; on GPUs without the extra bytes of split-K parts."""
    return partitioned.element_bytes if is_gpu(partitioned.platform) else partitioned.local_bytes

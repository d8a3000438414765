"""What each XLA backend does with a partitioned program: one row each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from shardfn.cost.backends.cpu import on_cpu
from shardfn.cost.backends.cpu_fusion import CpuFuser
from shardfn.cost.backends.gpu import on_gpu
from shardfn.cost.backends.gpu_fusion import GpuFuser
from shardfn.cost.backends.gpu_kernels import gpu_kernels
from shardfn.cost.backends.gpu_library import GPU_LIBRARY, UNCHECKED, Rule
from shardfn.cost.backends.tpu import gathered_arguments, row_growth, row_major_and_narrow_bytes, scattered_values
from shardfn.cost.backends.tpu_fusion import TpuFuser
from shardfn.cost.devices.chips import Chip
from shardfn.cost.fusion_walk import Fuser, FusionPlan
from shardfn.ir.model import Graph, is_gpu
from shardfn.ir.partitioned import PartitionedProgram

Array = np.ndarray


def _each_alone(partitioned: PartitionedProgram, fusion: FusionPlan) -> list[tuple[int, ...]]:
    return [(i,) for i, inner in enumerate(fusion.inside) if inner is not None]


@dataclasses.dataclass(frozen=True)
class Backend:
    """The rules of one XLA backend."""

    combined_bytes: Mapping[str, float]
    """The kinds of collectives that it combines, with the most bytes of one combined collective's results."""
    fuser: type[Fuser] = Fuser
    """How it fuses ops; `Fuser` itself has the common rules."""
    rewrite: Callable[[PartitionedProgram, Chip | None], PartitionedProgram] = lambda partitioned, _: partitioned
    """How it rewrites a program before scheduling."""
    kernels: Callable[[PartitionedProgram, FusionPlan], list[tuple[int, ...]]] = _each_alone
    """The ops of each kernel, each with what is fused into it."""
    asynchronous: frozenset[str] = frozenset()
    """The kinds of collectives that it starts early and overlaps with compute."""
    schedules_breadth_first: bool = False
    """Whether it schedules breadth first, in an order that does not depend on shardings; else it frees memory early."""
    stored_bytes: Callable[[PartitionedProgram, Iterable[int]], Mapping[int, int]] = lambda partitioned, narrow: {}
    """Bytes of the values whose storage differs from their elements, such as `narrow` ones (`FusionPlan.narrow`)."""
    row_major_values: Callable[[Graph], frozenset[int]] = lambda graph: frozenset()
    """The values that it stores row by row, each row padded."""
    row_major_copies: Callable[[Graph], frozenset[int]] = lambda graph: frozenset()
    """The arguments of which it stores a row-major copy."""
    row_growth: Callable[[Array, Array], Array] = lambda columns, size: np.ones_like(size)
    """The factor by which padding enlarges row-major arrays, from the elements of a row and the bytes without padding."""
    library: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    """The ops that are other kernels than an op's own, by name."""


_BACKENDS = {
    "": Backend({"all-reduce": math.inf}),
    "cpu": Backend(
        {"all-reduce": math.inf},
        CpuFuser,
        rewrite=lambda partitioned, _: on_cpu(partitioned),
        schedules_breadth_first=True,
    ),
    "tpu": Backend(
        {"all-reduce": 120 * 2**20},  # libtpu's `xla_jf_crs_combiner_threshold_in_bytes`
        TpuFuser,
        asynchronous=frozenset(("all-gather", "reduce-scatter", "collective-permute")),
        stored_bytes=row_major_and_narrow_bytes,
        row_major_values=scattered_values,
        row_major_copies=gathered_arguments,
        row_growth=row_growth,
        library=UNCHECKED,
    ),
    # The defaults of `xla_gpu_all_reduce_combine_threshold_bytes` and its like.
    "gpu": Backend(
        dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), 30 * 2**20 + 7),
        GpuFuser,
        rewrite=on_gpu,
        kernels=gpu_kernels,
        library=GPU_LIBRARY,
        asynchronous=frozenset(("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")),
    ),
}


def backend_of(platform: str) -> Backend:
    """The rules of a platform's backend.

    >>> backend_of("cpu").combined_bytes
    {'all-reduce': inf}
    """
    return _BACKENDS["gpu" if is_gpu(platform) else platform]


def fuse(partitioned: PartitionedProgram) -> FusionPlan:
    """Fuse as XLA's instruction fusion does, readers first, by the rules of the program's platform.

    An op is fused into its readers if all of them can compute it and run as one. It is duplicated into several readers
    if it is computed from one array as large as itself. Matmuls, collectives, loops and library calls read from memory.
    A reshape takes no time.
    """
    return backend_of(partitioned.platform).fuser(partitioned).fusion()


def kernels(partitioned: PartitionedProgram, fusion: FusionPlan) -> list[tuple[int, ...]]:
    """The ops of each kernel, each with what is fused into it. Kernels are in the order of their first ops."""
    return backend_of(partitioned.platform).kernels(partitioned, fusion)

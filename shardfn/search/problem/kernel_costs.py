"""The cost of an op as a part of the kernels that XLA computes it in.

A kernel takes the larger of its compute time and its memory time (`cost.compute`), and a maximum is no sum over ops. The search
needs a sum. So an op is charged its FLOPs in kernels that are compute-bound in the unsharded program, and its bytes in kernels
that are memory-bound there.
"""

from __future__ import annotations

import dataclasses

from shardfn.cost.compute import has_own_time, once, reads
from shardfn.cost.devices.chips import Chip
from shardfn.cost.fusion_walk import FusionPlan
from shardfn.cost.platforms import kernels
from shardfn.ir.op_traits import CONTRACTIONS
from shardfn.ir.partitioned import PartitionedProgram


@dataclasses.dataclass(frozen=True)
class KernelShare:
    """What an op adds to the time of its kernels: FLOPs to compute-bound ones, bytes to memory-bound ones. A matmul adds
    both."""

    computes: int
    """Kernels to whose time its FLOPs add."""
    reads: tuple[int, ...]
    """For each operand, the kernels to whose time its bytes add: those in which no other op reads more of it from memory."""
    is_written: bool
    """Whether the bytes of its results add to the time."""
    launches: int
    """Kernels whose launch it is charged: it is their first op."""


def kernel_shares(partitioned: PartitionedProgram, fusion: FusionPlan, chip: Chip) -> list[KernelShare]:
    """The kernels of each op, and its part in them on a chip.

    Args:
      partitioned: the unsharded program; sharding is assumed not to change what bounds a kernel.
      fusion: how XLA fuses its ops.
      chip: its rates decide what bounds a kernel.
    """
    ops = partitioned.graph.ops
    of = {id(op): n for n, op in enumerate(ops)}
    computes, taken, written = [0] * len(ops), [[0] * len(op.inputs) for op in ops], [False] * len(ops)
    launches = [0] * len(ops)
    for kernel in kernels(partitioned, fusion):
        kernel = [at for at in kernel if has_own_time(ops[at])]
        if kernel:
            launches[kernel[0]] += 1
        _, size, seconds = once(partitioned, kernel, chip, fusion)
        is_compute_bound = size < seconds * chip.memory_bytes_s
        for at in kernel:
            written[at] = not is_compute_bound or ops[at].name in CONTRACTIONS
        for n in dict.fromkeys(n for at in kernel for n in (*(fusion.inside[at] or ()), at)):
            computes[n] += is_compute_bound or ops[n].name in CONTRACTIONS
        for _, step, position in reads(partitioned, kernel, fusion).values():
            taken[of[id(step)]][position] += not is_compute_bound or step.name in CONTRACTIONS
    return [KernelShare(*each) for each in zip(computes, map(tuple, taken), written, launches, strict=True)]

"""What an op costs where XLA computes it: inside a kernel with others, or in several.

A kernel takes the larger of the times of its operations and its bytes (`cost.compute`), which is no sum over its ops. The
search wants one, as each op has its own layouts: so each op has a part of what takes the time of its kernels where
nothing is cut.
"""

from __future__ import annotations

import dataclasses

from shardfn.cost.compute import has_own_time, once, reads
from shardfn.cost.devices.chips import Chip
from shardfn.cost.fusion_walk import FusionPlan
from shardfn.ir.model import PartitionedProgram
from shardfn.ir.op_traits import CONTRACTIONS


@dataclasses.dataclass(frozen=True)
class KernelShare:
    """What an op adds to the time of the kernels that it is computed in, one or several, as XLA puts the whole program together:
    to those that take as long as their operations, or as long as their bytes. A product is of both kinds."""

    computes: int
    """In how many its operations count."""
    reads: tuple[int, ...]
    """In how many the bytes of each operand do, as the first of those in there that read it from memory."""
    is_written: bool
    """Whether the bytes of its results do."""


def kernel_shares(partitioned: PartitionedProgram, fusion: FusionPlan, chip: Chip) -> list[KernelShare]:
    """Where each op of a flow is computed, and what of it counts there on a chip.

    Args:
      flow: with everything whole: what takes the time of a kernel is taken to be the same however it is cut.
      fusion: how its ops are put together.
      chip: its rates say whether a kernel takes as long as its operations or as its bytes.
    """
    ops = partitioned.graph.ops
    of = {id(op): n for n, op in enumerate(ops)}
    computes, taken, written = [0] * len(ops), [[0] * len(op.inputs) for op in ops], [False] * len(ops)
    for at, (op, inner) in enumerate(zip(ops, fusion.inside, strict=True)):
        if inner is None or not has_own_time(op):
            continue
        _, size, seconds = once(partitioned, at, chip, fusion)
        is_slow = size < seconds * chip.memory_bytes_s  # to compute
        written[at] = not is_slow or op.name in CONTRACTIONS
        for n in (*inner, at):
            computes[n] += is_slow or ops[n].name in CONTRACTIONS
        for _, step, position in reads(partitioned, op, inner, fusion).values():
            taken[of[id(step)]][position] += not is_slow or step.name in CONTRACTIONS
    return [KernelShare(*each) for each in zip(computes, map(tuple, taken), written, strict=True)]

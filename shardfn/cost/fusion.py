"""What XLA computes where it is read: which values take a place in memory, and what each op reads from there."""

from __future__ import annotations

from shardfn.cost.backends.cpu_fusion import CpuFuser
from shardfn.cost.backends.tpu_fusion import TpuFuser
from shardfn.cost.fusion_walk import Fuser, FusionPlan
from shardfn.ir.model import PartitionedProgram

__all__ = ["FusionPlan", "fuse"]

FUSERS: dict[str, type[Fuser]] = {"cpu": CpuFuser, "tpu": TpuFuser}
"""By platform; the others fuse by the rules that all have in common."""


def fuse(partitioned: PartitionedProgram) -> FusionPlan:
    """Fuse as XLA's instruction fusion does, readers first, by the rules of the flow's platform.

    An op is computed where its readers are if all of them can do so (elementwise ops, moves of data, reductions over the
    last dim) and they run as one; in several places too, if it comes from one array as large
    as itself in the end. Products, collectives, loops and library calls read from memory. A reshape is no work at all.

    What CPUs and TPUs do otherwise is said in `fusion_cpu` and `fusion_tpu`.
    """
    return FUSERS.get(partitioned.platform, Fuser)(partitioned).fusion()

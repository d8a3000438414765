"""Fusion: which values are stored in memory, and what each op reads from there."""

from __future__ import annotations

from shardfn.cost.backends.cpu_fusion import CpuFuser
from shardfn.cost.backends.tpu_fusion import TpuFuser
from shardfn.cost.fusion_walk import Fuser, FusionPlan
from shardfn.ir.model import PartitionedProgram

__all__ = ["FusionPlan", "fuse"]

FUSERS: dict[str, type[Fuser]] = {"cpu": CpuFuser, "tpu": TpuFuser}
"""By platform; the others fuse by the common rules."""


def fuse(partitioned: PartitionedProgram) -> FusionPlan:
    """Fuse as XLA's instruction fusion does, readers first, by the rules of the program's platform.

    An op is fused into its readers if all of them can compute it and run as one. It is duplicated into several readers
    if it is computed from one array as large as itself. Matmuls, collectives, loops and library calls read from memory.
    A reshape is no work.
    """
    return FUSERS.get(partitioned.platform, Fuser)(partitioned).fusion()

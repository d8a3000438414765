"""How a process with one device takes part in a program for many, without the others: a row for each platform that can."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RehearsalPlatform:
    """A platform on which one process may stand for all.

    Attributes:
      device: what its devices are called.
      environment: the variables of the process that measures.
      flags: flags of XLA, in its environment.
      options: options of JAX for a number of devices, set before a backend starts.
      profiled: compiler options for the run that the profiler sees, where it would not see single kernels otherwise.
    """

    device: str
    environment: Callable[[], Mapping[str, str]]
    flags: tuple[str, ...] = ()
    options: Callable[[int], Mapping[str, Any]] = lambda count: {}
    profiled: tuple[tuple[str, str], ...] = ()


def _cuda_environment() -> dict[str, str]:
    """One GPU, the first that is visible, whose memory is taken as it is needed, nearly all of it."""
    return {
        "JAX_PLATFORMS": "cuda,cpu",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95"),
    }


CUDA = RehearsalPlatform(
    device="GPU",
    environment=_cuda_environment,
    # Else the compiler waits for ever for the autotuning results of processes that do not exist (JAX 0.11.2).
    flags=("--xla_gpu_shard_autotuning=false",),
    # Mocks NCCL: collectives return at once, with wrong values.
    options=lambda count: {"mock_num_gpu_processes": count} if count > 1 else {},
    # A command buffer is one launch of many kernels, which the profiler cannot tell apart.
    profiled=(("xla_gpu_enable_command_buffer", ""),),
)

PLATFORMS: dict[str, RehearsalPlatform] = {"cuda": CUDA}
"""By the platform of a plan, as JAX lowers for it."""

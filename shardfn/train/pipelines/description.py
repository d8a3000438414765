"""The content of each pipeline stage, as data and as a table."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from shardfn.train.pipelines.executor import DATA, TENSOR, PipelineExecutor
from shardfn.train.pipelines.flat_parameters import SHARDED
from shardfn.train.pipelines.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class StageDescription:
    """One stage; `share` is the stage's fraction of the model's modelled cost."""

    stage: int
    device: int
    chunk: int
    ops: int
    parameters: int
    share: float
    sends: int
    """Bytes sent to the next stage for a micro-batch."""


@dataclasses.dataclass(frozen=True)
class PipelineDescription:
    """A pipeline's stages, its schedule and the bytes on each device; `print` shows a table."""

    stages: tuple[StageDescription, ...]
    schedule: Schedule
    data: int
    """Devices along the data axis."""
    tensor: int
    """Devices along the tensor axis."""
    buffer_bytes: int
    """Parameters in flat buffers, in bytes per device."""
    shared_bytes: int
    """Parameters that several stages read, in bytes per device."""
    kept_bytes: int
    """Stage inputs kept from a forward to its backward, in bytes per device."""
    over_best: float
    """Modelled cost of the longest stage over that of the best contiguous split."""

    def to_dict(self) -> dict[str, Any]:
        """The description as plain data, for JSON."""
        schedule = self.schedule
        found = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("stages", "schedule")
        }
        return found | {
            "stages": [dataclasses.asdict(row) for row in self.stages],
            "schedule": {"name": schedule.name, "micro_size": schedule.micro_size, "bubble": schedule.bubble},
        }

    def __str__(self) -> str:
        s = self.schedule
        return "\n".join([
            f"{'stage':>5} {'device':>6} {'chunk':>5} {'ops':>5} {'parameters':>12} {'share':>6} {'sends B':>10}",
            *(f"{r.stage:>5} {r.device:>6} {r.chunk:>5} {r.ops:>5} {r.parameters:>12,} {r.share:>6.1%} {r.sends:>10,}"
              for r in self.stages),
            f"{s.name}, {s.micro_size} micro-batches: bubble {s.bubble:.1%}; mesh stage={s.devices} x data={self.data} "
            f"x tensor={self.tensor}",
            f"bytes per device: parameters {self.buffer_bytes + self.shared_bytes:,} (shared by stages "
            f"{self.shared_bytes:,}), stage inputs kept {self.kept_bytes:,}",
            f"longest stage: {self.over_best:.3f} x the best contiguous split (modelled)",
        ])  # fmt: skip


def pipeline_description(executor: PipelineExecutor, schedule: Schedule) -> PipelineDescription:
    """Describe a pipeline."""
    layout, split, mesh = executor.layout, executor.split, executor.mesh
    total = sum(stage.cost_s for stage in split.stages) or 1.0
    itemsize = lambda name: jnp.dtype(name.removesuffix(SHARDED)).itemsize  # noqa: E731
    elements = lambda stage: [math.prod(layout.slots[i].shape) for i in layout.of_stage(stage)]  # noqa: E731
    shared = zip(layout.of_stage(-1), elements(-1), strict=True)
    return PipelineDescription(
        tuple(
            StageDescription(
                i, i % layout.devices, i // layout.devices, len(stage.equations), sum(elements(i)), stage.cost_s / total,
                executor.message_bytes if i < executor.count - 1 else 0,
            )
            for i, stage in enumerate(split.stages)
        ),
        schedule, mesh.shape[DATA], mesh.shape[TENSOR],
        sum(length * itemsize(name) for name, length in layout.lengths) * layout.chunks,
        sum(n * jnp.dtype(layout.slots[i].dtype).itemsize for i, n in shared),
        schedule.slots * executor.message_bytes, split.longest_s / split.bound_s if split.bound_s else 1.0,
    )  # fmt: skip

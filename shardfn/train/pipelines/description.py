"""What a pipeline's stages hold, work out and send, as data and as a table."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from shardfn.train.pipelines.executor import DATA, TENSOR, PipelineExecutor
from shardfn.train.pipelines.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class StageRow:
    """One stage. Costs are modelled, and a guess: `share` is the part of the whole model's."""

    stage: int
    device: int
    chunk: int
    ops: int
    parameters: int
    share: float
    sends: int
    """Bytes handed to the next stage for a micro-batch."""


@dataclasses.dataclass(frozen=True)
class PipelineDescription:
    """The stages, the schedule, and bytes on each device; `largest` is the costliest stage's share, over the best cut's."""

    rows: tuple[StageRow, ...]
    schedule: Schedule
    data: int
    tensor: int
    row_bytes: int
    shared_bytes: int
    kept_bytes: int
    """Inputs of stages that are kept between a forward and its backward."""
    over_best: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("rows", "schedule")}
        schedule = self.schedule
        return found | {
            "stages": [dataclasses.asdict(row) for row in self.rows],
            "schedule": {"name": schedule.name, "micro_size": schedule.micro_size, "bubble": schedule.bubble},
        }

    def __str__(self) -> str:
        head = f"{'stage':>5} {'device':>6} {'chunk':>5} {'ops':>5} {'parameters':>12} {'share':>6} {'sends B':>10}"
        lines = [head] + [
            f"{r.stage:>5} {r.device:>6} {r.chunk:>5} {r.ops:>5} {r.parameters:>12,} {r.share:>6.1%} {r.sends:>10,}"
            for r in self.rows
        ]
        s = self.schedule
        lines += [
            f"{s.name}, {s.micro_size} micro-batches: bubble {s.bubble:.1%}; grid stage={s.devices} x data={self.data} "
            f"x tensor={self.tensor}",
            f"bytes per device: parameters {self.row_bytes + self.shared_bytes:,} (shared by stages {self.shared_bytes:,}), "
            f"inputs kept {self.kept_bytes:,}",
            f"longest stage: {self.over_best:.3f} x that of the best contiguous cut (modelled)",
        ]
        return "\n".join(lines)


def described(machine: PipelineExecutor, schedule: Schedule) -> PipelineDescription:
    """Describe it."""
    layout, cut = machine.layout, machine.cut
    total = sum(stage.cost_s for stage in cut.stages) or 1.0
    rows = []
    for i, stage in enumerate(cut.stages):
        sizes = sum(math.prod(layout.places[leaf].shape) for leaf in layout.of_stage(i))
        sends = machine.sends.bytes + machine.tells.bytes if i < machine.count - 1 else 0
        rows.append(
            StageRow(i, i % layout.devices, i // layout.devices, len(stage.ops), sizes, stage.cost_s / total, sends)
        )
    row_bytes = sum(length * jnp.dtype(kind.removesuffix("_cut")).itemsize for kind, length in layout.lengths)
    shared = sum(math.prod(layout.places[i].shape) * jnp.dtype(layout.places[i].dtype).itemsize for i in layout.beside)
    return PipelineDescription(
        tuple(rows), schedule, machine.mesh.shape[DATA], machine.mesh.shape[TENSOR], row_bytes * layout.chunks, shared,
        schedule.slots * (machine.sends.bytes + machine.tells.bytes),
        cut.largest / cut.bound if cut.bound else 1.0,
    )  # fmt: skip

"""The checked options of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from shardfn.cost.devices import hardware
from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.training_settings import TrainingSettings
from shardfn.train.collectives.buckets import FusionOptions
from shardfn.train.steps.gradients import Reduction
from shardfn.train.steps.modes import Mode
from shardfn.train.steps.optimizer_parallel import OptimizerParallel, optimizer_parallel_of


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options of `train.step`, checked."""

    loss_fn: Callable[..., Any]
    optimizer: Any
    mode: Mode
    defaults: Defaults
    """Those in force, with the step's own settings, without its mode and the layout of its data."""
    has_aux: bool
    mutable: tuple[str, ...]
    """The collections of Linen variables that the loss returns."""
    device: Any
    micro_batches: int
    compute_dtype: Any
    cross_batch: bool
    own: tuple[str, ...]
    frozen: tuple[str, ...]
    donate: bool
    gathers_again: bool
    """Whether sharded parameters are gathered again for the backward pass."""
    opt_state_memory_kind: str | None
    """The memory of the optimizer's arrays between steps; None for that of the devices."""
    fusion: FusionOptions | None
    """Which collectives are fused; None leaves that to XLA."""
    reuse: int | None
    """The largest number of layers in one scan; None scans nothing."""
    recompute: Any
    """How many layers the backward pass rematerialises, or "auto"."""
    options: Mapping[str, Any]
    """The options for `shard`."""

    @property
    def settings(self) -> TrainingSettings:
        """The step's own settings."""
        return self.defaults.training

    @property
    def reduction(self) -> Reduction:
        """How the devices' gradients become one."""
        return Reduction(self.settings.gradients_mean, self.settings.gradient_fp32_sync)

    @property
    def zero(self) -> OptimizerParallel | None:
        """Optimizer parallel; None for none."""
        return optimizer_parallel_of(self.settings)

    @property
    def is_plain(self) -> bool:
        """Whether a step is loss, gradients and update only, so that `shard` can plan and run it as it is."""
        once = self.settings.loss_repeated_mean
        return self.zero is None and self.micro_batches == 1 and self.reduction.mean and once

    def hardware(self) -> Hardware:
        """The devices of the mode."""
        count = 1 if self.mode.one_device else self.defaults.device_count
        return hardware.resolve(self.device, count=count, default=self.defaults.platform)

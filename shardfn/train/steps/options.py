"""What was asked of a training step, checked: the data that every stage of it takes."""

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
    """All that was asked for, checked."""

    loss_fn: Callable[..., Any]
    optimizer: Any
    mode: Mode
    defaults: Defaults
    """Those in force, with the step's own settings; its mode and its data's layout have been acted on."""
    has_aux: bool
    mutable: tuple[str, ...]
    """The collections of Linen's variables that the loss gives anew."""
    device: Any
    micro_batches: int
    compute_dtype: Any
    cross_batch: bool
    own: tuple[str, ...]
    frozen: tuple[str, ...]
    donate: bool
    gathers_again: bool
    """Whether parameters in pieces are put together again for the backward pass."""
    opt_state_memory_kind: str | None
    """The memory in which the optimizer's arrays lie between steps; None for that of the devices."""
    fusion: FusionOptions | None
    """Which collectives travel together."""
    reuse: int | None
    """The most equal blocks that one scanned body stands for; None folds nothing."""
    recompute: Any
    """How many of them are worked out again in the backward pass, or "auto"."""
    options: Mapping[str, Any]
    """What goes on to `shard`."""

    @property
    def settings(self) -> TrainingSettings:
        """The step's own settings."""
        return self.defaults.training

    @property
    def reduction(self) -> Reduction:
        """How gradients become one: a mean, unless you said otherwise."""
        return Reduction(self.settings.gradients_mean, self.settings.gradient_fp32_sync)

    @property
    def zero(self) -> OptimizerParallel | None:
        """What of the optimizer is cut."""
        return optimizer_parallel_of(self.settings)

    @property
    def is_plain(self) -> bool:
        """Whether a step is no more than loss, gradients and update, wherever things lie."""
        once = self.settings.loss_repeated_mean
        return self.zero is None and self.micro_batches == 1 and self.reduction.mean and once

    def hardware(self) -> Hardware:
        """The devices of the mode."""
        count = 1 if self.mode.one_device else self.defaults.device_count
        return hardware.resolve(self.device, count=count, default=self.defaults.platform)

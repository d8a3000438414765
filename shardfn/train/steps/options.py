"""The options of a training step, and MindSpore's parallel modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardfn.cost.devices import hardware
from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import ContextError, fail, nearest
from shardfn.frontend import defaults
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.other_words import mode_fix
from shardfn.frontend.training_settings import TrainingSettings
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps.shardings import OptimizerParallel, optimizer_parallel_of


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a mode treats devices, the loss and shardings."""

    name: str
    one_device: bool = False
    per_device: bool = False
    """Call the loss on each device with its part of the batch, then reduce gradients; a batch statistic sees one part.
    Otherwise the loss is called once on the global batch, and XLA partitions it."""
    layouts: str = "replicated"
    """Of parameters: "replicated", "given" by the user, or "searched" where the user leaves them open."""


MODES: Mapping[str, Mode] = MappingProxyType({
    mode.name: mode
    for mode in (
        Mode("stand_alone", one_device=True),
        Mode("data_parallel", per_device=True),
        Mode("hybrid_parallel", per_device=True),
        Mode("semi_auto_parallel", layouts="given"),
        Mode("auto_parallel", layouts="searched"),
    )
})  # fmt: skip


def mode_of(name: str | None) -> Mode:
    """The mode of that name; None is the context's if set, else "auto_parallel".

    >>> mode_of("data_parallel").per_device, mode_of(None).layouts
    (True, 'searched')
    """
    name = name or defaults.current().parallel_mode or "auto_parallel"
    if name not in MODES:
        meant = mode_fix(name)
        fail(ContextError, f"there is no mode {name!r}", where=f"mode = {name!r}",
             why=f"the modes are MindSpore's, {', '.join(MODES)}; a style is an option of its own",
             fix=f"write {meant}" if meant else nearest(name, MODES))  # fmt: skip
    return MODES[name]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The arguments of `train.step`, by their names; `step_problems` checks them."""

    loss_fn: Callable[..., Any]
    optimizer: Any
    mode: Mode
    defaults: Defaults
    """Those in force, with the step's own settings, without its mode and the layout of its data."""
    dataset_strategy: str | tuple[Any, ...] | None
    """The sharding of the batch from MindSpore's context, if it is set."""
    has_aux: bool
    mutable: tuple[str, ...]
    """The collections of Linen variables that the loss returns."""
    device: Any
    micro_batches: int
    compute_dtype: Any
    cross_batch: bool
    layerwise_parallel: tuple[str, ...]
    frozen: tuple[str, ...]
    ids: Mapping[str, Any]
    """Where the ids of each table among the parameters are in the batch, by the table's path."""
    donate: bool
    parallel_optimizer_comm_recompute: bool
    opt_state_memory_kind: str | None
    """The memory of the optimizer's arrays between steps; None for that of the devices."""
    fusion: Any
    """As the user gave it; then `FusionOptions`, or None, which leaves fusion to XLA."""
    reuse: Any
    """As the user gave it; then the largest number of layers in one scan, or None, which scans nothing."""
    recompute: Any
    """How many layers the backward pass rematerialises, or "auto"."""
    options: Mapping[str, Any]
    """The options for `shard`."""
    check: bool = False
    """Whether the first step is compared with the unsharded one."""

    @property
    def settings(self) -> TrainingSettings:
        """The step's own settings."""
        return self.defaults.training

    @property
    def zero(self) -> OptimizerParallel | None:
        """Optimizer parallel; None for none."""
        return optimizer_parallel_of(self.settings)

    @property
    def has_own_shardings(self) -> bool:
        """Whether the mode or a pipeline gives all shardings, so that none is searched or read from a file."""
        return self.mode.layouts == "replicated" or isinstance(self.loss_fn, Pipeline)

    @property
    def is_plain(self) -> bool:
        """Whether a step is loss, gradients and update only, so that `shard` can plan and run it as it is."""
        settings = self.settings
        is_mean = settings.gradients_mean and settings.loss_repeated_mean
        return self.zero is None and self.micro_batches == 1 and is_mean

    def hardware(self) -> Hardware:
        """The devices of the mode."""
        count = 1 if self.mode.one_device else self.defaults.device_count
        return hardware.resolve(self.device, count=count, default=self.defaults.platform)

"""Settings of a training step that are asked for and have no effect in it: each is said once, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from shardfn.errors import warn
from shardfn.frontend.training_settings import OPTIMIZER, TrainingSettings
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps.options import StepOptions

NO_FURTHER_SHARDS = (
    "gradient_accumulation_shard=True has no effect: the batch is sharded over some of the mesh's axes only, and a gradient "
    'cannot be scattered over these alone; use mode="data_parallel"'
)
"""What only a plan knows: said by `communication.gradient_sync`."""


def warn_of_settings(asked: StepOptions) -> None:
    """Warn of each setting without an effect."""
    for name, why, fix in without_effect(asked):
        warn(f"{name} has no effect: {why}; {fix}")


def without_effect(asked: StepOptions) -> Iterator[tuple[str, str, str]]:
    """The settings without an effect: what is set, why it does nothing, and what to do.

    Args:
      asked: the arguments of a step as the user gave them, with the context's settings.
    """
    settings, mode = asked.settings, asked.mode
    default = TrainingSettings()
    piped = isinstance(asked.loss_fn, Pipeline)
    one = not piped and asked.hardware().count == 1
    each = not one and not piped and (mode.per_device or asked.cross_batch or asked.micro_batches > 1)
    if settings.parameter_broadcast and jax.process_count() == 1:
        yield ("parameter_broadcast=True", "there is one process, whose parameters all devices have", "leave it out")
    yield from _of_the_optimizer(asked, one, each)
    if not settings.gradient_fp32_sync and not each:
        why = "there is one device" if one else "XLA inserts the sums of gradients, in the gradients' own dtype"
        yield ("gradient_fp32_sync=False", why, "leave it out" if one or piped else 'use mode="data_parallel"')
    if not settings.loss_repeated_mean and mode.layouts == "replicated" and not piped:
        yield (
            "loss_repeated_mean=False",
            f"in mode {mode.name!r} no two devices compute the same loss",
            "leave it out",
        )
    if one and (settings.comm_fusion or settings.all_reduce_fusion_config or asked.fusion):
        names = [name for name in ("comm_fusion", "all_reduce_fusion_config") if getattr(settings, name)]
        yield (", ".join([*names, *["fusion"] * bool(asked.fusion)]), "one device sends nothing", "leave it out")
    if asked.cross_batch and mode.per_device:
        yield (
            "cross_batch=True",
            f"in mode {mode.name!r} each device works on its part of the batch anyway",
            "leave it out",
        )
    if not piped:
        for name in ("pipeline_stages", "pipeline_config", "auto_pipeline"):
            value = getattr(settings, name)
            if value not in (getattr(default, name), 1):
                yield (f"{name}={value!r}", "the loss of this step is no pipeline",
                       "make one: train.step(train.pipeline(loss, micro_size), ...)")  # fmt: skip
    elif asked.dataset_strategy not in (None, "data_parallel"):
        yield (f"dataset_strategy={asked.dataset_strategy!r}", "a pipeline shards dimension 0 of the batch over its data axis",
               "leave it out")  # fmt: skip


def _of_the_optimizer(asked: StepOptions, one: bool, each: bool) -> Iterator[tuple[str, str, str]]:
    settings, zero = asked.settings, asked.zero
    config = dict(settings.parallel_optimizer_config)
    if zero is None:
        changed = {name: value for name, value in config.items() if value != OPTIMIZER[name]}
        if settings.optimizer_weight_shard_size != -1:
            changed["optimizer_weight_shard_size"] = settings.optimizer_weight_shard_size
        for name, value in changed.items():
            yield (f"{name}={value!r}", "optimizer parallel is off", "set enable_parallel_optimizer=True")
    elif one:
        yield ("enable_parallel_optimizer=True", "there is one device, which holds all of the optimizer's states",
               "use more devices, or leave it out")  # fmt: skip
    elif zero.accumulation_shard:
        name = "gradient_accumulation_shard=True"
        if asked.micro_batches == 1:
            yield (name, "there is one micro-batch, and nothing is accumulated", "set micro_batches")
        elif zero.level == 1:
            yield (name, 'at optimizer_level "level1" gradients are not sharded', 'set optimizer_level to "level2"')
        elif not each:
            yield (name, "a pipeline keeps the gradients of its own stages", "leave it out")

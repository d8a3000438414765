"""Settings of a training step that are asked for and have no effect in it: each is said once, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardfn.errors import warn
from shardfn.frontend.strategy import AUTO, short
from shardfn.frontend.training_settings import OPTIMIZER, TrainingSettings
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shardings import StepShardings

WithoutEffect = tuple[str, str, str]
"""What is set, why it does nothing, and what to do."""


def warn_of_settings(found: Iterable[WithoutEffect]) -> None:
    """Warn of each setting without an effect."""
    for name, why, fix in found:
        warn(f"{name} has no effect: {why}; {fix}")


def without_effect(asked: StepOptions) -> Iterator[WithoutEffect]:
    """The settings without an effect, as far as the options show it.

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
    yield from _of_the_search(asked)
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
    if one and asked.layerwise_parallel:
        yield ("layerwise_parallel", "there is one device, whose parameters are its own anyway", "leave it out")
    if asked.cross_batch and mode.per_device:
        yield (
            "cross_batch=True",
            f"in mode {mode.name!r} each device works on its part of the batch anyway",
            "leave it out",
        )
    if asked.opt_state_memory_kind is not None and asked.hardware().platform == "cpu":
        yield (f"opt_state_memory_kind={asked.opt_state_memory_kind!r}", "on cpu, host and device memory are the same",
               "leave it out")  # fmt: skip
    if not piped:
        for name in ("pipeline_stages", "pipeline_config", "auto_pipeline"):
            value = getattr(settings, name)
            if value != getattr(default, name) and not (name == "pipeline_stages" and value == 1):
                yield (f"{name}={value!r}", "the loss of this step is no pipeline",
                       "make one: train.step(train.pipeline(loss, micro_size), ...)")  # fmt: skip
    elif asked.dataset_strategy not in (None, "data_parallel"):
        yield (f"dataset_strategy={asked.dataset_strategy!r}", "a pipeline shards dimension 0 of the batch over its data axis",
               "leave it out")  # fmt: skip


def without_effect_on(
    asked: StepOptions, shardings: StepShardings, trained: Sequence[Any], each: bool
) -> Iterator[WithoutEffect]:
    """The settings without an effect that only the shardings of a step show.

    Args:
      asked: the options of the step.
      shardings: those of the step, with optimizer parallel.
      trained: the parameters that are trained, or their shapes.
      each: whether the loss is called on each device's part of the batch.
    """
    settings, zero, piped = asked.settings, asked.zero, isinstance(asked.loss_fn, Pipeline)
    axes = set(shardings.batch_axes)
    if (
        each
        and axes != set(shardings.mesh.axis_names)
        and zero is not None
        and zero.level == 2
        and zero.accumulation_shard
    ):
        yield ("gradient_accumulation_shard=True",
               "the batch is sharded over some of the mesh's axes only, and a gradient cannot be scattered over these alone",
               'use mode="data_parallel"')  # fmt: skip
    if zero is not None and shardings.mesh.size > 1 and not shardings.has_optimizer_parallel:
        config = {name: value for name, value in settings.parallel_optimizer_config.items() if value != OPTIMIZER[name]}
        least = f"and has at least {zero.threshold} kB per device" if zero.threshold else ""
        yield (f"parallel_optimizer_config={config}" if config else "enable_parallel_optimizer=True",
               f"no array that is replicated has a dimension that the devices divide {least}".rstrip(),
               "lower parallel_optimizer_threshold" if zero.threshold else "leave it out")  # fmt: skip
    if asked.cross_batch and not each and shardings.mesh.size > 1:
        yield ("cross_batch=True", "no mesh axis shards the batch", "leave it out, or shard the batch by in_strategy")
    if not settings.gradient_fp32_sync and each and all(
        jnp.dtype(asked.compute_dtype or x.dtype).itemsize > 2 for x in trained
    ):  # fmt: skip
        yield ("gradient_fp32_sync=False", "no gradient has 16 bits", "leave it out")
    if (
        not settings.loss_repeated_mean
        and asked.mode.layouts != "replicated"
        and shardings.mesh.size == shardings.count
    ):
        yield ("loss_repeated_mean=False", "no two devices compute the same loss", "leave it out")
    if not settings.gradients_mean and shardings.count == 1:
        yield ("gradients_mean=False", "a pipeline returns one loss for the batch" if piped else "no two devices share the batch",
               'pass loss="sum" to train.pipeline' if piped else "leave it out")  # fmt: skip


_SWITCHES = ("fully_use_devices", "enable_algo_approxi", "tensor_slice_align_enable")


def _of_the_search(asked: StepOptions) -> Iterator[WithoutEffect]:
    """Settings of a search where nothing is searched; those of `SHARDING_OPTIONS` are errors as arguments of the step."""
    style, layout, plan, entries = (asked.options.get(k) for k in ("style", "layout", "parameter_plan", "in_strategy"))
    given = (*(plan or {}).values(), *(entries or ()))
    if asked.mode.layouts == "given" and style and layout is None and not any(entry is AUTO for entry in given):
        yield (f"style={style!r}", f"in mode {asked.mode.name!r} parameter_plan says how parameters are sharded, and others are "
               "replicated", 'use mode="auto_parallel", or AUTO for entries that the style chooses')  # fmt: skip
    if not asked.has_own_shardings:
        return
    piped = isinstance(asked.loss_fn, Pipeline)
    current = asked.defaults
    named: dict[str, Any] = {"level": asked.options.get("level"), "search_mode": current.search_mode,
                             "strategy_ckpt_load_file": current.layout_file or None}  # fmt: skip
    named |= {name: True for name in _SWITCHES if getattr(current.algorithm, name)}
    own = "a pipeline has its own shardings" if piped else f"mode {asked.mode.name!r} has its own shardings"
    for name, value in named.items():
        if value is not None:
            yield (f"{name}={short(value)}", own,
                   "leave it out" if piped else 'use mode="semi_auto_parallel" or "auto_parallel"')  # fmt: skip


def _of_the_optimizer(asked: StepOptions, one: bool, each: bool) -> Iterator[WithoutEffect]:
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

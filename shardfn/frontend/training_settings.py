"""Settings of `train.step` and `train.pipeline`, by MindSpore's names; `CHECKS` says what each may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from shardfn.errors import ContextError, Problem, raise_problems
from shardfn.frontend.other_words import optimizer_level_of
from shardfn.frontend.value_checks import (
    Check,
    boolean,
    clipped,
    in_turn,
    indices,
    integer,
    one_of,
    record,
    wrong,
)

FUSION: Mapping[str, Any] = MappingProxyType(
    {"openstate": True}
    | {kind: {"mode": "auto", "config": None} for kind in ("allreduce", "allgather", "reducescatter")}
)
OPTIMIZER: Mapping[str, Any] = MappingProxyType({
    "gradient_accumulation_shard": False,
    "parallel_optimizer_threshold": 64,
    "optimizer_weight_shard_size": -1,
    "optimizer_level": "level1",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """What a training step does unless its arguments say otherwise; None stands for a setting that nobody set."""

    gradients_mean: bool = True
    gradient_fp32_sync: bool = True
    loss_repeated_mean: bool = True
    parameter_broadcast: bool = False
    enable_parallel_optimizer: bool = False
    parallel_optimizer_config: Mapping[str, Any] = dataclasses.field(default_factory=lambda: OPTIMIZER, hash=False)
    optimizer_weight_shard_size: int = -1
    comm_fusion: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    all_reduce_fusion_config: tuple[int, ...] | None = None
    pipeline_stages: int | None = None
    pipeline_config: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    auto_pipeline: bool = False

    def changed(self, caller: str, **values: Any) -> TrainingSettings:
        """These settings with the values that are not None; entries missing from a dict keep their defaults.

        Raises:
          ContextError, ContextTypeError: all values that a setting cannot have.

        >>> TrainingSettings().changed("train.step", gradients_mean=False, comm_fusion=None).gradients_mean
        False
        """
        values = {name: value for name, value in values.items() if value is not None}
        raise_problems((
            dataclasses.replace(problem, where=f"{caller}({name}={clipped(value)})")
            for name, value in values.items()
            for problem in CHECKS[name](name, value)
        ), ContextError)  # fmt: skip
        for name, default in (("comm_fusion", FUSION), ("parallel_optimizer_config", OPTIMIZER)):
            if name in values:
                values[name] = {**default, **values[name]}
        if "all_reduce_fusion_config" in values:
            values["all_reduce_fusion_config"] = tuple(values["all_reduce_fusion_config"])
        return dataclasses.replace(self, **values)


def _unset(name: str, value: Any) -> Iterator[Problem]:
    if value is not None:
        yield wrong(name, value, "mode 'auto' takes no configuration", "give None, or change the mode")


def _fusion(*modes: str) -> Check:
    # MindSpore's own check lets a threshold of 0 pass.
    config: Mapping[str, Check] = {"auto": _unset, "size": integer(0), "index": indices}

    def fits(name: str, value: dict[str, Any]) -> Iterator[Problem]:
        yield from config[value["mode"]](f"{name}['config']", value.get("config"))

    def check(name: str, value: Any) -> Iterator[Problem]:
        is_auto = isinstance(value, dict) and value.get("mode") == "auto"  # which has nothing to configure
        entries = record(complete=True, mode=one_of(*modes), config=lambda name, value: iter(()))
        yield from in_turn(entries, fits)(name, {"config": None, **value} if is_auto else value)

    return check


def _accumulation(name: str, value: dict[str, Any]) -> Iterator[Problem]:
    if value.get("optimizer_level") == "level3" and value.get("gradient_accumulation_shard"):
        yield wrong(f"{name}['optimizer_level']", "level3", "level3 does not go with gradient_accumulation_shard",
                    "drop gradient_accumulation_shard, or use level2")  # fmt: skip


def _optimizer_level(name: str, value: Any) -> Iterator[Problem]:
    meant = optimizer_level_of(value)
    for problem in one_of("level1", "level2", "level3")(name, value):
        yield dataclasses.replace(problem, fix=f'write "{meant}"') if meant else problem


def shard_size(name: str, value: Any) -> Iterator[Problem]:
    """A number of devices, or -1 for all. MindSpore refuses its own default of -1 in some places."""
    if type(value) is not int or value != -1:
        yield from integer(1)(name, value)


CHECKS: Mapping[str, Check] = MappingProxyType({
    **dict.fromkeys(("gradients_mean", "gradient_fp32_sync", "loss_repeated_mean", "parameter_broadcast",
                     "enable_parallel_optimizer", "auto_pipeline"), boolean),
    "parallel_optimizer_config": in_turn(
        record(gradient_accumulation_shard=boolean, parallel_optimizer_threshold=integer(0),
               optimizer_weight_shard_size=shard_size, optimizer_level=_optimizer_level),
        _accumulation,
    ),
    "optimizer_weight_shard_size": shard_size,
    "comm_fusion": record(openstate=boolean, allreduce=_fusion("auto", "size", "index"), allgather=_fusion("auto", "size"),
                          reducescatter=_fusion("auto", "size")),
    "all_reduce_fusion_config": indices,
    "pipeline_stages": integer(1),
})  # fmt: skip

"""Checks of the arguments of `train.step`: wrong values, and options that have no meaning together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from shardfn.errors import Problem, a, nearest
from shardfn.frontend import option_checks
from shardfn.frontend.options import Options
from shardfn.frontend.strategy import short
from shardfn.frontend.training_settings import TrainingSettings
from shardfn.train.collectives.buckets import id_problems
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.scan_layers.scan import reuse_problems
from shardfn.train.scan_layers.train_step import recompute_problems
from shardfn.train.steps.modes import Mode
from shardfn.train.steps.offload import memory_problems
from shardfn.train.steps.optimizer_parallel import optimizer_parallel_of
from shardfn.train.value_checks import bool_problems, int_problems

_OF_SHARD = {f.name for f in dataclasses.fields(Options)} - {
    "out_strategy", "donate_argnums", "donate_argnames", "static_argnums", "static_argnames",
}  # fmt: skip
_OWN = (
    "mode", "device", "gradients_mean", "gradient_fp32_sync", "loss_repeated_mean", "parameter_broadcast", "frozen",
    "enable_parallel_optimizer", "parallel_optimizer_config", "comm_fusion", "all_reduce_fusion_config", "donate",
)  # fmt: skip
_SEARCHES = ("search_mode", "compile_candidates", "time_limit", "memory_limit")
_LAID = "the pipeline shards its stages and their batch itself"

AROUND_A_PIPELINE: Mapping[str, tuple[str, str]] = {
    "has_aux": (
        "the last stage returns the loss alone",
        "leave has_aux out, and compute the rest with the plain function",
    ),
    "mutable": (
        "its loss is one number, and its stages send activations only",
        "train without a pipeline, or with a norm that has no statistics",
    ),
    "reuse": ("stages are compiled as they are", "leave it out, or scan over equal layers within a stage"),
    "recompute": (
        "its backward pass rematerialises every stage from the stage's input",
        "leave it out, or wrap functions within a stage with train.recompute",
    ),
    "in_strategy": (_LAID, "leave it out: dimension 0 of the batch is sharded over the data axis"),
    "parameter_plan": (_LAID, "give it to train.pipeline, by the paths of the model"),
    "layout": (_LAID, "give parameter_plan to train.pipeline, by the paths of the model"),
    "layerwise_parallel": ("its gradients are summed over the devices of a stage", "leave it out"),
    "cross_batch": ("each micro-batch goes through a stage on its own", "leave it out"),
    "parallel_optimizer_comm_recompute": (
        "it computes loss and gradients in one pass, from parameters gathered before it",
        "leave it out",
    ),
    **dict.fromkeys(_SEARCHES, ("its shardings are not searched", "leave it out")),
}
"""Options of a step that have no meaning around a pipeline: why, and what to do instead."""

SHARDING_OPTIONS = ("in_strategy", "parameter_plan", "layout", *_SEARCHES)
"""Options without a meaning where parameters are replicated."""


def step_problems(asked: Mapping[str, Any], mode: Mode, settings: TrainingSettings) -> list[Problem]:
    """All problems with the arguments of a step.

    Args:
      asked: the arguments by name; under "options" those of `shard`, with in_strategy and parameter_plan.
      mode: the mode of the step.
      settings: those in force, with the arguments that change them.
    """
    found = list(_values(asked))
    if isinstance(asked["loss_fn"], Pipeline):
        found += _around_a_pipeline(asked, settings)
    elif asked["mutable"]:
        found += [
            Problem(f"`{name}` cannot scan layers of a loss that changes collections", f"{name} = {short(asked[name])}",
                    f"each layer has its own {', '.join(asked['mutable'])}", "leave one of the two out")
            for name in ("reuse", "recompute") if asked[name]
        ]  # fmt: skip
    found += _of_the_mode(asked, mode)
    found += _regathering(asked, settings)
    return list(dict.fromkeys(found))


def _values(asked: Mapping[str, Any]) -> Iterator[Problem]:
    loss_fn, optimizer, count = asked["loss_fn"], asked["optimizer"], asked["micro_batches"]
    options = {name: value for name, value in asked["options"].items() if value is not None}
    yield from option_checks.problems(Options(**{k: v for k, v in options.items() if k in _OF_SHARD}), None)
    known = sorted({*_OF_SHARD, *_OWN, *asked} - {"options"})
    for name in sorted(asked["options"].keys() - _OF_SHARD):
        yield Problem(f"`train.step` has no option `{name}`", f"{name} = {short(asked['options'][name])}",
                      "its options are its own and those of `shard`", nearest(name, known), is_type=True)  # fmt: skip
    if not callable(loss_fn):
        yield Problem(f"`loss_fn` is {a(loss_fn)}, no function", f"loss_fn = {short(loss_fn)}",
                      "it is called as loss_fn(params, *batch)", "pass the function first", is_type=True)  # fmt: skip
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        yield Problem(f"`optimizer` is {a(optimizer)}, no optax transformation", f"optimizer = {short(optimizer)}",
                      "it has no init and update", "pass one, such as optax.adamw(1e-3)", is_type=True)  # fmt: skip
    yield from int_problems("micro_batches", count, 1, "the batch is processed in so many parts", "write 1 for none")
    dtype = asked["compute_dtype"]
    try:
        is_float = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    except TypeError:
        is_float = False
    if not is_float:
        yield Problem(f"`compute_dtype` cannot be {short(dtype)}", f"compute_dtype = {short(dtype)}",
                      "parameters are cast to it for the loss and its gradients",
                      "use a floating dtype, such as jnp.bfloat16", is_type=True)  # fmt: skip
    yield from id_problems(asked["fusion"]) if asked["fusion"] is not None else ()
    yield from recompute_problems(asked["recompute"], asked["options"])
    yield from reuse_problems(asked["reuse"])
    yield from memory_problems(asked["opt_state_memory_kind"])


def _around_a_pipeline(asked: Mapping[str, Any], settings: TrainingSettings) -> Iterator[Problem]:
    given = {**asked, **asked["options"]}
    for name, (why, fix) in AROUND_A_PIPELINE.items():
        if value := given.get(name):
            yield Problem(f"`{name}` has no meaning around a pipeline", f"{name} = {short(value)}", why, fix)
    if not settings.loss_repeated_mean:
        yield Problem("`loss_repeated_mean` has no meaning around a pipeline", "loss_repeated_mean = False",
                      "the devices of a stage do not compute the same loss", "leave it out")  # fmt: skip


def _of_the_mode(asked: Mapping[str, Any], mode: Mode) -> Iterator[Problem]:
    own: Sequence[str] = asked["layerwise_parallel"]
    if mode.layouts == "replicated" and not isinstance(asked["loss_fn"], Pipeline):
        for name in SHARDING_OPTIONS:
            value = asked["options"].get(name)
            if value and not (name == "memory_limit" and asked["recompute"]):
                yield Problem(f"`{name}` has no meaning in mode {mode.name!r}", f"{name} = {short(value)}",
                              "there parameters are replicated and dimension 0 of the batch is sharded over all devices",
                              'use mode="semi_auto_parallel" or "auto_parallel"')  # fmt: skip
    if asked["cross_batch"] and mode.one_device:
        yield Problem("`cross_batch` has no meaning on one device", "cross_batch = True", "there is one part of the batch",
                      "leave it out")  # fmt: skip
    if own and mode.layouts != "replicated":
        yield Problem(f"`layerwise_parallel` has no meaning in mode {mode.name!r}", f"layerwise_parallel = {short(own)}",
                      "there every parameter is one array, whose gradient is the loss's",
                      'use mode="data_parallel" or "hybrid_parallel"')  # fmt: skip


def _regathering(asked: Mapping[str, Any], settings: TrainingSettings) -> Iterator[Problem]:
    again = asked["parallel_optimizer_comm_recompute"]
    where = f"parallel_optimizer_comm_recompute = {short(again)}"
    if not isinstance(again, bool):
        yield from bool_problems("parallel_optimizer_comm_recompute", again)
    elif again and ((zero := optimizer_parallel_of(settings)) is None or zero.level < 3):
        yield Problem("`parallel_optimizer_comm_recompute` has nothing to gather again", where,
                      "parameters are sharded at optimizer_level \"level3\" only",
                      'add parallel_optimizer_config={"optimizer_level": "level3"}')  # fmt: skip

"""Checks of the arguments of `train.step`: wrong values, and options that have no meaning together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import jax.numpy as jnp

from shardfn.errors import Problem, a
from shardfn.frontend import option_checks
from shardfn.frontend.callee import is_function
from shardfn.frontend.options import Options
from shardfn.frontend.other_words import option_fix
from shardfn.frontend.strategy import short
from shardfn.frontend.value_checks import boolean, integer, option_problems
from shardfn.train.collectives import id_problems
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.scan_layers.scan import reuse_problems
from shardfn.train.scan_layers.train_step import recompute_problems
from shardfn.train.steps.check_step import check_problems
from shardfn.train.steps.offload import memory_problems
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.tables import ids_problems

_OF_SHARD = {f.name for f in dataclasses.fields(Options)} - {
    "out_strategy", "donate_argnums", "donate_argnames", "static_argnums", "static_argnames",
}  # fmt: skip
_SEARCHES = (
    "search_mode",
    "style",
    "compile_candidates",
    "rehearse_candidates",
    "time_limit",
    "budget",
    "tolerance",
    "memory_limit",
)
_LAID = "the pipeline shards its stages and their batch itself"

AROUND_A_PIPELINE: Mapping[str, tuple[str, str]] = {
    "has_aux": ("the last stage returns the loss alone", "leave has_aux out, and compute the rest with the plain function"),
    "mutable": ("its loss is one number, and its stages send activations only",
                "train without a pipeline, or with a norm that has no statistics"),
    "reuse": ("stages are compiled as they are", "leave it out, or scan over equal layers within a stage"),
    "recompute": ("its backward pass rematerialises every stage from the stage's input",
                  "leave it out, or wrap functions within a stage with train.recompute"),
    "check": ("its stages are one program for all devices", "check the loss alone: shard(loss, check=True)"),
    "ids": ("its stages hold all their parameters", "train without a pipeline, or keep the table as an array"),
    "in_strategy": (_LAID, "leave it out: dimension 0 of the batch is sharded over the data axis"),
    "parameter_plan": (_LAID, "give it to train.pipeline, by the paths of the model"),
    "layout": (_LAID, "give parameter_plan to train.pipeline, by the paths of the model"),
    "layerwise_parallel": ("its gradients are summed over the devices of a stage", "leave it out"),
    "cross_batch": ("each micro-batch goes through a stage on its own", "leave it out"),
    "parallel_optimizer_comm_recompute": (
        "it computes loss and gradients in one pass, from parameters gathered before it", "leave it out"),
    **dict.fromkeys(_SEARCHES, ("its shardings are not searched", "leave it out")),
}  # fmt: skip
"""Options of a step that have no meaning around a pipeline: why, and what to do instead."""

SHARDING_OPTIONS = ("in_strategy", "parameter_plan", "layout", *_SEARCHES)
"""Options without a meaning where parameters are replicated."""


def step_problems(asked: StepOptions, names: Iterable[str]) -> list[Problem]:
    """All problems with the arguments of a step.

    Args:
      asked: the arguments as the user gave them; its `options` are those of `shard`.
      names: of all arguments of a step.
    """
    found = list(_values(asked, names))
    if isinstance(asked.loss_fn, Pipeline):
        found += _around_a_pipeline(asked)
    elif asked.mutable:
        found += [
            Problem(f"`{name}` cannot scan layers of a loss that changes collections", f"{name} = {short(value)}",
                    f"each layer has its own {', '.join(asked.mutable)}", "leave one of the two out")
            for name, value in (("reuse", asked.reuse), ("recompute", asked.recompute)) if value
        ]  # fmt: skip
    return list(dict.fromkeys([*found, *_of_the_mode(asked), *_regathering(asked)]))


def _values(asked: StepOptions, names: Iterable[str]) -> Iterator[Problem]:
    options = {name: value for name, value in asked.options.items() if value is not None}
    yield from option_checks.problems(Options(**{k: v for k, v in options.items() if k in _OF_SHARD}), None)
    known = sorted({*_OF_SHARD, *names} - {"options"})
    for name in sorted(asked.options.keys() - _OF_SHARD):
        yield Problem(f"`train.step` has no option `{name}`", f"{name} = {short(asked.options[name])}",
                      "its options are its own and those of `shard`", option_fix(name, known), is_type=True)  # fmt: skip
    if not is_function(asked.loss_fn):
        yield Problem(f"`loss_fn` is {a(asked.loss_fn)}, no function", f"loss_fn = {short(asked.loss_fn)}",
                      "it is called as loss_fn(params, *batch)", "pass the function first", is_type=True)  # fmt: skip
    if not all(callable(getattr(asked.optimizer, name, None)) for name in ("init", "update")):
        yield Problem(f"`optimizer` is {a(asked.optimizer)}, no optax transformation", f"optimizer = {short(asked.optimizer)}",
                      "it has no init and update", "pass one, such as optax.adamw(1e-3)", is_type=True)  # fmt: skip
    yield from option_problems(integer(1), "micro_batches", asked.micro_batches)
    dtype = asked.compute_dtype
    try:
        is_float = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    except TypeError:
        is_float = False
    if not is_float:
        yield Problem(f"`compute_dtype` cannot be {short(dtype)}", f"compute_dtype = {short(dtype)}",
                      "parameters are cast to it for the loss and its gradients",
                      "use a floating dtype, such as jnp.bfloat16", is_type=True)  # fmt: skip
    yield from id_problems(asked.fusion) if asked.fusion is not None else ()
    yield from recompute_problems(asked.recompute, asked.options)
    yield from reuse_problems(asked.reuse)
    yield from ids_problems(asked.ids)
    yield from memory_problems(asked.opt_state_memory_kind)
    yield from check_problems(asked)


def _around_a_pipeline(asked: StepOptions) -> Iterator[Problem]:
    if asked.loss_fn.options.loss is None:  # type: ignore[attr-defined]
        yield Problem("the pipeline returns outputs, not a loss", f"loss_fn = {asked.loss_fn!r}", "it was made with loss=None",
                      "make a pipeline of the loss for training")  # fmt: skip
    for name, (why, fix) in AROUND_A_PIPELINE.items():
        if value := getattr(asked, name, None) or asked.options.get(name):
            yield Problem(f"`{name}` has no meaning around a pipeline", f"{name} = {short(value)}", why, fix)
    if not asked.settings.loss_repeated_mean:
        yield Problem("`loss_repeated_mean` has no meaning around a pipeline", "loss_repeated_mean = False",
                      "the devices of a stage do not compute the same loss", "leave it out")  # fmt: skip


def _of_the_mode(asked: StepOptions) -> Iterator[Problem]:
    mode = asked.mode
    if mode.layouts == "replicated" and not isinstance(asked.loss_fn, Pipeline):
        for name in SHARDING_OPTIONS:
            value = asked.options.get(name)
            if value and not (name == "memory_limit" and asked.recompute):
                yield Problem(f"`{name}` has no meaning in mode {mode.name!r}", f"{name} = {short(value)}",
                              "there parameters are replicated and dimension 0 of the batch is sharded over all devices",
                              'use mode="semi_auto_parallel" or "auto_parallel"')  # fmt: skip
    if asked.cross_batch and mode.one_device:
        yield Problem("`cross_batch` has no meaning on one device", "cross_batch = True", "there is one part of the batch",
                      "leave it out")  # fmt: skip
    if asked.layerwise_parallel and mode.layouts != "replicated":
        yield Problem(f"`layerwise_parallel` has no meaning in mode {mode.name!r}",
                      f"layerwise_parallel = {short(asked.layerwise_parallel)}",
                      "there every parameter is one array, whose gradient is the loss's",
                      'use mode="data_parallel" or "hybrid_parallel"')  # fmt: skip


def _regathering(asked: StepOptions) -> Iterator[Problem]:
    again, zero = asked.parallel_optimizer_comm_recompute, asked.zero
    yield from option_problems(boolean, "parallel_optimizer_comm_recompute", again)
    if again is True and (zero is None or zero.level < 3):
        yield Problem("`parallel_optimizer_comm_recompute` has nothing to gather again",
                      f"parallel_optimizer_comm_recompute = {again}",
                      "parameters are sharded at optimizer_level \"level3\" only",
                      'add parallel_optimizer_config={"optimizer_level": "level3"}')  # fmt: skip

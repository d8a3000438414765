"""Compare one training step with the unsharded step: the loss, what else it returns, and the next state, leaf by leaf.

The unsharded step is the loss on the global batch, its gradients and the optimizer's update, on one device. It has no
micro-batches and no collectives of its own. Parameters and optimizer states after the step show wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax import tree_util

from shardfn.api import shard
from shardfn.errors import Problem
from shardfn.frontend import defaults
from shardfn.frontend.paths import array_paths
from shardfn.frontend.strategy import REPLICATED
from shardfn.frontend.value_checks import boolean, option_problems
from shardfn.runtime.agreement import CheckResult
from shardfn.runtime.check import check_run, refuse_difference, refuse_uncheckable
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shard_step import ShardedStep
from shardfn.train.steps.state import ModelParts, TrainState
from shardfn.train.steps.update import update_function


def check_problems(asked: StepOptions) -> Iterator[Problem]:
    """What is wrong with `check`, and with it beside other options: steps that compute something else than the unsharded one."""
    yield from option_problems(boolean, "check", asked.check)
    if asked.check is not True:
        return
    rows = (
        ("ids", bool(asked.ids), "the tables update their rows outside the step"),
        ("gradients_mean", not asked.settings.gradients_mean, "False makes the objective another one than the loss"),
        ("loss_repeated_mean", not asked.settings.loss_repeated_mean, "False multiplies the gradients"),
        ("layerwise_parallel", bool(asked.layerwise_parallel), "each device has parameters of its own"),
    )
    for name, is_met, why in rows:
        if is_met:
            yield Problem(f"`check` has no unsharded step to compare with beside `{name}`", "check = True", why,
                          f"check a step without `{name}`, or the loss alone: shard(loss, check=True)")  # fmt: skip


def check_step(
    options: StepOptions, parts: ModelParts, step: ShardedStep, state: TrainState, batch: Any
) -> CheckResult:
    """Run a step sharded and unsharded; the state keeps its memory.

    Raises:
      DeviceError, NotAvailableError: the devices are not here, or belong to several processes.
    """
    with defaults.override(options.defaults):
        plan = step.planned.plan(state, *batch)
        refuse_uncheckable(plan)
        update = update_function(options, parts, None, None, state, batch)
        unsharded = shard(update, (REPLICATED,) * (1 + len(batch)), device=options.device).plan(state, *batch)

        def run() -> list[Any]:
            kept = tree_util.tree_map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)
            return tree_util.tree_leaves(step.function(kept, *batch))

        following, value = tree_util.tree_unflatten(
            tree_util.tree_structure(jax.eval_shape(update, state, *batch)), plan.outputs
        )
        loss, aux = value if options.has_aux else (value, ())
        paths = [*array_paths("state", following), *array_paths("loss", loss), *array_paths("aux", aux)]
        return check_run(plan, run, unsharded, tree_util.tree_leaves((state, *batch)), paths)


def refuse_wrong_step(options: StepOptions, result: CheckResult) -> None:
    """Raise where a check of a step found a difference.

    Raises:
      CheckError: it names the leaf that differs most.
    """
    fix = ""
    if options.mode.per_device or options.micro_batches > 1:
        part = "a device" if options.mode.per_device else "a micro-batch"
        fix = (
            f"a loss that is no mean over the batch, or has batch statistics, is another one on the part of {part}: "
            'use mode="auto_parallel" without micro-batches for it; else give the arrays another strategy'
        )
    refuse_difference(result, "step.check(state, *batch)", fix)

"""From a plan to a plan with a rehearsal: the other process, and the errors that it may answer with."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import NoReturn

from shardfn.cost.rehearsal import Rehearsal
from shardfn.errors import DeviceError, NotAvailableError, Problem, ShardError, StrategyError, StrategyTypeError, fail
from shardfn.frontend.paths import few
from shardfn.ir.index_bounds import index_bounds
from shardfn.planning.plan import Plan, answered_call
from shardfn.runtime.other_process import Answer, ask, environment, program_of
from shardfn.runtime.progress import progress
from shardfn.runtime.rehearsal.job import Job, Measured, Refused
from shardfn.runtime.rehearsal.layers import Layers, NoLayers, fewer_layers, scaled
from shardfn.runtime.rehearsal.platforms import PLATFORMS, RehearsalPlatform
from shardfn.units import bytes_text

_CODE = "import sys, jax; from shardfn.runtime.rehearsal.child import main; main(sys.argv[1], jax.config.update)"


def rehearse(plan: Plan, steps: int = 10, time_limit: float = 600.0) -> Plan:
    """`Plan.rehearse`."""
    _check("steps", steps, int, "a whole number")
    _check("time_limit", time_limit, (int, float), "a number of seconds")
    hardware = plan.hardware
    platform = PLATFORMS.get(hardware.platform)
    if platform is None:
        able = ", ".join(row.device for row in PLATFORMS.values())
        fail(NotAvailableError, f"one shard of a plan for {hardware.name} cannot be rehearsed",
             where=f"device = {hardware.name!r}", why=f"today only a {able} can run one device's part of a program alone",
             fix='plan for GPUs, as in device="h100:8"; or compile the plan: plan.verify()')  # fmt: skip
    with progress(f"rehearsing {plan.function} for {hardware.name}") as say:
        ask_of = functools.partial(_ask, plan, platform, steps, time.monotonic() + time_limit, say)
        return dataclasses.replace(plan, rehearsal=_rehearsed(plan, ask_of, time_limit))


def _rehearsed(plan: Plan, ask_of: Callable[[Layers | None], Answer], time_limit: float) -> Rehearsal:
    """The rehearsal of the whole program; where one shard does not fit, that of fewer layers."""
    answer, why = ask_of(None), ""
    if isinstance(answer.result, Refused) and answer.result.reason == "memory":
        try:
            return _of_layers(plan, ask_of, time_limit)
        except NoLayers as error:
            why = str(error)
    return rehearsal_of(plan, answer, time_limit, why)


def _of_layers(plan: Plan, ask_of: Callable[[Layers], Answer], time_limit: float) -> Rehearsal:
    """The rehearsal of two numbers of layers, scaled to all.

    Raises:
      NoLayers: fewer layers cannot be told apart.
      ShardError: nothing was measured.
    """

    def measured(layers: Layers) -> Measured:
        answer = ask_of(layers)
        if not isinstance(answer.result, Measured):
            _refuse(plan, answer, time_limit, f"with {layers.kept} of {layers.count} layers")
        return answer.result

    less, more = fewer_layers(_away(plan))
    found = scaled(measured(less), measured(more), (less.kept, more.kept), more.count)
    return _rehearsal(plan, found, f"{less.kept} and {more.kept} of {more.count} layers")


def _ask(
    plan: Plan,
    platform: RehearsalPlatform,
    steps: int,
    end: float,
    say: Callable[[str], None],
    layers: Layers | None,
) -> Answer:
    """What another process measures of a plan, or of it with fewer layers, until `end` by the clock (`time.monotonic`)."""
    hardware = plan.hardware
    bounds = index_bounds(answered_call(plan).posed.call.traced.jaxpr)[
        -len(plan.inputs) :
    ]  # after what the function captures
    below = bounds if layers is None else tuple(bounds[i] for i in layers.inputs)
    chip = hardware.chip
    if hardware.devices is not None:  # its figures may be those of another chip, for want of its own
        chip = dataclasses.replace(chip, device_kinds=(hardware.devices[0].device_kind,))
    job = Job(
        program_of(_away(plan) if layers is None else layers.plan), chip, hardware.count, below, steps,
        tuple(platform.options(hardware.count).items()), platform.profiled,
    )  # fmt: skip
    own = {**platform.environment()}
    env = environment(int(own.pop("JAX_NUM_CPU_DEVICES", 1)), own, platform.flags)
    which = "" if layers is None else f"{layers.kept} of {layers.count} layers: "
    return ask(_CODE, job, env, max(1.0, end - time.monotonic()), lambda text: say(which + text))


def _away(plan: Plan) -> Plan:
    """The plan without the devices of this process."""
    return dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, devices=None, mesh=None))


def rehearsal_of(plan: Plan, answer: Answer, time_limit: float, no_layers: str = "") -> Rehearsal:
    """What another process measured of a plan, beside the plan's own figures.

    Args:
      plan: the plan.
      answer: of that process.
      time_limit: seconds that it had.
      no_layers: why fewer layers cannot be measured in the place of a shard that does not fit.

    Raises:
      ShardError: it measured nothing.
    """
    if not isinstance(answer.result, Measured):
        _refuse(plan, answer, time_limit, no_layers=no_layers)
    return _rehearsal(plan, answer.result)


def _rehearsal(plan: Plan, found: Measured, layers: str = "") -> Rehearsal:
    uncounted = plan.partitioned.graph.uncounted
    loops = (
        [f"how often the loop at {few(list(uncounted), 2)} runs depends on values, which were made up"]
        if uncounted
        else []
    )
    cost = plan.cost
    return Rehearsal(
        plan.hardware.name, plan.hardware.count, found.device, found.jax, found.rounds_s, cost.compute_s, cost.communication_s,
        cost.memory.peak, found.compiled_bytes, found.peak_bytes, found.kernels, found.kernels_s, (*loops, *found.notes), layers,
    )  # fmt: skip


def _check(name: str, value: object, types: type | tuple[type, ...], wanted: str) -> None:
    is_type = isinstance(value, types) and not isinstance(value, bool)
    if not is_type or not value > 0:  # type: ignore[operator]
        fail(StrategyError if is_type else StrategyTypeError, f"`{name}` must be {wanted} above zero, not {value!r}",
             where=f"rehearse({name}={value!r})", why="it bounds what is measured", fix=f"leave `{name}` out")  # fmt: skip


# ---- errors


def _refuse(plan: Plan, answer: Answer, time_limit: float, which: str = "", no_layers: str = "") -> NoReturn:
    where = f"device = {plan.hardware.name!r}{f', {which}' * bool(which)}"
    if isinstance(answer.result, Refused):
        kind, problem = ERRORS[answer.result.reason](plan, answer.result.said)
        if no_layers and answer.result.reason == "memory":
            problem = dataclasses.replace(problem, why=f"{problem.why}; fewer layers cannot be measured: {no_layers}")
        raise kind(dataclasses.replace(problem, where=where))
    stage, name = answer.stage or "starting Python", plan.function
    if answer.status is None:
        fail(DeviceError, f"the rehearsal of `{name}` took more than {time_limit:g} s", where=f"time_limit = {time_limit:g}",
             why=f"it was {stage}, and was ended", fix="give it more time, or fewer steps")  # fmt: skip
    fail(StrategyError, f"the process that rehearses `{name}` ended with status {answer.status}", where=where,
         why=f"it was {stage}; last it wrote: {answer.said or 'nothing'}",
         fix="look for the op that it names; plan.verify() compiles without a device")  # fmt: skip


def _option(plan: Plan, said: str) -> tuple[type[ShardError], Problem]:
    return NotAvailableError, Problem(
        "this JAX cannot run one device's part of a program alone",
        why=f"it has no option `{said}`",
        fix="use JAX 0.10 or newer",
    )


def _device(plan: Plan, said: str) -> tuple[type[ShardError], Problem]:
    name, chip = PLATFORMS[plan.hardware.platform].device, plan.hardware.chip.name
    return DeviceError, Problem(
        f"there is no {name} here to rehearse on", why=f"a plan for {chip}s is measured on one; JAX says: {said}",
        fix="run this on a machine that has one; or compile the plan: plan.verify()",
    )  # fmt: skip


def _kind(plan: Plan, said: str) -> tuple[type[ShardError], Problem]:
    return DeviceError, Problem(
        f"the device here is no {plan.hardware.chip.name}", why=f"it is a {said}, on which other times hold",
        fix="plan for the device that is here, or rehearse where the plan's device is",
    )  # fmt: skip


def _count(plan: Plan, said: str) -> tuple[type[ShardError], Problem]:
    return NotAvailableError, Problem(
        "this JAX does not stand in for the other devices of a plan", why=f"{said}, not {plan.hardware.count}",
        fix="use JAX 0.10 or newer, without JAX settings of your own that choose devices",
    )  # fmt: skip


def _memory(plan: Plan, said: str) -> tuple[type[ShardError], Problem]:
    memory = plan.hardware.chip.memory_bytes
    return StrategyError, Problem(
        f"one shard of `{plan.function}` does not fit on a {plan.hardware.chip.name}",
        why=f"predicted were {bytes_text(plan.cost.memory.peak)} of {bytes_text(memory)}; XLA says: {said}",
        fix='plan with level="memory", a lower memory_limit or more devices. If another process holds memory of the device, '
        "end it; if it is this one, plan with JAX_PLATFORMS=cpu",
    )  # fmt: skip


def _compiler(plan: Plan, said: str) -> tuple[type[ShardError], Problem]:
    return StrategyError, Problem(
        f"`{plan.function}` does not run on one {plan.hardware.chip.name} of {plan.hardware.count}", why=said,
        fix="look for the op that it names",
    )  # fmt: skip


ERRORS: dict[str, Callable[[Plan, str], tuple[type[ShardError], Problem]]] = {
    "option": _option, "device": _device, "kind": _kind, "count": _count, "memory": _memory, "compiler": _compiler,
}  # fmt: skip
"""By the reason of a refusal, what it is to the user."""

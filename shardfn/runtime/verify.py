"""Compile a plan with its target's own compiler, for devices that are here or not, and compare it with the prediction.

For devices that are not here another process compiles: the TPU compiler takes a lock, and settings from the environment of
its process. The function is sent there as an exported module, and what was compiled comes back as data.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax

from shardfn.compiled.candidates import none_compiles, refused
from shardfn.compiled.executable import Compiled, read
from shardfn.compiled.log_capture import compile_logged
from shardfn.compiled.targets import Target, compiled_for, devices, target
from shardfn.compiled.xla_log import rematerialisations
from shardfn.errors import DeviceError, StrategyError, fail, with_extra
from shardfn.frontend.ambient_mesh import without_types
from shardfn.planning.plan import Plan, answered_call
from shardfn.report.report import Report, make_report
from shardfn.runtime.apply import jitted
from shardfn.runtime.other_process import Desk, Program, ask, environment, program_of
from shardfn.runtime.progress import progress


def verify(plan: Plan) -> Report:
    """The plan's report, with the compiled figures beside the predicted ones.

    Raises:
      DeviceError: there is no compiler for the target, or it refuses its shape.
      StrategyError: XLA does not compile the plan.
    """
    try:
        return make_report(plan, compile_plan(plan))
    except jax.errors.JaxRuntimeError as error:
        left_out = refused("the plan", answered_call(plan).answer, error)
    none_compiles(plan.function, [left_out], is_asked=False)


def compile_plan(plan: Plan, function: Any = None) -> Compiled:
    """What the compiler of a plan's devices, present or not, makes of it.

    Args:
      plan: the plan, made in this process.
      function: what `jax.jit` made of it, if it is to be called later: its first call compiles nothing again where the
        devices are here.

    Raises:
      DeviceError: there is no compiler for the target, or it refuses its shape.
      StrategyError: the compiled program does not fit, or the function cannot leave the process.
    """
    posed = answered_call(plan).posed.call.function
    function, args = function or jitted(plan), posed.call.values
    if plan.hardware.is_here:
        with progress(f"compiling {plan.function}"), without_types(None, plan.function):
            compiled, notes = compile_logged(function.lower(*args))
            found = read(compiled, posed.assumed_trips)
            return dataclasses.replace(found, diagnostics=(*found.diagnostics, *notes))
    where = target(plan.hardware)
    with progress(f"compiling {plan.function} for {plan.hardware.name}"):
        return _elsewhere(plan, where, program_of(plan, function), posed.assumed_trips)


# ---- from this process to the other one and back


@dataclasses.dataclass(frozen=True)
class _Job:
    target: Target
    program: Program
    assumed_trips: int


_CODE = "import sys; from shardfn.runtime.verify import compile_job; compile_job(sys.argv[1])"


def _elsewhere(plan: Plan, of: Target, program: Program, assumed_trips: int) -> Compiled:
    answer = ask(_CODE, _Job(of, program, assumed_trips), _environment(of))
    found = answer.said if answer.result is None else answer.result
    if isinstance(found, str):
        _refused(plan, of, found or f"its process ended with {answer.status}")
    return found


def _environment(of: Target) -> dict[str, str]:
    """The environment of a process that compiles for devices that are not here."""
    own = {
        "TPU_SKIP_MDS_QUERY": "1",  # else it looks for a cloud's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else only one process at a time may load the compiler
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    return environment(of.count if of.platform == "cpu" else 1, own)


def _refused(plan: Plan, of: Target, why: str) -> NoReturn:
    """Raise the compiler's error."""
    where = f"device = {plan.hardware.name!r}"
    if "RESOURCE_EXHAUSTED" in why:
        said = why[max(0, why.find("Ran out of memory")) :].split("\n")[0]
        fail(StrategyError, f"`{plan.function}`, as compiled, does not fit on {plan.hardware.name}", where=where,
             why=f"{said} Predicted were {plan.cost.memory.peak / 2**30:.2f}G in all.",
             fix="plan with level=1, for more devices, or with a lower memory_limit")  # fmt: skip
    if of.platform == "tpu" and "opology" in why:
        fail(DeviceError, f"the TPU compiler refuses the topology {of.name}", where=where, why=why.split("\n")[0],
             fix='name a slice that exists, such as "tpu-v5e:2x4", "tpu-v5e:4x4" or "tpu-v5p:2x2x2"')  # fmt: skip
    extra = {"tpu": "tpu-aot", "cuda": "gpu-aot"}.get(of.platform)  # JAX brings its CPU compiler along
    fitting = f"{with_extra(extra)}, for the compiler that fits this JAX; else " if extra else ""
    fail(StrategyError, f"`{plan.function}` does not compile for {plan.hardware.name}", where=where,
         why=why.split("\n")[0], fix=f"{fitting}look for the op it names")  # fmt: skip


def compile_job(directory: str) -> None:
    """In the other process: compile the job in a directory, and write the result or the error there."""
    desk = Desk.at(directory)
    job: _Job = desk.job
    try:
        made, hlo = _compile(job)
        result: Any = dataclasses.replace(made, diagnostics=(*made.diagnostics, *rematerialisations(desk.log, hlo)))
    except (RuntimeError, ValueError, NotImplementedError) as error:  # XLA's own errors are RuntimeErrors
        result = f"{error}" or type(error).__name__
    desk.hand_back(result)


def _compile(job: _Job) -> tuple[Compiled, str]:
    """What was compiled, and its HLO."""
    function, shapes = job.program.on(devices(job.target))
    compiled, notes = compiled_for(job.target.platform, function.lower(*shapes))
    found = read(compiled, job.assumed_trips)
    return dataclasses.replace(found, diagnostics=(*found.diagnostics, *notes)), compiled.as_text() or ""

"""Compile a plan with its target's own compiler, for devices that are here or not, and compare it with the prediction.

For devices that are not here another process compiles: the TPU compiler takes a lock, and settings from the environment of
its process. The function is sent there as an exported module, and what was compiled comes back as data.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding

from shardfn.compiled.candidates import none_compiles, refused
from shardfn.compiled.executable import Compiled, read
from shardfn.compiled.log_capture import compile_logged
from shardfn.compiled.targets import Target, compiled_for, devices, target
from shardfn.compiled.xla_log import rematerialisations
from shardfn.errors import DeviceError, StrategyError, fail, with_extra
from shardfn.frontend.ambient_mesh import without_types
from shardfn.frontend.jax_errors import JaxError
from shardfn.frontend.meshes import mesh_on, partition_spec
from shardfn.ir.model import Spec
from shardfn.planning.plan import Plan, answered_call
from shardfn.report.report import Report, make_report
from shardfn.runtime.apply import jitted
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
    function, args = function or jitted(plan), answered_call(plan).posed.call.function.call.values
    if plan.hardware.is_here:
        with progress(f"compiling {plan.function}"), without_types(None, plan.function):
            compiled, notes = compile_logged(function.lower(*args))
            found = read(compiled)
            return dataclasses.replace(found, diagnostics=(*found.diagnostics, *notes))
    where = target(plan.hardware)
    with progress(f"compiling {plan.function} for {plan.hardware.name}"):
        with without_types(None, plan.function):
            exported = _exported(plan, function, args)
        return _elsewhere(plan, where, *exported)


# ---- from this process to the other one and back


@dataclasses.dataclass(frozen=True)
class _Job:
    target: Target
    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    donated: tuple[bool, ...]
    exported: jax.export.Exported


def _exported(plan: Plan, jitted: Any, args: Sequence[Any]) -> tuple[jax.export.Exported, tuple[bool, ...]]:
    """The function as an exported module with flat inputs and outputs, and which inputs are donated."""
    traced = jitted.trace(*args)
    donated = tuple(info.donated for info in tree_util.tree_leaves(traced.args_info))
    platforms = (plan.hardware.platform,)
    try:
        try:
            found = jax.export.export(jitted, platforms=platforms)(*args)
        except ValueError as error:  # ops without a compatibility guarantee: the same JAX reads them
            if not JaxError.CUSTOM_CALL.match(error):
                raise
            text = traced.lower(lowering_platforms=platforms).as_text()
            calls = sorted(set(re.findall(r"custom_call @([\w.$]+)", text)))
            checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
            found = jax.export.export(jitted, platforms=platforms, disabled_checks=checks)(*args)
    except (ValueError, NotImplementedError) as error:
        fail(StrategyError, f"`{plan.function}` cannot be compiled in another process",
             where=f"device = {plan.hardware.name!r}", why=str(error).split("\n")[0],
             fix="leave out what calls back into Python, such as jax.debug.print")  # fmt: skip
    # Flat, as other pytrees may be unknown there; and without its derivatives.
    flat = tree_util.tree_structure((tuple(range(len(found.in_avals))), {}))
    unflat = tree_util.tree_structure(tuple(range(len(found.out_avals))))
    bound = {f.name: None for f in dataclasses.fields(found) if callable(getattr(found, f.name))}
    return dataclasses.replace(found, in_tree=flat, out_tree=unflat, **bound), donated


def _elsewhere(plan: Plan, of: Target, exported: jax.export.Exported, donated: tuple[bool, ...]) -> Compiled:
    job = _Job(
        of, plan.axes or (("a", 1),), plan.order or tuple(range(of.count)),
        tuple(d.spec for d in plan.inputs), tuple(d.spec for d in plan.outputs), donated, exported,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        path.joinpath("job").write_bytes(pickle.dumps(job))
        code = "import sys; from shardfn.runtime.verify import compile_job; compile_job(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", code, directory],
            env=_environment(of),
            capture_output=True,
            text=True,
            errors="replace",
        )
        result, log = path / "result", path / "log"
        said = log.read_text(errors="replace") if log.exists() else ""
        found = (
            pickle.loads(result.read_bytes()) if result.exists() else f"{said}\n{done.stderr}".strip().split("\n")[-1]
        )
    if isinstance(found, str):
        _refused(plan, of, found or f"its process ended with {done.returncode}")
    return found


def _environment(of: Target) -> dict[str, str]:
    """The environment of a process that compiles for devices that are not here."""
    own = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": str(int(jax.dtypes.canonicalize_dtype(float) == np.float64)),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TPU_SKIP_MDS_QUERY": "1",  # else it looks for a cloud's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else only one process at a time may load the compiler
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    flags = os.environ.get("XLA_FLAGS", "").split()
    own["XLA_FLAGS"] = " ".join(f for f in flags if not f.startswith("--xla_force_host_platform_device_count"))
    own["JAX_NUM_CPU_DEVICES"] = str(of.count if of.platform == "cpu" else 1)
    return {**os.environ, **own}


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
    path = pathlib.Path(directory)
    job: _Job = pickle.loads(path.joinpath("job").read_bytes())
    with path.joinpath("log").open("wb") as log:  # XLA writes to the file descriptor
        os.dup2(log.fileno(), 2)
    try:
        made, hlo = _compile(job)
        notes = rematerialisations(path.joinpath("log").read_text(errors="replace"), hlo)
        result: Any = dataclasses.replace(made, diagnostics=(*made.diagnostics, *notes))
    except (RuntimeError, ValueError, NotImplementedError) as error:  # XLA's own errors are RuntimeErrors
        result = f"{error}" or type(error).__name__
    path.joinpath("result").write_bytes(pickle.dumps(result))


def _compile(job: _Job) -> tuple[Compiled, str]:
    """What was compiled, and its HLO."""
    found = devices(job.target)
    mesh = mesh_on([found[i] for i in job.order], job.axes)
    exported = job.exported
    # What the function does not read is no argument of its program; a typed key cannot be made up in its place.
    given = [i for i, aval in enumerate(exported.in_avals)
             if i in exported.module_kept_var_idx or jnp.issubdtype(aval.dtype, jax.dtypes.extended)]  # fmt: skip

    def run(*arrays: Any) -> Any:
        here = dict(zip(given, arrays, strict=True))
        return exported.call(
            *(here[i] if i in here else jnp.zeros(aval.shape, aval.dtype) for i, aval in enumerate(exported.in_avals))
        )

    def sharding(spec: Spec) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(spec))

    jitted = jax.jit(
        run,
        in_shardings=tuple(sharding(job.inputs[i]) for i in given),
        out_shardings=tuple(map(sharding, job.outputs)),
        donate_argnums=tuple(at for at, i in enumerate(given) if job.donated[i]),
    )
    shapes = [jax.ShapeDtypeStruct(exported.in_avals[i].shape, exported.in_avals[i].dtype) for i in given]
    compiled, notes = compiled_for(job.target.platform, jitted.lower(*shapes))
    found = read(compiled)
    return dataclasses.replace(found, diagnostics=(*found.diagnostics, *notes)), compiled.as_text() or ""

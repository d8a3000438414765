"""A plan as a program that another process compiles; how that process starts, and what comes back.

The function is sent as an exported module, so that nothing of the user's code has to be imported there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding

from shardfn.errors import StrategyError, fail
from shardfn.frontend.ambient_mesh import without_types
from shardfn.frontend.jax_errors import JaxError
from shardfn.frontend.meshes import mesh_on, partition_spec
from shardfn.ir.model import Spec
from shardfn.planning.plan import Plan, answered_call
from shardfn.runtime.apply import jitted

POLL_S = 0.1
"""Seconds between two looks at the other process."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The function of a plan with flat arguments and results, their shardings, and which arguments are donated."""

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...]
    """The device at each position of the mesh."""
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    donated: tuple[bool, ...]
    exported: jax.export.Exported

    @functools.cached_property
    def given(self) -> tuple[int, ...]:
        """The arguments of the compiled program. What the function does not read is none of them; a typed key cannot be made up
        in its place."""
        exported = self.exported
        return tuple(i for i, aval in enumerate(exported.in_avals)
                     if i in exported.module_kept_var_idx or jnp.issubdtype(aval.dtype, jax.dtypes.extended))  # fmt: skip

    def on(self, devices: Sequence[Any]) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
        """The function under `jax.jit` on devices, numbered as in the plan, and its `given` arguments with their shardings."""
        exported, given = self.exported, self.given
        mesh = mesh_on([devices[i] for i in self.order], self.axes)

        def run(*arrays: Any) -> Any:
            here = dict(zip(given, arrays, strict=True))
            return exported.call(
                *(
                    here[i] if i in here else jnp.zeros(aval.shape, aval.dtype)
                    for i, aval in enumerate(exported.in_avals)
                )
            )

        ins, outs = ([NamedSharding(mesh, partition_spec(s)) for s in specs] for specs in (self.inputs, self.outputs))
        ins = [ins[i] for i in given]
        function = jax.jit(
            run,
            in_shardings=tuple(ins),
            out_shardings=tuple(outs),
            donate_argnums=tuple(at for at, i in enumerate(given) if self.donated[i]),
        )
        avals = [exported.in_avals[i] for i in given]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(avals, ins, strict=True)]
        return function, tuple(shapes)


def program_of(plan: Plan, function: Any = None) -> Program:
    """The program of a plan.

    Args:
      plan: the plan, made in this process.
      function: what `jax.jit` made of it, if there is one.

    Raises:
      StrategyError: the function cannot leave the process, or the plan was pickled.
    """
    function, args = function or jitted(plan), answered_call(plan).posed.call.function.call.values
    with without_types(None, plan.function):
        exported, donated = _exported(plan, function, args)
    return Program(
        plan.axes or (("a", 1),), plan.order or tuple(range(plan.hardware.count)),
        tuple(d.spec for d in plan.inputs), tuple(d.spec for d in plan.outputs), donated, exported,
    )  # fmt: skip


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


def environment(cpu_devices: int = 1, own: Mapping[str, str] = {}, flags: Sequence[str] = ()) -> dict[str, str]:
    """The environment of another process: that of this one, which stays as it is, with what it needs besides.

    Args:
      cpu_devices: how many CPU devices it has.
      own: variables that take precedence.
      flags: flags of XLA, after the user's.
    """
    theirs = os.environ.get("XLA_FLAGS", "").split()
    found = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": str(int(jax.dtypes.canonicalize_dtype(float) == np.float64)),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "XLA_FLAGS": " ".join(
            [*(f for f in theirs if not f.startswith("--xla_force_host_platform_device_count")), *flags]
        ),
        "JAX_NUM_CPU_DEVICES": str(cpu_devices),
    }
    return {**os.environ, **found, **own}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of another process."""

    result: Any
    """What it made; None where it ended without."""
    said: str
    """The last line that it, or XLA, wrote."""
    stage: str
    """What it did last (`Desk.say`)."""
    status: int | None
    """Its exit status; None where it took too long and was ended."""


def ask(
    code: str,
    job: Any,
    env: Mapping[str, str],
    seconds: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Start another Python that does a job, and wait for what it makes.

    Args:
      code: what it runs; `sys.argv[1]` is the directory that `Desk` reads.
      job: what it is to do; it is pickled.
      env: its environment.
      seconds: how long it may take; None for as long as it does.
      say: is told what it does.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        path.joinpath("job").write_bytes(pickle.dumps(job))
        with path.joinpath("said").open("wb") as said:
            process = subprocess.Popen([sys.executable, "-c", code, directory], env=dict(env), stdout=said, stderr=said)
        status, end, stage = None, time.monotonic() + (seconds or float("inf")), ""
        try:
            while status is None and time.monotonic() < end:
                try:
                    status = process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    if (now := _text(path / "stage")) != stage:
                        say(stage := now)
        finally:
            if status is None:
                process.kill()
                process.wait()
        made = path / "result"
        words = f"{_text(path / 'said')}\n{_text(path / 'log')}".strip().split("\n")[-1]
        found = pickle.loads(made.read_bytes()) if status is not None and made.exists() else None
        return Answer(found, words, _text(path / "stage"), status)


def _text(path: pathlib.Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@dataclasses.dataclass(frozen=True)
class Desk:
    """In the other process: where its job lies, and where it puts what it makes."""

    directory: pathlib.Path

    @classmethod
    def at(cls, directory: str) -> Desk:
        """The desk in a directory. What XLA writes, to the file descriptor, becomes its `log`."""
        path = pathlib.Path(directory)
        with path.joinpath("log").open("wb") as log:
            os.dup2(log.fileno(), 2)
        return cls(path)

    @property
    def job(self) -> Any:
        """What is to be done."""
        return pickle.loads(self.directory.joinpath("job").read_bytes())

    @property
    def log(self) -> str:
        """What was written to standard error since the start."""
        return _text(self.directory / "log")

    def say(self, stage: str) -> None:
        """Tell the process that waits what is done now."""
        part = self.directory / "stage.part"
        part.write_text(stage)
        part.rename(self.directory / "stage")

    def hand_back(self, result: Any) -> None:
        """Write what was made."""
        part = self.directory / "result.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(self.directory / "result")

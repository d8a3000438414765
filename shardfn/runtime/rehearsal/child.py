"""The process that measures: it starts JAX as if its one device were one of many, compiles, makes arguments, and runs."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardfn.compiled.executable import instruction_lines, read
from shardfn.cost.devices.hardware import is_of
from shardfn.cost.rehearsal import MOST_KERNELS
from shardfn.runtime.other_process import Desk
from shardfn.runtime.rehearsal.arguments import made_up
from shardfn.runtime.rehearsal.job import Job, Measured, Refused
from shardfn.runtime.rehearsal.kernels import events, kernels_of

ROUNDS = 3
WARM_UP = 2
"""Calls before the first round."""
PROFILED = 3
"""Calls that the profiler sees."""


def main(directory: str, set_option: Callable[[str, Any], None]) -> None:
    """Do the job in a directory, and write there what was measured or why nothing was.

    Args:
      directory: as `Desk` has it.
      set_option: `jax.config.update` of this process, which is nobody's but ours.
    """
    desk = Desk.at(directory)
    desk.hand_back(measure(desk.job, desk.say, set_option))


def measure(job: Job, say: Callable[[str], None], set_option: Callable[[str, Any], None]) -> Measured | Refused:
    """What this process measures of a job, or why it does not; the arguments are those of `main`."""
    for name, value in job.options:
        try:
            set_option(name, value)
        except AttributeError:
            return Refused("option", name)
    say("starting JAX")
    try:
        devices = sorted(jax.devices(), key=lambda device: device.id)
    except RuntimeError as error:
        return Refused("device", _line(error))
    kind = devices[0].device_kind
    if devices[0].platform != job.chip.platform:
        return Refused("device", f"there are {devices[0].platform.upper()} devices alone")
    if not is_of(kind, job.chip):
        return Refused("kind", kind)
    if len(devices) != job.count:
        return Refused("count", f"JAX has {len(devices)} devices")
    try:
        return _run(job, devices, say)
    except RuntimeError as error:  # XLA's own errors are RuntimeErrors
        said = str(error)
        if "RESOURCE_EXHAUSTED" in said or "out of memory" in said.lower():
            return Refused("memory", _line(error))
        return Refused("compiler", _line(error))


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _run(job: Job, devices: Sequence[Any], say: Callable[[str], None]) -> Measured:
    say("compiling")
    function, shapes = job.program.on(devices)
    lowered = function.lower(*shapes)
    compiled = lowered.compile()
    say("making arguments")
    below = [job.below[i] for i in job.program.given]
    calls = _Calls(compiled, lambda i: made_up(shapes[i], below[i], i), len(shapes))
    say("running")
    calls.seconds(WARM_UP)
    rounds = tuple(calls.seconds(job.steps) / job.steps for _ in range(ROUNDS))
    stats = jax.local_devices()[0].memory_stats() or {}
    notes = [] if calls.is_fed else ["donated arguments were made anew before each call, within the time"]
    say("profiling")
    kernels, kernels_s = (), 0.0
    try:
        calls.compiled = lowered.compile(dict(job.profiled)) if job.profiled else compiled
        kernels, kernels_s = _profiled(calls)
        notes += [] if kernels else ["no kernels, as the profiler saw none"]
    except RuntimeError as error:
        notes.append(f"no kernels, as the profiler failed: {_line(error)}")
    return Measured(
        devices[0].device_kind, jax.__version__, rounds,
        read(compiled).together(job.chip.platform), stats.get("peak_bytes_in_use"), kernels, kernels_s, tuple(notes),
    )  # fmt: skip


class _Calls:
    """A compiled program called again and again. The results that take over donated arguments are the next call's arguments."""

    def __init__(self, compiled: Any, make: Callable[[int], jax.Array], count: int):
        self.compiled, self.make = compiled, make
        self.arrays = [make(i) for i in range(count)]
        self.fed = fed_back(compiled.as_text() or "", count)
        self.is_fed = True
        """Whether no argument had to be made again."""

    def seconds(self, calls: int) -> float:
        """Run some calls in a row and wait for the last one; the seconds of all."""
        jax.block_until_ready(self.arrays)
        begun = time.perf_counter()
        results: Any = ()
        for _ in range(calls):
            del results  # else two calls' results are alive
            results = self.compiled(*self.arrays)
            self.arrays = [
                results[self.fed[i]] if i in self.fed else self._kept(i, array) for i, array in enumerate(self.arrays)
            ]
        jax.block_until_ready((results, self.arrays))
        return time.perf_counter() - begun

    def _kept(self, i: int, array: jax.Array) -> jax.Array:
        if not array.is_deleted():
            return array
        self.is_fed = False
        return self.make(i)


def fed_back(hlo_text: str, count: int) -> dict[int, int]:
    """For each donated argument the result that takes over its memory, as the head of an optimised HLO module has it.

    Args:
      hlo_text: the module.
      count: how many arguments the program was given; nothing is known where it has others.

    >>> fed_back("HloModule m, input_output_alias={ {0}: (1, {}, may-alias), {2}: (0, {}, must-alias) }, "
    ...          "entry_computation_layout={(f32[4]{0}, f32[2,3]{1,0})->(f32[2,3]{1,0}, f32[], f32[4]{0})}", 2)
    {1: 0, 0: 2}
    """
    head = hlo_text.partition("\n")[0]
    taken = re.search(r"entry_computation_layout=\{\((.*?)\)->", head)
    if taken is None or len(re.findall(r"\b[a-z]\w*\[", taken[1])) != count:
        return {}
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", head)
    return {int(argument): int(result or 0) for result, argument in pairs}


def _profiled(calls: _Calls) -> tuple[Any, float]:
    """The costliest kernels of a call, and the seconds of all."""
    calls.seconds(1)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    text = calls.compiled.as_text() or ""
    module = re.match(r"HloModule ([\w.\-]+)", text)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            calls.seconds(PROFILED)
        with warnings.catch_warnings():
            # Python 3.13 warns of a type of JAX 0.12, which ends the process where that is an error
            warnings.simplefilter("ignore", DeprecationWarning)
            seen = list(events(directory, module[1] if module else ""))
    return kernels_of(seen, instruction_lines(text), PROFILED, MOST_KERNELS)

"""How much faster is a sharded training step than the step on one device? Strong scaling: the batch stays the same.

On CPU each device has one core: a process of its own for each number of devices, bound to as many cores. More devices
than cores are left out, as they would only share cores. A further row runs the unsharded step on one device with all cores, which
XLA's own threads use. The processes take turns, one step each, and a speed-up is the median of the ratios of a round.
On other platforms, one process runs all numbers of devices. The search chooses the shardings (`level="time"`).
Run: python benchmarks/speedup.py [--devices 1 2 4 8] [--programs mlp gpt2] [--size small] [--rounds 15] [--platform cpu]
     [--json OUT]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import shardfn
from benchmarks import harness
from examples.models.families import FAMILIES

Step = Callable[[], float]
"""Runs one step of training and returns its seconds."""
Run = Callable[[str], float]
"""Runs one step of the program of this name and returns its seconds."""
WARM_UP = 3


def prepare(name: str, size: str, devices: int) -> tuple[Step, str]:
    """A training step of a family on so many devices, and what shards it. On one device it is plain `jax.jit`."""
    family = FAMILIES[name]
    function, args = family.make(getattr(family, size))
    count = len(family.donated)
    if devices == 1:
        call, kind = jax.jit(function, donate_argnums=family.donated), "unsharded"
        args = jax.device_put(args, jax.devices()[0])
    else:
        call = shardfn.shard(function, device=jax.devices()[:devices], level="time", donate_argnums=family.donated)
        plan = call.plan(*args)
        kind, args = plan.kind, jax.device_put(args, plan.in_shardings)
    state, batch = args[:count], args[count:]

    def step() -> float:
        nonlocal state
        begin = time.perf_counter()
        out = jax.block_until_ready(call(*state, *batch))
        took = time.perf_counter() - begin
        state = out[:count]
        return took

    return step, kind


def rows_of(name: str, runs: Sequence[tuple[int, int, str, Run]], rounds: int) -> list[dict[str, Any]]:
    """One row for each run (devices, cores, what shards it, how a step is run), in turns; speed-ups over the first run."""
    for _ in range(WARM_UP):
        for *_, run in runs:
            run(name)
    took: list[list[float]] = [[] for _ in runs]
    for i in range(rounds):
        order = range(len(runs)) if i % 2 == 0 else reversed(range(len(runs)))
        for j in order:
            took[j].append(runs[j][3](name))
    found = []
    for (devices, cores, kind, _), seconds in zip(runs, took, strict=True):
        speedup = statistics.median(one / many for one, many in zip(took[0], seconds, strict=True))
        row = {"program": name, "devices": devices, "cores": cores, "sharding": kind}
        row |= {"ms": 1e3 * statistics.median(seconds), "speed-up": speedup}
        found.append(row | {"of ideal": speedup / max(devices, cores)})
    return found


def _serve(pipe, names: Sequence[str], size: str, devices: int, cores: Sequence[int]) -> None:
    """A process bound to some cores: says what shards each program, then runs a step of the one that it is asked for."""
    os.sched_setaffinity(0, cores)
    harness.start("cpu", devices)
    os.environ["NPROC"] = str(2 * devices if devices > 1 else len(cores))
    steps = {name: prepare(name, size, devices) for name in names}
    pipe.send({name: kind for name, (_, kind) in steps.items()})
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(steps[pipe.recv()][0]())


@contextlib.contextmanager
def bound_process(
    names: Sequence[str], size: str, devices: int, cores: Sequence[int]
) -> Iterator[tuple[dict[str, str], Run]]:
    """A process with `devices` virtual devices on these cores: what shards each program, and how a step of it is run."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, names, size, devices, cores))
    process.start()
    theirs.close()

    def run(name: str) -> float:
        ours.send(name)
        return ours.recv()

    try:
        yield ours.recv(), run
    finally:
        ours.close()
        process.join()


def on_cores(names: Sequence[str], size: str, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Rows for virtual CPU devices with one core each, and for one device with all cores."""
    here = sorted(os.sched_getaffinity(0))
    wanted = [(n, here[:n]) for n in counts] + [(1, here)] * (len(here) > 1)
    with contextlib.ExitStack() as stack:
        started = [(n, len(cores), *stack.enter_context(bound_process(names, size, n, cores))) for n, cores in wanted]
        return [
            row
            for name in names
            for row in rows_of(name, [(n, cores, kinds[name], run) for n, cores, kinds, run in started], rounds)
        ]


def in_this_process(names: Sequence[str], size: str, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Rows for devices that do not share cores."""
    found = []
    for name in names:
        steps = [(n, *prepare(name, size, n)) for n in counts]
        found += rows_of(name, [(n, n, kind, lambda _, step=step: step()) for n, step, kind in steps], rounds)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8], help="the first is compared with")
    parser.add_argument("--programs", nargs="+", choices=tuple(FAMILIES), default=["mlp", "gpt2"])
    parser.add_argument("--size", choices=("tiny", "small", "large"), default="small")
    parser.add_argument("--rounds", type=int, default=15)
    options = harness.parse(parser, devices=1)
    on_cpu = options.platform == "cpu"
    there = harness.cores() if on_cpu else len(jax.devices())
    counts, over = ([n for n in options.devices if (n <= there) == fits] for fits in (True, False))
    what = f"{there} core{'s' * (there > 1)}" if on_cpu else f"{there} device{'s' * (there > 1)}"
    notes = [f"The machine has {what}{', one for each device' * on_cpu}."]
    if over:
        notes[0] += f" {' and '.join(map(str, over))} devices are not measured."
    print(notes[0], flush=True)
    rows = (on_cores if on_cpu else in_this_process)(options.programs, options.size, counts, options.rounds)
    harness.show(rows)
    harness.save(options.json, {"steps": rows}, notes=notes)


if __name__ == "__main__":
    main()

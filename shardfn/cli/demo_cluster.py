"""`python -m shardfn demo --cluster`: two processes train, one is killed; the job goes on without it, then with it again.

The processes run this file too: `python -m shardfn.cli.demo_cluster FOLDER STEPS [KILLED_AT]`.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import cluster, data, train
from shardfn.report.processes import process_rows

KILLED_AT, WITHOUT, STEPS, EVERY = 13, 20, 30, 5
"""The step after which process 1 is killed, how far the job goes without it, all steps, and those between checkpoints."""
PROCESSES, DEVICES = 2, 4
TOLERANCE = 1e-3
"""On fewer devices sums have another order, so losses differ by rounding."""
PAUSE_S, WAIT_S = 0.1, 600
"""After each step, for the eye; for the signal that ends process 1."""


# ---- what each process runs


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of a perceptron with one hidden layer; x [batch, 32], y [batch]."""
    return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"] - y) ** 2)


def train_up_to(folder: pathlib.Path, steps: int, killed_at: int = 0) -> None:
    """Train with `cluster.run`; process 0 appends `[step, loss, seconds]` to a file, and prints each step.

    After the step `killed_at`, process 1 waits to be killed, so that all runs of the demo show the same on any machine.
    """
    cluster.init()
    x = np.random.default_rng(0).normal(size=(480, 32)).astype("float32")
    y = np.sin(x[:, :4]).sum(1)

    def batches(devices: list[Any]) -> Any:
        return data.load((x, y), "data_parallel", batch_size=24, shuffle=True, epochs=None, device=devices)

    def make_step(devices: list[Any]) -> tuple[Any, Any]:
        sharded = {"optimizer_level": "level2", "parallel_optimizer_threshold": 0}
        step = train.step(
            loss, optax.adam(1e-2), mode="data_parallel", device=devices, parallel_optimizer_config=sharded
        )
        up, down = jax.random.split(jax.random.key(0))
        params = {"up": jax.random.normal(up, (32, 96)) / 6, "down": jax.random.normal(down, (96,)) / 10}
        shapes = batches(devices).shapes
        plan = step.plan(jax.eval_shape(lambda: step.init(params, *shapes)), *shapes)
        for _, places, held in process_rows(plan, 2)[cluster.rank() :][:1]:
            print(f"pid {os.getpid()}, devices {places}, holds {held}")
        return step, params

    def after_step(step: int, value: Any) -> None:
        number = float(value)
        if cluster.rank() == 0:
            with open(folder / "losses.jsonl", "a") as file:  # before the line that process 1 is killed at
                print(json.dumps([step, number, time.time()]), file=file)
            print(f"step {step:>2}  loss {number:.6f}  {'#' * round(20 * number)}")
        time.sleep(WAIT_S if cluster.rank() == 1 and step == killed_at else PAUSE_S)

    cluster.run(make_step, batches, folder / "checkpoints", steps=steps, every=EVERY, after_step=after_step)


# ---- what starts them


class _Watch(io.TextIOBase):
    """Shows the lines of the processes, and kills process 1 when process 0 has taken a step."""

    def __init__(self, show: bool, killed_at: int | None):
        self.show, self.killed_at, self.pids, self.killed_s = show, killed_at, dict[str, int](), 0.0
        self.left = ""

    def write(self, text: str) -> int:
        """Show the lines that are complete."""
        *lines, self.left = (self.left + text).split("\n")
        for line in lines:
            self._see(line)
        return len(text)

    def _see(self, line: str) -> None:
        if not self.show or "[Gloo]" in line or "preemption_notifier" in line:  # what XLA says about its connections
            return
        print(line, flush=True)
        if found := re.match(r"\[(\d)\] pid (\d+)", line):
            self.pids[found[1]] = int(found[2])
        if self.killed_at is not None and line.startswith(f"[0] step {self.killed_at:>2} "):
            self.killed_at, self.killed_s = None, time.time()
            print(f"--- SIGKILL to process 1, pid {self.pids['1']}", flush=True)
            os.kill(self.pids["1"], signal.SIGKILL)


def _job(
    folder: pathlib.Path, steps: int, processes: int, devices: int, killed_at: int | None = None, show: bool = True
) -> float:
    """Run a job up to a step; when it was killed, in seconds since the epoch."""
    folder.mkdir(exist_ok=True)
    watch = _Watch(show, killed_at)
    outcome = cluster.launch(
        [sys.executable, "-m", "shardfn.cli.demo_cluster", str(folder), str(steps), str(killed_at or 0)],
        cluster.local_job(processes, devices), folder / f"logs-{steps}", retries=1, min_processes=1, grace_s=1,
        out=cast(IO[str], watch),
    )  # fmt: skip
    if outcome.status:
        raise SystemExit(str(outcome))
    return watch.killed_s


def _losses(folder: pathlib.Path) -> list[tuple[int, float, float]]:
    return [(step, value, s) for step, value, s in map(json.loads, open(folder / "losses.jsonl"))]


def run(show: Callable[[Any], None] = print) -> bool:
    """Run the jobs and compare their losses; return whether they are equal. No report is shown."""
    begun = time.time()
    with tempfile.TemporaryDirectory() as temporary:
        whole, folder = pathlib.Path(temporary, "whole"), pathlib.Path(temporary, "job")
        print(f"1. {PROCESSES} processes with {DEVICES} devices each, a checkpoint every {EVERY} steps. "
              f"Process 1 is killed after step {KILLED_AT}, and does not come back.\n", flush=True)  # fmt: skip
        killed_s = _job(folder, WITHOUT, PROCESSES, DEVICES, KILLED_AT)
        print("\n2. The same job with both processes again.\n", flush=True)
        _job(folder, STEPS, PROCESSES, DEVICES)
        print("\n3. A job that nothing happens to, for comparison.", flush=True)
        _job(whole, STEPS, 1, PROCESSES * DEVICES, show=False)
        taken, expected = _losses(folder), {step: value for step, value, _ in _losses(whole)}
    worst = max(abs(value - expected[step]) / expected[step] for step, value, _ in taken)
    last = max(step for step, _, s in taken if s <= killed_s)
    back, _, back_s = next(row for row in taken if row[2] > killed_s and row[0] <= last)
    equal = worst <= TOLERANCE and {step for step, *_ in taken} == set(range(1, STEPS + 1))
    counts = f"{PROCESSES * DEVICES}, {DEVICES} and {PROCESSES * DEVICES}"
    print(f"\nThe job was killed at step {last} and went on with step {back}: {last - back + 1} steps were taken again, "
          f"{back_s - killed_s:.1f} s after the kill.\n"
          f"Its losses on {counts} devices {'are' if equal else 'ARE NOT'} those of the job that nothing happened to "
          f"(they differ by {worst:.0e} at most); {time.time() - begun:.0f} s in all.")  # fmt: skip
    return equal


if __name__ == "__main__":
    train_up_to(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))

"""What does a job lose when something fails, and when does it go on? One table, a row for each kind of failure.

Two processes train with `cluster.run` under `cluster.launch`, with a checkpoint every 4 steps. A row holds how many steps were
taken again, how often the job went on from another step than that of the newest complete checkpoint, how many checkpoints were
damaged after the failure, how many losses differed from those of an uninterrupted run (bit by bit), and the seconds from the
failure to the next step.

- moment: SIGKILL of one process at a random moment: while it starts, compiles, restores, trains, saves.
- save: SIGKILL of one process while a checkpoint is written.
- disk: the disk refuses the writes of one process, which a limit on the size of files does. They are in the background, so the
  job ends at its next save; the seconds count from then.
- damage: one bit of each file of the newest checkpoint is changed between two runs.
- hang: SIGSTOP of one process; the launcher ends the job after 5 s without a heartbeat.

Run: python benchmarks/recovery.py [--moments 50] [--others 5] [--only moment save disk damage hang]
     [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.argv[1:2] == ["worker"]:
    print(f"pid {os.getpid()}", flush=True)  # before the imports: a kill may come while they run

import argparse
import io
import pathlib
import random
import re
import resource
import signal
import statistics
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness
from shardfn import checkpoint, cluster, data, train
from shardfn.errors import CheckpointFileError

EVERY, KEPT, WIDTH, PAUSE_S, HEARTBEAT_S = 4, 3, 384, 0.05, 5.0
"""Steps between checkpoints; how many are kept; the model's width, for a state of 3 x 590 kB; a pause after each step; seconds
of silence that count as a hang."""


# ---- what each process runs


def loss(params, x, y, key):
    hidden = jnp.tanh(x @ params["w"])
    kept = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0)
    return jnp.mean((kept @ params["v"] - y) ** 2)


def make_step(devices):
    sharded = {"optimizer_level": "level2", "parallel_optimizer_threshold": 0}
    options = {"mode": "semi_auto_parallel", "device": devices, "parallel_optimizer_config": sharded}
    params = {"w": np.random.default_rng(1).normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, "v": np.ones(WIDTH) / WIDTH}
    return train.step(loss, optax.adam(1e-3), **options), {name: x.astype("float32") for name, x in params.items()}


def batches(devices):
    x = np.random.default_rng(0).normal(size=(512, WIDTH)).astype("float32")
    return data.load((x, x.sum(1)), "data_parallel", batch_size=32, shuffle=True, epochs=None, device=devices)


def worker(folder: pathlib.Path) -> None:
    """Train up to the step in the file `until`; the file `limit-RANK` bounds the size of a file, once."""
    cluster.init()

    def after_step(step, value):
        number = float(value)
        if cluster.rank() == 0:
            print(f"step {step} {number!r}", flush=True)
        limit = folder / f"limit-{cluster.rank()}"
        if limit.exists():
            limit.unlink()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        time.sleep(PAUSE_S)

    steps = int((folder / "until").read_text())
    cluster.run(
        make_step,
        batches,
        folder / "run",
        steps=steps,
        every=EVERY,
        keep=KEPT,
        key=jax.random.key(3),
        after_step=after_step,
    )


# ---- what makes it fail


LINES = {"pid": r"\[(\d)\] pid (\d+)", "resume": r"\[0\] goes on from step (\d+)", "step": r"\[0\] step (\d+) ([\d.]\S*)",
         "again": r"starting (again)"}  # fmt: skip
"""What a job prints, by the kind of event that it is."""


class Job(io.TextIOBase):
    """A job in a folder, and what happened to it: `(seconds, kind, data)` in order.

    Kinds: a process's "pid", "resume" from a checkpoint, a "step" and its loss, "fail", the launcher starts it "again", the
    newest "whole" checkpoint then, the "end" and its status.
    """

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True)
        self.folder, self.text, self.changed = folder, "", threading.Condition()
        self.events: list[tuple[float, str, tuple[str, ...]]] = []

    def write(self, text: str) -> int:
        *lines, self.text = (self.text + text).split("\n")
        for line in lines:
            for kind, pattern in LINES.items():
                if found := re.match(pattern, line):
                    self.add(kind, *found.groups())
        return len(text)

    def add(self, kind: str, *data: object) -> None:
        with self.changed:
            self.events.append((time.monotonic(), kind, tuple(map(str, data))))
            self.changed.notify_all()

    def wait(self, kind: str, since: int, count: int = 1) -> None:
        """Wait for so many events of a kind after the event number `since`."""
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.of(kind, since)) >= count, timeout=180):
                raise TimeoutError(f"no {kind!r} came: {self.events[-5:]}")

    def of(self, kind: str, since: int = 0) -> list[tuple[float, str, tuple[str, ...]]]:
        return [event for event in self.events[since:] if event[1] == kind]

    def run(self, until: int, retries: int = 0) -> None:
        (self.folder / "until").write_text(str(until))
        command = [sys.executable, __file__, "worker", str(self.folder)]
        outcome = cluster.launch(command, cluster.local_job(2), self.folder / "logs", retries=retries, grace_s=0.5,
                                 heartbeat_s=HEARTBEAT_S, out=self)  # fmt: skip
        self.add("end", outcome.status)
        if outcome.status:
            raise RuntimeError(str(outcome))

    def last_step(self) -> int:
        return max((int(data[0]) for _, _, data in self.of("step")), default=0)

    def checkpoints(self) -> tuple[int, int]:
        """The newest one of which every byte is right, and the number of those to be kept of which some is wrong.

        A kill may come while the oldest is deleted, which none of the newest three is.
        """
        steps = {step: _is_whole(self.folder / "run", step) for step in checkpoint.steps(self.folder / "run")[-KEPT:]}
        return max((step for step, whole in steps.items() if whole), default=0), list(steps.values()).count(False)


def _is_whole(folder: pathlib.Path, step: int) -> bool:
    try:
        checkpoint.verify(folder, step)
    except CheckpointFileError:
        return False
    return True


def fail_while_it_runs(job: Job, kind: str, times: int, rng: random.Random, horizon_s: float) -> None:
    """Let a job fail so often, then come to an end."""
    thread = threading.Thread(target=job.run, args=(1_000_000, times + 1))
    thread.start()
    begun = 0
    for i in range(times):
        job.wait("pid", begun, 2)
        pids = {int(rank): int(pid) for _, _, (rank, pid) in job.of("pid", begun)}
        if kind == "moment":
            time.sleep(rng.uniform(0, horizon_s))
        else:
            job.wait("step", begun)
            time.sleep(rng.uniform(0, 1))
        if i == times - 1:  # the next attempt reads it
            (job.folder / "until").write_text(str(job.last_step() + 4 * EVERY))
        while kind == "save" and not any((job.folder / "run").glob("*.orbax-checkpoint-tmp*")):
            time.sleep(0.002)
        rank, here, is_training = rng.randrange(2), len(job.events), bool(job.of("step", begun))
        if kind == "disk":
            (job.folder / f"limit-{rank}").touch()
        else:
            os.kill(pids[rank], signal.SIGSTOP if kind == "hang" else signal.SIGKILL)
            job.add("fail", rank, is_training)
        job.wait("again", here)
        begun = len(job.events)
        if kind == "disk":  # the job ends when the error of the write comes, which was in the background
            job.add("fail", rank, is_training)
        job.add("whole", *job.checkpoints())
    thread.join()


def damage_between_runs(job: Job, times: int) -> None:
    """Change a bit in each file of the newest checkpoint, so often, and go on."""
    job.run(3 * EVERY)
    for i in range(times):
        newest = job.last_step()
        for path in (job.folder / "run" / str(newest) / "state").rglob("d/*"):
            if path.is_file():
                held = bytearray(path.read_bytes())
                held[len(held) // 2] ^= 1
                path.write_bytes(held)
        job.add("fail", "between", False)
        job.add("whole", job.checkpoints()[0], 0)
        job.run(newest + EVERY * (1 + i % 2))


# ---- what came of it

FAILURES = {"moment": "SIGKILL at a random moment", "save": "SIGKILL during a save", "disk": "the disk refuses a write",
            "damage": "the newest checkpoint is changed", "hang": "SIGSTOP, 5 s without a heartbeat"}  # fmt: skip


def summary(kind: str, job: Job, expected: dict[int, str]) -> dict[str, object]:
    """The row of a kind of failure."""
    at = [i for i, event in enumerate(job.events) if event[1] == "fail"]
    lost, seconds, wrong_step, damaged, training = [], [], 0, 0, 0
    for i, end in zip(at, [*at[1:], len(job.events)], strict=True):
        last = next((int(data[0]) for _, name, data in reversed(job.events[:i]) if name == "step"), 0)
        after = job.events[i:end]
        training += after[0][2][1] == "True"
        whole, bad = next(data for _, name, data in after if name == "whole")
        steps = [(s, int(data[0])) for s, name, data in after if name == "step"]
        damaged += int(bad)
        lost.append(last - int(whole))
        if steps:
            seconds.append(steps[0][0] - job.events[i][0])
            wrong_step += steps[0][1] != int(whole) + 1
    losses = [(int(data[0]), data[1]) for _, _, data in job.of("step")]
    return {
        "failure": FAILURES[kind], "times": len(at), "while it took steps": training, "steps taken again, most": max(lost),
        "other step than after the newest whole checkpoint": wrong_step, "damaged checkpoints": damaged,
        "losses": len(losses), "other than uninterrupted": sum(expected[step] != value for step, value in losses),
        "s to the next step, median": statistics.median(seconds), "most": max(seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50, help="how many random moments")
    parser.add_argument("--others", type=int, default=5, help="how often each other failure")
    parser.add_argument("--only", nargs="+", choices=tuple(FAILURES), default=list(FAILURES))
    parser.add_argument("--seed", type=int, default=0)
    given = harness.parse(parser, devices=1)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        first = Job(pathlib.Path(name) / "first")
        first.run(EVERY)
        startup_s = first.of("step")[0][0] - first.of("pid")[0][0]
        for kind in given.only:
            job, whole = Job(pathlib.Path(name) / kind), Job(pathlib.Path(name) / f"{kind}-whole")
            if kind == "damage":
                damage_between_runs(job, given.others)
            else:
                times = given.moments if kind == "moment" else given.others
                fail_while_it_runs(job, kind, times, random.Random(given.seed), 2 * startup_s)
            whole.run(job.last_step())
            rows.append(summary(kind, job, {int(data[0]): data[1] for _, _, data in whole.of("step")}))
            print(rows[-1], file=sys.stderr, flush=True)
            harness.save(given.json, {"failures": rows}, notes=[f"A checkpoint every {EVERY} steps."])
    harness.show(rows)


if __name__ == "__main__":
    worker(pathlib.Path(sys.argv[2])) if sys.argv[1:2] == ["worker"] else main()

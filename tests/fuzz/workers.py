"""Judgement in processes of their own: XLA's partitioner ends the process where a check of its own fails, or never comes back."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import os
import tempfile
import time
from typing import Any

from tests.fuzz.packs import Finding, Pack

CALLS = 60
"""After so many a process is a new one: what XLA compiles stays in memory."""

DEVICES = "xla_force_host_platform_device_count"

FLAGS = {
    DEVICES: "8",
    "xla_backend_optimization_level": "0",
    "xla_cpu_parallel_codegen_split_count": "1",
}
"""Those of `make test`: they shorten compilations and change no value."""

if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have no such flag
    FLAGS["xla_cpu_use_fusion_emitters"] = "false"


class Ended(Exception):
    """The process is gone, or was ended at the time limit. The text says why."""


def environment(device: str) -> None:
    """Set what a new process needs before it imports JAX. What compiles for a device that is not here gets no `FLAGS`."""
    given = os.environ.get("XLA_FLAGS", "")
    flags = {DEVICES: FLAGS[DEVICES]} if device else FLAGS
    more = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    os.environ.update(JAX_PLATFORMS="cpu", NPROC="32", SHARDFN_CHIPS="", XLA_FLAGS=" ".join([given, *more]).strip())
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")  # for the TPU compiler, as in `verify`


class Worker:
    """A process that judges. It starts when it is first needed, and anew after it has ended.

    Args:
      device: the `Pack.device` of all that it judges.
    """

    def __init__(self, device: str = "") -> None:
        self.device = device
        self.process: Any = None
        self.calls = 0
        self.cpu_time_s = 0.0

    def call(self, name: str, *args: Any, limit_s: float = 600.0) -> Any:
        """`TASKS[name](*args)` in the process.

        Raises:
          Ended: it did not come back within the limit.
        """
        if self.process is None or self.calls >= CALLS:
            self.close()
            environment(self.device)
            spawn = multiprocessing.get_context("spawn")  # a fork of a process with JAX's threads may hang
            self.log = tempfile.NamedTemporaryFile(prefix="fuzz-", suffix=".log")  # noqa: SIM115 (it lives as long as the process)
            self.connection, theirs = spawn.Pipe()
            self.process = spawn.Process(target=serve, args=(theirs, self.log.name), daemon=True)
            self.process.start()
            theirs.close()
            self.calls, limit_s = 0, limit_s + 60
        self.calls += 1
        try:
            self.connection.send((name, args))
            if not self.connection.poll(limit_s):
                self.close()
                raise Ended(f"time limit of {limit_s:.0f} s")
            result, seconds = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            why = self.last_words()
            self.close()
            raise Ended(why) from error
        self.cpu_time_s += seconds
        if isinstance(result, Exception):
            raise result
        return result

    def last_words(self) -> str:
        """What the process wrote about its end: the first line of a failed check."""
        self.process.join(10)
        with open(self.log.name, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        fatal = [line for line in lines if line.startswith("F") or "Check failed" in line]
        return f"the process ended ({self.process.exitcode}): " + (fatal[0] if fatal else " ".join(lines[-2:]))[:400]

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.log.close()
            self.process = None


def judged_apart(worker: Worker, pack: Pack, limit_s: float = 600.0) -> list[Finding]:
    """The findings of a pack with one check that may end the process. If it ends unsharded too, the pack is invalid."""
    try:
        return worker.call("judge", pack, limit_s=limit_s)
    except RuntimeError as error:
        return [Finding(pack, pack.checks[0], "invalid", str(error))]
    except Ended as error:
        finding = Finding(pack, pack.checks[0], "crashed", str(error))
    try:
        worker.call("reference", pack, limit_s=limit_s)
    except (Ended, RuntimeError):
        finding = dataclasses.replace(finding, verdict="invalid")
    return [finding]


def serve(connection: Any, log: str) -> None:
    """Run tasks until the other side is gone."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    import jax

    from tests.fuzz import judge, packs

    tasks = {
        "seed": lambda *args: judge.judge(packs.draw_pack(*args)),
        "judge": judge.judge,
        "reference": judge.unsharded,
        "without_library": judge.without_library,
    }
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        start = time.process_time()
        try:
            result = tasks[name](*args)
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        jax.clear_caches()
        connection.send((result, time.process_time() - start))

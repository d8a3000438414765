"""Judge random programs until a number or a time is reached: `python -m tests.fuzz --programs 2000`."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import threading
import time
from typing import Any

from shardfn.compiled.targets import target
from shardfn.cost.devices.hardware import resolve
from tests.fuzz.packs import CHECKS, PACK, Finding, Pack, draw_pack, script
from tests.fuzz.programs import DEVICES
from tests.fuzz.shrink import shrink, signature
from tests.fuzz.workers import Ended, Worker, judged_apart

VERDICTS = ("right", "wrong", "crashed", "refused", "unsure", "invalid")
FAILURES = ("wrong", "crashed")
SHOWN = (*FAILURES, "refused")
"""A refusal is a program too: its strategies divide all shapes, so there is nothing for a user to correct."""


class Run:
    """The state that the threads share, each with a worker of its own."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.lock = threading.Lock()
        self.start = time.monotonic()
        self.seeds = itertools.count(options.seed)
        self.programs = 0
        self.verdicts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.as_predicted: collections.Counter[bool | None] = collections.Counter()
        self.texts: collections.Counter[str] = collections.Counter()
        self.kinds: dict[str, collections.Counter[str]] = {v: collections.Counter() for v in ("all", *VERDICTS)}
        self.failing = 0
        self.shrunk: dict[Any, dict[str, Any]] = {}
        self.crashes: set[Any] = set()
        self.shrink_time_s = self.cpu_time_s = 0.0

    def elapsed_s(self) -> float:
        return time.monotonic() - self.start

    def is_over(self) -> bool:
        return self.programs >= self.options.programs or self.elapsed_s() > self.options.minutes * 60

    def work(self) -> None:
        worker = Worker(self.options.device)
        try:
            while True:
                with self.lock:
                    if self.is_over():
                        return
                    seed = next(self.seeds)
                self.one_pack(worker, seed)
        finally:
            with self.lock:
                self.cpu_time_s += worker.cpu_time_s
            worker.close()

    def one_pack(self, worker: Worker, seed: int) -> None:
        options = self.options
        try:
            findings = worker.call("seed", seed, not options.no_gradients, options.device)
        except Ended as error:
            findings = self.each_alone(worker, seed, error)
        except RuntimeError as error:  # of the fuzzer's own making
            findings = [Finding(self.pack(seed), "values", "invalid", f"seed {seed}: {error}")]
        with self.lock:
            self.count(seed, findings)
        failures = [f for f in findings if f.verdict in SHOWN]
        for finding in failures:
            self.show(worker, seed, finding)

    def pack(self, seed: int) -> Pack:
        return draw_pack(seed, not self.options.no_gradients, self.options.device)

    def each_alone(self, worker: Worker, seed: int, error: Ended) -> list[Finding]:
        """Which program and which check ended the process."""
        pack, findings = self.pack(seed), []
        for i, check in itertools.product(range(len(pack.programs)), pack.checks):
            single = dataclasses.replace(pack, programs=(pack.programs[i],), checks=(check,))
            findings += judged_apart(worker, single)
        if not any(f.verdict in ("crashed", "invalid") for f in findings):
            findings.append(Finding(pack, pack.checks[-1], "crashed", f"with these programs together only: {error}"))
        return findings

    def count(self, seed: int, findings: list[Finding]) -> None:
        programs = {p for f in findings for p in f.pack.programs}
        worst: dict[Any, str] = {}
        for finding in findings:
            self.verdicts[finding.check, finding.verdict] += len(finding.pack.programs)
            self.as_predicted[finding.as_predicted] += 1
            if finding.verdict in ("refused", "crashed", "invalid"):
                self.texts[f"{finding.verdict}: {signature(finding.text)}"] += 1
            for program in finding.pack.programs:
                worst[program] = max(worst.get(program, "right"), finding.verdict, key=SEVERITY.index)
        for program, verdict in worst.items():
            self.kinds[verdict].update(program.kinds())
            self.kinds["all"].update(program.kinds())
        before = self.programs
        self.programs += len(programs)
        self.failing += sum(v in FAILURES for v in worst.values())
        if before // 200 != self.programs // 200:
            print(
                f"# {self.programs} programs in {self.elapsed_s():.0f} s, {self.failing} wrong or crashed; seed {seed}",
                flush=True,
            )

    def show(self, worker: Worker, seed: int, finding: Finding) -> None:
        """Shrink a failure, unless shrinking has had its share of the time, and print it."""
        is_late = self.shrink_time_s > self.options.shrink * self.elapsed_s() * self.options.workers
        is_known = finding.verdict == "wrong" or (finding.verdict, signature(finding.text)) in self.crashes
        with self.lock:
            self.crashes.add((finding.verdict, signature(finding.text)))
        if self.options.shrink == 0 or (is_late and is_known):
            with self.lock:
                self.keep(seed, finding, "not shrunk")
            return

        def judged(pack: Pack) -> Finding:
            made = judged_apart(worker, pack)
            return next((f for f in made if f.verdict == finding.verdict), Finding(pack, pack.checks[0], "right"))

        before = time.monotonic()
        smaller = shrink(finding, judged)
        try:
            by_xla = worker.call("without_library", smaller.pack, smaller.pack.checks[0], limit_s=40)
        except (Ended, RuntimeError) as error:
            by_xla = f"fails: {signature(str(error))}"
        with self.lock:
            self.shrink_time_s += time.monotonic() - before
            self.keep(seed, smaller, by_xla)

    def keep(self, seed: int, finding: Finding, by_xla: str) -> None:
        kinds = tuple(sorted({k for p in finding.pack.programs for k in p.kinds()}))
        key = (
            (finding.verdict, finding.pack.checks[0], kinds, signature(finding.text))
            if by_xla != "not shrunk"
            else seed
        )
        if key in self.shrunk:
            self.shrunk[key]["times"] += 1
            return
        code = script(finding.pack)
        self.shrunk[key] = {"verdict": finding.verdict, "check": finding.pack.checks[0], "kinds": kinds, "text": finding.text,
                            "jax.jit alone": by_xla, "seed": seed, "code": code, "times": 1}  # fmt: skip
        if by_xla != "not shrunk" or self.options.verbose:
            print(f"\n## {finding.verdict}, {finding.pack.checks[0]}: {', '.join(kinds)} (seed {seed})\n# {finding.text}"
                  f"\n# jax.jit without the library: {by_xla}\n{code}", flush=True)  # fmt: skip

    def table(self) -> str:
        lines = [f"{'':10}" + "".join(f"{v:>10}" for v in VERDICTS)]
        for check in CHECKS:
            lines.append(f"{check:10}" + "".join(f"{self.verdicts[check, v]:>10}" for v in VERDICTS))
        for title, counter in (
            ("ops of wrong programs", self.kinds["wrong"]),
            ("ops of crashed programs", self.kinds["crashed"]),
        ):
            lines += [
                "",
                title,
                "  " + ", ".join(f"{k} {n} of {self.kinds['all'][k]}" for k, n in counter.most_common()),
            ]
        lines += ["", "refused, crashed and invalid", *(f"  {n:>5} {text}" for text, n in self.texts.most_common(30))]
        if compared := self.as_predicted[True] + self.as_predicted[False]:
            lines += ["", f"{self.as_predicted[True]} of {compared} compiled plans send as many bytes as predicted"]
        seconds = self.elapsed_s()
        lines += ["", f"{self.programs} programs, {self.failing} wrong or crashed ({self.failing / max(1, self.programs):.1%}), in {seconds:.0f} s;"
                      f" {self.cpu_time_s / max(1, self.programs):.2f} CPU s a program, {self.shrink_time_s:.0f} s of it all to shrink failures"]  # fmt: skip
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "programs": self.programs, "failing": self.failing, "elapsed_s": self.elapsed_s(), "cpu_time_s": self.cpu_time_s,
            "verdicts": {f"{c} {v}": n for (c, v), n in sorted(self.verdicts.items())}, "texts": dict(self.texts),
            "plans as predicted": self.as_predicted[True], "plans not as predicted": self.as_predicted[False],
            "kinds": {v: dict(c) for v, c in self.kinds.items()}, "failures": list(self.shrunk.values()), "options": vars(self.options),
        }  # fmt: skip


SEVERITY = ["right", "unsure", "invalid", "refused", "crashed", "wrong"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=10**9, help=f"how many programs; {PACK} are judged together")
    parser.add_argument("--minutes", type=float, default=10**6, help="how long")
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of the first pack; the next packs have the next seeds"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--json", metavar="FILE", help="write what was found")
    parser.add_argument(
        "--device",
        default="",
        help="compile the programs for these devices (h100:8, v5e:8), which need not be here, in place of running them",
    )
    parser.add_argument("--no-gradients", action="store_true", help="compare values alone")
    parser.add_argument(
        "--shrink", type=float, default=0.25, help="the share of the time that shrinking may take; 0 for none"
    )
    parser.add_argument("--verbose", action="store_true", help="print the failures that were not shrunk, too")
    options = parser.parse_args()
    if options.programs == 10**9 and options.minutes == 10**6:
        options.programs = 1000
    if options.device:
        hardware = resolve(options.device)
        target(hardware)  # raises where its compiler is not installed
        if hardware.count not in DEVICES:
            parser.error(f"--device {options.device}: programs are drawn for {', '.join(map(str, DEVICES))} devices")
    run = Run(options)
    threads = [threading.Thread(target=run.work) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(run.table())
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(run.as_json(), file, indent=1, default=str)
    return 1 if run.failing else 0


if __name__ == "__main__":
    raise SystemExit(main())

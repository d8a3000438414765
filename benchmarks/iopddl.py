"""Solve instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism and check the answers.

    python benchmarks/iopddl.py [--no-memory] [--seconds N | --work N] [--json OUT] FILE.json.gz ...

The files are at https://github.com/google/iopddl (Apache-2.0). Cost and memory of an answer are counted again here,
from the file alone. `gap` is how much of the cost may be too much: (cost - bound) / cost.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import pathlib
import sys
import time
from typing import Any

from benchmarks import harness
from shardfn.solver.budget import Budget
from shardfn.solver.labelling import FORBIDDEN, labelling
from shardfn.solver.solve import Effort, solve

OTHER_SECONDS = 60  # for a file the table below does not name
CONTEST_SECONDS = {"A": 60, "B": 60, "G": 120, "M": 180, "S": 240, "V": 300}
"""By the letter that a file's name ends in; another letter counts as the one before it in this table, a guess."""
THOROUGH = Effort(rounds=10**6, parts=10**6, patience=100, most=300_000)  # the budget ends it
RESERVE = 0.9  # of the time: the rest is for reading the file and a step that runs over


def read(path: pathlib.Path) -> dict[str, Any]:
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return found["problem"]


def check(problem: dict[str, Any], choice: list[int]) -> tuple[int, int]:
    """The cost and the peak of a choice by the contest's rules, with nothing of the solver."""
    nodes, edges = problem["nodes"], problem["edges"]
    cost = sum(costs[at] for costs, at in zip(nodes["costs"], choice, strict=True))
    for ends, costs in zip(edges["nodes"], edges["costs"], strict=True):
        at = 0
        for node in ends:
            at = at * len(nodes["costs"][node]) + choice[node]
        cost += costs[at]
    events = []
    for (start, end), usages, at in zip(nodes["intervals"], nodes["usages"], choice, strict=True):
        if start < end:
            events += [(start, usages[at]), (end, -usages[at])]
    peak = alive = 0
    for _, change in sorted(events):  # at one time, what ends (negative) goes first
        alive += change
        peak = max(peak, alive)
    return cost, peak


def seconds_for(path: pathlib.Path, given: float | None) -> float:
    """What a file may take: `asplos-2025-iopddl-V.json.gz` and `V.json` have the contest's time of V.

    >>> [seconds_for(pathlib.Path(name), None) for name in ("V.json", "asplos-2025-iopddl-H.json.gz", "other.json")]
    [270.0, 108.0, 54.0]
    """
    if given is not None:
        return given
    letter = path.name.split(".")[0].rpartition("-")[2]
    before = [known for known in CONTEST_SECONDS if len(letter) == 1 and known <= letter <= "Z"]
    return (CONTEST_SECONDS[max(before)] if before else OTHER_SECONDS) * RESERVE


def row_of(path: pathlib.Path, memory: bool, given: float | None, work: float | None = None) -> dict[str, Any]:
    begin = time.perf_counter()
    problem = read(path)
    limit = problem.get("usage_limit") if memory else None
    nodes, edges = problem["nodes"], problem["edges"]
    tables = list(zip(edges["nodes"], edges["costs"], strict=True))
    stated = labelling(nodes["costs"], nodes["usages"], nodes["intervals"], tables, limit)
    reading = time.perf_counter() - begin
    seconds = max(seconds_for(path, given) - reading, 0.1)
    budget = Budget(seconds=seconds) if work is None else Budget(work)
    solving, cpu = time.perf_counter(), time.process_time()
    found = solve(stated, budget, THOROUGH)
    solving, cpu = time.perf_counter() - solving, time.process_time() - cpu
    cost, peak = check(problem, list(found.choice))
    return {
        "file": path.name, "name": problem.get("name", path.stem), "nodes": len(nodes["costs"]), "cost": cost,
        "bound": found.bound if math.isfinite(found.bound) else None, "proved": found.proved,
        "gap": found.gap, "peak": peak, "limit": limit, "feasible": limit is None or peak <= limit,
        "least_peak": found.least_peak.peak if found.least_peak else None,
        "least_peak_bound": found.least_peak.bound if found.least_peak else None, "seconds": solving,
        "cpu_s": cpu, "work": budget.spent,
        "reading_s": reading, "choice": list(found.choice),
        "agrees": cost == found.cost or (math.isinf(found.cost) and cost >= FORBIDDEN),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE.json.gz")
    parser.add_argument("--no-memory", action="store_true", help="leave the limit on what is alive out")
    parser.add_argument(
        "--seconds",
        type=float,
        help="for each file, reading included; default: 0.9 of the contest's (A, B 60; G 120; M 180; S 240; "
        "V 300; any other 60), the rest is for what runs over",
    )
    parser.add_argument(
        "--work",
        type=float,
        help="instead: entries of tables that may be read, about 2e8 a second; a busy machine gives the same answer",
    )
    given = harness.parse(parser, argv=arguments)
    rows = []
    print(f"{'name':<22}{'nodes':>7}{'cost':>17}{'bound':>17}{'gap':>9}  {'proved':<7}{'fits':<6}"
          f"{'peak/limit':>10}{'solve s':>9}{'CPU s':>8}{'work':>10}{'read s':>8}")  # fmt: skip
    for path in given.files:
        row = row_of(path, not given.no_memory, given.seconds, given.work)
        rows.append(row)
        used = f"{row['peak'] / row['limit']:.3f}" if row["limit"] else "-"
        gap = f"{row['gap']:.3%}" if row["feasible"] else "-"
        bound = "none" if row["bound"] is None else f"{row['bound']:,.0f}"
        print(f"{row['name'][:21]:<22}{row['nodes']:>7}{row['cost']:>17,.0f}{bound:>17}{gap:>9}  "
              f"{'yes' if row['proved'] else 'no':<7}{'yes' if row['feasible'] else 'NO':<6}{used:>10}"
              f"{row['seconds']:>9.2f}{row['cpu_s']:>8.2f}{row['work']:>10.1e}{row['reading_s']:>8.2f}", flush=True)  # fmt: skip
        if not row["feasible"] and row["least_peak"] is not None:
            why = "no choice keeps the limit" if row["proved"] else "no choice within the limit was found"
            print(f"  {why}: the least memory found is {row['least_peak']:,.0f} of {row['limit']:,.0f}; "
                  f"none needs less than {row['least_peak_bound']:,.0f}")  # fmt: skip
        if not row["agrees"]:
            print(f"  the check counts {row['cost']}, the solver said otherwise: please report this")
    harness.save(given.json, {"instances": rows})
    return 0 if all(row["feasible"] and row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

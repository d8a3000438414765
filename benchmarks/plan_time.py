"""How long does a plan take? The targets, and how the time grows with layers and devices.

A time is that of `shard(step).plan(*shapes)` with everything open, less JAX's own tracing and lowering: reading the
module, the search, the flows and their prices, and making the plan. Every plan is the first of its program.
Run: python benchmarks/plan_time.py [--only TEXT ...] [--quick] [--json OUT] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import shardfn
from benchmarks import harness
from examples.models import abstract, gpt2, llama, mindspore
from shardfn.cost.estimate import Cost
from shardfn.ir import shardy
from shardfn.planning.call import call_function

LAYERS = (2, 6, 12, 24, 48, 96)
DEVICES = (8, 64, 512, 4096)
PROVED = 0.01
"""The gap to the optimum of the cost model within which a plan counts as proved."""
BATCH = 64
"""Enough that every device count has something to do."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One plan. `series` and `x` place it in the plot; `target` is in seconds; `proof` asks for a proved optimum."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], Any]]
    options: Callable[[Any], dict[str, Any]]
    series: str = ""
    x: int = 0
    target: float = math.inf
    proof: bool = False
    report: bool = False
    """Whether the report is made too."""
    long: bool = False
    table: str = "plans"


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured; `jax_s` is what tracing and lowering took beside `plan_s`.

    `plan_cpu_s`, the process's own time, is held against `target`: other work on the machine disturbs it less.
    """

    name: str
    series: str
    x: int
    ops: int
    jax_s: float
    plan_s: float
    plan_cpu_s: float
    target: float
    policy: str
    ok: bool
    table: str
    cost: Cost


def gpt(layers: int, scan: bool = False) -> Callable[[], Any]:
    cfg = dataclasses.replace(gpt2.SMALL, layers=layers, scan=scan, batch=BATCH)
    return functools.partial(abstract, gpt2.make, cfg)


def on(devices: int, **options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda args: {"device": f"h100:{devices}", "level": 2, "donate_argnums": (0, 1), **options}


def mesh_4x2(args: Any) -> dict[str, Any]:
    """Everything open but the batch, which lies over the first axis."""
    rows = shardfn.mindspore.Layout((4, 2), ("data", "model"))("data", "None")
    entries = (shardfn.AUTO, shardfn.AUTO, rows)
    return on(8, in_strategy=entries, search_mode="dynamic_programming")(args)


def data_parallel(args: Any) -> dict[str, Any]:
    """Nothing open: parameters and state whole, the batch over all devices."""
    whole = [jax.tree.map(lambda leaf: (1,) * leaf.ndim, tree) for tree in args[:2]]
    return {"device": "tpu-v5e:4x8", "in_strategy": (*whole, (32, 1)), "donate_argnums": (0, 1)}


def seconds_for(layers: int, devices: int, scan: bool) -> float:
    """The target of a GPT-2 training step."""
    if scan:
        return 1.0
    return {(12, 8): 3.0, (12, 4096): 6.0, (96, 8): 30.0}.get((layers, devices), math.inf)


def cases() -> Iterator[Case]:
    """All cases; those of a series grow in one number."""
    for layers in LAYERS:
        for scan in (True, False):
            kind = "scanned" if scan else "unrolled"
            yield Case(
                f"gpt2, {layers} layers {kind}, 8 devices", gpt(layers, scan), on(8), f"layers, {kind}", layers,
                seconds_for(layers, 8, scan), long=layers > 24 and not scan,
            )  # fmt: skip
    for devices in DEVICES:
        yield Case(
            f"gpt2, 12 layers unrolled, {devices} devices", gpt(12), on(devices), "devices", devices,
            seconds_for(12, devices, False),
        )  # fmt: skip
    for devices in (8, 16, 64):
        yield Case(
            f"MindSpore's transformer with gradients, {devices} devices",
            functools.partial(abstract, mindspore.make, mindspore.TRANSFORMER),
            on(devices, donate_argnums=()), target=1.0,
        )  # fmt: skip
    for mode in ("recursive_programming", "dynamic_programming"):
        for level in (0, 1, 2):
            yield Case(
                f"MindSpore's transformer, 64 devices, level {level}, {mode}",
                functools.partial(abstract, mindspore.make, mindspore.TRANSFORMER),
                on(64, donate_argnums=(), level=level, search_mode=mode), table="modes",
            )  # fmt: skip
    yield Case("gpt2, 24 layers unrolled, mesh (4, 2), with proof", gpt(24), mesh_4x2, target=5.0, proof=True)
    pod = functools.partial(abstract, llama.make, llama.llama3_70b(batch=256, context=4096))
    yield Case("Llama 3 70B, 80 layers scanned, 256 devices", pod, on(256), target=45.0)
    yield Case("Llama 3 70B, the same, fast budget", pod, on(256, level="time", budget="fast"))
    cfg = llama.Config(
        layers=32, d_model=4096, heads=32, kv_heads=8, d_hidden=14336, vocab=128256, context=2048, batch=64
    )
    for device in ("h100", "h200"):  # on the first one no plan of level 2 fits
        yield Case(f"Llama 3 8B, 32 layers unrolled, 64 {device}", functools.partial(abstract, llama.make, cfg),
                   on(64, device=f"{device}:64"))  # fmt: skip
    yield Case("explain, gpt2 of 6 layers, no devices", gpt(6), data_parallel, target=1.0, report=True)


class Clock:
    """Seconds, and CPU seconds of the process, spent inside functions that are wrapped for a while."""

    def __init__(self) -> None:
        self.spent = self.cpu = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.perf_counter() - start
                self.cpu += time.process_time() - cpu

        return timed


def measure(case: Case) -> Row:
    """Plan once; what tracing takes beside reading the module is JAX's."""
    fn, args = case.make()
    options = case.options(args)
    whole, tracing, reading = Clock(), Clock(), Clock()
    trace, lower, read = call_function.trace_jaxpr, call_function.lower, shardy.read_graph
    call_function.trace_jaxpr, call_function.lower = tracing.around(trace), tracing.around(lower)
    shardy.read_graph = reading.around(read)
    try:
        function: Any = shardfn.shard(fn, **options)
        call = function.explain if case.report else function.plan
        whole.around(call)(*args)
    finally:
        call_function.trace_jaxpr, call_function.lower, shardy.read_graph = trace, lower, read
    plan = function.plan(*args)
    jax_s = tracing.spent - reading.spent
    plan_s = whole.spent - jax_s
    cpu = whole.cpu - tracing.cpu + reading.cpu
    ok = cpu <= case.target and (not case.proof or (plan.gap is not None and plan.gap <= PROVED))
    ops = len(plan.partitioned.graph.ops)
    return Row(case.name, case.series, case.x, ops, jax_s, plan_s, cpu, case.target, plan.policy, ok, case.table,
               plan.cost)  # fmt: skip


# ---- showing


def line(row: Row) -> str:
    target = "" if math.isinf(row.target) else f"{row.target:g}"
    verdict = "" if math.isinf(row.target) else "ok" if row.ok else "FAIL"
    times = f"{row.jax_s:>7.2f} {row.plan_s:>8.2f} {row.plan_cpu_s:>7.2f}"
    return f"{row.name:<52} {row.ops:>7,} {times} {target:>7} {verdict:<5}{row.policy}"


def as_json(row: Row) -> dict[str, Any]:
    return {"program": row.name, "ops": row.ops, "CPU s": row.plan_cpu_s, "s": row.plan_s, "tracing s": row.jax_s,
            "target s": row.target, "ok": row.ok, "policy": row.policy, "sent MB": row.cost.bytes_sent / 1e6,
            "peak MB": row.cost.memory.peak / 1e6, "modelled ms": row.cost.time_s * 1e3}  # fmt: skip


def bars(rows: Sequence[Row], width: int = 60) -> Iterator[str]:
    """Each series as bars on one scale."""
    most = max((r.plan_s for r in rows), default=1.0)
    for series in dict.fromkeys(r.series for r in rows if r.series):
        yield f"\n{series}"
        for row in (r for r in rows if r.series == series):
            yield f"{row.x:>6} {'█' * max(1, round(width * row.plan_s / most))} {row.plan_s:.2f} s"


def svg(rows: Sequence[Row], width: int = 480, height: int = 300, margin: int = 50) -> str:
    """The series as lines, both axes logarithmic: layers or devices, and seconds."""
    shown = [r for r in rows if r.series]
    xs, ys = [math.log2(r.x) for r in shown], [math.log10(max(r.plan_s, 1e-3)) for r in shown]
    low, high = math.floor(min(ys)), math.ceil(max(ys)) or 1
    right = max(xs)

    def at(row: Row) -> tuple[float, float]:
        x = margin + (width - 2 * margin) * (math.log2(row.x) - min(xs)) / max(right - min(xs), 1)
        y = (math.log10(max(row.plan_s, 1e-3)) - low) / max(high - low, 1)
        return x, height - margin - (height - 2 * margin) * y

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
             f'<rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for power in range(low, high + 1):
        y = height - margin - (height - 2 * margin) * (power - low) / max(high - low, 1)
        parts.append(f'<path d="M{margin} {y:.1f}H{width - margin}" stroke="#ddd"/>')
        parts.append(f'<text x="{margin - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for i, series in enumerate(dict.fromkeys(r.series for r in shown)):
        colour = ("#1b6ca8", "#c0392b", "#27864b", "#8e44ad")[i % 4]
        points = [(at(r), r) for r in shown if r.series == series]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for (x, y), _ in points)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), row in points:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            parts.append(f'<text x="{x:.1f}" y="{y - 7:.1f}" text-anchor="middle" fill="{colour}">{row.x}</text>')
        parts.append(f'<text x="{margin}" y="{18 + 14 * i}" fill="{colour}">plan time over {series}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Print the table and the growth; exit with 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="cases whose name holds one of these")
    parser.add_argument("--quick", action="store_true", help="without the 48 and 96 unrolled layers")
    parser.add_argument("--plot", help="an SVG file to write")
    options = harness.parse(parser)
    harness.start("cpu", 1)
    for scan in (False, True):  # what is imported and compiled once
        measure(Case("warm", gpt(1, scan), on(8)))
    rows: list[Row] = []
    print(f"{'plan of':<52} {'ops':>7} {'JAX s':>7} {'plan s':>8} {'CPU s':>7} {'target':>7}")
    for case in cases():
        if (options.quick and case.long) or (options.only and not any(t in case.name for t in options.only)):
            continue
        known = next((r for r in rows if r.name == case.name), None)
        if known is not None:  # a point of two series
            rows.append(dataclasses.replace(known, series=case.series, x=case.x))
            continue
        rows.append(measure(case))
        print(line(rows[-1]), flush=True)
    print("\n".join(bars(rows)))
    if options.plot and any(r.series for r in rows):
        pathlib.Path(options.plot).write_text(svg(rows))
    tables = {row.table: list({r.name: as_json(r) for r in rows if r.table == row.table}.values()) for row in rows}
    harness.save(options.json, tables)
    missed = list(dict.fromkeys(r.name for r in rows if not r.ok))
    print(f"\n{len(missed)} targets missed" + (f": {'; '.join(missed)}" if missed else ""))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

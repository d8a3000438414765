"""Is the plan as good as the best layout written by hand? Families of training steps, on 8, 64 and 512 devices.

On 8 devices XLA compiles every layout for the CPU (for TPU chips with --tpu, which needs libtpu and no TPU); on 64 and
512 the figures are predicted. Each family is planned at levels 0, 1 and 2 under two memory limits: ample,
and one that pure data parallel does not fit. Printed are bytes sent, peak memory, FLOPs of matmuls and convolutions
(all of one device) and modelled time, then the checks. Nothing is run: programs are planned and compiled.
Run: python benchmarks/plan_quality.py [--families a,b] [--devices 8,64,512] [--level 2] [--layers 2] [--tpu]
     [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shardfn
from benchmarks import harness
from examples.models import mindspore
from examples.models.families import FAMILIES, with_layers
from shardfn import compiled
from shardfn.cost.compute import op_flops
from shardfn.cost.devices.links import link_over
from shardfn.planning.plan import Plan
from shardfn.search.problem import objectives
from shardfn.search.problem.objectives import aim

DEVICES = 8
QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options for programs that are never run: XLA takes the same decisions, and LLVM optimises less."""
TARGETS = {64: "tpu-v5e:8x8", 512: "h100:512"}
"""What is planned for beyond 8 devices."""
LEVELS = (0, 1, 2)
SAME, BETTER = 1e-3, 1e-2
"""A score this much larger is not worse; one this much smaller is strictly better."""
HOUR = 3600.0
"""Seconds for one plan: how busy the machine is must not decide."""
WITHIN = {"bytes": 0.05, "peak": 0.10, "flops": 0.02}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one call costs one device."""

    bytes: float
    peak: float
    flops: float
    communication_s: float
    compute_s: float
    even_s: float
    """Seconds of an even share of the compute."""
    memory_bytes: float
    """Of the device."""

    @property
    def time_s(self) -> float:
        return self.communication_s + self.compute_s


@dataclasses.dataclass(frozen=True)
class Row:
    """One layout of one family; of a plan also its level and its limit. `compiled` only where XLA compiled it."""

    family: str
    device: str
    devices: int
    layout: str
    predicted: Figures | None
    compiled: Figures | None
    seconds: float
    level: int | None = None
    limit: str = ""
    limit_bytes: float | None = None
    same_as: str = ""
    policy: str = ""
    error: str = ""

    @property
    def figures(self) -> Figures | None:
        """The best that is known of it."""
        return self.compiled or self.predicted

    @property
    def fits(self) -> bool:
        return self.figures is not None and (self.limit_bytes is None or self.figures.peak <= self.limit_bytes)


# ---- figures


def predicted(plan: Plan) -> Figures:
    cost = plan.cost
    return figures(plan, cost.bytes_sent, cost.memory.peak, matrix_flops(plan), cost.communication_s, cost.compute_s)


def figures(plan: Plan, sent: float, peak: float, flops: float, communication_s: float, compute_s: float) -> Figures:
    even_s = plan._answered.problem.even_s
    return Figures(sent, peak, flops, communication_s, compute_s, even_s, plan.hardware.chip.memory_bytes)


def matrix_flops(plan: Plan) -> float:
    """FLOPs of matmuls and convolutions, which is what can be read from a compiled module."""
    partitioned = plan.partitioned
    return sum(
        op_flops(partitioned, op) * op.trips
        for op in partitioned.graph.ops
        if op.name in ("dot_general", "convolution")
    )


def as_compiled(plan: Plan, real: compiled.Compiled) -> Figures:
    """The compiled figures; the time is the cost model's on them.

    Compute scales with the compiled FLOPs; each collective takes its time on the links of groups of their size.
    """
    sent = sum(c.total_bytes for c in real.collectives)
    peak = real.together(plan.hardware.platform) or plan.cost.memory.peak
    model = matrix_flops(plan)
    compute_s = plan.cost.compute_s * (real.flops / model if model else 1.0)
    links = {c.group_size: link_over(plan.hardware, plan.axes, (), c.group_size) for c in real.collectives}
    sent_s = sum(links[c.group_size].seconds(c.kind, c.bytes_sent) * c.trips for c in real.collectives)
    return figures(plan, sent, peak, real.flops, sent_s, compute_s)


def score(of: Figures, level: int) -> float:
    """What each level makes least: 0 seconds of communication and of unbalanced compute, 1 peak memory, 2 modelled time and the
    charge for memory."""
    return aim(level, objectives.Figures(of.communication_s, of.compute_s, of.even_s, of.peak, of.memory_bytes))[0]


# ---- measuring one family on one device count


def measure(
    name: str, devices: int, levels: Sequence[int], tpu: bool, compile_candidates: int, layers: int = 0
) -> Iterator[Row]:
    """All rows of a family: hand-written layouts first, then plans."""
    family = FAMILIES[name]
    compiles = devices == DEVICES
    size = family.small if compiles else family.large
    if layers:
        size = with_layers(size, layers)
    fn, args = family.on_paper(size)
    device: Any = None if compiles else TARGETS.get(devices, f"cpu:{devices}")
    if tpu:
        device = tpu_devices()
    seen: list[tuple[Any, str, Figures | None]] = []

    def row(layout: str, **options: Any) -> Row:
        more = {k: options.pop(k) for k in ("limit", "limit_bytes") if k in options}
        start = time.perf_counter()
        function: Any = shardfn.shard(options.pop("fn", fn), device=device, donate_argnums=family.donated, **options)
        shown = "tpu" if tpu else jax.default_backend() if device is None else str(device)
        try:
            plan = function.plan(*args)
            seconds = time.perf_counter() - start
            key = form(plan)
            twin, real = next(((other, known) for k, other, known in seen if k == key), ("", None))
            if compiles and real is None:
                real = as_compiled(
                    plan, compiled.read(function.lower(*args).compile(QUICK if shown == "cpu" else None))
                )
        except Exception as error:  # a row without figures is a check that fails: the others still count
            text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            spent = time.perf_counter() - start
            return Row(name, shown, devices, layout, None, None, spent, options.get("level"), **more, error=text)
        seen.append((key, layout, real))
        return Row(name, shown, devices, layout, predicted(plan), real, seconds, options.get("level"), **more,
                   same_as=twin, policy=plan.policy if "level" in options else "")  # fmt: skip

    written = family.hand_written(size, devices)
    by_hand = {layout: row(layout, in_strategy=w.in_strategy, fn=w.written(fn)) for layout, w in written.items()}
    yield from by_hand.values()
    for limit, limit_bytes in limits(by_hand):
        for level in levels:
            options = {
                "memory_limit": int(limit_bytes),
                "compile_candidates": compile_candidates if compiles else 0,
                "time_limit": HOUR,
            }
            yield row(f"plan, level {level}, {limit}", level=level, limit=limit, limit_bytes=limit_bytes, **options)


def form(plan: Plan) -> Any:
    """What tells one plan from another: two of one form compile to one program."""
    specs = tuple((d.path, d.strategy, d.spec) for d in (*plan.inputs, *plan.outputs))
    return plan.axes, specs, plan.collectives, dataclasses.replace(plan.cost, communication_s=0.0)


def limits(by_hand: dict[str, Row]) -> Iterator[tuple[str, float]]:
    """An ample memory limit, and one that data parallel misses while a hand-written layout still fits it."""
    peaks = {name: row.figures.peak for name, row in by_hand.items() if row.figures}
    if "data parallel" not in peaks:
        return
    yield "ample", 2 * max(peaks.values())
    tight = max(0.6 * peaks["data parallel"], 1.05 * min(peaks.values()))
    if tight < 0.95 * peaks["data parallel"]:
        yield "tight", tight


def tpu_devices() -> list[Any]:
    """Eight chips that are not here, for which libtpu compiles."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)


# ---- one matmul against its lower bound


def matmul_rows(devices: Iterable[int] = (4, 16, 64), n: int = 8192) -> Iterator[dict[str, Any]]:
    """Bytes of the planned n x n product beside the least that any algorithm sends with the memory that the plan takes."""
    shape = jax.ShapeDtypeStruct((n, n), jnp.float32)
    for p in devices:
        side = math.isqrt(p)
        blocks = shardfn.mindspore.Layout((side, side), ("rows", "columns"))("rows", "columns")
        kinds: dict[str, dict[str, Any]] = {
            "open": {},
            "rows of both, each held once": {"in_strategy": ((p, 1), (p, 1))},
            "square blocks, each held once": {"in_strategy": (blocks, blocks), "out_strategy": (blocks,)},
        }
        for name, options in kinds.items():
            try:
                plan = shardfn.plan(jnp.matmul, shape, shape, device=f"cpu:{p}", level=2, **options)
            except Exception as error:
                yield {"devices": p, "layouts": name, "error": f"{type(error).__name__}: {error}".split("\n")[0]}
                continue
            strategies = [d.strategy for d in (*plan.inputs, *plan.outputs)]
            yield {"devices": p, "layouts": name, "strategies": strategies, "peak": plan.cost.memory.peak,
                   "bytes": plan.cost.bytes_sent, "bound": least_bytes(n, p, plan)}  # fmt: skip


def matmul_table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'devices':>7} {'layouts':<44} {'x, w, result':<26} {'peak B':>13} {'B sent':>13} {'bound B':>13} over the bound"
    for line in lines:
        if "error" in line:
            yield f"{line['devices']:>7} {line['layouts']:<44} {line['error']}"
            continue
        over = f"{line['bytes'] / line['bound']:.2f}" if line["bound"] else "nothing has to be sent"
        strategies = " ".join("x".join(map(str, c)) for c in line["strategies"])
        yield (
            f"{line['devices']:>7} {line['layouts']:<44} {strategies:<26} {line['peak']:>13,} {line['bytes']:>13,} "
            f"{line['bound']:>13,.0f} {over}"
        )


def least_bytes(n: int, p: int, plan: Plan) -> float:
    """The least bytes that one of p devices sends or receives for an n x n product, given what it holds.

    With M words of memory n³ / (2√2 p √M) - M (Irony, Toledo, Tiskin 2004, Theorem 3.1; for M = 3n²/p of order n²/√p,
    Ballard et al. 2011); whatever the memory, at least 3 (n³/p)^(2/3) words are used, less those that lie there before
    and after (Al Daas, Ballard, Grigori, Kumar, Rouse 2022).
    """
    memory = plan.cost.memory.peak / 4
    held = sum(d.local_bytes for d in (*plan.inputs, *plan.outputs)) / 4
    bounded = n**3 / (2 * math.sqrt(2) * p * math.sqrt(memory)) - memory
    return 4 * max(0.0, bounded, 3 * (n**3 / p) ** (2 / 3) - held)


# ---- MindSpore's seed


def seed_rows(devices: int = DEVICES) -> Iterator[dict[str, Any]]:
    """One seed on the first Q projection of the 4-layer transformer: do all blocks get tensor x data parallel?"""
    wanted = {"q": (1, 4), "k": (1, 4), "v": (1, 4), "o": (4, 1), "up": (1, 4), "down": (4, 1)}
    for train in (False, True):
        size = dataclasses.replace(mindspore.TRANSFORMER, train=train)
        fn, args = FAMILIES["mindspore transformer"].on_paper(size)
        for mode in ("auto", "sharding_propagation", "dynamic_programming"):
            options = {"in_strategy": (shardfn.AUTO, (2, 1, 1)), "parameter_plan": {"params/0/q": (1, 4)}}
            try:
                plan = shardfn.plan(fn, *args, device=f"cpu:{devices}", level=2, search_mode=mode, **options)
            except Exception as error:
                yield {"gradients": train, "mode": mode, "blocks": 0, "of": size.layers, "others": {},
                       "error": f"{type(error).__name__}: {error}".split("\n")[0]}  # fmt: skip
                continue
            found = {d.path.split("/", 1)[1]: d.strategy for d in plan.inputs if "/" in d.path}
            good = sum(all(found[f"{layer}/{w}"] == one for w, one in wanted.items()) for layer in range(size.layers))
            yield {"gradients": train, "mode": mode, "blocks": good, "of": size.layers,
                   "others": {k: c for k, c in found.items() if wanted.get(k.split("/")[1], c) != c}}  # fmt: skip


def seed_table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for line in lines:
        kind = "with gradients" if line["gradients"] else "forward"
        others = line.get("error") or ", ".join(f"{k} {tuple(c)}" for k, c in line["others"].items())
        yield f"{line['mode']:<22} {kind:<15} {line['blocks']} of {line['of']} blocks are data 2 x tensor 4" + (
            f"; not {others}" if others else ""
        )


# ---- checks


def families(rows: Sequence[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """The rows of each family, on each kind and number of devices, that have figures for one at least."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.family, row.device, row.devices), []).append(row)
    return {key: mine for key, mine in groups.items() if any(r.figures for r in mine)}


def best_written(plan: Row, mine: Sequence[Row]) -> tuple[float, str] | None:
    """The score at a plan's level of the best layout by hand that keeps its limit, and that layout; None if none does."""
    limit = plan.limit_bytes or math.inf
    fitting = [r for r in mine if r.level is None and r.figures and r.figures.peak <= limit]
    return min(((score(r.figures, plan.level or 0), r.layout) for r in fitting if r.figures), default=None)


def over(own: float, best: float) -> float:
    """A plan's score over that of the best layout by hand."""
    return 1.0 if own == best else own / best if best else math.inf


def scores(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each plan's score over that of the best layout by hand, a line for each family; empty where there is none."""
    for (family, device, devices), mine in families(rows).items():
        verdicts = [passed for _, passed, _ in checks(mine) if passed is not None]
        line: dict[str, Any] = {"devices": devices, "for": device, "family": family}
        for limit, level in itertools.product(("ample", "tight"), LEVELS):
            plan = next((r for r in mine if r.level == level and r.limit == limit and r.figures), None)
            best = best_written(plan, mine) if plan else None
            own = score(plan.figures, level) if plan and plan.figures else math.inf
            line[f"level {level}{', tight' * (limit == 'tight')}"] = over(own, best[0]) if best else None
        yield line | {"checks passed": f"{sum(verdicts)} of {len(verdicts)}"}


def checks(rows: Sequence[Row]) -> Iterator[tuple[str, bool | None, str]]:
    """(what, passed or None for a remark, text), for each family and then over all."""
    better: dict[str, str] = {}
    for (family, device, devices), mine in families(rows).items():
        where = f"{family} on {devices} ({device})"
        plans = [r for r in mine if r.level is not None]
        yield from ((f"{where}, {r.layout}", False, r.error) for r in mine if r.level is None and r.error)
        for plan in plans:
            label = f"{where}, {plan.limit}, level {plan.level}"
            best = best_written(plan, mine)
            if plan.figures is None:
                yield label, False if best else None, f"no plan: {plan.error}"
                continue
            if not plan.fits:
                text = f"does not fit: {plan.figures.peak:,.0f} B of {plan.limit_bytes:,.0f}"
                yield label, False, text
                continue
            if best is None:
                yield label, None, "no hand-written layout fits"
                continue
            ratio = over(score(plan.figures, plan.level or 0), best[0])
            yield label, ratio <= 1 + SAME, f"{ratio:.4f} of the best by hand, {best[1]}"
            if ratio < 1 - BETTER:
                better.setdefault(family, f"{ratio:.2f} at level {plan.level}, {plan.limit}, {devices} devices")
            if family.startswith("mindspore") and plan.level != 1:
                plain = next((r.figures.bytes for r in mine if r.layout == "data parallel" and r.figures), math.inf)
                text = f"{plan.figures.bytes:,.0f} of {plain:,.0f} B"
                yield f"{label}, bytes at most data parallel's", plan.figures.bytes <= plain, text
        for limit in dict.fromkeys(r.limit for r in plans):
            three = [r for r in plans if r.limit == limit and r.figures]
            if len(three) < len(LEVELS):
                continue
            for plan in three:
                scores = {r.level: score(r.figures, plan.level or 0) for r in three if r.figures}
                own, best = scores[plan.level], min(scores.values())
                good = own <= best * (1 + SAME)
                text = (
                    ""
                    if good
                    else f"level {min(scores, key=lambda k: scores[k])} is better by {own / best if best else 0:.3f}"
                )
                yield f"{where}, {limit}, level {plan.level} best of the three at its objective", good, text
            different = len({r.figures for r in three})
            yield f"{where}, {limit}", None, f"{different} different plans of 3"
    if len({r.family for r in rows}) >= 3:
        named = "; ".join(f"{k} ({v})" for k, v in better.items())
        yield (
            "strictly better than every sharding by hand on at least 3 families",
            len(better) >= 3,
            f"{len(better)}: {named}",
        )


def accuracy(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """How close the predictions are to what was compiled, a line for each family and one for all."""
    both = [r for r in rows if r.predicted and r.compiled and not r.same_as]
    for family in (*dict.fromkeys(r.family for r in both), "all"):
        mine = [r for r in both if family in (r.family, "all")]
        line: dict[str, Any] = {"family": family, "rows": len(mine)}
        for what, bound in WITHIN.items():
            ratios = [(ratio(getattr(r.predicted, what), getattr(r.compiled, what)), r) for r in mine]
            worst, row = max(ratios, key=lambda pair: distance(pair[0]))
            name = row.layout if family != "all" else f"{row.family}, {row.layout}"
            line[f"{what} within {bound:.0%}"] = sum(abs(q - 1) <= bound for q, _ in ratios)
            line[f"worst {what}"] = f"{worst:.3f}" + (f" {name}" if round(worst, 3) != 1 else "")
        yield line


def distance(q: float) -> float:
    """How far a ratio is from 1, as a factor."""
    return abs(math.log(q)) if 0 < q < math.inf else math.inf


def ratio(first: float, second: float) -> float:
    return 1.0 if first == second else first / second if second else math.inf


# ---- printing


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'layout':<44} {'B sent':>15} {'peak B':>15} {'GFLOPs':>11} {'modelled ms':>12}  {'predicted / compiled':<22} plan s"
    for row in rows:
        figures = row.figures
        if figures is None:
            yield f"{row.layout:<44} {row.error}"
            continue
        ratios = ""
        if row.predicted and row.compiled:
            pairs = ((getattr(row.predicted, w), getattr(row.compiled, w)) for w in WITHIN)
            ratios = " ".join(f"{ratio(*pair):>6.2f}" for pair in pairs)
        fits = "" if row.fits else " does not fit"
        yield (
            f"{row.layout:<44} {figures.bytes:>15,.0f} {figures.peak:>15,.0f} {figures.flops / 1e9:>11,.3f} "
            f"{figures.time_s * 1e3:>12,.3f}  {ratios:<22} {row.seconds:>6.2f}{fits}"
            + (f" = {row.same_as}" if row.same_as else "")
        )


def as_row(data: dict[str, Any]) -> Row:
    sides: dict[str, Any] = {k: Figures(**data[k]) if data[k] else None for k in ("predicted", "compiled")}
    return Row(**(data | sides))


# ---- one process for each family: what XLA keeps of compiled programs grows


def in_own_process(arguments: Sequence[str]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        done = subprocess.run([sys.executable, __file__, *arguments, "--child", path], check=False)
        if not os.path.exists(path):
            return {"failed": done.returncode}
        with open(path) as file:
            return json.load(file)


def child(options: argparse.Namespace) -> None:
    what, levels = options.families, [int(n) for n in options.level.split(",")]
    if what == "matmul":
        found: Any = list(matmul_rows())
    elif what == "seed":
        found = list(seed_rows())
    else:
        count = int(options.devices)
        rows = measure(what, count, levels, options.tpu, options.compile_candidates, options.layers)
        found = [dataclasses.asdict(r) for r in rows]
    with open(options.child, "w") as file:
        json.dump(found, file)


def section(title: str, lines: Iterable[str]) -> None:
    print(f"\n== {title}")
    for line in lines:
        print(line, flush=True)


def verdict(found: tuple[str, bool | None, str]) -> str:
    what, passed, text = found
    return f"{'    ' if passed is None else 'PASS' if passed else 'FAIL'} {what}{': ' if text else ''}{text}"


def main() -> None:
    """Print the tables and the checks; exit with 1 where a check fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", default=",".join((*FAMILIES, "matmul", "seed")),
                        help='comma-separated, of these; "matmul" and "seed" are sections of their own')  # fmt: skip
    parser.add_argument("--devices", default="8,64,512")
    parser.add_argument("--level", default="0,1,2")
    parser.add_argument(
        "--compile-candidates", type=int, default=7, help="candidates that a plan compiles, on 8 devices"
    )
    parser.add_argument(
        "--layers", type=int, default=0, help="of a model, or blocks of each of its stages; 0: as many as it has"
    )
    parser.add_argument("--tpu", action="store_true", help="on 8 devices, compile for TPU v5e chips that are not here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    options = harness.parse(parser, devices=DEVICES)
    if options.child:
        child(options)
        return
    more = [
        "--level",
        options.level,
        "--compile-candidates",
        str(options.compile_candidates),
        "--layers",
        str(options.layers),
        "--platform",
        options.platform,
        *["--tpu"] * options.tpu,
    ]
    rows: list[Row] = []
    failed: list[tuple[str, bool | None, str]] = []
    extra: dict[str, Any] = {}
    names = options.families.split(",")
    if unknown := [n for n in names if n not in (*FAMILIES, "matmul", "seed")]:
        parser.error(f"unknown families: {', '.join(unknown)}")
    for count in (int(n) for n in options.devices.split(",")):
        for name in (n for n in names if n in FAMILIES):
            found = in_own_process(["--families", name, "--devices", str(count), *more])
            if isinstance(found, dict):
                failed.append((f"{name} on {count}", False, f"its process ended with {found['failed']}"))
                continue
            mine = [as_row(data) for data in found]
            rows += mine
            section(
                f"{name}, {count} devices ({mine[0].device}), {'compiled' if mine[0].compiled else 'flow'}", table(mine)
            )
    for name in ("matmul", "seed"):
        if name in names:
            extra[name] = in_own_process(["--families", name])
            if isinstance(extra[name], dict):
                failed.append((name, False, f"its process ended with {extra.pop(name)['failed']}"))
                continue
            title = {"matmul": "one n x n matmul against its lower bound", "seed": "MindSpore's seed"}[name]
            section(title, {"matmul": matmul_table, "seed": seed_table}[name](extra[name]))
    verdicts = [*checks(rows), *failed]
    for line in extra.get("seed", ()):
        label = f"seed, {line['mode']}, {'with gradients' if line['gradients'] else 'forward'}"
        verdicts.append((label, line["blocks"] == line["of"], f"{line['blocks']} of {line['of']} blocks"))
    section("checks", map(verdict, verdicts))
    tables: dict[str, list[dict[str, Any]]] = {"scores": list(scores(rows))}
    if tables["scores"]:
        harness.show(tables["scores"], "\n== of the best layout by hand")
    if any(r.compiled for r in rows):
        tables["accuracy"] = list(accuracy(rows))
        harness.show(tables["accuracy"], "\n== predicted against compiled")
    wrong = sum(passed is False for _, passed, _ in verdicts)
    print(f"\n{sum(passed is True for _, passed, _ in verdicts)} checks passed, {wrong} failed")
    listed = [dict(zip(("check", "passed", "figures"), found, strict=True)) for found in verdicts]
    harness.save(options.json, {**tables, "layouts": [dataclasses.asdict(r) for r in rows], **extra, "checks": listed})
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

"""Plan the models of examples/gallery at full size, and compare each plan with what XLA compiles.

Run: python benchmarks/gallery.py [--only NAME ...] [--compile [tiny]] [--save]

`--compile` compiles each plan with its target's own compiler, which needs no device (for TPUs libtpu, for GPUs JAX's CUDA
plugin); `--compile tiny` those of the tests' size alone. `--save` writes the figures and pictures to docs/gallery, and its pages
from these. `--pages` only writes the pages.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import harness

if __name__ == "__main__":  # eight virtual devices for the tiny sizes
    os.environ.update(harness.environment("cpu", 8))  # before JAX is imported

import shardfn
from examples.gallery import NAMES
from shardfn.compiled.comparison import compare
from shardfn.compiled.targets import target
from shardfn.runtime.verify import compile_plan
from shardfn.units import bytes_text, flops_text, time_text

Row = dict[str, Any]
FOLDER = harness.ROOT / "docs" / "gallery"
COMPILERS = {"cpu": "jaxlib", "tpu": "libtpu", "cuda": "jax-cuda12-plugin"}
"""By JAX's name of a platform the package that its compiler is in."""
PICTURES = {"memory": "What fills the memory of a device", "time": "What takes the time of a call"}
MOST_ARRAYS, MOST_COLLECTIVES = 12, 6


# ---- measuring


def cpu_s() -> float:
    """CPU seconds of this process and of those that it waited for."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + waited.ru_utime + waited.ru_stime


def local(text: str) -> str:
    """A text without the folders of this repository and of installed packages."""
    return re.sub(r"[^\s(`]*/site-packages/", "", text.replace(f"{harness.ROOT}/", ""))


def planned(plan: shardfn.Plan, seconds: float) -> Row:
    """The figures of a plan that pages show."""
    cost, counted = plan.cost, [d for d in plan.inputs if d.path.startswith("params")]
    return {
        "function": plan.function,
        "device": plan.hardware.name,
        "chip": plan.hardware.chip.name,
        "devices": plan.hardware.count,
        "parameters": sum(math.prod(d.shape) for d in counted),
        "ops": len(plan.partitioned.graph.ops),
        "plan_cpu_s": round(seconds, 2),
        "kind": plan.kind,
        "mesh": plan.axes,
        "summary": local(str(plan)),
        "policy": plan.policy,
        "gap": plan.gap,
        "time_s": cost.time_s,
        "compute_s": cost.compute_s,
        "communication_s": cost.communication_s,
        "flops": cost.flops,
        "bytes_sent": cost.bytes_sent,
        "peak_bytes": cost.memory.peak,
        "device_bytes": plan.hardware.chip.memory_bytes,
        "arrays": [
            {"path": d.path, "dtype": d.dtype, "shape": d.shape, "strategy": d.strategy}
            for d in sorted(plan.inputs, key=lambda d: -math.prod(d.shape))[:MOST_ARRAYS]
        ],
        "collectives": [
            {"kind": c.kind, "axes": c.axes, "runs": c.trips, "total_bytes": c.total_bytes, "where": local(c.where)}
            for c in sorted(plan.collectives, key=lambda c: -c.total_bytes)[:MOST_COLLECTIVES]
        ],
        "diagnostics": [local(text) for text in plan.diagnostics],
    }


def compiled(plan: shardfn.Plan) -> Row:
    """What the target's compiler makes of a plan, beside the prediction; or why it does not compile it."""
    start = cpu_s()
    try:
        found = compare(plan, made := compile_plan(plan))
    except shardfn.ShardError as error:
        return {"error": local(str(error)), "cpu_s": round(cpu_s() - start, 1)}
    memory = dict(found.memory)["together"]
    return {
        "compiler": compiler("cpu" if plan.hardware.is_here else target(plan.hardware).platform),
        "cpu_s": round(cpu_s() - start, 1),
        "kinds": {
            kind: {"predicted": [p.runs, p.bytes_sent], "compiled": [c.runs, c.bytes_sent]}
            for kind, p, c in found.kinds
        },
        "bytes_sent": [sum(c.total_bytes for c in side) for side in (plan.collectives, made.collectives)],
        "peak_bytes": [memory.predicted, memory.compiled],
        "matmul_flops": [found.matrix_flops.predicted, found.matrix_flops.compiled],
        "differences": [local(text) for text in found.why],
    }


def compiler(platform_name: str) -> str:
    """The compiler's package and version."""
    package = COMPILERS[platform_name]
    return f"{package} {importlib.metadata.version(package)}"


def measure(name: str, compile_sizes: str, save: bool) -> Row:
    """Plan every size of a model, the tiny one first, which imports and compiles what is needed once."""
    module = importlib.import_module(f"examples.gallery.{name}")
    rows: dict[str, Row] = {}
    for size in ("tiny", *sizes(module)):
        program = module.program(size)
        start = cpu_s()
        plan = program.plan()
        rows[size] = planned(plan, cpu_s() - start)
        if compile_sizes in ("all", size):
            rows[size]["compiled"] = compiled(plan)
        if save and size == sizes(module)[0]:
            for kind in PICTURES:
                plan.draw(kind).save(FOLDER / "images" / f"{name}-{kind}.svg")
        if size != "tiny":
            print(line(name, size, rows[size]), flush=True)
    machine, versions = harness.machine(), harness.versions(("flax", "equinox", "dm-haiku", "jraph", "numpyro"))
    made = {
        "command": harness.command(sys.argv),
        "date": f"{datetime.date.today()}",
        "versions": versions,
        "machine": f"{machine['processor']}, {machine['cores']} cores, load {os.getloadavg()[0]:.0f} at the end",
    }
    return {"name": name, **made, "sizes": rows}


def sizes(module: Any) -> tuple[str, ...]:
    """The sizes of a model beside the tiny one."""
    return getattr(module, "SIZES", ("full",))


# ---- the table


def line(name: str, size: str, row: Row) -> str:
    """One row of the printed table."""
    figures = (
        f"{row['plan_cpu_s']:>7.1f} {time_text(row['time_s']):>9} {bytes_text(row['peak_bytes']):>9} "
        f"{bytes_text(row['bytes_sent']):>9} {ratio(row, 'bytes_sent'):>7} {ratio(row, 'peak_bytes'):>7}"
    )
    return f"{f'{name} {size}':<28} {row['device']:<16} {figures}  {row['kind']}"


HEAD = (
    f"{'model':<28} {'devices':<16} {'CPU s':>7} {'step':>9} {'peak':>9} {'sent':>9} {'/bytes':>7} {'/peak':>7}  plan"
)


def ratio(row: Row, figure: str) -> str:
    """Predicted over compiled."""
    found = row.get("compiled", {})
    if figure not in found:
        return "failed" if found else "-"
    predicted, actual = found[figure]
    return "-" if not actual else f"{predicted / actual:.3f}"


# ---- the pages


def page(name: str, figures: Row) -> str:
    """The page of a model, from its script and its figures."""
    source = (harness.ROOT / "examples" / "gallery" / f"{name}.py").read_text(encoding="utf-8")
    title, text = documented(source)
    rows = {size: row for size, row in figures["sizes"].items() if size != "tiny"}
    drawn = {kind: f"![{text}: {title}](images/{name}-{kind}.svg)" for kind, text in PICTURES.items()}
    parts = [f"# {title}", drawn["time"], text]
    for i, (size, row) in enumerate(rows.items()):
        prose, *tables = planned_part(row)
        parts += ["## The plan" if len(rows) == 1 else f"## The plan: {size}", prose, *(tables if i == 0 else ())]
    if notes := constant(source, "NOTES"):
        parts += ["## Notes", notes]
    parts += [f"## {PICTURES['memory']}", drawn["memory"]]
    parts += ["## Prediction and compiler", *compared_part(figures["sizes"])]
    parts += ["## The program", *program_part(name, source, rows)]
    made = ", ".join(f"{package} {version}" for package, version in figures["versions"].items())
    parts += [
        "## How this page was made",
        f"`{figures['command']}` on {figures['date']}; {made}; {figures['machine']}.",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def documented(source: str) -> tuple[str, str]:
    """The title of a script and the text below it."""
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    return title.rstrip("."), text.strip()


def constant(source: str, name: str) -> str:
    """A text that a script assigns to a name, dedented; empty if there is none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [to.id for to in node.targets if isinstance(to, ast.Name)] == [name]:
            return str(ast.literal_eval(node.value)).strip()
    return ""


def planned_part(row: Row) -> Iterator[str]:
    """What was planned, in prose, then in tables."""
    many = f"{row['parameters'] / 1e9:,.1f} billion parameters, " if row["parameters"] >= 1e8 else ""
    mesh = " x ".join(f"{axis}={count}" for axis, count in row["mesh"])
    yield (f"**{row['kind']}**, on the mesh {mesh} of {row['device']}. One call takes {time_text(row['time_s'])} (modelled): "
           f"{time_text(row['compute_s'])} of compute, {time_text(row['communication_s'])} of communication. A device sends "
           f"{bytes_text(row['bytes_sent'])} and needs {bytes_text(row['peak_bytes'])} of its {bytes_text(row['device_bytes'])} "
           f"at the peak. The program has {many}{row['ops']:,} ops. Planned in {row['plan_cpu_s']:.0f} CPU seconds.")  # fmt: skip
    arrays = [f"| `{a['path']}` | {a['dtype']}{a['shape']} | {tuple(a['strategy'])} |" for a in row["arrays"]]
    yield "\n".join(["| largest arrays | shape | strategy |", "|---|---|---|", *arrays])
    sent = [
        f"| {c['kind']} | {', '.join(c['axes'])} | {c['runs']:,} | {bytes_text(c['total_bytes'])} | `{c['where']}` |"
        for c in row["collectives"]
    ]
    if sent:
        head = ["| largest collectives | mesh axes | runs | sent per device | line |", "|---|---|---:|---:|---|"]
        yield "\n".join([*head, *sent])


def program_part(name: str, source: str, rows: dict[str, Row]) -> Iterator[str]:
    """The script without the texts that the page has shown, and what it prints."""
    body, skipped = ast.parse(source).body, set[int]()
    for node in body:
        is_note = isinstance(node, ast.Assign) and [getattr(to, "id", "") for to in node.targets] == ["NOTES"]
        if is_note or (node is body[0] and ast.get_docstring(ast.parse(source))):
            skipped |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    kept = [i for i in range(1, len(source.splitlines()) + 1) if i not in skipped]
    starts = [i for i in kept if i - 1 not in kept]
    ends = [i for i in kept if i + 1 not in kept]
    lines = ",".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
    yield f"```{{literalinclude}} ../../examples/gallery/{name}.py\n:language: python\n:lines: {lines}\n```"
    for size, row in rows.items():
        yield f"`python -m examples.gallery.{name}{'' if size == 'full' else f' {size}'}` prints:"
        yield f"```text\n{row['summary']}\n```"


def compared_part(rows: dict[str, Row]) -> Iterator[str]:
    """Predicted and compiled figures of every size."""
    for size, row in sorted(rows.items(), key=lambda item: item[0] == "tiny"):
        found = row.get("compiled")
        where = "8 CPU devices, at the size of the tests" if size == "tiny" else f"{row['device']}, {size}"
        if not found:
            yield f"**{where}**: not compiled."
        elif "error" in found:
            yield f"**{where}**: did not compile ({found['cpu_s']:,.0f} CPU seconds):\n\n```text\n{found['error']}\n```"
        else:
            yield f"**{where}**, compiled by {found['compiler']} in {found['cpu_s']:,.0f} CPU seconds. Per device:"
            yield "\n".join(comparison(found))
            if found["differences"] and size != "tiny":
                yield "\n".join(f"- {text}" for text in found["differences"])


def comparison(found: Row) -> Iterator[str]:
    """A table of predicted and compiled figures."""
    yield "| | predicted | compiled | predicted / compiled |\n|---|---:|---:|---:|"
    for kind, sides in found["kinds"].items():
        (runs, size), (actual_runs, actual) = sides["predicted"], sides["compiled"]
        cells = f"{bytes_text(size)}, {runs:,} runs | {bytes_text(actual)}, {actual_runs:,} runs"
        yield f"| {kind} | {cells} | {f'{size / actual:.3f}' if actual else '-'} |"
    texts = (("all collectives", "bytes_sent", bytes_text), ("peak memory", "peak_bytes", bytes_text),
             ("matmul FLOPs", "matmul_flops", flops_text))  # fmt: skip
    for text, figure, shown in texts:
        predicted, actual = found[figure]
        if actual is not None:
            yield f"| {text} | {shown(predicted)} | {shown(actual)} | {ratio({'compiled': found}, figure)} |"


INDEX = """# Gallery: models people know

Each model is a short script. It is planned at full size from shapes, on a machine without accelerators. The compiler of the
target then compiles the plan. The tests run each at a tiny size on eight virtual CPU devices and compare it with the unsharded
function.

```{{rst-class}} cards
```

{cards}

## All figures

| model | devices | plan | CPU seconds | modelled time | peak memory | sent per device | bytes ratio | peak ratio |
|---|---|---|---:|---:|---:|---:|---:|---:|
{rows}

*CPU seconds* is what planning took, which is more where other programs shared the cores: newer pages say their load. Times are
modelled from datasheets, without overlap of compute and communication. The ratios are predicted over compiled: the bytes that one
device sends, and its peak memory. Each page gives the reasons for differences.

Each page says when it was measured: a later search may find another plan.
`python benchmarks/gallery.py --compile --save` measures again and writes these pages; `--only NAME` does one.

```{{toctree}}
:hidden:

{names}
```
"""


def index(figures: Sequence[Row]) -> str:
    """The page of all models."""
    rows = [index_row(each, size, row) for each in figures for size, row in each["sizes"].items() if size != "tiny"]
    names = "\n".join(each["name"] for each in figures)
    return INDEX.format(rows="\n".join(rows), cards="\n".join(map(card, figures)), names=names)


def card(figures: Row) -> str:
    """What the index shows of a model first: its picture, name and devices, as an item of a list."""
    name = figures["name"]
    source = (harness.ROOT / "examples" / "gallery" / f"{name}.py").read_text(encoding="utf-8")
    title, _, text = documented(source)[0].partition(": ")
    return f"- [![{title}](images/{name}-time.svg)]({name}.md)\n  **[{title}]({name}.md)** {text}"


def index_row(figures: Row, size: str, row: Row) -> str:
    """One row of its table."""
    source = (harness.ROOT / "examples" / "gallery" / f"{figures['name']}.py").read_text(encoding="utf-8")
    title = documented(source)[0].partition(":")[0] + ("" if size == "full" else f", {size}")
    cells = (f"[{title}]({figures['name']}.md)", row["device"], row["kind"], f"{row['plan_cpu_s']:.0f}",
             time_text(row["time_s"]), bytes_text(row["peak_bytes"]), bytes_text(row["bytes_sent"]),
             ratio(row, "bytes_sent"), ratio(row, "peak_bytes"))  # fmt: skip
    return f"| {' | '.join(cells)} |"


def stored(names: Sequence[str] = NAMES) -> list[Row]:
    """The figures of all models that were saved."""
    paths = (FOLDER / "figures" / f"{name}.json" for name in names)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def write_pages() -> None:
    """Write every page from the stored figures."""
    figures = stored()
    for each in figures:
        (FOLDER / f"{each['name']}.md").write_text(page(each["name"], each), encoding="utf-8")
    (FOLDER / "index.md").write_text(index(figures), encoding="utf-8")


def main() -> None:
    """Print the table; write figures, pictures and pages if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(NAMES), choices=NAMES, metavar="NAME", help="some models")
    parser.add_argument(
        "--compile", nargs="?", const="all", default="", choices=("all", "tiny"), help="compile each plan too"
    )
    parser.add_argument("--save", action="store_true", help="write docs/gallery")
    parser.add_argument("--pages", action="store_true", help="only write the pages, from the figures of docs/gallery")
    options = parser.parse_args()
    if not options.pages:
        print(HEAD)
        for name in options.only:
            made = measure(name, options.compile, options.save)
            if options.save:
                path = FOLDER / "figures" / f"{name}.json"
                path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.save or options.pages:
        write_pages()


if __name__ == "__main__":
    main()

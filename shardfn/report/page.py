"""The report as one HTML page that needs no other file, for readers who have never seen shardfn."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import importlib.resources
import re
from collections.abc import Iterator, Sequence

from shardfn.draw.kinds import draw_plan
from shardfn.draw.palette import PALETTE
from shardfn.ir.model import mesh_text
from shardfn.planning.plan import Plan, devices_text, fit_text
from shardfn.render.html import body, element
from shardfn.render.parts import Cell, Part, Table, Text
from shardfn.report.sections import Subject, parts
from shardfn.report.source_lines import SourceLines
from shardfn.units import bytes_text, time_text

NARROW, WIDE = 348, 1120
"""Widths of each picture in pixels: a page on a small screen shows the first, others the second."""
LONG = 24
"""A cell of more characters may be wrapped where the page is narrow."""

INTRODUCTION = (
    "shardfn divides the arrays of a JAX function over devices. XLA, the compiler, then inserts collectives: the steps in "
    "which devices exchange data. This page shows what each device holds, what one call costs, and which lines of code "
    "communicate."
)
ESTIMATED = "All figures are estimates, made without running the function."
REHEARSED = "The figures are estimates; the tables “Rehearsed” hold what one device measured of its part."
COMPARED = "The figures are estimates; the tables “Compiled” compare them with the compiled program."

WORDS = (
    ("Mesh, mesh axis", "The devices as a grid, and a named direction of it. `a=4 x b=2` is 8 devices in 4 groups of 2."),
    ("Shard", "The part of an array that one device holds. A replicated array has no shards: every device holds all of it."),
    ("Strategy", "The number of shards of each dimension. `(4, 1)` divides the first of two dimensions into 4 shards."),
    ("Spec", "The same with mesh axes, as in JAX. `P('a', None)` shards the first dimension over mesh axis `a`."),
    ("All-reduce", "Devices add up their partial results, and each gets the sum."),
    ("All-gather", "Each device gets the shards of the others."),
    ("Reduce-scatter", "Devices add up their partial results, and each gets one shard of the sum."),
    ("All-to-all", "Devices exchange shards: an array changes the dimension that is sharded."),
    ("Collective-permute", "Each device sends to one other device, for instance the edge of its shard to its neighbour."),
    ("Peak", "The most memory that one device needs at any time of a call."),
    ("Chosen by", "The user's entry, a file, propagation (it follows from other arrays), or the search."),
)  # fmt: skip
"""What a reader who has never seen shardfn needs to know."""

_OPEN = ("Diagnostics", "Arguments", "Collectives", "Rehearsed", "Compiled", "Why they differ")
"""Sections that are open at first, by the beginnings of their titles."""
_LEADING = ("Collectives", "Arguments")
"""Sections that go before the others, in this order."""


def page_html(of: Subject) -> str:
    """The report of a plan as a page, from `<!doctype html>` on.

    The page loads nothing, and its content security policy forbids it. Where scripts are off, only the filter and the sorting
    of tables are missing.
    """
    headline, *rest = parts(dataclasses.replace(of, is_full=True, most=_ALL))
    assert isinstance(headline, Text)
    leading = [_decided_first(part) for title in _LEADING for part in rest if part.title.startswith(title)]
    others = [part for part in rest if not part.title.startswith((*_LEADING, "Diagnostics"))]
    lines = _source_lines(leading)
    folder = importlib.resources.files("shardfn.report")
    script, style = (folder.joinpath(name).read_text("utf-8") for name in ("page.js", "page.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = html.escape(f"{of.plan.function}: plan for {devices_text(of.plan.hardware)}")
    content = [
        *_header(of, headline),
        *(_section(part, lines) for part in rest if part.title == "Diagnostics"),
        *_pictures(of.plan),
        *(_section(part, lines) for part in leading),
        *_code(lines),
        *(_section(part, lines) for part in others),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline';"
        f"script-src 'sha256-{digest}'\"><title>{title}</title><style>{_colours()}{style}</style></head>"
        f"<body><main>{''.join(content)}</main><footer>Made by shardfn. The same as data: "
        f"<code>report.save(\"report.json\")</code></footer><script>{script}</script></body></html>"
    )  # fmt: skip


def _decided_first(part: Part) -> Part:
    """A table of arrays with who chose their shardings beside the strategies, where a narrow page shows it too."""
    if not isinstance(part, Table) or not {"strategy", "chosen by"} <= set(part.columns):
        return part
    order = [i for i, name in enumerate(part.columns) if name != "chosen by"]
    order.insert(part.columns.index("strategy") + 1, part.columns.index("chosen by"))
    columns, *rows = (tuple(row[i] for i in order) for row in (part.columns, *part.rows))
    return dataclasses.replace(part, columns=columns, rows=tuple(rows))


_ALL = 1 << 60
"""No table of a page leaves rows out."""


def _header(of: Subject, headline: Text) -> Iterator[str]:
    plan, cost = of.plan, of.plan.cost
    verdict, _, memory = fit_text(plan).partition(": ")
    state = "fits" if verdict.startswith("fits") else "over"
    yield f"<header>{element('h1', plan.function)}"
    yield element("p class=lead", f"{plan.kind}, on {devices_text(plan.hardware)}")
    yield f"<p class='verdict {state}'>{element('strong', verdict[:1].upper() + verdict[1:] + ':')} {html.escape(memory)}</p>"
    figures = (
        ("time of one call", time_text(cost.time_s)),
        ("peak memory per device", bytes_text(cost.memory.peak)),
        ("sent per device and call", bytes_text(cost.bytes_sent)),
        ("mesh", mesh_text(plan.axes).removeprefix("of ")),
    )
    cards = "".join(f"<div>{element('dt', name)}{element('dd', text)}</div>" for name, text in figures)
    yield f'<dl class="figures">{cards}</dl>'
    yield element("p", f"{INTRODUCTION} {' '.join(_sources(of))}")
    rows = (line.partition(": ") for line in headline.lines[1:] if not line.startswith(("devices: ", "memory: ")))
    facts = "".join(f"{element('dt', name)}<dd>{_with_code(text)}</dd>" for name, _, text in rows)
    yield f'<dl class="facts">{facts}</dl>'
    words = "".join(f"{element('dt', word)}<dd>{_with_code(meaning)}</dd>" for word, meaning in WORDS)
    yield f'<details class="words"><summary>Words on this page</summary><dl class="facts">{words}</dl></details></header>'


def _sources(of: Subject) -> Iterator[str]:
    """Where the figures of the page come from."""
    if of.plan.rehearsal is None and of.compared is None:
        yield ESTIMATED
    if of.plan.rehearsal is not None:
        yield REHEARSED
    if of.compared is not None:
        yield COMPARED


def _with_code(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _pictures(plan: Plan) -> Iterator[str]:
    for kind in ("arrays", "memory", "time"):
        yield _picture(plan, kind)
    if plan.candidates:
        yield f"<details><summary><h2>Search</h2></summary>{_picture(plan, 'search')}</details>"


def _picture(plan: Plan, kind: str) -> str:
    wide, narrow = (draw_plan(plan, kind, width=width) for width in (WIDE, NARROW))
    return "".join(
        f'<div role="region" tabindex="0" class="picture {name}" aria-label="{html.escape(drawn.title)}">{drawn}</div>'
        for name, drawn in (("wide", wide), ("narrow", narrow))
    )


def _section(part: Part, lines: SourceLines) -> str:
    state = " open" if part.title.startswith(_OPEN) else ""
    count, inner = "", body(part)
    if isinstance(part, Table):
        many = f"{len(part.rows)} row{'s'[: len(part.rows) != 1]}"
        count, inner = f' <span class="count">{many}</span>', body(part, lambda text: _cell(text, lines))
    elif isinstance(part, Text):
        inner = "".join(f"<p>{_with_code(line)}</p>" for line in part.lines)
    return f"<details{state}><summary>{element('h2', part.title)}{count}</summary>{inner}</details>"


def _cell(text: str, lines: SourceLines) -> str:
    shown = html.escape(text).replace("/", "/<wbr>")
    if len(text) > LONG:
        shown = f'<span class="long">{shown}</span>'
    if not isinstance(text, Cell):
        return shown
    if text.place:
        shown = lines.linked(text.place, text)
    if not text.members:
        return shown
    members = html.escape(", ".join(text.members))
    return f'{shown}<details class="members"><summary>all {len(text.members)}</summary>{members}</details>'


def _source_lines(leading: Sequence[Part]) -> SourceLines:
    """The lines of the collectives in the tables, with a note for each row."""
    notes: dict[str, list[str]] = {}
    for table in leading:
        if isinstance(table, Table) and "line" in table.columns:
            for row in table.rows:
                told = dict(zip(table.columns, row, strict=True))
                count = f" × {told['count']}" if told.get("count") else ""
                place = told["line"].place if isinstance(told["line"], Cell) else ""
                notes.setdefault(place, []).append(f"{told['collective']}{count}: {told['sent']}, {told['time']}")
    return SourceLines(notes)


def _code(lines: SourceLines) -> Iterator[str]:
    listing = "".join(lines.listing())
    if listing:
        yield f"<details open><summary><h2>Code that communicates</h2></summary>{listing}</details>"


def _colours() -> str:
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in PALETTE.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"@media print{{:root{{color-scheme:light;{light}}}}}"
    )

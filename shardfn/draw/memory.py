"""The picture of memory: bytes on one device over the program as an area, against the limit, with the arrays at the peak."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from shardfn.cost.memory.live_memory import LiveMemory, live_memory
from shardfn.draw.palette import strong
from shardfn.draw.picture import Picture, head, percent, picture
from shardfn.draw.scale import Scale
from shardfn.draw.svg import MARGIN, fitted, line, polygon, rectangle, text, text_width
from shardfn.frontend.paths import layer, starred
from shardfn.ir.source_lines import file_line, source_line
from shardfn.planning.plan import Plan
from shardfn.units import bytes_text

BANDS = 6
"""How many temporaries have a colour of their own."""
MOST_ROWS = 9
"""Rows below the area."""
HEIGHT = 260.0
"""Pixels of the area."""
FAR = 4.0
"""A limit of more than this many times the peak is named, not drawn."""
_ROW = 20.0


@dataclasses.dataclass(frozen=True)
class _Group:
    """Arrays at the peak that are alike: what they are, from which line, their bytes together, and which buffers they are."""

    name: str
    line: str
    count: int
    bytes: int
    colour: str
    buffers: tuple[int, ...] = ()


def memory_picture(plan: Plan, width: float) -> Picture:
    """The memory of one device over one call: arguments and results throughout, temporaries where they are alive."""
    live, donated_note = _live(plan)
    groups = list(_groups(plan, live))
    peak, chip = plan.cost.memory.peak, plan.hardware.chip
    limit = chip.memory_bytes if plan.memory_limit is None else plan.memory_limit
    limit_text = f"{bytes_text(limit)} ({chip.name if plan.memory_limit is None else 'memory_limit'})"
    verdict = f"{percent(peak / limit)} of" if peak <= limit else f"{bytes_text(peak - limit)} over"
    title = f"Memory of {plan.function} on one device"
    notes = [f"Peak {bytes_text(peak)} (estimate), {verdict} the limit of {limit_text}.", *donated_note]
    elements, y = head(width, title, notes)
    elements += _chart(live, groups, limit, limit_text, y, width)
    y += HEIGHT + 58
    elements.append(text(MARGIN, y, "At the peak" if groups else "At the peak: no bytes", is_bold=True))
    sizes = max((text_width(bytes_text(group.bytes)) for group in groups), default=0)
    for group in groups[:MOST_ROWS]:
        y += _ROW
        elements += _row(group, sizes, y, width)
    if rest := groups[MOST_ROWS:]:
        y += _ROW
        count, size = sum(group.count for group in rest), bytes_text(sum(group.bytes for group in rest))
        listed = "; ".join(f"{group.name} {bytes_text(group.bytes)}" for group in rest)
        elements.append(text(MARGIN, y, f"… and {count} smaller arrays", fill="muted", title=listed))
        elements.append(text(width - MARGIN, y, size, anchor="end", fill="muted"))
    return picture(width, y + MARGIN, elements, title, notes)


def _live(plan: Plan) -> tuple[LiveMemory, list[str]]:
    """The buffers of a plan, and a note where donated arguments are not known."""
    answered = plan._answered
    donated = answered.problem.donated if answered is not None else ()
    unknown = answered is None and plan.cost.memory.donated
    note = ["The plan comes from another process, so the area counts results apart from donated arguments."]
    return live_memory(plan.partitioned, donated, plan.hardware.chip), note if unknown else []


def _groups(plan: Plan, live: LiveMemory) -> Iterator[_Group]:
    """What is alive at the peak, the largest first; the largest temporaries have colours of their own."""
    graph = live.partitioned.graph
    paths = dict(zip(graph.arguments(len(plan.inputs)), (d.path for d in plan.inputs), strict=True))
    results = dict(
        zip(graph.outputs[len(graph.outputs) - len(plan.outputs) :], (d.path for d in plan.outputs), strict=True)
    )
    found: dict[tuple[str, str, str], list[tuple[str, int, int]]] = {}

    def add(kind: str, name: str, where: str, size: int, buffer: int = -1) -> None:
        found.setdefault((kind, layer(name), where), []).append((name, size, buffer))

    for v, size in live.arguments:
        add("argument", paths.get(v, "captured"), "", size)
    for v, size in live.results:
        add("result", results.get(v, "result"), _line(live, v), size)
    for i in live.at_peak:
        buffer = live.temporaries[i]
        add("temporary", *_described(live, buffer.values), buffer.bytes, i)
    ordered = sorted(found.items(), key=lambda item: -sum(size for _, size, _ in item[1]))
    hues = (strong(i) for i in range(2, 2 + BANDS))
    for (kind, _, where), same in ordered:
        size = sum(size for _, size, _ in same)
        if size:
            colour = _COLOUR[kind] if kind in _COLOUR else next(hues, "grey")
            name = starred([name for name, _, _ in same])
            yield _Group(name, where, len(same), size, colour, tuple(i for _, _, i in same if i >= 0))


_COLOUR = {"argument": strong(0), "result": strong(1)}


def _described(live: LiveMemory, values: Sequence[int]) -> tuple[str, str]:
    """What a temporary is, with its line."""
    graph = live.partitioned.graph
    v = next((v for v in values if v in graph.makers), values[0] if values else None)
    if v is None:
        return "a copy by XLA", ""
    maker = graph.maker(v)
    return f"{maker.name if maker else 'loop carry'} {graph.values[v]}", _line(live, v)


def _line(live: LiveMemory, value: int) -> str:
    return file_line(source_line(live.partitioned.graph, value))


def _row(group: _Group, sizes: float, y: float, width: float) -> Iterator[str]:
    """A row of the table: colour, array, line, bytes; `sizes` is the width of the widest bytes."""
    where = group.line if width >= 480 else ""
    count = f" × {group.count}" if group.count > 1 else ""
    right = width - MARGIN - sizes - 14
    where = fitted(where, 0.3 * width, 12)
    room = right - text_width(where) - MARGIN - 18 - text_width(count) - 8
    yield rectangle(MARGIN, y - 10, 11, 11, group.colour, radius=2)
    yield text(MARGIN + 18, y, fitted(group.name, room) + count, title=f"{group.name} {group.line}")
    yield text(right, y, where, anchor="end", fill="muted")
    yield text(width - MARGIN, y, bytes_text(group.bytes), anchor="end")


def _chart(
    live: LiveMemory, groups: Sequence[_Group], limit: float, limit_text: str, y: float, width: float
) -> Iterator[str]:
    """The area with its axes, the limit, and a mark at the peak."""
    bands, ticks = _bands(live, groups, int((width - 100) / 1.5))
    top_bytes = max((total for _, _, values in bands[-1:] for total in values), default=0)
    is_near = limit <= FAR * max(top_bytes, 1)
    high = max(top_bytes, limit if is_near else 0) * 1.06 or 1.0
    up = Scale(0, high, y + HEIGHT, y + 8)
    labels = [(value, bytes_text(value)) for value in up.ticks()]
    left = MARGIN + max(text_width(label, 11) for _, label in labels) + 8
    right = width - MARGIN
    across = Scale(0, max(1, live.last_tick + 1), left, right)
    for value, label in labels:
        yield line([(left, up(value)), (right, up(value))], "rule")
        yield text(left - 6, up(value) + 4, label, size=11, anchor="end", fill="muted")
    base: Sequence[float] = [0] * len(ticks)
    for name, colour, values in bands:
        yield _area(across, up, [*ticks, live.last_tick + 1], base, values, colour, name)
        base = values
    if is_near:
        yield line([(left, up(limit)), (right, up(limit))], "paper", width=4)
        yield line([(left, up(limit)), (right, up(limit))], "limit", width=1.5, dash="6 4")
        label = fitted(f"limit {limit_text}", right - left - 8, 11)
        is_above = up(limit) - y > 22
        yield text(
            right - 4, up(limit) + (-7 if is_above else 16), label, size=11, anchor="end", fill="limit", has_halo=True
        )
    yield from _peak_mark(live, across, up, left, right)
    yield from _program(live, across, y + HEIGHT + 15, width)


def _program(live: LiveMemory, across: Scale, y: float, width: float) -> Iterator[str]:
    """Below the area: the source lines of some ops, where they run."""
    ops = live.partitioned.graph.ops
    edge, last = across.start - 1, ""
    for i, op in enumerate(ops):
        x = across(2 * i)
        where = _line(live, op.outputs[0]) if x > edge and op.outputs else ""
        if where and where != last and x + 4 + text_width(where, 11) <= width - MARGIN:
            yield line([(x, y - 15), (x, y - 11)], "muted")
            yield text(x, y, where, size=11, fill="muted")
            edge, last = x + text_width(where, 11) + 30, where
    loops = ", a loop's once" if any(op.trips > 1 for op in ops) else ""
    name = f"the program: {len(ops):,} op{'s'[: len(ops) != 1]} in the order in which they run{loops}"
    yield text(across.start, y + 16, fitted(name, across.stop - across.start, 11), size=11, fill="muted")


def _peak_mark(live: LiveMemory, across: Scale, up: Scale, left: float, right: float) -> Iterator[str]:
    """A dotted line at the peak, with its bytes and the line of the op that runs there."""
    x, peak = across(live.peak_tick + 0.5), live.estimate.peak
    ops = live.partitioned.graph.ops
    at = min(live.peak_tick // 2, len(ops) - 1)
    where = next((_line(live, v) for v in ops[at].outputs), "") if ops else ""
    label = f"peak {bytes_text(peak)}" + (f" at {where}" if where else "")
    is_left = x > (left + right) / 2
    label = fitted(label, (x - left if is_left else right - x) - 10, 12, True)
    top = max(up(peak) - 8, up.stop + 6)
    yield line([(x, up(0)), (x, up(peak))], "ink", dash="2 3")
    yield text(x + (-5 if is_left else 5), top, label, anchor="end" if is_left else "start", is_bold=True)


def _bands(
    live: LiveMemory, groups: Sequence[_Group], columns: int
) -> tuple[list[tuple[str, str, list[float]]], list[int]]:
    """The areas from below, each with its name, its colour and its upper edge at each drawn tick; and these ticks.

    Of many ticks those with the most bytes are drawn, one for each of `columns` columns.
    """
    count = live.last_tick + 1
    total = _alive(live, range(len(live.temporaries)))
    chosen = np.array([
        part[int(np.argmax(total[part]))] for part in np.array_split(np.arange(count), min(count, columns))
    ])  # fmt: skip
    starts = [int(part[0]) for part in np.array_split(np.arange(count), min(count, columns))]
    fixed = (("arguments", strong(0), live.arguments), ("results", strong(1), live.results))
    bands, edge = [], np.zeros(len(chosen))
    for name, colour, held in fixed:
        edge = edge + sum(size for _, size in held)
        bands.append((f"{name}: {bytes_text(sum(size for _, size in held))}", colour, edge.tolist()))
    coloured = [group for group in groups if group.buffers and group.colour != "grey"]
    rest = total[chosen] - sum((_alive(live, group.buffers)[chosen] for group in coloured), np.zeros(len(chosen)))
    for group in coloured:
        edge = edge + _alive(live, group.buffers)[chosen]
        bands.append((f"{group.name}: {bytes_text(group.bytes)}", group.colour, edge.tolist()))
    edge = edge + rest
    bands.append(("other temporaries", "grey", edge.tolist()))
    return bands, starts


def _alive(live: LiveMemory, buffers: Iterable[int]) -> np.ndarray:
    """The bytes of some temporaries at every tick."""
    change = np.zeros(live.last_tick + 2)
    for i in buffers:
        buffer = live.temporaries[i]
        change[buffer.start] += buffer.bytes
        change[min(buffer.end, live.last_tick) + 1] -= buffer.bytes
    return np.cumsum(change)[:-1]


def _area(
    across: Scale,
    up: Scale,
    ticks: Sequence[int],
    lower: Sequence[float],
    upper: Sequence[float],
    colour: str,
    name: str,
) -> str:
    """The area between two edges, as steps."""
    if all(a == b for a, b in zip(lower, upper, strict=True)):
        return ""

    def edge(values: Sequence[float]) -> Iterator[tuple[float, float]]:
        steps = [(value, list(same)) for value, same in itertools.groupby(range(len(values)), key=lambda i: values[i])]
        for value, same in steps:
            yield across(ticks[same[0]]), up(value)
            yield across(ticks[same[-1] + 1]), up(value)

    return polygon([*edge(upper), *reversed(list(edge(lower)))], colour, opacity=0.85, title=name)

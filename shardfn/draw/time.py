"""The picture of time: the modelled time of a call as a bar of compute, memory traffic and each collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from shardfn.cost.compute import kernel_runs
from shardfn.cost.estimate import collective_s
from shardfn.cost.schedule import lower_for_backend, schedule_ops
from shardfn.draw.palette import strong
from shardfn.draw.picture import Picture, head, percent, picture
from shardfn.draw.svg import MARGIN, fitted, rectangle, text, text_width
from shardfn.frontend.paths import layer
from shardfn.ir.model import Graph, Op
from shardfn.ir.source_lines import file_line, source_line
from shardfn.planning.plan import Plan
from shardfn.render.cells import axes_text, shape_text
from shardfn.units import bytes_text, flops_text, time_text

MOST_ROWS = 14
"""Rows below the bar."""
_COLOUR = {
    "compute": strong(0), "memory": strong(2), "all-reduce": strong(1), "all-gather": strong(3),
    "reduce-scatter": strong(4), "all-to-all": strong(6), "collective-permute": strong(5),
}  # fmt: skip
_BAR, _ROW, _FIGURES = 30.0, 21.0, 112.0


@dataclasses.dataclass(frozen=True)
class TimePart:
    """A part of the modelled time: compute, memory or a collective, at a line of the user's code."""

    kind: str
    detail: str
    where: str
    seconds: float
    count: int = 1

    @property
    def group(self) -> str:
        """What bounds the ops, or communication."""
        return f"{self.kind}-bound" if self.kind in ("compute", "memory") else "communication"


def time_picture(plan: Plan, width: float) -> Picture:
    """The modelled time of one call on one device, by kind and source line."""
    parts = time_parts(plan)
    total = sum(part.seconds for part in parts)
    cost = plan.cost
    title = f"Modelled time of {plan.function}: {time_text(cost.time_s)}"
    sent = f"{bytes_text(cost.bytes_sent)} sent" if plan.collectives else "no collectives"
    notes = [
        f"One call on one device of {plan.hardware.name}: {flops_text(cost.flops)}, {sent}; communication follows compute."
    ]
    elements, y = head(width, title, notes)
    elements += _stack(parts, total, y, width)
    y += _BAR + 22
    ordered = sorted(parts, key=lambda part: -part.seconds)
    most = MOST_ROWS if len(parts) <= MOST_ROWS else MOST_ROWS - 1
    for part in ordered[:most]:
        y += _ROW
        elements += _row(part, total, ordered[0].seconds, y, width)
    if rest := ordered[most:]:
        y += _ROW
        listed = "; ".join(f"{_described(part)} {part.where} {time_text(part.seconds)}" for part in rest)
        left, right = MARGIN + 18, width - MARGIN - 40
        said = _with_lines(f"… and {sum(part.count for part in rest)} smaller", rest, right - left - 70)
        elements.append(text(left, y, said, fill="muted", title=listed))
        elements.append(text(right, y, time_text(sum(part.seconds for part in rest)), anchor="end", fill="muted"))
    return picture(width, y + MARGIN, elements, title, notes)


def time_parts(plan: Plan) -> list[TimePart]:
    """The parts of the modelled time in the order of the bar: compute, memory, collectives, each the longest first.

    An op is compute where its FLOPs take longer than its bytes, else memory (`cost.compute.work`). Equal parts of one line
    are one.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    chip = plan.hardware.chip
    schedule = schedule_ops(lower_for_backend(plan.partitioned, chip))
    graph = schedule.partitioned.graph
    for run in kernel_runs(schedule.partitioned, chip, schedule.fusion):
        if run.seconds:
            kind = "memory" if run.is_memory_bound else "compute"
            where = _line(graph, [graph.ops[i] for i in reversed(run.kernel)])
            found.setdefault((kind, "", where), []).append(run.total_s)
    for c in plan.collectives:
        runs = (f" in {c.trips:,} runs" if c.trips > 1 else "") + (" within a matmul" if c.in_matmul else "")
        detail = f"over {axes_text(c.axes) if c.axes else c.group_size} of {c.dtype}{shape_text(c.shape)}{runs}"
        detail += f", {layer(c.purpose)}" if c.purpose else ""
        found.setdefault((c.kind, detail, c.where), []).append(collective_s(c, plan.hardware, plan.axes))
    parts = [
        TimePart(kind, detail, file_line(where), sum(each), len(each)) for (kind, detail, where), each in found.items()
    ]
    return sorted(parts, key=lambda part: (_GROUPS.index(part.group), -part.seconds))


def _line(graph: Graph, kernel: Sequence[Op]) -> str:
    """The user's line of a kernel: of its last op that has one, else of the nearest op before it, else of one that reads it."""
    own = next((op.where for op in kernel if op.where), "")
    before = own or next(filter(None, (source_line(graph, v) for op in kernel for v in op.outputs)), "")
    made = {v for op in kernel for v in op.outputs}
    return before or next((op.where for op in graph.ops if op.where and made.intersection(op.inputs)), "")


def _with_lines(said: str, parts: Sequence[TimePart], room: float) -> str:
    """A text and as many lines of some parts as there is room for, those with the most time first."""
    seconds: dict[str, float] = {}
    for part in parts:
        if part.where:
            seconds[part.where] = seconds.get(part.where, 0.0) + part.seconds
    for i, where in enumerate(sorted(seconds, key=lambda where: -seconds[where])):
        longer = f"{said}{', ' if i else ' at '}{where}"
        if text_width(f"{longer}, …") > room:
            return f"{said}, …" if i else said
        said = longer
    return said


_GROUPS = ("compute-bound", "memory-bound", "communication")
"""The groups of parts in the order of the bar."""


def _described(part: TimePart, has_detail: bool = True) -> str:
    if part.group != "communication":
        return f"{part.group}{' ops' if has_detail else ''} ({part.count})"
    detail = f" {part.detail}" if has_detail else ""
    return f"{part.kind}{detail}{f' × {part.count}' if part.count > 1 else ''}"


def _stack(parts: Sequence[TimePart], total: float, y: float, width: float) -> Iterator[str]:
    """The bar, with the share of each kind below it."""
    room, x = width - 2 * MARGIN, MARGIN
    if not total:
        yield rectangle(x, y, room, _BAR, "pale", radius=2)
        yield text(x + 8, y + 19, "nothing takes time", fill="muted")
        return
    for part in parts:
        length = room * part.seconds / total
        gap = 1 if length > 3 else 0
        title = f"{_described(part)}{f' at {part.where}' if part.where else ''}: {time_text(part.seconds)}"
        yield rectangle(x, y, length - gap, _BAR, _COLOUR[part.kind], title=title)
        x += length
    x = MARGIN
    for group in _GROUPS:
        share = sum(part.seconds for part in parts if part.group == group) / total
        label = f"{group} {percent(share)}"
        if share and text_width(label, 11) <= room * share:
            yield text(x, y + _BAR + 15, label, size=11, fill="muted")
        x += room * share


def _row(part: TimePart, total: float, longest: float, y: float, width: float) -> Iterator[str]:
    """A row: colour, what, line, a small bar, time."""
    right = width - MARGIN
    share = 90.0 if width >= 560 else 0.0
    room = right - _FIGURES - share - MARGIN - 18
    where = fitted(part.where, room * 0.4, 11) if part.where else ""
    fits = room - (text_width(where, 11) + 10 if where else 0)
    name = _described(part)
    short = next((n for n in (name, _described(part, False)) if text_width(n) <= fits), name)
    yield rectangle(MARGIN, y - 10, 11, 11, _COLOUR[part.kind], radius=2)
    yield text(MARGIN + 18, y, fitted(short, fits), title=f"{name} {part.where}")
    yield text(right - _FIGURES - share - 8, y, where, size=11, anchor="end", fill="muted")
    if share and longest:
        yield rectangle(right - _FIGURES - share, y - 9, share * part.seconds / longest, 9, _COLOUR[part.kind])
    yield text(right - 40, y, time_text(part.seconds), anchor="end")
    yield text(right, y, percent(part.seconds / total if total else 0), size=11, anchor="end", fill="muted")

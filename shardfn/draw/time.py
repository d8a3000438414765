"""The picture of time: the modelled time of a call as a bar of compute, memory traffic and each collective."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from shardfn.cost.compute import once
from shardfn.cost.estimate import collective_s
from shardfn.cost.schedule import lower_for_backend, schedule_ops
from shardfn.draw.palette import strong
from shardfn.draw.picture import Picture, head, percent, picture
from shardfn.draw.svg import MARGIN, fitted, rectangle, text, text_width
from shardfn.planning.plan import Plan
from shardfn.render.cells import shape_text
from shardfn.search.memory_limit import source_line
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
    longest = max((part.seconds for part in parts), default=0.0)
    shown = parts if len(parts) <= MOST_ROWS else sorted(parts, key=lambda part: -part.seconds)[: MOST_ROWS - 1]
    for part in sorted(shown, key=lambda part: -part.seconds):
        y += _ROW
        elements += _row(part, total, longest, y, width)
    if rest := [part for part in parts if part not in shown]:
        y += _ROW
        listed = "; ".join(f"{part.kind} {part.detail} {part.where} {time_text(part.seconds)}" for part in rest)
        count = sum(part.count for part in rest)
        elements.append(text(MARGIN + 18, y, f"… and {count} smaller parts", fill="muted", title=listed))
        elements.append(
            text(width - MARGIN - 40, y, time_text(sum(part.seconds for part in rest)), anchor="end", fill="muted")
        )
    return picture(width, y + MARGIN, elements, title, notes)


def time_parts(plan: Plan) -> list[TimePart]:
    """The parts of the modelled time in the order of the bar: compute, memory, collectives, each the longest first.

    An op is compute where its FLOPs take longer than its bytes, else memory (`cost.compute.work`). Equal parts of one line
    are one.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    chip = plan.hardware.chip
    order, fusion = schedule_ops(lower_for_backend(plan.partitioned, chip))
    graph = order.partitioned.graph
    made = {v: op for op in graph.ops for v in op.outputs}
    for i, op in enumerate(graph.ops):
        _, moved, seconds = once(order.partitioned, i, chip, fusion)
        if seconds:
            kind = "memory" if moved / chip.memory_bytes_s >= seconds else "compute"
            where = op.where or (source_line(made, op.outputs[0]) if op.outputs else "")
            found.setdefault((kind, "", where), []).append(seconds * op.trips)
    for c in plan.collectives:
        detail = f"over {', '.join(c.axes) or c.group_size} of {c.dtype}{shape_text(c.shape)}"
        found.setdefault((c.kind, detail, c.where), []).append(collective_s(c, plan.hardware, plan.axes))
    parts = [
        TimePart(kind, detail, pathlib.PurePath(where).name, sum(each), len(each))
        for (kind, detail, where), each in found.items()
    ]
    rank = {"compute": 0, "memory": 1}
    return sorted(
        parts, key=lambda part: (rank.get(part.kind, 2), part.kind if part.kind in rank else "", -part.seconds)
    )


_MEANING = {"compute": "compute-bound ops", "memory": "memory-bound ops"}


def _described(part: TimePart, has_detail: bool = True) -> str:
    if part.kind in _MEANING:
        return f"{_MEANING[part.kind]} ({part.count})"
    detail = f" {part.detail}" if has_detail else ""
    return f"{part.kind}{detail}{f' × {part.count}' if part.count > 1 else ''}"


def _stack(parts: Sequence[TimePart], total: float, y: float, width: float) -> Iterator[str]:
    """The bar, with the share of each kind below it."""
    room, x = width - 2 * MARGIN, MARGIN
    if not total:
        yield rectangle(x, y, room, _BAR, "pale", radius=2)
        yield text(x + 8, y + 19, "nothing takes time", fill="muted")
        return
    shares: dict[str, float] = {}
    for part in parts:
        shares[part.kind] = shares.get(part.kind, 0.0) + part.seconds
        length = room * part.seconds / total
        gap = 1 if length > 3 else 0
        title = f"{_described(part)}{f' at {part.where}' if part.where else ''}: {time_text(part.seconds)}"
        yield rectangle(x, y, length - gap, _BAR, _COLOUR[part.kind], title=title)
        x += length
    x = MARGIN
    for group, name in (
        (("compute",), "compute-bound"),
        (("memory",), "memory-bound"),
        (tuple(set(shares) - {"compute", "memory"}), "communication"),
    ):
        share = sum(shares.get(kind, 0.0) for kind in group) / total
        label, length = f"{name} {percent(share)}", room * share
        if share and text_width(label, 11) <= length:
            yield text(x, y + _BAR + 15, label, size=11, fill="muted")
        x += length


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

"""The picture of a search: each candidate by the bytes that it sends and its peak memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shardfn.draw.palette import strong
from shardfn.draw.picture import Picture, head, picture
from shardfn.draw.scale import Scale
from shardfn.draw.svg import MARGIN, circle, fitted, line, rectangle, text, text_width
from shardfn.planning.plan import Candidate, Figures, Plan
from shardfn.search.problem import OBJECTIVES
from shardfn.units import bytes_text, time_text

HEIGHT = 300.0
MOST_ROWS = 12
"""Candidates that have a number and a row."""
LOG = 40.0
"""A scale is logarithmic if the largest value is more than this many times the smallest."""
_ROW = 20.0


def search_picture(plan: Plan, width: float) -> Picture:
    """The candidates that the search evaluated: bytes sent against peak memory, with the one that it chose."""
    own = Candidate("this plan", plan.axes, Figures.of(plan.cost))
    candidates = plan.candidates or (own,)
    chip = plan.hardware.chip
    limit = chip.memory_bytes if plan.memory_limit is None else plan.memory_limit
    title = f"Search for {plan.function}"
    count = len(candidates)
    objective = OBJECTIVES[plan.level]
    notes = [
        f"{count} candidates evaluated; the objective is {objective}."
        if count > 1
        else "One candidate: every sharding was given, or follows from those that were."
    ]
    elements, y = head(width, title, notes)
    y += 14
    elements += _scatter(candidates, limit, y, width)
    y += HEIGHT + 56
    elements += _table_head(y, width)
    for number, candidate in enumerate(candidates[:MOST_ROWS]):
        y += _ROW
        elements += _row(number, candidate, limit, y, width)
    if rest := candidates[MOST_ROWS:]:
        y += _ROW
        listed = "; ".join(candidate.name for candidate in rest)
        elements.append(text(MARGIN, y, f"… and {len(rest)} more, drawn without a number", fill="muted", title=listed))
    return picture(width, y + MARGIN, elements, title, notes)


def _scatter(candidates: Sequence[Candidate], limit: float, y: float, width: float) -> Iterator[str]:
    """The points with axes and limit; the chosen one is drawn last."""
    sent = [c.figures.bytes_sent for c in candidates]
    memory = [c.figures.memory for c in candidates]
    right, bottom = width - MARGIN - 6, y + HEIGHT
    up = _scale(memory, bottom - 8, y + 12)
    labels = [(value, bytes_text(value)) for value in up.ticks()]
    left = MARGIN + max(text_width(label, 11) for _, label in labels) + 10
    across = _scale(sent, left + 8, right - 12)
    for value, label in labels:
        yield line([(left, up(value)), (right, up(value))], "rule")
        yield text(left - 6, up(value) + 4, label, size=11, anchor="end", fill="muted")
    edge = -1e9
    for value in across.ticks():
        label, x = bytes_text(value), across(value)
        half = text_width(label, 11) / 2
        yield line([(x, y + 4), (x, bottom)], "rule")
        if x - half > edge and x + half <= width - 4:
            yield text(x, bottom + 15, label, size=11, anchor="middle", fill="muted")
            edge = x + half + 8
    yield text(left, y, fitted("peak memory of one device", right - left, 11), size=11, fill="muted")
    yield text(
        right,
        bottom + 32,
        fitted("bytes that one device sends →", right - left, 11),
        size=11,
        anchor="end",
        fill="muted",
    )
    if up.low < limit < up.high:
        yield line([(left, up(limit)), (right, up(limit))], "limit", width=1.5, dash="6 4")
        yield text(right - 4, up(limit) - 5, f"limit {bytes_text(limit)}", size=11, anchor="end", fill="limit")
    yield from _frontier(candidates, across, up)
    places = [(across(a), up(b)) for a, b in zip(sent, memory, strict=True)]
    for number, candidate in reversed(list(enumerate(candidates))):
        x, height = places[number]
        if number:
            yield circle(
                x, height, 4.5, _colour(candidate, limit), opacity=0.8, outline="paper", title=_said(candidate)
            )
        else:
            yield circle(x, height, 8, "paper", outline=strong(1))
            yield circle(x, height, 5.5, strong(1), title=_said(candidate))
    yield from _numbers(places, left, right, y, bottom)


def _scale(values: Sequence[float], start: float, stop: float) -> Scale:
    """From zero, or logarithmic where small values would lie on each other."""
    some = [value for value in values if value > 0]
    if some and max(some) > LOG * min(some):
        return Scale(min(some) / 1.2, max(some) * 1.2, start, stop, is_log=True)
    if some and min(some) == min(values) > 0.5 * max(some):
        room = max(0.1 * max(some), (max(some) - min(some)) * 0.15)
        return Scale(max(0, min(some) - room), max(some) + room, start, stop)
    return Scale(0, max(some, default=1.0) * 1.08, start, stop)


def _frontier(candidates: Sequence[Candidate], across: Scale, up: Scale) -> Iterator[str]:
    """The best of both: a line through the candidates of which none is better in bytes and in memory."""
    best: list[tuple[float, float]] = []
    for figures in sorted((c.figures for c in candidates), key=lambda f: (f.bytes_sent, f.memory)):
        if not best or figures.memory < best[-1][1]:
            best.append((figures.bytes_sent, figures.memory))
    points = [(across(a), up(b)) for a, b in best]
    corners = itertools.chain(points[:1], *(((x2, y1), (x2, y2)) for (_, y1), (x2, y2) in itertools.pairwise(points)))
    if len(points) > 1:
        yield line(list(corners), "grey", dash="3 3", title="no candidate is better in bytes sent and in memory")


def _numbers(
    places: Sequence[tuple[float, float]], left: float, right: float, top: float, bottom: float
) -> Iterator[str]:
    """The number of each candidate of the table beside its point, where no other number or point is."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for number, (x, y) in enumerate(places[:MOST_ROWS]):
        label = "this plan" if not number else str(number)
        wide = text_width(label, 11, not number)
        for dx, dy in (
            (9, 4),
            (-9 - wide, 4),
            (-wide / 2, -11),
            (-wide / 2, 19),
            (8, -7),
            (8, 16),
            (-8 - wide, -7),
            (-8 - wide, 16),
        ):
            box = (x + dx, y + dy - 10, x + dx + wide, y + dy + 2)
            inside = left <= box[0] and box[2] <= right and top <= box[1] and box[3] <= bottom
            others = (other for i, other in enumerate(taken) if i != number)
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in others):
                taken.append(box)
                yield text(x + dx, y + dy, label, size=11, is_bold=not number, has_halo=True)
                break


_FIGURES = (("memory", 80.0), ("sent", 80.0), ("time", 72.0), ("mesh", 76.0))
"""The columns from the right, with their widths."""


def _columns(width: float) -> list[tuple[str, float, float]]:
    """The columns that fit: name, right edge, width."""
    found, right = [], width - MARGIN
    for name, wide in _FIGURES if width >= 480 else _FIGURES[:2]:
        found.append((name, right, wide))
        right -= wide
    return found


def _table_head(y: float, width: float) -> Iterator[str]:
    yield text(MARGIN, y, "Candidate", is_bold=True)
    for name, right, _ in _columns(width):
        yield text(right, y, name, size=11, anchor="end", fill="muted")


def _row(number: int, candidate: Candidate, limit: float, y: float, width: float) -> Iterator[str]:
    columns = _columns(width)
    f = candidate.figures
    texts = {
        "memory": bytes_text(f.memory),
        "sent": bytes_text(f.bytes_sent),
        "time": time_text(f.time_s),
        "mesh": _mesh(candidate),
    }
    room = columns[-1][1] - columns[-1][2] - MARGIN - 42
    yield rectangle(MARGIN, y - 10, 11, 11, strong(1) if not number else _colour(candidate, limit), radius=5)
    if number:
        yield text(MARGIN + 16, y, str(number), size=11, fill="muted")
    yield text(MARGIN + 38, y, fitted(candidate.name, room), title=_said(candidate))
    for column, right, wide in columns:
        over = column == "memory" and f.memory > limit
        yield text(right, y, fitted(texts[column], wide), anchor="end", fill="limit" if over else "ink")


def _colour(candidate: Candidate, limit: float) -> str:
    return "limit" if candidate.figures.memory > limit else strong(0)


def _mesh(candidate: Candidate) -> str:
    return "×".join(str(size) for _, size in candidate.axes) or "1"


def _said(candidate: Candidate) -> str:
    f = candidate.figures
    cost = f"{time_text(f.time_s)}, {bytes_text(f.bytes_sent)} sent, {bytes_text(f.memory)} peak"
    return f"{candidate.name} on mesh {_mesh(candidate)}: {cost}"

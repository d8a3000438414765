"""The picture of a plan as a strip: each array is a bar, its length its bytes, its shards coloured by mesh axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from shardfn.draw.palette import strong
from shardfn.draw.picture import Picture, head, legend, picture
from shardfn.draw.svg import MARGIN, fitted, rectangle, strokes, text, text_width
from shardfn.frontend.paths import alike, layer, mirrored, name_of_row
from shardfn.ir.model import mesh_text
from shardfn.planning.plan import Decision, Plan
from shardfn.render.cells import shape_text, spec_text
from shardfn.units import bytes_text

MOST_ROWS = 24
"""Bars of arguments; of results a third as many."""
ONE_LINE = 560
"""The least width in pixels at which name, bar and figures are beside each other."""
_BAR = 16.0


@dataclasses.dataclass(frozen=True)
class _Row:
    """Arrays that are sharded alike: a bar."""

    name: str
    first: Decision
    count: int
    paths: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name, with how many arrays it stands for."""
        return self.name + (f" × {self.count}" if self.count > 1 else "")

    @property
    def strategy(self) -> str:
        """The strategy as text."""
        return str(self.first.strategy) if any(self.first.spec) else "replicated"

    @property
    def bytes(self) -> int:
        """Bytes of all of them on all devices, copies counted once."""
        return self.local_bytes * math.prod(self.first.strategy)

    @property
    def local_bytes(self) -> int:
        """Bytes of all of them on one device."""
        return self.first.local_bytes * self.count


def arrays_picture(plan: Plan, width: float) -> Picture:
    """All arguments and results of a plan, equal ones of all layers as one bar."""
    title = f"Arrays of {plan.function}"
    sides = [("Arguments", plan.inputs, MOST_ROWS), ("Results", plan.outputs, MOST_ROWS // 3)]
    rows = {name: rows_of(decisions) for name, decisions, _ in sides}
    several = any(sum(map(len, row.first.spec)) > 1 for side in rows.values() for row in side)
    notes = [
        f"{plan.kind}; mesh {mesh_text(plan.axes)}" if plan.axes else f"one device, {plan.hardware.name}",
        "A bar is as long as its array is large; the full colour is what one device holds."
        + (" An array that is sharded over several mesh axes has a lane for each." if several else ""),
    ]
    elements, y = head(width, title, notes)
    colour = {name: strong(i) for i, (name, _) in enumerate(plan.axes)}
    entries = [(colour[name], f"sharded over {name} ({size})") for name, size in plan.axes]
    more, y = legend([*entries, ("grey", "replicated")], y, width)
    elements += more
    columns = _Columns.of([row for name, _, most in sides for row in rows[name][:most]], width)
    longest = max((row.bytes for side in rows.values() for row in side), default=0)
    for name, decisions, most in sides:
        y += 24
        elements += _head_of(name, decisions, columns, y)
        y += 7
        for row in rows[name][:most]:
            elements += _bar(plan, row, colour, longest, y, columns)
            y += 40 if columns.is_narrow else 22
        if rest := rows[name][most:]:
            count, size = sum(row.count for row in rest), bytes_text(sum(row.local_bytes for row in rest))
            listed = ", ".join(path for row in rest for path in row.paths)
            note = fitted(f"… and {count} smaller arrays, {size} per device", width - 2 * MARGIN)
            elements.append(text(MARGIN, y + 16, note, fill="muted", title=listed))
            y += 22
    return picture(width, y + MARGIN, elements, title, notes[:1])


def rows_of(decisions: Iterable[Decision]) -> list[_Row]:
    """The arrays, the largest first; those of all layers are one row, with the moments of an optimizer."""
    decisions = list(decisions)
    copies = mirrored([(d.path, d.shape) for d in decisions])
    groups = alike(decisions, lambda d: (layer(copies.get(d.path, d.path)), d.shape, d.dtype, d.spec), least=2)
    rows = [
        _Row(name_of_row([d.path for d in same]), same[0], len(same), tuple(d.path for d in same)) for same in groups
    ]
    return sorted(rows, key=lambda row: -row.bytes)


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Where the parts of a row are: name, bar, strategy, bytes. In a narrow picture the bar is below the texts."""

    width: float
    name: float
    strategy: float
    size: float
    is_narrow: bool

    @classmethod
    def of(cls, rows: Sequence[_Row], width: float) -> _Columns:
        """The columns that fit the texts of some rows."""
        room, is_narrow = width - 2 * MARGIN, width < ONE_LINE
        size = max([text_width("per device", 11), *(text_width(bytes_text(row.local_bytes)) for row in rows)])
        strategy = min(room * 0.25, max([text_width("strategy", 11), *(text_width(row.strategy) for row in rows)]))
        longest = max((text_width(row.label) for row in rows), default=0)
        return cls(
            width, room - size - strategy - 24 if is_narrow else min(room * 0.36, longest), strategy, size, is_narrow
        )

    @property
    def bar(self) -> tuple[float, float]:
        """Left edge and width of the longest bar."""
        if self.is_narrow:
            return MARGIN, self.width - 2 * MARGIN
        left = MARGIN + self.name + 12
        return left, self.width - MARGIN - self.size - self.strategy - 28 - left


def _head_of(title: str, decisions: Sequence[Decision], columns: _Columns, y: float) -> Iterator[str]:
    """The title of a side, and those of its columns."""
    yield text(MARGIN, y, title if decisions else f"{title}: none", is_bold=True)
    if decisions:
        right = columns.width - MARGIN
        yield text(right, y, "per device", size=11, anchor="end", fill="muted")
        at = right - columns.size - 12
        yield text(at, y, "strategy", size=11, anchor="end", fill="muted")


def _bar(plan: Plan, row: _Row, colour: dict[str, str], longest: int, y: float, columns: _Columns) -> Iterator[str]:
    """The bar of a row with its texts."""
    d, right, at = row.first, columns.width - MARGIN, y + (13 if columns.is_narrow else 16)
    title = (
        f"{', '.join(row.paths[:8])}{f' and {row.count - 8} more' if row.count > 8 else ''}: {d.dtype}{shape_text(d.shape)} "
        f"{d.strategy} {spec_text(d.spec)}, {bytes_text(d.local_bytes)} of {bytes_text(row.bytes // row.count)} per device"
    )
    count = row.label[len(row.name) :]
    yield text(MARGIN, at, fitted(row.name, columns.name - text_width(count)) + count, title=title)
    yield text(right, at, bytes_text(row.local_bytes), anchor="end")
    strategy = fitted(row.strategy, columns.strategy)
    yield text(right - columns.size - 12, at, strategy, anchor="end", fill="muted")
    left, room = columns.bar
    length = max(2.0, room * row.bytes / longest) if longest else 2.0
    yield from _lanes(plan, d, colour, left, y + (18 if columns.is_narrow else 3), length, title)


def _lanes(
    plan: Plan, d: Decision, colour: dict[str, str], x: float, y: float, length: float, title: str
) -> Iterator[str]:
    """A lane for each mesh axis that shards the array, divided as often as its dimension is up to that axis."""
    sizes, lanes = dict(plan.axes), []
    for dim in d.spec:
        shards = 1
        for axis in dim:
            shards *= sizes[axis]
            lanes.append((axis, shards))
    if not lanes:
        yield rectangle(x, y, length, _BAR, "grey", radius=1, title=title)
        return
    high = _BAR / len(lanes)
    for i, (axis, shards) in enumerate(lanes):
        top = y + i * high
        yield rectangle(x, top, length, high - (i + 1 < len(lanes)), colour[axis], opacity=0.3, title=title)
        yield rectangle(x, top, length / shards, high - (i + 1 < len(lanes)), colour[axis], title=title)
        if length / shards >= 3:
            yield strokes([(x + k * length / shards, top, high) for k in range(1, shards)], "paper")

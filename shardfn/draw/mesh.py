"""The picture of a mesh: an array divided into shards, and the shard that each device holds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardfn.draw.palette import COLOURS, soft, strong
from shardfn.draw.picture import Picture, head, picture
from shardfn.draw.svg import MARGIN, fitted, rectangle, text, text_width, wrapped
from shardfn.frontend.meshes import shard_numbers
from shardfn.ir.divisors import divisors
from shardfn.ir.model import mesh_text
from shardfn.planning.plan import Decision, Plan, decision_of
from shardfn.render.cells import shape_text, shard_text, spec_text
from shardfn.units import bytes_text

MOST_DEVICES = 512
"""The most devices, and the most shards of an array, that are drawn: the first ones."""
MOST_COLUMNS = 32
"""Devices side by side."""
SIDE_BY_SIDE = 560
"""The least width in pixels at which the devices may be beside the array."""
GAP = 32.0
"""Between the array and the devices."""
HIGHEST = 560.0
"""The greatest height of all rows together, in pixels. More rows have less text, and in the end none."""
WITH_TITLES = 15
"""The least number of an array's rows at which each row says where it begins."""
_LINE = 15.0


@dataclasses.dataclass(frozen=True)
class _Cell:
    """A rectangle of a grid: what it says, the line above, the shard that colours it, and its tooltip."""

    label: str
    slices: str
    shard: int
    title: str


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Cells in rows, with the titles of rows and columns."""

    title: str
    notes: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[_Cell, ...], ...]

    def width_with(self, *texts: str) -> float:
        """The width of the grid where all cells show some of their texts."""
        return self.label_width + max(_widest(self, name) for name in texts) * max(map(len, self.cells))

    def left(self, width: float) -> float:
        """The room for the titles of rows in a grid of a width."""
        return min(self.label_width, width * 0.3)

    @property
    def label_width(self) -> float:
        """The width of the titles of rows."""
        return max((text_width(row, 11) + 6 for row in self.rows if row), default=0.0)


def _widest(grid: _Grid, name: str) -> float:
    """The width of a cell in which a text of every cell fits; the longest text stands for all."""
    longest = sorted((getattr(cell, name) for row in grid.cells for cell in row), key=len)[-8:]
    return max(text_width(text, 11) for text in longest) + 8


def _texts(grid: _Grid, width: float) -> tuple[bool, bool]:
    """Whether the cells of a grid show their slices, and their label."""
    cell, rows = (width - grid.left(width)) / max(map(len, grid.cells)), len(grid.cells)
    has_slices, has_label = _widest(grid, "slices") <= cell, _widest(grid, "label") <= cell
    if rows * (_LINE + 3) > HIGHEST:
        return False, False
    if rows * (2 * _LINE + 8) > HIGHEST:  # one line at most
        has_slices = has_slices and not has_label
    return has_slices, has_label


@dataclasses.dataclass(frozen=True)
class _Colours:
    """The colours of an array's shards, by the number of shards; with a tone of `palette`."""

    shards: int
    tone: Callable[[int], str]

    def of(self, shard: int) -> tuple[str, float]:
        """The colour and the opacity of a shard: neighbours share a hue where there are more shards than hues.

        >>> _Colours(4, soft).of(3), _Colours(16, soft).of(1)
        (('soft3', 1.0), ('soft0', 0.65))
        """
        if self.shards == 1:
            return "pale", 1.0
        per_hue = -(-self.shards // COLOURS)
        hue, step = divmod(shard, per_hue)
        return self.tone(hue), 1.0 - 0.7 * step / per_hue


def mesh_picture(plan: Plan, path: str | None, width: float) -> Picture:
    """The shards of one array and the devices that hold them.

    Args:
      plan: the plan.
      path: the array's path; the largest argument by default.
      width: pixels.

    Raises:
      StrategyError: no array has that path.
    """
    if path is not None:
        shown = decision_of(plan, path, "draw")
    else:
        shown = max(plan.inputs or plan.outputs, key=lambda d: d.local_bytes * math.prod(d.strategy), default=None)
    if shown is None:
        shown = Decision("no array", (), "", (), (), "")
    count = math.prod(shown.strategy)
    copies = plan.hardware.count // count
    held = f"on {copies} devices each" if copies > 1 else "on one device each"
    name = f"{shown.path}: {shown.dtype}{shape_text(shown.shape)}" if shown.dtype else shown.path
    notes = [
        f"mesh {mesh_text(plan.axes)}, {plan.hardware.name}" if plan.axes else plan.hardware.name,
        f"{spec_text(shown.spec)}: {count} shards of {shape_text(shown.local_shape)}, {bytes_text(shown.local_bytes)}, {held}"
        if count > 1
        else f"replicated: every device holds all of it, {bytes_text(shown.local_bytes)}",
    ]
    elements, y = head(width, name, notes)
    array, devices = _array_grid(plan, shown), _device_grid(plan, shown)
    room = width - 2 * MARGIN
    beside = min((room - GAP) / 2, max(array.width_with("label", "slices"), 0.36 * room))
    lines = {w: _texts(devices, w) for w in (room, room - GAP - beside)}
    tone = soft if any(lines[room]) or any(_texts(array, room)) else strong  # text is on soft colours only
    colours = _Colours(count, tone)
    if room >= SIDE_BY_SIDE and lines[room] == lines[room - GAP - beside]:
        left, bottom_left = _grid(array, MARGIN, y, beside, colours, _array_height(shown, beside))
        right, bottom_right = _grid(devices, MARGIN + beside + GAP, y, room - beside - GAP, colours)
        return picture(width, max(bottom_left, bottom_right) + MARGIN, [*elements, *left, *right], name, notes)
    above, y = _grid(array, MARGIN, y, room, colours, _array_height(shown, room) / 2)
    below, y = _grid(devices, MARGIN, y + 18, room, colours)
    return picture(width, y + MARGIN, [*elements, *above, *below], name, notes)


def _array_grid(plan: Plan, d: Decision) -> _Grid:
    """The array's shards: the last sharded dimension from left to right, the others from top to bottom."""
    sharded = [i for i, n in enumerate(d.strategy) if n > 1]
    # A matrix with sharded rows is drawn with its shards below each other.
    across = sharded.pop() if len(sharded) > 1 or sharded == [len(d.shape) - 1] else None
    columns = 1 if across is None else d.strategy[across]
    devices: dict[tuple[int, ...], list[int]] = {}
    for place, shard in enumerate(map(tuple, shard_numbers(plan.axes, d.spec))):
        devices.setdefault(shard, []).append(_device(plan, place))
    cells = []
    for number, shard in enumerate(itertools.islice(np.ndindex(*d.strategy), MOST_DEVICES // columns * columns)):
        holders, slices = devices.get(shard, []), shard_text(shard, d.strategy, d.local_shape)
        named = ", ".join(map(str, holders[:8])) + (f" and {len(holders) - 8} more" if len(holders) > 8 else "")
        label = (
            f"device {named}"
            if len(holders) == 1
            else f"{len(holders)} devices"
            if len(holders) > 4
            else f"devices {named}"
        )
        cells.append(_Cell(label, slices, number, f"{slices} is on device{'s'[: len(holders) != 1]} {named}"))
    names = {
        i: f"dimension {i} ({d.shape[i]:,}) over {', '.join(d.spec[i])}" for i, n in enumerate(d.strategy) if n > 1
    }
    notes = [f"{'top to bottom' if i != across else 'left to right'}: {text}" for i, text in names.items()]
    if len(cells) < math.prod(d.strategy):
        notes.append(f"the first {len(cells):,} of {math.prod(d.strategy):,} shards are drawn")
    rows = tuple(tuple(cells[i : i + columns]) for i in range(0, len(cells), columns))
    return _Grid("The array", tuple(notes or ["not sharded"]), _row_titles(d, across, len(rows)), (), rows)


def _row_titles(d: Decision, across: int | None, rows: int) -> tuple[str, ...]:
    """Where the rows of many shards begin, as their cells have no text; of few shards nothing."""
    if rows < WITH_TITLES:
        return ("",) * rows
    down = [i for i, n in enumerate(d.strategy) if n > 1 and i != across]
    places = itertools.islice(np.ndindex(*(d.strategy[i] for i in down)), rows)
    starts = (zip(place, down, strict=True) for place in places)
    return tuple(", ".join(str(n * d.local_shape[i]) for n, i in start) for start in starts)


def _device_grid(plan: Plan, d: Decision) -> _Grid:
    """The mesh: its last axis from left to right, all others from top to bottom; a long last axis takes several rows."""
    *outer, (last, size) = plan.axes or (("", 1),)
    number = {shard: n for n, shard in enumerate(np.ndindex(*d.strategy))}
    shards = list(map(tuple, shard_numbers(plan.axes, d.spec)))
    step = max(n for n in divisors(size) if n <= MOST_COLUMNS)
    step = size if size <= MOST_COLUMNS else step if step > MOST_COLUMNS // 4 else MOST_COLUMNS
    rows, titles, base = [], [], 0
    for index in itertools.product(*(range(n) for _, n in outer)):
        name = " ".join(f"{axis}={i}" for (axis, _), i in zip(outer, index, strict=True))
        for first in range(base, base + size, step):
            if first >= MOST_DEVICES:
                break
            rows.append(
                tuple(_device_cell(plan, d, shards[p], number, p) for p in range(first, min(first + step, base + size)))
            )
            part = f"{last}={first - base}–{min(first - base + step, size) - 1}" if step < size else ""
            titles.append(" ".join(filter(None, (name, part))))
        base += size
    shown = sum(map(len, rows))
    down = " and ".join(name for name, _ in outer)
    notes = [
        f"left to right: {last}; top to bottom: {down}" if outer else f"left to right: {last}" if last else "one device"
    ]
    if shown < len(shards):
        notes.append(f"the first {shown:,} of {len(shards):,} devices are drawn")
    columns = tuple(f"{last}={i}" for i in range(size)) if step == size and last else ()
    return _Grid("The devices", tuple(notes), tuple(titles), columns, tuple(rows))


def _device_cell(
    plan: Plan, d: Decision, shard: tuple[int, ...], number: dict[tuple[int, ...], int], place: int
) -> _Cell:
    device, slices = _device(plan, place), shard_text(shard, d.strategy, d.local_shape)
    return _Cell(str(device), slices, number[shard], f"device {device} holds {d.path}{slices}")


def _device(plan: Plan, place: int) -> int:
    return plan.order[place] if plan.order else place


def _array_height(d: Decision, width: float) -> float:
    """A height that hints at the array's shape: a wide matrix is drawn wide."""
    if len(d.shape) < 2:
        return 56.0
    rows, columns = max(1, math.prod(d.shape[:-1])), max(1, d.shape[-1])
    return min(width, max(width / 3, width * rows / columns))


def _grid(
    grid: _Grid, x: float, y: float, width: float, colours: _Colours, height: float = 0
) -> tuple[list[str], float]:
    """The elements of a grid and the `y` below it; with a `height` its rows share it, else they are as high as their text."""
    elements = [text(x, y + 12, fitted(grid.title, width, 12, True), is_bold=True)]
    y += 12
    for note in grid.notes:
        for row in wrapped(note, width, 11):
            y += _LINE
            elements.append(text(x, y, row, size=11, fill="muted"))
    y += 8
    left = grid.left(width)
    cell, rows = (width - left) / max(map(len, grid.cells)), len(grid.cells)
    has_slices, has_label = _texts(grid, width)
    lines = has_slices + has_label
    least = lines * _LINE + (8 if lines == 2 else 3) if lines else min(18.0, max(6.0, cell))
    tall = min(max(least, height / rows), max(HIGHEST / rows, 36.0 if rows < 3 else 0.0))
    if grid.columns:
        shown = _shown_titles(grid.columns, cell)
        elements += [
            text(x + left + (i + 0.5) * cell, y + 10, grid.columns[i], size=11, anchor="middle", fill="muted")
            for i in shown
        ]
        y += _LINE + 2 if shown else 0
    lines_of_rows = max(1, math.ceil(13 / tall))
    for r, row in enumerate(grid.cells):
        top = y + r * tall
        if r % lines_of_rows == 0:
            elements.append(
                text(
                    x,
                    top + min(tall, 24) / 2 + 4,
                    fitted(grid.rows[r], left, 11),
                    size=11,
                    fill="muted",
                    title=grid.rows[r],
                )
            )
        for c, each in enumerate(row):
            elements += _cell(each, x + left + c * cell, top, cell, tall, colours, has_slices, has_label)
    return elements, y + tall * len(grid.cells)


def _cell(
    cell: _Cell, x: float, y: float, width: float, height: float, colours: _Colours, has_slices: bool, has_label: bool
) -> Iterator[str]:
    gap = 1.0 if min(width, height) >= 12 else 0.03 * min(width, height)
    hue, opacity = colours.of(cell.shard)
    yield rectangle(x + gap, y + gap, width - 2 * gap, height - 2 * gap, hue, opacity=opacity,
                    radius=2 if gap == 1 else 0, title=cell.title)  # fmt: skip
    middle, at = x + width / 2, y + height / 2 + 4
    if has_slices and has_label:
        yield text(middle, at - 7, cell.label, size=11, anchor="middle", fill="muted")
        yield text(middle, at + 8, cell.slices, size=11, anchor="middle")
    elif has_slices or has_label:
        yield text(middle, at, cell.slices if has_slices else cell.label, size=11, anchor="middle")


def _shown_titles(titles: Sequence[str], cell: float) -> list[int]:
    """The titles of columns for which there is room: all of them, or every second, fourth, …"""
    widest = max(text_width(title, 11) for title in titles) + 6
    every = 1
    while every * cell < widest:
        every *= 2
    return list(range(0, len(titles), every)) if every < 2 * len(titles) else []

"""The picture of a pipeline schedule: a Gantt chart with a row for each device and a column for each tick."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from shardfn.draw.palette import soft, strong
from shardfn.draw.picture import WIDTH, Picture, checked_width, head, legend, picture
from shardfn.draw.svg import MARGIN, bars_of, rectangle, text, text_width

WITH_TEXT, NARROWEST = 15.0, 1.0
"""Pixels of a tick that has a number, and of the narrowest that is drawn."""
HIGHEST, LOWEST = 520.0, 5.0
"""Pixels of all rows together, and of the lowest row. Of more devices the first and the last are drawn."""
FORWARD, BACKWARD = "forward", "backward"
_ROW = 22.0


class PipelineUnit(Protocol):
    """The work of one device in a tick."""

    @property
    def micro(self) -> int:
        """The micro-batch."""
        ...

    @property
    def chunk(self) -> int:
        """The chunk of the model."""
        ...


class PipelineTick(Protocol):
    """The work of all devices at a time."""

    @property
    def kind(self) -> str:
        """`forward` or `backward`."""
        ...

    @property
    def units(self) -> Sequence[PipelineUnit | None]:
        """For each device its work; None is idle."""
        ...


class PipelineSchedule(Protocol):
    """What the picture reads of a `shardfn.train` schedule."""

    @property
    def name(self) -> str:
        """The schedule's name."""
        ...

    @property
    def devices(self) -> int:
        """The number of stages that run at a time."""
        ...

    @property
    def chunks(self) -> int:
        """Chunks of the model on each device."""
        ...

    @property
    def micro_size(self) -> int:
        """The number of micro-batches."""
        ...

    @property
    def ticks(self) -> Sequence[PipelineTick]:
        """All ticks in order."""
        ...

    @property
    def bubble(self) -> float:
        """The fraction of time in which devices idle."""
        ...

    @property
    def slots(self) -> int:
        """Stage inputs that a device keeps at most."""
        ...


def pipeline_picture(schedule: PipelineSchedule, width: float = WIDTH) -> Picture:
    """A schedule as a Gantt chart: the work of every device in every tick.

    Args:
      schedule: the schedule of a pipeline (`pipe.schedule`).
      width: pixels.

    Raises:
      StrategyError: the width is too small or too large.

    >>> from shardfn.train.pipelines.schedule import schedule
    >>> print(pipeline_picture(schedule("1f1b", 2, 3)).title)
    Pipeline schedule 1f1b
    """
    s, ticks, width = schedule, schedule.ticks, checked_width(width)
    many = f"{s.devices} device{'s'[: s.devices != 1]}" + (f" with {s.chunks} chunks each" if s.chunks > 1 else "")
    title = f"Pipeline schedule {s.name}"
    notes = [
        f"{many}, {s.micro_size} micro-batch{'es'[: 2 * (s.micro_size != 1)]}: devices idle for {s.bubble:.1%} of "
        f"{len(ticks):,} ticks and keep at most {s.slots} stage input{'s'[: s.slots != 1]}."
    ]
    left = MARGIN + text_width(f"device {s.devices - 1}") + 8
    room = width - MARGIN - left
    wide = max(WITH_TEXT, text_width(str(s.micro_size - 1), 11) + 4)
    columns = _columns(len(ticks), room, wide)
    cell = min(max(26.0, wide), room / len(columns))
    has_text = cell >= wide
    if has_text:
        notes.append("A number is a micro-batch" + ("; a lighter colour is a later chunk." if s.chunks > 1 else "."))
    elements, y = head(width, title, notes)
    tone = soft if has_text else strong  # text is on soft colours only
    kinds = [(tone(0), FORWARD), (tone(1), BACKWARD)][: 1 + any(t.kind != FORWARD for t in ticks)]
    more, y = legend([*kinds, ("pale", "idle")], y, width, left)
    elements += more
    y += 12
    high = _ROW if has_text else max(LOWEST, min(_ROW, HIGHEST / s.devices))
    most = int(HIGHEST / high)
    rows = range(s.devices) if s.devices <= most else [*range(most - 6), -1, *range(s.devices - 4, s.devices)]
    edge = 0.0
    for device in rows:
        name = f"device {device}" if device >= 0 else f"… {s.devices - most + 2} more devices"
        middle = y + high / 2 + 3
        if middle - 11 >= edge or device < 0:
            elements.append(text(MARGIN, middle, name, fill="ink" if device >= 0 else "muted"))
            edge = middle + 2
        if device >= 0:
            place = (device, columns, left, y, cell, high)
            elements += _units(s, ticks, *place) if has_text else _runs(ticks, *place)
        y += high if device >= 0 else _ROW
    elements += _ticks(columns, left, y, cell)
    return picture(width, y + 20 + MARGIN / 2, elements, title, notes)


def _columns(count: int, room: float, wide: float) -> list[int]:
    """The ticks that are drawn, all of them where there is room; else the first and the last, with -1 in between."""
    if count * NARROWEST <= room:
        return list(range(count))
    each = int(room / wide - 3) // 2
    return [*range(each), -1, -1, -1, *range(count - each, count)]


def _units(
    s: PipelineSchedule,
    ticks: Sequence[PipelineTick],
    device: int,
    columns: Sequence[int],
    left: float,
    y: float,
    cell: float,
    high: float,
) -> Iterator[str]:
    """The work of a device in the drawn ticks, each with its micro-batch."""
    for i, tick in enumerate(columns):
        if tick < 0:
            continue
        unit, kind, x = ticks[tick].units[device], ticks[tick].kind, left + i * cell
        if unit is None:
            title = f"tick {tick}: device {device} is idle"
            yield rectangle(x + 0.5, y, cell - 1, high - 2, "pale", title=title)
            continue
        chunk = f", chunk {unit.chunk}" if s.chunks > 1 else ""
        title = f"tick {tick}: device {device}, {kind} of micro-batch {unit.micro}{chunk}"
        opacity = 1 - 0.6 * unit.chunk / s.chunks
        yield rectangle(x + 0.5, y, cell - 1, high - 2, soft(kind != FORWARD), opacity=opacity, radius=1, title=title)
        yield text(x + cell / 2, y + 14, str(unit.micro), size=11, anchor="middle")


def _runs(
    ticks: Sequence[PipelineTick], device: int, columns: Sequence[int], left: float, y: float, cell: float, high: float
) -> Iterator[str]:
    """The work of a device as narrow bars: one shape of its forwards, one of its backwards."""
    gap = 0.12 * cell
    yield rectangle(left, y, cell * len(columns), high - high / 8, "pale", title=f"device {device} is idle")
    for kind in (FORWARD, BACKWARD):
        spans = [
            (left + i * cell + gap / 2, left + (i + 1) * cell - gap / 2)
            for i, tick in enumerate(columns)
            if tick >= 0 and ticks[tick].kind == kind and ticks[tick].units[device] is not None
        ]
        title = f"device {device}: {kind} in {len(spans):,} ticks"
        yield bars_of(spans, y, high - high / 8, strong(kind != FORWARD), title=title)


def _ticks(columns: Sequence[int], left: float, y: float, cell: float) -> Iterator[str]:
    """The numbers of ticks below the rows, in equal steps, and what is left out."""
    widest = text_width(str(max(columns)), 11) + 10
    step = next(n * 10**k for k in range(9) for n in (1, 2, 5) if n * 10**k * cell >= widest)
    hidden = [i for i, tick in enumerate(columns) if tick < 0]
    for i, tick in enumerate(columns):
        is_apart = not hidden or abs(i - hidden[1]) * cell > widest
        if tick % step == 0 and tick >= 0 and is_apart:
            yield text(left + (i + 0.5) * cell, y + 13, str(tick), size=11, anchor="middle", fill="muted")
    if hidden:
        yield text(left + (hidden[1] + 0.5) * cell, y + 13, "…", size=11, anchor="middle", fill="muted")

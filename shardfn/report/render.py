"""Plain parts (texts, tables, drawings) shown in a terminal, as text, or as HTML. It knows nothing of plans."""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines of prose below a title; each may be long."""

    title: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells below named columns; units stand in the columns' names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Placed:
    """One array on a grid: for each device that is shown, the (start, stop) it holds of every dim."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Arrays on a grid of devices, `axes` as (name, size), row-major. Only HTML shows it: a text has the cuts."""

    title: str
    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    arrays: tuple[Placed, ...]
    note: str = ""


Part = Text | Table | Drawing


def unit_of(sizes: Iterable[float]) -> tuple[str, int]:
    """The unit that shows the largest of some sizes in bytes with at least two digits before the point.

    >>> unit_of([4096, 20480]), unit_of([])
    (('KiB', 1024), ('B', 1))
    """
    top = max(sizes, default=0)
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next(((name, size) for name, size in units if top >= 10 * size), ("B", 1))


def figure(number: float) -> str:
    """A number with three digits, or all of them before the point.

    >>> figure(1234.5), figure(0.12345), figure(7)
    ('1,234', '0.123', '7')
    """
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.3g}"


def to_rich(parts: Sequence[Part]) -> rich.console.Group:
    """The parts for `rich.console.Console.print`; drawings are left out."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text as Line

    shown: list[rich.console.RenderableType] = []
    for part in parts:
        if isinstance(part, Drawing):
            continue
        if shown:
            shown.append(Line())
        if part.title:
            shown.append(Line(part.title, style="bold"))
        if isinstance(part, Table):
            shown.append(_Fitted(part))
            shown += [Line(part.note, style="dim")] if part.note else []
        else:
            shown += [Padding(Line(line), (0, 0, 0, 2 if part.title else 0)) for line in part.lines]
    return Group(*shown)


def to_text(parts: Sequence[Part], width: int = 100) -> str:
    """The parts as plain text without colours or line drawing; what is too long for `width` folds.

    >>> print(to_text([Table("Sizes", ("name", "B"), (("x", "4,096"), ("weights", "12")))]))
    Sizes
    name        B
    ------- -----
    x       4,096
    weights    12
    """
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, force_terminal=False)
    with console.capture() as capture:
        console.print(to_rich(parts))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def to_html(parts: Sequence[Part], title: str, page: bool = False) -> str:
    """The parts as HTML, all escaped, that needs no script and no file; colours go with a light and a dark page.

    Args:
      parts: what to show, in order.
      title: name of the whole, for screen readers and for the page.
      page: make it a whole page instead of a fragment for a notebook.

    >>> to_html([Text("", ("a < b",))], "example").endswith("<p>a &lt; b</p></section>")
    True
    """
    inner = "".join(itertools.chain.from_iterable(_HTML[type(part)](part) for part in parts))
    body = f'<section class="shardfn" aria-label="{html.escape(title)}"><style>{_CSS}</style>{inner}</section>'
    if not page:
        return body
    head = f'<meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>{html.escape(title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


_NUMBER = re.compile(r"(<?[\d,.]+(e[+-]\d+)?%?|-)?")
_WIDTHS = ((32, 18), (24, 12))
"""Cells of the first column, which says what a row is, and of the others fold no earlier than at so many characters."""
_OPEN_ROWS = 24  # longer tables are folded at first


def _is_number(table: Table, column: int) -> bool:
    """Whether a column holds figures and nothing else, and so is set flush right."""
    return any(row[column] for row in table.rows) and all(_NUMBER.fullmatch(row[column]) for row in table.rows)


def _widths(table: Table, width: int) -> list[int] | None:
    """The width of each column if all of them fit into `width`, one space apart: the tightest that folds little."""
    longest = [max((len(row[i]) for row in table.rows), default=0) for i in range(len(table.columns))]
    words = [max(map(len, name.split())) for name in table.columns]
    for first, others in _WIDTHS:
        least = [max(w, min(n, others if i else first)) for i, (n, w) in enumerate(zip(longest, words, strict=True))]
        spare = width - sum(least) - len(least) + 1
        if spare < 0:
            continue
        wanted = [max(n, len(c)) - w for n, c, w in zip(longest, table.columns, least, strict=True)]
        for left, i in enumerate(sorted(range(len(least)), key=wanted.__getitem__)):
            more = min(wanted[i], spare // (len(least) - left))
            least[i], spare = least[i] + more, spare - more
        return least
    return None


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """A table in rich: as columns where they fit the width, else one cell below the other."""

    table: Table

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.console.RenderableType]:
        from rich.box import Box
        from rich.padding import Padding
        from rich.table import Table as Grid
        from rich.text import Text as Line

        columns, rows = self.table.columns, self.table.rows
        widths = _widths(self.table, options.max_width)
        if widths is None:
            for row in rows:
                yield Line(row[0], overflow="fold")
                cells = (f"{name}: {cell}" for name, cell in zip(columns[1:], row[1:], strict=True) if cell)
                yield from (Padding(Line(cell, overflow="fold"), (0, 0, 0, 2)) for cell in cells)
            return
        rule = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)  # a line of dashes below the header
        grid = Grid(box=rule, show_edge=False, pad_edge=False, padding=0, header_style="")
        for i, name in enumerate(columns):
            justify = "right" if _is_number(self.table, i) else "left"
            grid.add_column(Line(name), justify=justify, overflow="fold", width=widths[i])
        for row in rows:
            grid.add_row(*map(Line, row))  # as Line, so that the brackets of float32[4] are not taken for markup
        yield grid


def _element(tag: str, text: str) -> str:
    return f"<{tag}>{html.escape(text)}</{tag.split()[0]}>" if text else ""


def _html_text(text: Text) -> Iterator[str]:
    yield _element("h4", text.title)
    yield from (_element("p", line) for line in text.lines)


def _html_table(table: Table) -> Iterator[str]:
    title = html.escape(table.title)
    style = [' class="n"' if _is_number(table, i) else "" for i in range(len(table.columns))]
    head = "".join(f'<th scope="col"{s}>{html.escape(c)}</th>' for c, s in zip(table.columns, style, strict=True))
    tags = ('th scope="row"', *(f"td{s}" for s in style[1:]))
    cells = ((f"<{t}>{html.escape(c)}</{t[:2]}>" for t, c in zip(tags, row, strict=True)) for row in table.rows)
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    yield f"<details{' open' if len(table.rows) <= _OPEN_ROWS else ''}><summary>{title} ({len(table.rows)})</summary>"
    yield f'<div role="region" tabindex="0" aria-label="{title}"><table><thead><tr>{head}</tr></thead>'
    yield f"<tbody>{rows}</tbody></table></div>{_element('p class=note', table.note)}</details>"


def _html_drawing(drawing: Drawing) -> Iterator[str]:
    *outer, (last, columns) = drawing.axes or (("", 1),)
    indices = itertools.product(*(range(size) for _, size in outer))
    names = (" ".join(f"{name}={i}" for (name, _), i in zip(outer, index, strict=True)) for index in indices)
    ids = [html.escape(name or "devices") for name in names]
    head = "".join(f'<th scope="col">{html.escape(f"{last}={i}")}</th>' for i in range(columns))
    yield f"{_element('h4', drawing.title)}{_element('p class=note', drawing.note)}<div class='grids'>"
    for array in drawing.arrays:
        colours: dict[tuple[tuple[int, int], ...], int] = {}
        cells = []
        for device, piece in zip(drawing.devices, array.pieces, strict=True):
            # The golden angle: neighbours in number are far apart in hue. The text says the same as the colour.
            hue = colours.setdefault(piece, len(colours) * 137 % 360)
            text = f"<small>{device}</small> {_piece(piece, array.shape)}"
            cells.append(f'<td style="background:hsl({hue} 70% 50%/.28)">{text}</td>')
        lines = ["".join(cells[i : i + columns]) for i in range(0, len(cells), columns)]
        rows = "".join(f'<tr><th scope="row">{n}</th>{line}</tr>' for n, line in zip(ids, lines, strict=True))
        yield (
            f'<div role="region" tabindex="0" aria-label="{html.escape(array.name)}"><table class="grid">'
            f"<caption>{html.escape(array.name)}</caption><thead><tr><td></td>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
    yield "</div>"


def _piece(piece: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> str:
    """As one would index it: `[0:16, :]`."""
    ranges = (":" if r == (0, n) else f"{r[0]}:{r[1]}" for r, n in zip(piece, shape, strict=True))
    return f"[{', '.join(ranges)}]"


_HTML = {Text: _html_text, Table: _html_table, Drawing: _html_drawing}

# Text takes the page's colour and backgrounds are translucent, so that it reads on light and on dark alike.
_CSS = """
.shardfn{font:13px/1.5 system-ui,sans-serif}.shardfn p{margin:.1em 0;overflow-wrap:anywhere}
.shardfn h4,.shardfn summary{font-size:14px;font-weight:600;margin:1em 0 .3em}.shardfn summary{cursor:pointer}
.shardfn .note,.shardfn small{opacity:.75}.shardfn small{font-size:10px}
.shardfn div[role=region]{overflow-x:auto;max-width:100%}.shardfn .grids{display:flex;flex-wrap:wrap;gap:1em 2em}
.shardfn table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:0}
.shardfn caption{text-align:left;font-weight:600;white-space:nowrap}
.shardfn th,.shardfn td{padding:.15em .7em .15em 0;text-align:left;vertical-align:top;border:0;background:none}
.shardfn thead th{border-bottom:1px solid rgb(128 128 128/.6)}.shardfn tbody th{font-weight:500}
.shardfn tbody tr+tr>*{border-top:1px solid rgb(128 128 128/.2)}.shardfn .n{text-align:right}
.shardfn .grid td,.shardfn .grid th{padding:.25em .6em;border:1px solid rgb(128 128 128/.35);white-space:nowrap}
.shardfn .grid thead td{border:0}
""".replace("\n", "")

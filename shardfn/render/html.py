"""Parts as HTML that needs no script and no other file."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterator, Sequence

from shardfn.render.parts import Drawing, Part, Table, Text

_OPEN_ROWS = 24
"""A longer table is closed at first."""


def to_html(parts: Sequence[Part], title: str) -> str:
    """The parts as a piece of HTML for a notebook, all escaped; colours go with a light and a dark page.

    Args:
      parts: what to show, in order.
      title: name of the whole, for screen readers.

    >>> to_html([Text("", ("a < b",))], "example").endswith("<p>a &lt; b</p></section>")
    True
    """
    inner = "".join(map(_titled, parts))
    return f'<section class="shardfn" aria-label="{html.escape(title)}"><style>{_CSS}</style>{inner}</section>'


def _titled(part: Part) -> str:
    if not isinstance(part, Table):
        return element("h4", part.title) + body(part)
    state = " open" if part.is_open and len(part.rows) <= _OPEN_ROWS else ""
    return f"<details{state}>{element('summary', f'{part.title} ({len(part.rows)})')}{body(part)}</details>"


def element(tag: str, text: str) -> str:
    """A text in an element, escaped; nothing where the text is empty. `tag` may have attributes."""
    return f"<{tag}>{html.escape(text)}</{tag.split()[0]}>" if text else ""


def body(part: Part, cell: Callable[[str], str] = html.escape) -> str:
    """A part below its title.

    Args:
      part: the part.
      cell: a cell of a table as HTML.
    """
    if isinstance(part, Text):
        return "".join(element("p", line) for line in part.lines)
    return "".join(_table(part, cell) if isinstance(part, Table) else _drawing(part))


def _table(table: Table, cell: Callable[[str], str]) -> Iterator[str]:
    style = [' class="n"' if table.is_numeric(i) else "" for i in range(len(table.columns))]
    head = "".join(f'<th scope="col"{s}>{html.escape(c)}</th>' for c, s in zip(table.columns, style, strict=True))
    tags = ('th scope="row"', *(f"td{s}" for s in style[1:]))
    names = ("", *(f' data-column="{html.escape(name)}"' for name in table.columns[1:]))
    cells = ((f"<{t}{n}>{cell(c)}</{t[:2]}>" for t, n, c in zip(tags, names, row, strict=True)) for row in table.rows)
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    yield f'<div role="region" tabindex="0" aria-label="{html.escape(table.title)}"><table><thead><tr>{head}</tr></thead>'
    yield f"<tbody>{rows}</tbody></table></div>{element('p class=note', table.note)}"


def _drawing(drawing: Drawing) -> Iterator[str]:
    *outer, (last, columns) = drawing.axes or (("", 1),)
    indices = itertools.product(*(range(size) for _, size in outer))
    names = (" ".join(f"{name}={i}" for (name, _), i in zip(outer, index, strict=True)) for index in indices)
    ids = [html.escape(name or "devices") for name in names]
    head = "".join(f'<th scope="col">{html.escape(f"{last}={i}")}</th>' for i in range(columns))
    yield f"{element('p class=note', drawing.note)}<div class='meshes'>"
    for array in drawing.arrays:
        colours: dict[str, int] = {}
        cells = []
        for device, shard in zip(drawing.devices, array.shards, strict=True):
            # The golden angle: consecutive shards are far apart in hue. The text says the same as the colour.
            hue = colours.setdefault(shard, len(colours) * 137 % 360)
            text = f"<small>{device}</small> {html.escape(shard)}"
            cells.append(f'<td style="background:hsl({hue} 70% 50%/.28)">{text}</td>')
        lines = ["".join(cells[i : i + columns]) for i in range(0, len(cells), columns)]
        rows = "".join(f'<tr><th scope="row">{n}</th>{line}</tr>' for n, line in zip(ids, lines, strict=True))
        yield (
            f'<div role="region" tabindex="0" aria-label="{html.escape(array.name)}"><table class="mesh">'
            f"<caption>{html.escape(array.name)}</caption><thead><tr><td></td>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
    yield "</div>"


# Text takes the page's colour and backgrounds are translucent, so that it reads on light and on dark alike.
_CSS = """
.shardfn{font:13px/1.5 system-ui,sans-serif}.shardfn p{margin:.1em 0;overflow-wrap:anywhere}
.shardfn h4,.shardfn summary{font-size:14px;font-weight:600;margin:1em 0 .3em}.shardfn summary{cursor:pointer}
.shardfn .note,.shardfn small{opacity:.75}.shardfn small{font-size:10px}
.shardfn div[role=region]{overflow-x:auto;max-width:100%}.shardfn .meshes{display:flex;flex-wrap:wrap;gap:1em 2em}
.shardfn table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:0}
.shardfn caption{text-align:left;font-weight:600;white-space:nowrap}
.shardfn th,.shardfn td{padding:.15em .7em .15em 0;text-align:left;vertical-align:top;border:0;background:none}
.shardfn thead th{border-bottom:1px solid rgb(128 128 128/.6)}.shardfn tbody th{font-weight:500}
.shardfn tbody tr+tr>*{border-top:1px solid rgb(128 128 128/.2)}.shardfn .n{text-align:right}
.shardfn .mesh td,.shardfn .mesh th{padding:.25em .6em;border:1px solid rgb(128 128 128/.35);white-space:nowrap}
.shardfn .mesh thead td{border:0}
""".replace("\n", "")

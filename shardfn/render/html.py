"""Parts as HTML that needs no script and no other file."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Sequence

from shardfn.render.parts import Drawing, Part, Table, Text

_OPEN_ROWS = 24
"""A longer table is closed at first."""


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


def _element(tag: str, text: str) -> str:
    return f"<{tag}>{html.escape(text)}</{tag.split()[0]}>" if text else ""


def _html_text(text: Text) -> Iterator[str]:
    yield _element("h4", text.title)
    yield from (_element("p", line) for line in text.lines)


def _html_table(table: Table) -> Iterator[str]:
    title = html.escape(table.title)
    style = [' class="n"' if table.is_numeric(i) else "" for i in range(len(table.columns))]
    head = "".join(f'<th scope="col"{s}>{html.escape(c)}</th>' for c, s in zip(table.columns, style, strict=True))
    tags = ('th scope="row"', *(f"td{s}" for s in style[1:]))
    cells = ((f"<{t}>{html.escape(c)}</{t[:2]}>" for t, c in zip(tags, row, strict=True)) for row in table.rows)
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    is_open = table.is_open and len(table.rows) <= _OPEN_ROWS
    yield f"<details{' open' if is_open else ''}><summary>{title} ({len(table.rows)})</summary>"
    yield f'<div role="region" tabindex="0" aria-label="{title}"><table><thead><tr>{head}</tr></thead>'
    yield f"<tbody>{rows}</tbody></table></div>{_element('p class=note', table.note)}</details>"


def _html_drawing(drawing: Drawing) -> Iterator[str]:
    *outer, (last, columns) = drawing.axes or (("", 1),)
    indices = itertools.product(*(range(size) for _, size in outer))
    names = (" ".join(f"{name}={i}" for (name, _), i in zip(outer, index, strict=True)) for index in indices)
    ids = [html.escape(name or "devices") for name in names]
    head = "".join(f'<th scope="col">{html.escape(f"{last}={i}")}</th>' for i in range(columns))
    yield f"{_element('h4', drawing.title)}{_element('p class=note', drawing.note)}<div class='meshes'>"
    for array in drawing.arrays:
        colours: dict[tuple[tuple[int, int], ...], int] = {}
        cells = []
        for device, shard in zip(drawing.devices, array.shards, strict=True):
            # The golden angle: consecutive shards are far apart in hue. The text says the same as the colour.
            hue = colours.setdefault(shard, len(colours) * 137 % 360)
            text = f"<small>{device}</small> {_slice_text(shard, array.shape)}"
            cells.append(f'<td style="background:hsl({hue} 70% 50%/.28)">{text}</td>')
        lines = ["".join(cells[i : i + columns]) for i in range(0, len(cells), columns)]
        rows = "".join(f'<tr><th scope="row">{n}</th>{line}</tr>' for n, line in zip(ids, lines, strict=True))
        yield (
            f'<div role="region" tabindex="0" aria-label="{html.escape(array.name)}"><table class="mesh">'
            f"<caption>{html.escape(array.name)}</caption><thead><tr><td></td>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
    yield "</div>"


def _slice_text(shard: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> str:
    """As one would index it: `[0:16, :]`."""
    ranges = (":" if r == (0, n) else f"{r[0]}:{r[1]}" for r, n in zip(shard, shape, strict=True))
    return f"[{', '.join(ranges)}]"


_HTML = {Text: _html_text, Table: _html_table, Drawing: _html_drawing}

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

"""Parts as text, with one layout for terminals and files. Shapes and paths are never broken; a long path is elided."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardfn.render.parts import Drawing, Part, Table

if TYPE_CHECKING:
    import rich.console

PATH_WIDTHS = (40, 32, 24, 16, 12)
"""A path keeps at least so many characters; the first width with which the table fits is taken."""

Line = tuple[str, str]
"""A line and its style: `bold`, `dim` or none."""


def to_text(parts: Sequence[Part], width: int | None = None) -> str:
    """The parts as plain text without colours. Without a `width` nothing is wrapped or elided.

    >>> from shardfn.render.parts import Table
    >>> print(to_text([Table("Sizes", ("name", "size"), (("x", "4 KiB"), ("weights", "12 B")))]))
    Sizes
    name      size
    -------  -----
    x        4 KiB
    weights   12 B
    """
    return "\n".join(line for line, _ in _lines(parts, width))


def terminal_width() -> int | None:
    """The width for text on standard output: that of the terminal, at least 60; None for a file or a pipe."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


class Shown:
    """The parts for `rich.console.Console.print`, fitted to its width; as a string, for `print`."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts

    def __str__(self) -> str:
        return to_text(self.parts, terminal_width())

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.console.RenderableType]:
        from rich.text import Text

        for line, style in _lines(self.parts, options.max_width):
            yield Text(line, style=style, no_wrap=True, overflow="ignore")


def elided(path: str, width: int) -> str:
    """A path without its middle, so that it is at most `width` characters long.

    >>> elided("params/encoder/layers/attention/query/kernel", 32)
    'params/…/attention/query/kernel'
    >>> elided("a_single_name_that_is_too_long", 12)
    'a_sin…o_long'
    """
    if len(path) <= width:
        return path
    first, *rest = path.split("/")
    for kept, starts in (([first], range(1, len(rest))), ([], range(len(rest)))):
        for start in starts:
            short = "/".join([*kept, "…", *rest[start:]])
            if len(short) <= width:
                return short
    left = (width - 1) // 2
    return f"{path[:left]}…{path[len(path) - (width - 1 - left) :]}"


def _lines(parts: Sequence[Part], width: int | None) -> Iterator[Line]:
    shown = [part for part in parts if not isinstance(part, Drawing)]
    for number, part in enumerate(shown):
        if number:
            yield "", ""
        if part.title:
            yield part.title, "bold"
        if isinstance(part, Table):
            yield from _table_lines(part, width)
            yield from ((line, "dim") for line in _wrapped(part.note, width))
        else:
            indent = "  " if part.title else ""
            for text in part.lines:
                for number_of_line, line in enumerate(_wrapped(text, width, len(indent) + 2)):
                    yield f"{indent}{'  ' if number_of_line else ''}{line}", ""


def _table_lines(table: Table, width: int | None) -> Iterator[Line]:
    """As columns where they fit, if need be without the optional ones; else each row as one cell below the other."""
    widths = _column_widths(table, width)
    if widths is None and table.optional:
        yield from _table_lines(table.without(table.optional[0]), width)
        return
    if widths is None:
        for row in table.rows:
            yield from ((line, "") for line in _wrapped(row[0], width))
            for name, cell in zip(table.columns[1:], row[1:], strict=True):
                yield from ((f"  {line}", "") for line in _wrapped(f"{name}: {cell}" if cell else "", width, 2))
        return
    gap = "  " if width is None or sum(widths) + 2 * len(widths) - 2 <= width else " "
    is_right = [table.is_numeric(i) for i in range(len(widths))]
    for number, row in enumerate((table.columns, *table.rows)):
        cells = [_wrapped(cell, w) for cell, w in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            texts = [cell[k] if k < len(cell) else "" for cell in cells]
            fitted = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, is_right, strict=True))
            yield gap.join(fitted).rstrip(), ""
        if not number:
            yield gap.join("-" * w for w in widths), ""


def _column_widths(table: Table, width: int | None) -> list[int] | None:
    """The width of each column, or None where no layout in columns fits: prose is wrapped first, then paths are elided."""
    columns = list(zip(table.columns, *table.rows, strict=True))
    natural = [max(map(len, column)) for column in columns]
    gaps = len(columns) - 1
    if width is None or sum(natural) + gaps <= width:
        return natural
    for shortest in PATH_WIDTHS:
        least = [max(_least(word, shortest) for cell in column for word in ("", *_words(cell))) for column in columns]
        spare = width - gaps - sum(least)
        if spare < 0:
            continue
        wanted = [n - w for n, w in zip(natural, least, strict=True)]
        for left, i in enumerate(sorted(range(len(least)), key=wanted.__getitem__)):
            more = min(wanted[i], spare // (len(least) - left))
            least[i], spare = least[i] + more, spare - more
        return least
    return None


def _least(word: str, shortest: int) -> int:
    """The width that a word needs: a path can be elided."""
    return min(len(word), shortest) if "/" in word else len(word)


_WORD = re.compile(
    r"[<+-]?[\d,.]+ (?:[KMGT]?i?B|[nµm]?s|[kMGTP]?FLOPs)\b[,;.)]?"
    r"|(?:[^\s()\[\]{}]|\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\]|\{[^{}]*\}|[()\[\]{}])+"
)
_LONGEST_WORD = 48
"""Brackets hold a shape or a tuple together up to so many characters; what is longer is prose."""


def _words(text: str) -> list[str]:
    """The words of a text; a tuple such as `(4, 1)` or `P('a', None)` is one, and so is a number with its unit.

    >>> _words("shard `w` (1, 8) over P('a', None)")
    ['shard', '`w`', '(1, 8)', 'over', "P('a', None)"]
    """
    found = _WORD.findall(text)
    return [part for word in found for part in ([word] if len(word) <= _LONGEST_WORD else word.split())]


def _wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """The lines of a text between words; a word that is too long is elided. `indent` is left free in every line."""
    if width is None or len(text) <= width - indent:
        return [text] if text else []
    lines, limit = [""], max(1, width - indent)
    for word in _words(text):
        word = elided(word, limit)
        if lines[-1] and len(lines[-1]) + 1 + len(word) > limit:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines

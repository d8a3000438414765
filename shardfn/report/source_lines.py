"""Lines of the user's code beside what they cause, for a page."""

from __future__ import annotations

import html
import itertools
import linecache
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from shardfn.ir.source_lines import file_name

CONTEXT = 2
"""Lines shown before and after a line."""


class SourceLines:
    """The code at some places, as far as its files can be read here.

    Args:
      notes: for each place (`file:line`) what happens there.
    """

    def __init__(self, notes: Mapping[str, Sequence[str]]):
        self.notes: dict[str, dict[int, Sequence[str]]] = {}
        """By file and line."""
        for place, texts in notes.items():
            file, line = split(place)
            if linecache.getline(file, line).strip():
                self.notes.setdefault(file, {})[line] = texts

    def linked(self, place: str, text: str) -> str:
        """A place as a link to its line, with the line's code beside it; the text alone where the page has no such line."""
        file, line = split(place)
        if line not in self.notes.get(file, {}):
            return html.escape(text)
        code = html.escape(linecache.getline(file, line).strip())
        return f'<a href="#{self._anchor(file, line)}" title="{html.escape(place)}">{html.escape(text)}</a> <code>{code}</code>'

    def listing(self) -> Iterator[str]:
        """The lines as HTML, file by file, with their neighbours and notes."""
        for file, notes in self.notes.items():
            lines = linecache.getlines(file)
            near = {n for at in notes for n in range(at - CONTEXT, at + CONTEXT + 1) if 0 < n <= len(lines)}
            shown = sorted(n for n in near if lines[n - 1].strip())
            name = html.escape(file_name(file))
            yield f'<h3 title="{html.escape(file)}">{name}</h3>'
            yield f'<div role="region" tabindex="0" aria-label="{name}" class="code">'
            for _, numbered in itertools.groupby(enumerate(shown), lambda pair: pair[1] - pair[0]):
                block = [number for _, number in numbered]
                code = textwrap.dedent("".join(lines[n - 1].rstrip() + "\n" for n in block).expandtabs(4)).split("\n")
                rows = (self._row(file, n, text) for n, text in zip(block, code, strict=False))
                yield f"<table><tbody>{''.join(rows)}</tbody></table>"
            yield "</div>"

    def _row(self, file: str, line: int, code: str) -> str:
        notes = self.notes[file].get(line)
        start = f'<tr id="{self._anchor(file, line)}" class="hit">' if notes else "<tr>"
        told = "".join(f"<p>{html.escape(note)}</p>" for note in notes or ())
        return f"{start}<td>{line}</td><td><code>{html.escape(code)}</code></td><td>{told}</td></tr>"

    def _anchor(self, file: str, line: int) -> str:
        return f"code-{[*self.notes].index(file)}-{line}"


def split(place: str) -> tuple[str, int]:
    """The file and the line of a place; line 0 where it names none.

    >>> split("/home/me/model.py:13"), split("")
    (('/home/me/model.py', 13), ('', 0))
    """
    file, _, line = place.rpartition(":")
    return (file, int(line)) if line.isdecimal() else (place, 0)

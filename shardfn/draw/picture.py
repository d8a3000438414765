"""A picture: SVG text that notebooks show and that can be saved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

from shardfn.draw.svg import MARGIN, fitted, page, rectangle, text, text_width, wrapped
from shardfn.errors import StrategyError, StrategyTypeError, a, fail
from shardfn.render.files import save_text

WIDTH = 760
"""Width of a picture in pixels, unless it is asked for."""
NARROWEST, WIDEST = 320, 4000


@dataclasses.dataclass(frozen=True, repr=False)
class Picture:
    """A picture of a plan or of a pipeline's schedule. `str` is its SVG; a notebook shows it; `save` writes it.

    The SVG has the colours of light and dark pages and needs no other file.

    Attributes:
      title: what it shows, in one line.
      width: pixels.
      height: pixels.
      svg: the SVG text.
    """

    title: str
    width: int
    height: int
    svg: str

    def __str__(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture {self.title!r}, {self.width} x {self.height}>"

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg}</div>'  # in a page, unlike in an image, tooltips show

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture as a file.

        Args:
          path: the file; its name ends in `.svg`.

        Raises:
          StrategyError: the name has another ending, or the file cannot be written.
        """
        save_text(path, {".svg": self.__str__}, "a picture")


def checked_width(width: Any) -> float:
    """The width, if a picture can have it.

    Raises:
      StrategyError: it is too small or too large.
      StrategyTypeError: it is no number.
    """
    if not isinstance(width, int | float) or isinstance(width, bool):
        fail(StrategyTypeError, f"the width of a picture is a number, not {a(width)}", where=f"width = {width!r:.60}",
             why="it counts pixels", fix=f"leave it out for {WIDTH}")  # fmt: skip
    if not NARROWEST <= width <= WIDEST:
        fail(StrategyError, f"a picture cannot be {width} pixels wide", where=f"width = {width}",
             why="texts would not fit, or get lost", fix=f"give {NARROWEST} to {WIDEST} pixels")  # fmt: skip
    return width


def head(width: float, title: str, notes: Iterable[str] = ()) -> tuple[list[str], float]:
    """The title of a picture with notes below it, and the `y` below them."""
    room = width - 2 * MARGIN
    elements, y = [text(MARGIN, 30, fitted(title, room, 15, True), size=15, is_bold=True, title=title)], 30.0
    for note in notes:
        for row in wrapped(note, room):
            y += 18
            elements.append(text(MARGIN, y, row, fill="muted"))
    return elements, y + 14


def legend(entries: Sequence[tuple[str, str]], y: float, width: float, left: float = MARGIN) -> tuple[list[str], float]:
    """Squares of a colour with what they mean, in as many lines as they need, and the `y` below."""
    elements, x = [], left
    for fill, name in entries:
        name = fitted(name, width - MARGIN - left - 20, 11)
        needed = text_width(name, 11) + 34
        if x > left and x + needed > width - MARGIN:
            x, y = left, y + 17
        elements += [rectangle(x, y, 11, 11, fill, radius=2), text(x + 16, y + 10, name, size=11)]
        x += needed
    return elements, y + 11


def percent(share: float) -> str:
    """A share in whole percent; a small one is not zero.

    >>> percent(0.234), percent(0.002), percent(0)
    ('23%', '<1%', '0%')
    """
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def picture(width: float, height: float, elements: Iterable[str], title: str, notes: Iterable[str] = ()) -> Picture:
    """The picture of some elements; `notes` describe it to screen readers."""
    return Picture(
        title, round(width), round(height), page(round(width), round(height), elements, title, " ".join(notes))
    )

"""SVG elements as text: shapes with tooltips, texts that fit a width, and the page around them.

Colours are names of `palette.PALETTE`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

from shardfn.draw.palette import style_sheet
from shardfn.render.text import elided

MARGIN = 16.0
"""Space around a picture, in pixels."""

_WIDTHS = {
    character: width
    for width, characters in (
        (0.30, "'IJijl"), (0.34, " ,./:;\\|·"), (0.42, "!()-[]frt"), (0.50, '"*_`'), (0.54, "?sz"), (0.56, "Lc"),
        (0.60, "Fkvxy"), (0.64, "0123456789EPSTYabdeghnopqu{}µ"), (0.70, "ABCKRVXZ"), (0.79, "&DGHNOQU"),
        (0.84, "#+<=>^~w×→"), (0.87, "M"), (1.00, "%@Wm…"),
    )
    for character in characters
}  # fmt: skip
"""Width of a character over the font size: that of DejaVu Sans, the widest of the usual sans-serif fonts."""
_OTHER, _WIDE, _SYMBOL = 0.66, 1.05, 1.3


def text_width(text: str, size: float = 12, is_bold: bool = False) -> float:
    """An upper estimate of the width of a text in pixels.

    >>> text_width("") < text_width("il") < text_width("mw") < text_width("mw", is_bold=True)
    True
    """
    return sum(map(_character_width, text)) * size * (1.13 if is_bold else 1)


def _character_width(character: str) -> float:
    if character in _WIDTHS:
        return _WIDTHS[character]
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.category(character) == "So":
        return _SYMBOL
    return _WIDE if unicodedata.east_asian_width(character) in "WF" else _OTHER


def fitted(text: str, width: float, size: float = 12, is_bold: bool = False) -> str:
    """A text without its middle, so that it fits into a width; empty where not even one character fits.

    >>> fitted("params/encoder/layers/attention/query/kernel", 200)
    'params/…/query/kernel'
    """
    if text_width(text, size, is_bold) <= width:
        return text
    for length in range(min(len(text) - 1, int(width / (0.28 * size))), 2, -1):
        short = elided(text, length)
        if text_width(short, size, is_bold) <= width:
            return short
    return "…" if text_width("…", size, is_bold) <= width else ""


def wrapped(text: str, width: float, size: float = 12, most: int = 4) -> list[str]:
    """The lines of a text between words, at most `most` of them; what is too long for a line is elided.

    >>> wrapped("one two three", 60)
    ['one two', 'three']
    """
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if text_width(longer, size) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < most:
            lines.append(word)
        else:
            lines[-1] = longer
    return [fitted(line, width, size) for line in lines if line]


# ---- elements


def text(
    x: float, y: float, content: str, *, size: float = 12, anchor: str = "start", fill: str = "ink", is_bold: bool = False,
    title: str = "", has_halo: bool = False,
) -> str:  # fmt: skip
    """A line of text on the baseline `y`; `anchor` is "start", "middle" or "end"; a halo keeps lines off it."""
    if not content:
        return ""
    more = "" if anchor == "start" else f' text-anchor="{anchor}"'
    more += "" if size == 12 else f' font-size="{_number(size)}"'
    more += ' font-weight="600"' if is_bold else ""
    more += ' paint-order="stroke" stroke-width="4" stroke-linejoin="round"' if has_halo else ""
    fill += " line-paper" if has_halo else ""
    return f'<text class="{fill}" x="{_number(x)}" y="{_number(y)}"{more}>{_tooltip(title)}{_escaped(content)}</text>'


def rectangle(
    x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1, radius: float = 0, title: str = "",
    outline: str = "",
) -> str:  # fmt: skip
    """A filled rectangle; `outline` is the colour of its border."""
    more = _shape(opacity, outline) + (f' rx="{_number(radius)}"' if radius else "")
    return _element(
        "rect", f'class="{fill}{_stroke(outline)}" x="{_number(x)}" y="{_number(y)}" width="{_number(max(0, width))}" '
        f'height="{_number(max(0, height))}"{more}', title,
    )  # fmt: skip


def circle(
    x: float, y: float, radius: float, fill: str, *, opacity: float = 1, title: str = "", outline: str = ""
) -> str:
    """A filled circle."""
    place = f'cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"'
    return _element("circle", f'class="{fill}{_stroke(outline)}" {place}{_shape(opacity, outline)}', title)


def polygon(points: Iterable[tuple[float, float]], fill: str, *, opacity: float = 1, title: str = "") -> str:
    """A filled polygon."""
    places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return _element("polygon", f'class="{fill}" points="{places}"{_shape(opacity)}', title)


def line(
    points: Sequence[tuple[float, float]], stroke: str, *, width: float = 1, dash: str = "", title: str = ""
) -> str:
    """A line through points."""
    places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    more = "" if width == 1 else f' stroke-width="{_number(width)}"'
    more += f' stroke-dasharray="{dash}"' if dash else ""
    return _element("polyline", f'class="line-{stroke}" fill="none" points="{places}"{more}', title)


def strokes(places: Iterable[tuple[float, float, float]], stroke: str) -> str:
    """Vertical lines as one element, each as (x, top, height)."""
    path = "".join(f"M{_number(x)} {_number(y)}v{_number(height)}" for x, y, height in places)
    return f'<path class="line-{stroke}" d="{path}"/>' if path else ""


def bars_of(spans: Iterable[tuple[float, float]], y: float, height: float, stroke: str, *, title: str = "") -> str:
    """Rectangles of one height beside each other as one element, each from its left to its right edge."""
    at = _number(y + height / 2)
    path = "".join(f"M{_number(left)} {at}H{_number(right)}" for left, right in spans)
    attributes = f'class="line-{stroke}" d="{path}" stroke-width="{_number(height)}"'
    return _element("path", attributes, title) if path else ""


def page(width: float, height: float, elements: Iterable[str], title: str, summary: str) -> str:
    """The elements as an SVG file that needs nothing else; screen readers get `title` and `summary`."""
    inner = "\n".join(filter(None, elements))
    background = rectangle(0.5, 0.5, width - 1, height - 1, "paper", radius=6, outline="rule")
    names = set(re.findall(r'class="([\w -]+)"', f'{inner}{background}<text class="ink"/>'))
    label = quoteattr(_clean(". ".join(filter(None, (title, summary)))))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="shardfn-picture" role="img" aria-label={label} '
        f'viewBox="0 0 {_number(width)} {_number(height)}" width="{_number(width)}" height="{_number(height)}" '
        f'font-family="{FONTS}" font-size="12">\n'
        f"<style>{style_sheet({name for group in names for name in group.split()})}</style>\n{background}\n{inner}\n</svg>\n"
    )


FONTS = "system-ui, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"


def _element(tag: str, attributes: str, title: str) -> str:
    return f"<{tag} {attributes}>{_tooltip(title)}</{tag}>" if title else f"<{tag} {attributes}/>"


def _tooltip(title: str) -> str:
    return f"<title>{_escaped(title)}</title>" if title else ""


def _shape(opacity: float, outline: str = "") -> str:
    return ("" if opacity >= 1 else f' fill-opacity="{_number(opacity, 3)}"') + (' stroke-width="1"' if outline else "")


def _stroke(outline: str) -> str:
    return f" line-{outline}" if outline else ""


def _number(number: float, digits: int = 2) -> str:
    """A coordinate as text; `-0` is 0.

    >>> _number(3.0), _number(2.756), _number(-0.001)
    ('3', '2.76', '0')
    """
    return f"{round(number, digits) + 0:.{digits}f}".rstrip("0").rstrip(".")


def _clean(content: str) -> str:
    """The text without control characters, which XML cannot hold."""
    return "".join(
        c if c >= " " and c not in "\ufffe\uffff" and not "\ud800" <= c <= "\udfff" else " " for c in content
    )


def _escaped(content: str) -> str:
    return escape(_clean(content))

"""Strings and lists as TOML text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def wrapped(words: Iterable[str], width: int = 110) -> Iterator[str]:
    """Lines of words with a comma after each."""
    line = ""
    for word in words:
        if line and len(line) + len(word) > width:
            yield line
            line = ""
        line += f"  {word}," if not line else f" {word},"
    if line:
        yield line


def quoted(text: str) -> str:
    """A basic string of TOML.

    >>> print(quoted('a "b"'))
    "a \\"b\\""
    """
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _code(c)) for c in text) + '"'


def _code(c: str) -> str:
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

"""ProtoBuf's wire format: the fields of a message, without a schema. https://protobuf.dev/programming-guides/encoding

A message is a sequence of fields. Each begins with a number, whose last three bits say how the value is stored: as a number
of variable length (0), as 8 or 4 bytes (1, 5), or as a length and that many bytes (2).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator

Bytes = bytes | memoryview | mmap.mmap
Span = tuple[int, int]
"""Where the bytes of a value begin and end."""

NUMBER, EIGHT, BYTES, FOUR = 0, 1, 2, 5


def number_at(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """A number of variable length (seven bits a byte, the lowest first), and where it ends.

    >>> number_at(bytes([0xAC, 0x02]), 0, 2)
    (300, 2)
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("it is truncated")
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"byte {at:,} ends no number")


def fields(data: Bytes, span: Span) -> Iterator[tuple[int, int | Span]]:
    """The fields of a message: each field's number, and its value if it is a number, else where its bytes are.

    Raises:
      ValueError: it is no message, or truncated.

    >>> list(fields(bytes([0x08, 0x05, 0x12, 0x01, 0x61]), (0, 5)))
    [(1, 5), (2, (4, 5))]
    """
    at, end = span
    while at < end:
        tag, at = number_at(data, at, end)
        kind, size = tag & 7, 0
        if kind == NUMBER:
            value, at = number_at(data, at, end)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            size, at = number_at(data, at, end)
        elif kind in (EIGHT, FOUR):
            size = 8 if kind == EIGHT else 4
        else:
            raise ValueError(f"byte {at:,} begins no field")
        if at + size > end:
            raise ValueError(f"a field should end at byte {at + size:,}, and its message ends at {end:,}")
        yield tag >> 3, (at, at + size)
        at += size


def integers(data: Bytes, values: Iterable[int | Span]) -> list[int]:
    """The signed integers of a repeated field, one by one or packed."""
    found: list[int] = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        at, end = value
        while at < end:
            one, at = number_at(data, at, end)
            found.append(one)
    return [value - (1 << 64) if value >> 63 else value for value in found]


def text(data: Bytes, value: int | Span) -> str:
    """A string."""
    if isinstance(value, int):
        raise ValueError("a number stands where a name should")
    return bytes(data[slice(*value)]).decode("utf-8")


def message(*parts: tuple[int, int | str | bytes]) -> bytes:
    """A message of fields: numbers, strings and messages, in order.

    >>> message((1, 5), (2, "a")).hex()
    '0805120161'
    """
    found = bytearray()
    for field, value in parts:
        if isinstance(value, int):
            found += _number(field << 3 | NUMBER) + _number(value % (1 << 64))
        else:
            content = value.encode() if isinstance(value, str) else value
            found += _number(field << 3 | BYTES) + _number(len(content)) + content
    return bytes(found)


def _number(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])

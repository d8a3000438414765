"""Numbers as people read them: three significant digits and one spelling for each unit (KiB, µs, GFLOPs)."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40))
_SECONDS = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
_FLOPS = (("FLOPs", 1), ("kFLOPs", 1e3), ("MFLOPs", 1e6), ("GFLOPs", 1e9), ("TFLOPs", 1e12), ("PFLOPs", 1e15))


def number_text(number: float) -> str:
    """A number with three significant digits, or with all digits before the point.

    >>> number_text(1234.5), number_text(0.12345), number_text(7)
    ('1,234', '0.123', '7')
    """
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.3g}"


def bytes_text(size: float) -> str:
    """A size in bytes, in the unit that leaves one to three digits before the point.

    >>> bytes_text(4), bytes_text(1536), bytes_text(1023 * 1024), bytes_text(-64 << 20)
    ('4 B', '1.5 KiB', '0.999 MiB', '-64 MiB')
    """
    return _scaled(size, _BYTES)


def time_text(seconds: float) -> str:
    """A time in seconds, as ns, µs, ms or s.

    >>> time_text(7.12e-5), time_text(0.0062134), time_text(0)
    ('71.2 µs', '6.21 ms', '0 s')
    """
    return _scaled(seconds, _SECONDS)


def flops_text(flops: float) -> str:
    """A count of floating-point operations.

    >>> flops_text(16512), flops_text(687_496_757_250)
    ('16.5 kFLOPs', '687 GFLOPs')
    """
    return _scaled(flops, _FLOPS)


def signed(text: str) -> str:
    """The text of a difference with its sign; a difference of zero has none.

    >>> signed(bytes_text(2048)), signed(bytes_text(-2048)), signed(bytes_text(0))
    ('+2 KiB', '-2 KiB', '0 B')
    """
    return text if text.startswith(("-", "0 ")) else f"+{text}"


def _scaled(number: float, units: Sequence[tuple[str, float]]) -> str:
    """The number in the first unit that leaves less than 1,000 of it; zero in the base unit."""
    if not number:
        return f"0 {next(name for name, size in units if size == 1)}"
    name, size = next((unit for unit in units if abs(number) < 999.5 * unit[1]), units[-1])
    return f"{number_text(number / size)} {name}"

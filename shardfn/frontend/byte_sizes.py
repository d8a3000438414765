"""Amounts that a user writes: bytes as a number or as text with a unit."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from shardfn.errors import Problem, a

_UNITS = {"": 1, **{f"{prefix}B": 1000**i for i, prefix in enumerate(("", "k", "M", "G", "T"))},
          **{f"{prefix}iB": 1024**i for i, prefix in enumerate(("", "K", "M", "G", "T")) if i}}  # fmt: skip
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_FIX = 'write a number of bytes from 1 up, or text such as "14GiB" or "16GB"'


def plain(number: Any) -> Any:
    """A NumPy scalar as Python's own number; all else as it is.

    >>> plain(np.int64(3)), plain(np.float32(0.5)), plain("14GiB")
    (3, 0.5, '14GiB')
    """
    return number.item() if isinstance(number, np.number) else number


def bytes_of(amount: Any, name: str) -> float | Problem:
    """The bytes of a size: an integer above 0, or text with a unit of 1000s (kB, MB, GB, TB) or 1024s (KiB, MiB, …).

    >>> bytes_of("14GiB", "memory_limit"), bytes_of("1.5 kB", "memory_limit"), bytes_of(100, "memory_limit")
    (15032385536.0, 1500.0, 100.0)
    """
    amount = plain(amount)
    where, number, factor = f"{name} = {amount!r}", amount, 1
    if isinstance(amount, str):
        found = _TEXT.fullmatch(amount)
        factor = next((_UNITS[unit] for unit in _UNITS if found and unit.lower() == found[2].lower()), 0)
        number = float(found[1]) if found else 0.0
        if number * factor < 1:
            units = f"the units are {', '.join(filter(None, _UNITS))}"
            prefix = found[2][:1].upper() if found else ""
            meant = f'did you mean "{found[1]}{prefix}iB"?' if found and prefix and prefix in "KMGT" else _FIX
            return Problem(f"`{name}` is not a byte size", where, units, meant)
    elif isinstance(amount, bool) or not isinstance(amount, int | float):
        return Problem(f"`{name}` is {a(amount)}", where, "it is a byte size", _FIX, is_type=True)
    elif not math.isfinite(amount) or amount < 1:
        fix = f"leave `{name}` out for all that a device has, or " + _FIX if amount == math.inf else _FIX
        return Problem(f"`{name}` is {amount}", where, "it is a byte size", fix)
    if factor == 1 and number != int(number):
        why = "a device holds bytes, not parts of them"
        return Problem(f"`{name}` is not an integer number of bytes", where, why, f'did you mean "{number:g}GiB"?')
    return float(number * factor)

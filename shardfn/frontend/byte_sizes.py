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
    where = f"{name} = {amount!r}"
    if isinstance(amount, str):
        found = _TEXT.fullmatch(amount)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if found is None or found[2].lower() not in units or float(found[1]) * units[found[2].lower()] < 1:
            return Problem(
                f"`{name}` is not a byte size", where, f"the units are {', '.join(filter(None, _UNITS))}", _FIX
            )
        made = float(found[1]) * units[found[2].lower()]
        return made if units[found[2].lower()] > 1 or made.is_integer() else _in_parts(name, where)
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        return Problem(f"`{name}` is {a(amount)}", where, "it is a byte size", _FIX, is_type=True)
    if not math.isfinite(amount) or amount < 1:
        fix = f"leave `{name}` out for all that a device has, or " + _FIX if amount == math.inf else _FIX
        return Problem(f"`{name}` is {amount}", where, "it is a byte size", fix)
    return float(amount) if amount == int(amount) else _in_parts(name, where)


def _in_parts(name: str, where: str) -> Problem:
    return Problem(
        f"`{name}` is not an integer number of bytes", where, "a device holds bytes, not parts of them", _FIX
    )

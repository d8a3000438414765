"""Where a sequence of equations repeats, by one number for each equation, the same for equal ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np


def stretches(numbers: np.ndarray, period: int) -> Iterator[tuple[int, int]]:
    """The longest stretches of a sequence whose numbers are equal to those `period` later: start and length.

    >>> list(stretches(np.array([7, 1, 2, 1, 2, 1, 9]), 2))
    [(1, 3)]
    """
    equal = np.concatenate([[0], numbers[:-period] == numbers[period:], [0]]).astype(np.int8)
    ends = np.flatnonzero(np.diff(equal)).tolist()
    return ((start, stop - start) for start, stop in zip(ends[::2], ends[1::2], strict=True))


def without_addresses(value: Any) -> str:
    """The text of a value, without the addresses of objects in it.

    >>> without_addresses("<function f at 0x7f01>")
    '<function f at >'
    """
    return re.sub(r"0x[0-9a-f]+", "", str(value))

"""Scales: from quantities to pixels, with round numbers to label."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Scale:
    """From a quantity in [low, high] to pixels. A logarithmic scale has the zero at `start`, before its lowest value."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        if self.high <= self.low:
            return (self.start + self.stop) / 2 if self.is_log or value else self.start
        if not self.is_log:
            return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)
        if value <= 0:
            return self.start
        share = math.log(value / self.low) / math.log(self.high / self.low)
        first = self.start + _BEFORE * (self.stop - self.start)
        return first + share * (self.stop - first)

    def ticks(self, most: int = 5) -> list[float]:
        """Zero and up to `most` round numbers of bytes within the scale.

        >>> Scale(0, 10 * 2**20, 0, 100).ticks()
        [0.0, 2097152.0, 4194304.0, 6291456.0, 8388608.0, 10485760.0]
        >>> Scale(2**10, 2**30, 0, 100, is_log=True).ticks()
        [0.0, 1024.0, 32768.0, 1048576.0, 33554432.0, 1073741824.0]
        """
        if self.high <= self.low:
            return [self.low]
        if self.is_log:
            first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
            step = max(1, math.ceil((last - first) / (most - 1)))
            return [0.0, *(2.0**k for k in range(first, last + 1, step))]
        step = 2.0 ** max(0, math.ceil(math.log2((self.high - self.low) / most)))
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


_BEFORE = 0.08
"""The part of a logarithmic scale between zero and the lowest value."""

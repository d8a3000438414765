"""The budget of a search: counted work, the same on every machine, and a clock only for a user's time limit.

The unit of work is a table entry read. Steps on small arrays are charged as entries too. A unit takes about five nanoseconds
of a core.
"""

from __future__ import annotations

import math
import time

CALL = 2e3
"""Fixed cost of a step over arrays, in entries."""

SECOND = 2e8
"""Entries that a core reads in a second, about: the unit of work limits."""


class Budget:
    """Work, in table entries, and seconds from now; either may be infinite. A part's spending counts for the whole.

    >>> whole = Budget(100)
    >>> half = whole.part(0.5)
    >>> half.spend(60)
    >>> half.is_over, whole.is_over, whole.left
    (True, False, 40.0)
    """

    def __init__(self, work: float = math.inf, seconds: float = math.inf, whole: Budget | None = None):
        self.work, self.whole, self.spent = float(work), whole, 0.0
        self.seconds = seconds
        self.begun = time.monotonic() if seconds < math.inf else 0.0

    def spend(self, entries: float) -> None:
        """Count work."""
        self.spent += entries
        if self.whole is not None:
            self.whole.spend(entries)

    @property
    def left(self) -> float:
        """Work left."""
        return max(0.0, self.work - self.spent)

    @property
    def seconds_left(self) -> float:
        """Seconds left; infinite without a time limit, and then no clock is read."""
        return max(0.0, self.begun + self.seconds - time.monotonic()) if self.seconds < math.inf else math.inf

    @property
    def is_over(self) -> bool:
        """Whether work or time is used up."""
        return self.spent >= self.work or self.seconds_left <= 0

    def part(self, share: float) -> Budget:
        """A share of what is left; never nothing, so that each step gives an answer."""
        return Budget(max(1.0, share * self.left), share * self.seconds_left, self)

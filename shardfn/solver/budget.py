"""How much a search may do: work that is counted, the same on every machine, and a clock only where the user set a limit.

The unit is an entry of a table that is read, as most of the time goes there; what a step takes however small its arrays
are is charged as entries too. How long a unit takes is the machine's matter: five to ten nanoseconds of one core where it
was measured.
"""

from __future__ import annotations

import math
import time

CALL = 2e3
"""Entries that a step over arrays costs beside those it reads."""

SECOND = 2e8
"""Entries read in a second of one core, about: what limits of work are written in."""


class Budget:
    """Work, in entries of tables, and seconds from now; either may be infinite. What a part of it spends, it has spent.

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
        """Work that may still be done."""
        return max(0.0, self.work - self.spent)

    @property
    def seconds_left(self) -> float:
        """Until the time is over; infinite where the user set none, and then no clock is read."""
        return max(0.0, self.begun + self.seconds - time.monotonic()) if self.seconds < math.inf else math.inf

    @property
    def is_over(self) -> bool:
        """Whether work or time is used up."""
        return self.spent >= self.work or self.seconds_left <= 0

    def part(self, share: float = 1.0, work: float = math.inf, seconds: float = math.inf) -> Budget:
        """A share of what is left, and at most so much; never nothing, so that what is begun gives an answer."""
        return Budget(max(1.0, min(work, share * self.left)), min(seconds, share * self.seconds_left), self)

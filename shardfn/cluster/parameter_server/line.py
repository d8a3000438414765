"""Who waits for servers that change: changes without pause would hold up everybody else."""

from __future__ import annotations

TURN_S = 10
"""Seconds in which whoever waits can take its turn. After that it may have died, and goes to the end of the line."""


class Line:
    """Names of calls that wait, in the order in which they came.

    >>> line = Line()
    >>> line.join("push", 0.0), line.join("resize", 1.0)
    (None, None)
    >>> line.is_first("resize", 5.0, free_since=2.0), line.is_first("push", 5.0, free_since=2.0)
    (False, True)
    >>> line.is_first("resize", 12.5, free_since=2.0)
    True
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def join(self, name: str, now: float) -> None:
        """Stand in line, unless it does already."""
        self._since.setdefault(name, now)

    def leave(self, name: str) -> None:
        """Leave the line."""
        self._since.pop(name, None)

    def is_first(self, name: str, now: float, free_since: float) -> bool:
        """Whether nobody waits that came before.

        Args:
          name: the call, in line or not.
          now: the time, in seconds.
          free_since: the time since which those that wait could have taken their turn.
        """
        for other, since in list(self._since.items()):
            if other == name:
                return True
            if now < max(since, free_since) + TURN_S:
                return False
            del self._since[other]
        return True

"""The objectives of a search, which a user names by a word or by MindSpore's level."""

from __future__ import annotations

from typing import Any

OBJECTIVES = ("communication", "memory", "time")
"""By level: the fewest bytes sent with the work evenly spread, the smallest peak per device, the shortest modelled step."""


def level_of(objective: Any) -> Any:
    """The level of a word; any other value as it is.

    >>> level_of("memory"), level_of(2), level_of("speed")
    (1, 2, 'speed')
    """
    return OBJECTIVES.index(objective) if isinstance(objective, str) and objective in OBJECTIVES else objective

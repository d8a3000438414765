"""What the user asked of the search, beside the level: its bounds, and what it may leave out."""

from __future__ import annotations

import dataclasses
import math

from shardfn.search.problem import Algorithm


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What bounds a search: bytes per device (None: what the device has), the user's time limit, and what may be left out."""

    memory_limit: float | None = None
    seconds: float = math.inf
    is_strict: bool = True
    """Whether a plan that is predicted to hold more than `memory_limit` is an error."""
    algorithm: Algorithm = dataclasses.field(default_factory=Algorithm)
    inside: bool = False
    """Whether the layouts inside are searched though no argument is open."""


UNBOUNDED = Wishes()
"""Nothing asked: the device's memory, and all the time."""

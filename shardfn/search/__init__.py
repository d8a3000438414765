"""How open layouts are chosen. `MODES` maps MindSpore's `search_mode` names to searches of one signature."""

from __future__ import annotations

from shardfn.errors import ContextError, NotAvailableError, fail
from shardfn.search import dynamic, propagation
from shardfn.search.problem import Answer, Problem, Search

__all__ = ["MODES", "Answer", "Problem", "Search", "select"]

MODES: dict[str, Search | None] = {
    "auto": propagation.search,
    "sharding_propagation": propagation.search,
    "dynamic_programming": dynamic.search,
    "recursive_programming": None,
}
"""None: the name is known, the search is not built yet."""


def select(mode: str) -> Search:
    """The search of a name.

    Raises:
      ContextError: no such name. NotAvailableError: not built yet.
    """
    if mode not in MODES:
        fail(ContextError, f"search_mode {mode!r} is unknown", where=f"search_mode = {mode!r}",
             why="a search is chosen by its name", fix=f"use one of {', '.join(MODES)}")  # fmt: skip
    found = MODES[mode]
    if found is None:
        fail(NotAvailableError, f"search_mode {mode!r} is not available yet", where=f"search_mode = {mode!r}",
             fix='use "auto" or "sharding_propagation", or give the strategies yourself')  # fmt: skip
    return found

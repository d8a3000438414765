"""How open layouts are chosen. `MODES` maps MindSpore's `search_mode` names to searches of one signature."""

from __future__ import annotations

from shardfn.errors import ContextError, fail
from shardfn.search import auto, dynamic, propagation, recursive
from shardfn.search.problem import Answer, Problem, Search

__all__ = ["MODES", "Answer", "Problem", "Search", "register", "select"]

MODES: dict[str, Search] = {
    "auto": auto.search,
    "sharding_propagation": propagation.search,
    "dynamic_programming": dynamic.search,
    "recursive_programming": recursive.search,
}


def register(name: str, search: Search) -> None:
    """Make a search of your own known by a name, for `search_mode`.

    It takes a `Problem` and gives an `Answer`; `Problem.price` prices what it tries.

    >>> register("mine", MODES["sharding_propagation"])
    >>> select("mine") is MODES.pop("mine")
    True

    Raises:
      ContextError: the name is taken, or not a name.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in MODES:
        fail(ContextError, f"a search cannot be registered as {name!r}", where=f"register({name!r}, ...)",
             why="a search is found by its name, and each name once", fix="give it a name that is free")  # fmt: skip
    MODES[name] = search


def select(mode: str) -> Search:
    """The search of a name.

    Raises:
      ContextError: no such name.
    """
    if mode not in MODES:
        fail(ContextError, f"search_mode {mode!r} is unknown", where=f"search_mode = {mode!r}",
             why="a search is chosen by its name", fix=f"use one of {', '.join(MODES)}")  # fmt: skip
    return MODES[mode]

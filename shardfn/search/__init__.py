"""How open layouts are chosen. `MODES` maps MindSpore's `search_mode` names to searches of one signature (`problem`).

- the modes: `auto`, `dynamic`, `recursive`, and `seeds` ("sharding_propagation"); where nothing is open: `following`; what they
  try for which size of program and which level: `scope`
- the choices on a grid as a labelling problem: `strategies`, of `forms`, `grid`, `facts`, `kernels`, `borders`, `sums` and
  `windowed`; the level's costs: `levels`; what `set_algo_parameters` leaves out: `filters`; solved by `solver`, on a grid as
  a whole by `ongrid`
- what was found on a grid: `found`; how much of it is held: `holding`, and let go: `letgo`; what cannot fit at all: `room`; an
  answer over its limit: `limits`
- to the answer, each by its flow: `choose`; what is said of it: `told`; layouts that people write: `plain`; made better:
  `polish`, `neighbours`; open results: `results`; what else stands beside it: `beside`

What a level makes least is said in `aims`, of a flow, of what was found on a grid and of a compiled program alike, and in
`levels` as the costs of a labelling.
"""

from __future__ import annotations

import functools

from shardfn.errors import ContextError, ContextTypeError, a, fail
from shardfn.search import auto, dynamic_programming, recursive_programming, sharding_propagation
from shardfn.search.problem import Answer, Search, SearchProblem

__all__ = ["MODES", "Answer", "Search", "SearchProblem", "forget", "register", "select"]

MODES: dict[str, Search] = {
    "auto": auto.search,
    "sharding_propagation": sharding_propagation.search,
    "dynamic_programming": dynamic_programming.search,
    "recursive_programming": recursive_programming.search,
}
BUILT_IN = tuple(MODES)
"""MindSpore's searches, which `forget` keeps."""


def register(name: str, search: Search) -> None:
    """Make a search of your own known by a name, for `search_mode`, here and in the context.

    It takes a `SearchProblem` and gives an `Answer`; `SearchProblem.evaluate` prices what it tries.

    >>> register("mine", MODES["sharding_propagation"])
    >>> "mine" in MODES
    True
    >>> forget("mine")

    Raises:
      ContextError: the name is taken, or not a name.
      ContextTypeError: the search cannot be called.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in MODES:
        fail(ContextError, f"a search cannot be registered as {name!r}", where=f"register({name!r}, ...)",
             why="a search is found by its name, and each name once", fix="give it a name that is free")  # fmt: skip
    if not callable(search):
        fail(ContextTypeError, f"a search must be callable, but it is {a(search)}", where=f"register({name!r}, ...)",
             why="it is called with a SearchProblem, and gives an Answer", fix="pass a function")  # fmt: skip
    MODES[name] = search


def forget(name: str) -> None:
    """Take back what `register` did.

    Raises:
      ContextError: nobody registered that name.
    """
    if name in BUILT_IN or name not in MODES:
        fail(ContextError, f"no search was registered as {name!r}", where=f"forget({name!r})",
             why="MindSpore's four searches stay", fix="give the name that it was registered by")  # fmt: skip
    del MODES[name]


def select(mode: str) -> Search:
    """The search of a name.

    Raises:
      ContextError: no such name.
    """
    if not isinstance(mode, str) or mode not in MODES:
        fail(ContextError, f"search_mode {mode!r} is unknown", where=f"search_mode = {mode!r}",
             why="a search is chosen by its name", fix=f"use one of {', '.join(MODES)}")  # fmt: skip
    return MODES[mode] if mode in BUILT_IN else functools.partial(_asked, mode)


def _asked(mode: str, problem: SearchProblem) -> Answer:
    """The answer of a search that somebody registered."""
    answer: object = MODES[mode](problem)
    if not isinstance(answer, Answer):
        fail(ContextTypeError, f"the search {mode!r} gave {a(answer)}", where=f"search_mode = {mode!r}",
             why="a search takes a SearchProblem and gives an Answer",
             fix='return one, such as that of MODES["sharding_propagation"](problem)')  # fmt: skip
    return answer

"""Search the shardings that the user left open.

The way of a call through the modules:

1. `problem`: the question (`SearchProblem`) and the answer (`Answer`) of every search. `effort`: what to try for its size.
   `read_as_given`: constraints that hold the user's strategies inside in every candidate.
2. `MODES` names the searches: `auto`, `dynamic_programming` (the exact one), `recursive_programming`, `sharding_propagation`.
   `default_policy` answers where nothing is open.
3. `dynamic_programming` lists meshes; `exact` solves one: `label_tables` builds its labelling from `op_labels`,
   `resharding_costs`, `partial_sum_costs`, `halo_costs` and `kernel_costs`; `level_costs` states the objective; `filters`
   removes labels; `shardfn.solver` solves it. The result is a `mesh_solution.MeshSolution`.
4. `selection` evaluates candidates of the solutions (`constrained_candidates`, `result_shardings`, `refinement`) and
   `baselines` by their partitioned programs, takes the best, and drops redundant constraints (`constraint_reduction`).
   `styles` chooses among plans of one parallel style instead.
5. `alternatives` compares with other levels, and `one_array_changes` is the local search.
6. `explanation` writes the policy and the reasons; `memory_limit` handles a limit that the answer exceeds.
"""

from __future__ import annotations

import functools

from shardfn.errors import ContextError, ContextTypeError, a, fail
from shardfn.search import auto, dynamic_programming, recursive_programming, sharding_propagation, styles
from shardfn.search.problem import Answer, Search, SearchProblem

__all__ = ["MODES", "Answer", "Search", "SearchProblem", "forget", "register", "select", "styles"]

MODES: dict[str, Search] = {
    "auto": auto.search,
    "sharding_propagation": sharding_propagation.search,
    "dynamic_programming": dynamic_programming.search,
    "recursive_programming": recursive_programming.search,
}
BUILT_IN = tuple(MODES)
"""MindSpore's searches, which `forget` keeps."""


def register(name: str, search: Search) -> None:
    """Register a search of your own under a name, for `search_mode` and the context.

    Args:
      name: a free identifier.
      search: takes a `SearchProblem` and returns an `Answer`; `SearchProblem.evaluate` gives the cost of a choice.

    Raises:
      ContextError: the name is taken, or not an identifier.
      ContextTypeError: the search is not callable.

    >>> register("mine", MODES["sharding_propagation"])
    >>> "mine" in MODES
    True
    >>> forget("mine")
    """
    if not isinstance(name, str) or not name.isidentifier() or name in MODES:
        fail(ContextError, f"a search cannot be registered as {name!r}", where=f"register({name!r}, ...)",
             why="the name must be a free identifier", fix="choose another name")  # fmt: skip
    if not callable(search):
        fail(ContextTypeError, f"a search must be callable, but it is {a(search)}", where=f"register({name!r}, ...)",
             why="it is called with a SearchProblem and returns an Answer", fix="pass a function")  # fmt: skip
    MODES[name] = search


def forget(name: str) -> None:
    """Remove a registered search.

    Args:
      name: the name it was registered under.

    Raises:
      ContextError: nobody registered that name.
    """
    if name in BUILT_IN or name not in MODES:
        fail(ContextError, f"no search was registered as {name!r}", where=f"forget({name!r})",
             why="the four built-in searches stay", fix="give the name that it was registered under")  # fmt: skip
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
    """The answer of a registered search."""
    answer: object = MODES[mode](problem)
    if not isinstance(answer, Answer):
        fail(ContextTypeError, f"the search {mode!r} returned {a(answer)}", where=f"search_mode = {mode!r}",
             why="a search takes a SearchProblem and returns an Answer",
             fix='return one, such as that of MODES["sharding_propagation"](problem)')  # fmt: skip
    return answer

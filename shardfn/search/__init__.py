"""Search the shardings that the user left open.

A search is a list of candidate generators, one evaluator, one budget and one archive. There is one folder for each trade; each
imports only those above it in the table.

| folder | holds |
|---|---|
| `problem` | the question (`SearchProblem`), a choice (`Proposal`) and the answer; objectives, budget, memory limits |
| `labels` | the label model: a program on a mesh as a labelling problem, which `shardfn.solver` solves |
| `engine` | generators take turns until the budget is spent; the archive of what they found |
| `moves` | local search, from the parts of baselines and constraints on ops |
| `generators` | the exact search, the fast one, propagation, styles, and the policy where nothing is open |

`BASELINES` come first: `generators.sharding_propagation` follows the user's entries; `generators.styles` proposes nothing sharded
and the plans that people write by hand. Then the `GENERATORS` of the objective, in the order of their first turns. `explanation`
writes the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardfn.errors import ContextError, ContextTypeError, a, fail, nearest
from shardfn.ir.model import Axes
from shardfn.search.engine import Archive, CandidateGenerator, proposal_checks, run
from shardfn.search.explanation import answer_of
from shardfn.search.generators import (
    default_policy,
    equal_blocks,
    exact,
    recursive_programming,
    sharding_propagation,
    styles,
)
from shardfn.search.labels import LEAST_SENT, LEAST_SENT_BALANCED, LEAST_SENT_IN_SMALLEST_SHARDS, LEAST_TIME
from shardfn.search.moves import local_search
from shardfn.search.problem import (
    COMMUNICATION,
    LEVELS,
    MEMORY,
    OBJECTIVES,
    TIME,
    Answer,
    Proposal,
    Search,
    SearchProblem,
)

__all__ = [
    "MODES",
    "Answer",
    "Archive",
    "Proposal",
    "Search",
    "SearchProblem",
    "forget",
    "register",
    "select",
    "styles",
]

BASELINES: Mapping[str, CandidateGenerator] = {
    "entries followed": sharding_propagation.follow_entries,
    styles.BASELINES: lambda problem, archive: styles.baselines(problem),
}
"""What every search evaluates first."""

LOCAL_SEARCH: Mapping[int, Mapping[str, CandidateGenerator]] = {
    level: {f"local search, {name}": functools.partial(local_search.generate, level)}
    for level, name in enumerate(OBJECTIVES)
}
"""Of each level."""

_TENSOR_BASELINES = {styles.TENSOR_BASELINES: styles.tensor_baselines}
_TIME = {"exact, time": functools.partial(exact.generate, LEAST_TIME)}
_SENT = {"exact, communication": functools.partial(exact.generate, LEAST_SENT)}
_SHARDS = {"exact, smallest shards": functools.partial(exact.generate, LEAST_SENT_IN_SMALLEST_SHARDS)}


def _on_best_mesh(generators: Mapping[str, CandidateGenerator]) -> Mapping[str, CandidateGenerator]:
    """The proposals of each on its first mesh: what another objective contributes."""
    return {
        name: lambda problem, archive, generator=generator: _with_first_axes(generator(problem, archive))
        for name, generator in generators.items()
    }


def _with_first_axes(proposals: Iterator[Proposal | None]) -> Iterator[Proposal | None]:
    axes: Axes | None = None
    for proposal in proposals:
        axes = axes or (proposal and proposal.axes)
        if proposal is not None and proposal.axes != axes:
            return
        yield proposal


GENERATORS: Mapping[int, Mapping[str, CandidateGenerator]] = {
    TIME: {
        **_TENSOR_BASELINES, **_TIME, **LOCAL_SEARCH[TIME], **_on_best_mesh(_SENT | _SHARDS),
        "exact, three axes, time": functools.partial(exact.three_axes, LEAST_TIME),
    },
    COMMUNICATION: {
        **_TENSOR_BASELINES,
        "exact, balanced communication": functools.partial(exact.generate, LEAST_SENT_BALANCED),
        **LOCAL_SEARCH[COMMUNICATION], **_SENT, **_on_best_mesh(_SHARDS),
        "exact, three axes, communication": functools.partial(exact.three_axes, LEAST_SENT_BALANCED),
    },
    MEMORY: {
        **_TENSOR_BASELINES, **_SHARDS, **LOCAL_SEARCH[MEMORY], **_on_best_mesh(_TIME | _SENT),
        "exact, less memory": exact.less_memory,
    },
}  # fmt: skip
"""The generators of the default search for each objective, in the order of their first turns: its own, then the exact optimum of
each other one."""

RECURSIVE: Mapping[int, Mapping[str, CandidateGenerator]] = {
    level: {
        f"recursive, {name}": functools.partial(recursive_programming.generate, level), **_TENSOR_BASELINES,
    }
    for level, name in enumerate(OBJECTIVES)
}  # fmt: skip
"""Those of the fast search."""

WITHIN_LIMIT: Mapping[int, Mapping[str, CandidateGenerator]] = {
    level: {
        f"exact, {name}, within the limit": functools.partial(exact.within_limit, level),
        **LOCAL_SEARCH[level], **_SHARDS, **LOCAL_SEARCH[MEMORY],
    }
    for level, name in enumerate(OBJECTIVES)
}  # fmt: skip
"""What follows where the best candidate exceeds the memory limit. Until then the limit plays no part: what a search finds
without one, it finds with one."""


def search_with(
    what: str, generators: Mapping[int, Mapping[str, CandidateGenerator]], problem: SearchProblem
) -> Answer:
    """The answer of a search by the generators of the problem's level; that of the simple policy where nothing is open or nothing
    is proposed."""
    if not problem.is_open:
        return default_policy.search(problem)
    free = dataclasses.replace(problem, memory_limit=math.inf)
    own, first = generators[problem.level], BASELINES
    if equal_blocks.is_large(problem) and (smaller := problem.with_fewer_blocks()) is not None:
        best_of_fewer = functools.partial(equal_blocks.generate, smaller, own, BASELINES)
        what, own, first = f"{what} of {smaller.text}", {}, {equal_blocks.NAME: best_of_fewer}
    archive = run(free, own, first)
    if not len(archive):
        return default_policy.search(problem)
    if archive.was_interrupted or problem.fits(archive.best(problem.level)):
        return answer_of(what, Archive(problem, archive))
    return answer_of(what, run(problem, WITHIN_LIMIT[problem.level], known=archive))


MODES: dict[str, Any] = {
    "auto": functools.partial(search_with, "search", GENERATORS),
    "sharding_propagation": sharding_propagation.search,
    "dynamic_programming": functools.partial(search_with, "search", GENERATORS),
    "recursive_programming": functools.partial(search_with, "recursive search", RECURSIVE),
}
BUILT_IN = tuple(MODES)
"""MindSpore's searches, which `forget` keeps."""


def register(name: str, search: Callable[[SearchProblem], Answer] | CandidateGenerator) -> None:
    """Register a search or a candidate generator of your own under a name, for `search_mode` and the context.

    A search takes a `SearchProblem` and returns the `Answer`, which is taken as it is if it fits the problem. A generator takes
    a `SearchProblem` and the `Archive` of what was evaluated, and yields each `Proposal`. The baselines and the local search
    come with it.

    Args:
      name: a free identifier.
      search: the search, with one parameter, or the generator, with two.

    Raises:
      ContextError: the name is taken, or not an identifier.
      ContextTypeError: the search cannot be called with one or two arguments.

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
    if not _parameters(search):
        fail(ContextTypeError, f"the search {name!r} cannot be called with one or two arguments",
             where=f"register({name!r}, ...)", why="a search takes a SearchProblem; a generator takes the Archive too",
             fix="give it one or two parameters without defaults")  # fmt: skip
    MODES[name] = search


def _parameters(search: Callable[..., Any]) -> int:
    """With how many positional arguments a search is called: one if it can be, else two; 0 if neither is possible."""
    for count in (1, 2):
        with contextlib.suppress(TypeError, ValueError):  # other parameters; a built-in function without a signature
            inspect.signature(search).bind(*(None,) * count)
            return count
    return 0


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
             why=f"the searches are {', '.join(MODES)}", fix=nearest(mode, MODES))  # fmt: skip
    return MODES[mode] if mode in BUILT_IN else functools.partial(_registered, mode)


def _registered(mode: str, problem: SearchProblem) -> Answer:
    """The answer of a registered search, or of the search with a registered generator."""
    search: Any = MODES[mode]
    if _parameters(search) == 2:
        own = functools.partial(proposal_checks.checked, mode, search)
        problem = dataclasses.replace(problem, with_fewer_blocks=lambda: None)  # it proposes for the arrays of the call
        return search_with(f"search {mode!r}", {level: {mode: own, **LOCAL_SEARCH[level]} for level in LEVELS}, problem)
    return proposal_checks.checked_answer(mode, search(problem), problem)

"""The options of `shard`, and the bounds of the search that follow from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from shardfn.errors import Problem
from shardfn.frontend.byte_sizes import bytes_of, plain
from shardfn.frontend.defaults import Defaults
from shardfn.search.problem import DEFAULT, OBJECTIVES, TOLERANCE, Algorithm


def level_of(objective: Any) -> Any:
    """The level of a word; any other value as it is.

    >>> level_of("memory"), level_of(2), level_of("speed")
    (1, 2, 'speed')
    """
    return OBJECTIVES.index(objective) if isinstance(objective, str) and objective in OBJECTIVES else objective


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """The bounds of a search, made once for each call by `Options.for_search`."""

    level: int
    mode: str
    """The name of the search."""
    memory_limit: float | None
    """Bytes per device; None is the device's memory."""
    time_limit_s: float
    budget: str | float
    """A name of `search.problem.budget.BUDGETS`, or a number of ops visited."""
    tolerance: float
    """The search ends when its plan is proved to cost at most this part more than the optimum; 0 for never."""
    compile_candidates: int | str
    """How many, or "auto"."""
    rehearse_candidates: int
    algorithm: Algorithm
    search_ops: bool
    """Whether ops are searched though no argument is open: the user named a search, an objective or a style."""
    alltoall: bool = True
    """Whether XLA may reshard by all-to-all."""
    style: str = ""
    """The style that the plan must have (`search.generators.styles.STYLES`); empty for any."""

    @property
    def is_limit_strict(self) -> bool:
        """Whether a predicted peak above `memory_limit` is an error. Compiled candidates are judged by XLA's own figure."""
        return isinstance(self.compile_candidates, str) or self.compile_candidates <= 1


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `shard`, in one form: numbers are Python's own, several positions or names are a tuple."""

    in_strategy: Any = None
    out_strategy: Any = None
    device: Any = None
    level: Any = None
    """0, 1, 2, or a word of `OBJECTIVES`, which is kept as its number; None is the layout file's, or else 0."""
    parameter_plan: Any = None
    search_mode: str | None = None
    style: str | None = None
    memory_limit: int | float | str | None = None
    compile_candidates: int | str = 0
    rehearse_candidates: int = 0
    time_limit: float | None = None
    budget: str | int | float = DEFAULT
    tolerance: float | None = None
    """None is `TOLERANCE`, and 0 for the budget "thorough"."""
    static_argnums: Any = ()
    static_argnames: Any = ()
    donate_argnums: Any = ()
    donate_argnames: Any = ()
    layout: Any = None
    compiler_options: Any = None
    closed_over: str = "constant"
    """What becomes of arrays that the function closes over, one of `closed_over.OPTIONS`."""
    assumed_trips: int = 1
    """How often the cost model counts loops whose length is not known before they run."""
    check: bool = False
    """Whether the first call of a kind compares the sharded function with the unsharded one."""

    def __post_init__(self) -> None:
        for name in (
            "level",
            "memory_limit",
            "compile_candidates",
            "rehearse_candidates",
            "time_limit",
            "budget",
            "tolerance",
            "assumed_trips",
        ):
            object.__setattr__(self, name, plain(getattr(self, name)))
        object.__setattr__(self, "level", level_of(self.level))
        for name in ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"):
            value = getattr(self, name)
            several = tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)
            object.__setattr__(self, name, several)
        if isinstance(self.compiler_options, Mapping):
            object.__setattr__(self, "compiler_options", dict(self.compiler_options))

    def of_bound_method(self) -> Options:
        """The same for a method of an instance: numbers of arguments count the instance where the method is decorated.

        >>> Options(static_argnums=(0, 2)).of_bound_method().static_argnums
        (1,)
        """
        if not self.static_argnums and not self.donate_argnums:
            return self
        static, donated = (tuple(i - 1 for i in n if i > 0) for n in (self.static_argnums, self.donate_argnums))
        return dataclasses.replace(self, static_argnums=static, donate_argnums=donated)

    def for_search(self, defaults: Defaults, layout_level: int | None = None, layout_style: str = "") -> SearchOptions:
        """The search options of a call, once `shard` has checked these options.

        Args:
          defaults: the settings in force.
          layout_level: the level that the layout file names, if there is one.
          layout_style: the style that it names, for arrays that it leaves open.
        """
        limit = None if self.memory_limit is None else bytes_of(self.memory_limit, "memory_limit")
        assert not isinstance(limit, Problem)
        mode = self.search_mode or defaults.search_mode or "auto"
        return SearchOptions(
            level=next(level for level in (self.level, layout_level, 0) if level is not None),
            mode=mode,
            memory_limit=limit,
            time_limit_s=math.inf if self.time_limit is None else self.time_limit,
            budget=self.budget,
            tolerance=self.tolerance if self.tolerance is not None else 0.0 if self.budget == "thorough" else TOLERANCE,
            compile_candidates=self.compile_candidates,
            rehearse_candidates=self.rehearse_candidates,
            algorithm=defaults.algorithm,
            search_ops=mode != "auto" or self.style is not None or (self.level is not None and self.layout is None),
            alltoall=defaults.alltoall is not False,
            style=self.style or layout_style,
        )


OPTION_NAMES = tuple(f.name for f in dataclasses.fields(Options))
"""The options of `shard`, in their order."""

"""Answers to calls of this library's functions with arguments that they do not take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from shardfn.errors import Problem, StrategyTypeError, nearest
from shardfn.frontend.strategy import short

P = ParamSpec("P")
R = TypeVar("R")


def answered(
    name: str, words: Mapping[str, tuple[str, str]], by_position: str = "name the others"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function answer to a call that does not fit its signature: with all that is wrong, where Python names one thing.

    Args:
      name: what the function is called.
      words: other libraries' options: why there is none, and what to do in its place.
      by_position: what to do where too many arguments are given by position.

    >>> @answered("load", {"drop_last": ("all batches are full", "leave it out")})
    ... def load(source, *, batch_size): ...
    >>> load([1], drop_last=True, batch_size=2)
    Traceback (most recent call last):
    shardfn.errors.StrategyTypeError: `load` has no option `drop_last`
      where: drop_last = True
      why:   all batches are full
      fix:   leave it out
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(fn).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        required = [p.name for p in parameters if p.default is p.empty and p.name in names]
        takes_any = len(names) < len(parameters)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = {*positional[: len(args)], *kwargs}
            unknown = [] if takes_any else [option for option in kwargs if option not in names]
            twice = [option for option in positional[: len(args)] if option in kwargs]
            missing = [option for option in required if option not in given]
            if not (unknown or missing or twice or len(args) > len(positional)):
                return fn(*args, **kwargs)
            why = f"its arguments are {', '.join(names)}"
            problems = [Problem(f"`{name}` has no option `{option}`", f"{option} = {short(kwargs[option])}",
                                *words.get(option, (why, nearest(option, names))), is_type=True)
                        for option in unknown]  # fmt: skip
            problems += [Problem(f"`{name}` has `{option}` twice", f"{option} = {short(kwargs[option])}",
                                 "it is given by position too", "give it once", is_type=True) for option in twice]  # fmt: skip
            if len(args) > len(positional):
                problems.append(Problem(f"`{name}` takes {len(positional)} arguments by position, not {len(args)}",
                                        f"{name}({', '.join(map(short, args))})", f"they are {', '.join(positional)}",
                                        by_position, is_type=True))  # fmt: skip
            else:
                problems += [Problem(f"`{name}` needs `{option}`", f"{name}(...)", "it has no default",
                                     f"give {option}=...", is_type=True)
                             for option in missing]  # fmt: skip
            raise StrategyTypeError(problems)

        return call

    return decorate

"""Checks of settings: `check(name, value)` yields a `Problem` for everything wrong with the value."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shardfn.errors import Problem, nearest

Check = Callable[[str, Any], Iterator[Problem]]


def clipped(value: Any) -> str:
    """The `repr` of a value, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def wrong(name: str, value: Any, why: str, fix: str, *, is_type: bool = False) -> Problem:
    """The problem that setting `name` has this value."""
    return Problem(f"`{name}` cannot be {clipped(value)}", why=why, fix=fix, is_type=is_type)


def option_problems(check: Check, name: str, value: Any) -> Iterator[Problem]:
    """The problems of an option with this value, each with the option as its place; NumPy's ints are ints here."""
    for problem in check(name, int(value) if isinstance(value, np.integer) else value):
        yield dataclasses.replace(problem, where=f"{name} = {clipped(value)}")


def is_number(value: Any) -> bool:
    """Whether a value is a real number, Python's or NumPy's, and no bool.

    >>> [is_number(value) for value in (1, 0.5, np.float32(2), True, "1", None)]
    [True, True, True, False, False, False]
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def of_type(kind: type, words: str) -> Check:
    """The value is an instance of `kind`; `words` describe it in the fix."""

    def check(name: str, value: Any) -> Iterator[Problem]:
        # MindSpore lets True pass for 1 in some places: an int that is a bool is always a slip.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            why = f"its type is {type(value).__name__}, not {kind.__name__}"
            yield wrong(name, value, why, f"give {words}", is_type=True)

    return check


def in_turn(*checks: Check) -> Check:
    """All checks up to the first that finds a problem: each may rely on the ones before it."""

    def check(name: str, value: Any) -> Iterator[Problem]:
        yield from next(filter(None, (list(step(name, value)) for step in checks)), ())

    return check


def integer(low: int, high: int | None = None) -> Check:
    """An int from `low` to `high`, both included."""
    words = f"an int from {low} up" if high is None else f"an int from {low} to {high}"

    def within(name: str, value: Any) -> Iterator[Problem]:
        if value < low:
            yield wrong(name, value, f"it is less than {low}", f"give {words}")
        if high is not None and value > high:
            yield wrong(name, value, f"it is more than {high}", f"give {words}")

    return in_turn(of_type(int, words), within)


def one_of(*choices: str) -> Check:
    """One of these strings."""

    def among(name: str, value: Any) -> Iterator[Problem]:
        if value not in choices:
            yield wrong(name, value, f"it must be one of {', '.join(choices)}", nearest(value, choices))

    return in_turn(of_type(str, f"one of the strings {', '.join(choices)}"), among)


def record(*, complete: bool = False, **entries: Check) -> Check:
    """A dict with these entries; with `complete`, all of them."""

    def check(name: str, value: dict[Any, Any]) -> Iterator[Problem]:
        for entry in (e for e in value if e not in entries):
            why = f"its entries are {', '.join(entries)}"
            yield Problem(f"`{name}` has no entry {entry!r}", why=why, fix=nearest(entry, entries))
        missing = " and ".join(repr(entry) for entry in entries if entry not in value)
        if complete and missing:
            yield Problem(f"`{name}` lacks {missing}", why="each of its entries must be there", fix=f"add {missing}")
        for entry, inner in entries.items():
            if entry in value:
                yield from inner(f"{name}[{entry!r}]", value[entry])

    return in_turn(of_type(dict, f"a dict of {', '.join(entries)}"), check)


def _each_index(name: str, value: list[int]) -> Iterator[Problem]:
    for i, item in enumerate(value):
        yield from integer(0)(f"{name}[{i}]", item)


def _ascending(name: str, value: list[int]) -> Iterator[Problem]:
    if not value or any(b <= a for a, b in itertools.pairwise(value)):
        why = "it must hold at least one index, each larger than the one before"
        yield wrong(name, value, why, "sort it and drop repeats, or leave it out")


boolean = of_type(bool, "True or False")
text = of_type(str, "a string")
indices = in_turn(of_type(list, "a list of ints"), _each_index, _ascending)

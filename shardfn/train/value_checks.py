"""Checks of single option values that several training options share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardfn.errors import Problem
from shardfn.frontend.strategy import short


def int_problems(name: str, value: Any, least: int, why: str, fix: str) -> Iterator[Problem]:
    """A problem unless `value` is an int of at least `least`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < least:
        what = f"`{name}` must be an int from {least} up"
        yield Problem(what, f"{name} = {short(value)}", why, fix, is_type=not is_int)


def bool_problems(name: str, value: Any) -> Iterator[Problem]:
    """A problem unless `value` is a bool."""
    if not isinstance(value, bool):
        yield Problem(f"`{name}` must be True or False", f"{name} = {short(value)}", "it is a switch",
                      "write True or False", is_type=True)  # fmt: skip

"""What a search is asked and what it answers: one signature for every search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shardfn.cost.price import Price
from shardfn.graph.model import Spec

Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments with layouts given or open (None), on a grid that may still be one unnamed axis.

    `classes[i][d]` is the dim class of dim `d` of argument `i`; `price` prices a full choice by Shardy's flow.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    axes: Axes
    specs: tuple[Spec | None, ...]
    devices: int
    level: int
    price: Callable[[Axes, tuple[Spec, ...]], Price]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A layout for every argument, and for each open one the reason; `policy` says in a line how it was found."""

    axes: Axes
    specs: tuple[Spec, ...]
    reasons: tuple[str, ...]
    policy: str
    runner_up: str = ""


Search = Callable[[Problem], Answer]

"""What a search is asked and what it answers: one signature for every search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from shardfn.cost.hardware import Chip
from shardfn.cost.price import Price
from shardfn.graph.model import Graph, Spec

Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments with layouts given or open (None); `axes` is the grid of what was given, empty where it is open too.

    `classes[i][d]` is the dim class of dim `d` of argument `i`; `price` prices a full choice by Shardy's flow.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[int, ...], ...]
    weights: Mapping[int, int]
    """Bytes of all values of the program that have a dim of a class."""
    axes: Axes
    specs: tuple[Spec | None, ...]
    devices: int
    level: int
    price: Callable[[Axes, tuple[Spec, ...]], Price]
    graph: Graph
    chip: Chip
    inputs: tuple[int, ...]
    """The arguments' values in `graph`."""
    results: Mapping[int, Spec]
    """Layouts that were given for results, by value."""
    same_as: Mapping[int, int]
    """Results, by value, that take the layout of an argument's value."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A layout for every argument, and for each open one the reason; `policy` says in a line how it was found.

    `source` is the `Decision.source` of what was open: "searched", or "propagated" where nothing was weighed.
    """

    axes: Axes
    specs: tuple[Spec, ...]
    reasons: tuple[str, ...]
    policy: str
    runner_up: str = ""
    source: str = "searched"


Search = Callable[[Problem], Answer]

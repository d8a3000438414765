"""The facts: what MindSpore 2.10 accepts, what it refuses, and the layouts that come out; `cases.jsonl` holds them.

A line is one case. `in` and `out` are strategies (a layout is `{"matrix", "alias", "map"}`); `inputs` gives, for each
tensor, MindSpore's device matrix, tensor map (`map[d] = k`: dim d lies along axis `len(matrix) - 1 - k`; -1: whole) and
the shape of one device's slice, or null where MindSpore dropped the strategy. Function-level cases are Python text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CASES = pathlib.Path(__file__).with_name("cases.jsonl")


@dataclasses.dataclass(frozen=True)
class Held:
    """How MindSpore lays one tensor on its devices."""

    matrix: tuple[int, ...]
    map: tuple[int, ...]
    slice_shape: tuple[int, ...]

    def axes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """For each dim the axes of the matrix that cut it; MindSpore writes a dim that two axes cut as two dims.

        >>> Held((2, 4), (1, 0, -1), (4, 16)).axes((32, 16))
        ((0, 1), ())
        """
        left, found = list(self.map), []
        for size, piece in zip(shape, self.slice_shape, strict=True):
            dim = [left.pop(0)]
            while math.prod(self.matrix[-1 - k] for k in dim if k >= 0) < size // piece:
                dim.append(left.pop(0))
            found.append(tuple(len(self.matrix) - 1 - k for k in dim if k >= 0))
        return tuple(found)

    def starts(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Where a rank's slice starts in each dim, in slices; ranks are row-major over the matrix.

        >>> [Held((2, 4), (0, -1), (1, 2)).starts((4, 2), rank) for rank in (0, 1, 4)]
        [(0, 0), (1, 0), (0, 0)]
        """
        at = np.unravel_index(rank, self.matrix)
        return tuple(
            int(np.ravel_multi_index([at[a] for a in dim], [self.matrix[a] for a in dim])) if dim else 0
            for dim in self.axes(shape)
        )


def in_order(held: Sequence[Held], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether the matrix lists the cuts in the order of the arguments' dims, and repeats stand last.

    >>> in_order([Held((2, 4), (1, -1), (1, 1))], [(2, 1)]), in_order([Held((2, 4), (0, -1), (1, 1))], [(4, 1)])
    (True, False)
    """
    met = dict.fromkeys(a for h, shape in zip(held, shapes, strict=False) for dim in h.axes(shape) for a in dim)
    return list(met) == list(range(len(met)))


@dataclasses.dataclass(frozen=True)
class LayoutFact:
    """An entry that is a layout."""

    matrix: tuple[int, ...]
    alias: tuple[str, ...]
    map: tuple[Any, ...] | None
    """None for a layout that is not called yet."""

    def __call__(self, *axes: Any) -> LayoutFact:
        """As MindSpore's `layout(...)`.

        >>> LayoutFact((2, 4), ("dp", "mp"), None)(("dp", "mp"), "None").map
        ((1, 0), -1)
        """
        number = {"None": -1} | {name: i for i, name in enumerate(reversed(self.alias))}
        return dataclasses.replace(
            self, map=tuple(tuple(number[a] for a in dim) if isinstance(dim, tuple) else number[dim] for dim in axes)
        )

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ways each dim is cut.

        >>> LayoutFact((2, 4), ("dp", "mp"), ((1, 0), -1)).cuts
        (8, 1)
        """
        return tuple(math.prod(self.matrix[-1 - k] for k in _several(dim) if k >= 0) for dim in self.map or ())

    @property
    def axes(self) -> tuple[Any, ...]:
        """What MindSpore's `layout(...)` is called with.

        >>> LayoutFact((2, 4), ("dp", "mp"), ((1, 0), -1)).axes
        (('dp', 'mp'), 'None')
        """
        named = [tuple("None" if k < 0 else self.alias[-1 - k] for k in _several(dim)) for dim in self.map or ()]
        return tuple(n if isinstance(dim, tuple) else n[0] for n, dim in zip(named, self.map or (), strict=True))


def _several(dim: Any) -> tuple[int, ...]:
    return dim if isinstance(dim, tuple) else (dim,)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One fact. Fields that its kind doesn't have are None."""

    name: str
    kind: str
    op: str
    accepted: bool
    devices: int = 8
    ctor: str | None = None
    call: str | None = None
    shapes: Any = None
    strategy: Any = None
    out: Any = None
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ctx: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: str | None = None
    plan: str | None = None
    kwargs: str | None = None
    inputs: Any = ()
    gives: str | None = None
    error: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def held(self) -> tuple[Held | None, ...]:
        """How MindSpore lays out each tensor; None where it dropped the strategy."""
        return tuple(self.inputs.values()) if isinstance(self.inputs, dict) else self.inputs


def case(line: Mapping[str, Any]) -> Case:
    """A case from its line of JSON."""
    fields = {k: _frozen(v) for k, v in line.items()}
    fields["strategy"] = fields.pop("in", None)
    fields.pop("output", None)
    held = fields.get("inputs", ())
    if isinstance(held, dict):
        fields["inputs"] = {name: h and Held(*h) for name, h in held.items()}
    else:
        fields["inputs"] = tuple(h and Held(*h) for h in held)
    return Case(**fields)


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples, a layout as `LayoutFact`."""
    match value:
        case list():
            return tuple(map(_frozen, value))
        case {"matrix": _}:
            return LayoutFact(**{k: _frozen(v) for k, v in value.items()})
        case dict():
            return {k: _frozen(v) for k, v in value.items()}
    return value


@functools.cache
def load(kind: str) -> tuple[Case, ...]:
    """Every case of a kind: `single_op`, `shard_function` or `api_args`."""
    lines = map(json.loads, CASES.read_text(encoding="utf-8").splitlines())
    return tuple(case(line) for line in lines if line["kind"] == kind)

"""Callables that are made of an object: its bound methods, partials, sharded and recomputed functions, and nests of these.

`unwrapped` takes such a callable apart, so that a copy of the object gets a callable of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

PARTS = "__shardfn_parts__"
"""Attribute of a class of this library whose instances stand for the attributes that it names. The first is a function `fn`, and
`with_function` gives the same of another one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One step from a callable to what it is made of. Two are equal if they do the same."""

    kind: type
    parts: tuple[Any, ...]
    make: Callable[[Any], Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layer) or self.kind is not other.kind or len(self.parts) != len(other.parts):
            return False
        return all(a is b for a, b in zip(self.parts, other.parts, strict=True))

    def __hash__(self) -> int:
        return hash((self.kind, *map(id, self.parts)))


Layers = tuple[Layer, ...]
"""From the outermost one inwards."""


def unwrapped(value: Any) -> tuple[Any, Layers]:
    """What a callable is made of, and how.

    >>> class Scale:
    ...     def by(self, x, k): return k * x
    >>> scale = Scale()
    >>> owner, layers = unwrapped(functools.partial(scale.by, k=3))
    >>> owner is scale, wrapped(Scale(), layers)(2)
    (True, 6)
    """
    layers: list[Layer] = []
    while True:
        if isinstance(value, types.MethodType):
            function = value.__func__
            layers.append(Layer(types.MethodType, (function,), functools.partial(types.MethodType, function)))
            value = value.__self__
        elif isinstance(value, functools.partial):
            layers.append(_of_partial(value))
            value = value.func
        elif hasattr(type(value), PARTS):
            of = type(value).__shardfn_parts__
            parts = tuple(getattr(value, name) for name in of[1:])
            layers.append(Layer(type(value), parts, value.with_function))
            value = value.fn
        else:
            return value, tuple(layers)


def _of_partial(value: functools.partial[Any]) -> Layer:
    kind, args, keywords = type(value), value.args, value.keywords
    parts = (*args, *(part for item in keywords.items() for part in item))
    return Layer(kind, parts, functools.partial(_partial, kind, args, keywords))


def _partial(kind: type, args: tuple[Any, ...], keywords: dict[str, Any], function: Any) -> Any:
    return kind(function, *args, **keywords)


def wrapped(owner: Any, layers: Layers) -> Any:
    """The same callable of another object: the inverse of `unwrapped`."""
    for layer in reversed(layers):
        owner = layer.make(owner)
    return owner

"""Values made of values: with others below them, for another trace, and with their dimensions in another order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardfn.movement.values import (
    Elementwise,
    Iota,
    Known,
    Lazy,
    Moved,
    Spread,
    Squeezed,
    Value,
    constant,
    elementwise,
    joined,
    sliced,
)


def mapped(values: Sequence[Value], change: Callable[[Value], Value | None]) -> list[Value]:
    """Values made of other values: of `change` of each value below them for which this is not None. What they share stays one."""
    seen: dict[int, Value] = {}
    return [_changed(value, change, False, seen) for value in values]


def anew(values: Sequence[Value], change: Callable[[Value], Value | None] = lambda one: None) -> list[Value]:
    """The same for another trace: no value has an array yet but those that `change` gives."""
    seen: dict[int, Value] = {}
    return [_changed(value, change, True, seen) for value in values]


def _changed(value: Value, change: Callable[[Value], Value | None], is_anew: bool, seen: dict[int, Value]) -> Value:
    if id(value) not in seen:
        found = change(value)
        seen[id(value)] = _mapped(value, change, is_anew, seen) if found is None else found
    return seen[id(value)]


def _mapped(value: Value, change: Callable[[Value], Value | None], is_anew: bool, seen: dict[int, Value]) -> Value:
    below = value.below() if isinstance(value, Moved | Elementwise | Spread | Squeezed) else ()
    new = [_changed(one, change, is_anew, seen) for one in below]
    if not isinstance(value, Lazy) or (not is_anew and all(a is b for a, b in zip(new, below, strict=True))):
        return value
    found: Value
    if isinstance(value, Moved) and value.parts:
        parts = zip(new, value.parts, strict=True)
        found = joined([sliced(source, value.dim, part.first, part.rows) for source, part in parts], value.dim)
        if isinstance(found, Moved) and len(found.parts) == len(value.parts):
            found.is_rotation = value.is_rotation
    elif isinstance(value, Elementwise):
        found = elementwise(value.shape, value.dtype, value.op, new)
    elif isinstance(value, Spread):
        found = Spread(value.shape, value.dtype, new[0], value.dims)
    elif isinstance(value, Squeezed):
        found = Squeezed(value.shape, value.dtype, new[0], value.dim)
    elif isinstance(value, Known):
        found = constant(value.array, value.dtype)
    else:
        found = dataclasses.replace(value, own=None, placed={}, home=None, aligned={}, squeezed={})
    if isinstance(found, Lazy) and found.source is None:
        found.source = value.source
    return found


def transposed(
    value: Value,
    order: Sequence[int],
    of_array: Callable[[Any, Sequence[int]], Any],
    seen: dict[Any, Value] | None = None,
) -> Value:
    """A value with its dimensions in another order; `of_array` is what transposes an array."""
    seen, key = {} if seen is None else seen, (id(value), tuple(order))
    if key not in seen:
        seen[key] = _transposed(value, order, of_array, seen)
    return seen[key]


def _transposed(value: Value, order: Sequence[int], of_array: Callable[..., Any], seen: dict[Any, Value]) -> Value:
    if not isinstance(value, Moved | Elementwise | Iota | Known | Spread):
        return of_array(value, order)
    shape = tuple(value.shape[d] for d in order)
    if isinstance(value, Known):
        return constant(value.array.transpose(order), value.dtype)
    if isinstance(value, Moved):
        parts = tuple(part._replace(source=transposed(part.source, order, of_array, seen)) for part in value.parts)
        return Moved(shape, value.dtype, list(order).index(value.dim), parts)
    if isinstance(value, Iota):
        return Iota(shape, value.dtype, list(order).index(value.dim), value.first)
    if isinstance(value, Spread):
        dims = [list(order).index(d) for d in value.dims]
        own = sorted(range(len(dims)), key=dims.__getitem__)  # JAX transposes a broadcast in order only
        operand = value.operand if own == [*range(len(own))] else transposed(value.operand, own, of_array, seen)
        return Spread(shape, value.dtype, operand, tuple(sorted(dims)))
    if value.home is not None:
        return of_array(value, order)
    operands = [transposed(o, order, of_array, seen) if np.shape(o) else o for o in value.operands]
    return elementwise(shape, value.dtype, value.op, operands)

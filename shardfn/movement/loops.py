"""Values that go into and out of loops without being made.

Reverse differentiation stacks, in one loop, what another one reads turn by turn: often a padded array, whose shards are uneven.
The arrays that it is made of are stacked in its place, and the loop that reads it makes it of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn.ir.rewrite import scan_counts
from shardfn.movement.emit import DEEPEST, Emitter
from shardfn.movement.mapped import anew
from shardfn.movement.values import Elementwise, Lazy, Op, Spread, Stacked, Value, alignments, has_few, scalar_of

MOST_MORE = 2
"""Elements of the arrays that are stacked in the place of a value, to one of the value."""

Evaluate = Callable[[Any, Sequence[Any], Sequence[Value]], list[Value]]
"""Takes a jaxpr, its constants and its arguments, and gives its results."""


def scanned(emitter: Emitter, eqn: Any, operands: Sequence[Value], values: Evaluate) -> list[Value]:
    """The results of a scan."""
    p, closed, (constants, carries) = eqn.params, eqn.params["jaxpr"], scan_counts(eqn)
    consts = _on_arrays(emitter, operands[:constants])
    carry = [emitter.array(o) for o in operands[constants : constants + carries]]
    xs = [o if isinstance(o, Stacked) else emitter.array(o) for o in operands[constants + carries :]]
    arrays = {id(a): a for x in xs for a in (x.arrays.values() if isinstance(x, Stacked) else (x,))}
    outer = {*map(id, closed.consts), *_arrays(consts, ())}
    stack_of = {own: stack for x in xs if isinstance(x, Stacked) for own, stack in x.arrays.items()}
    kept, pieces = list[Value](), dict[int, Any]()

    def step(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, Any]:
        kept.clear()
        pieces.clear()
        turn = dict(zip(arrays, rows, strict=True))
        read = [x.value if isinstance(x, Stacked) else turn[id(x)] for x in xs]
        own = anew([*consts, *read], lambda one: turn[id(stack_of[id(one)])] if id(one) in stack_of else None)
        with emitter.inside_trace():
            results = values(closed.jaxpr, closed.consts, [*own[:constants], *carry, *own[constants:]])
            last = tuple(emitter.array(one) for one in results[:carries])
            kept.extend(_kept(emitter, results[carries:], outer))
        pieces.update(_arrays(kept, outer))
        return last, tuple(pieces.values())

    last, stacks = jax.lax.scan(
        step, tuple(carry), tuple(arrays.values()), length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
    )
    stacked = dict(zip(pieces, stacks, strict=True))
    return [*last, *_stacked(emitter, kept, stacked, p["length"])]


def _on_arrays(emitter: Emitter, values: Sequence[Value]) -> list[Value]:
    """Uneven values on settled ones, constants as they are, the others as arrays."""
    is_uneven = [*map(_is_uneven, values)]  # before any is settled
    settled = iter(emitter.on_settled([*itertools.compress(values, is_uneven)]))
    return [
        next(settled) if one else value if _is_constant(value) else emitter.array(value)
        for value, one in zip(values, is_uneven, strict=True)
    ]


def _kept(emitter: Emitter, results: Sequence[Value], outer: Collection[int]) -> list[Value]:
    """What is stacked: values of arrays that hold not many more elements than they do, and the arrays of the others."""
    kept = _on_arrays(emitter, results)
    lazy = [i for i, one in enumerate(kept) if isinstance(one, Lazy)]
    made = _arrays([one for one in kept if not isinstance(one, Lazy)], outer)
    if _elements(_arrays(kept, {*outer, *made})) <= MOST_MORE * sum(math.prod(kept[i].shape) for i in lazy):
        return kept
    for i in lazy:
        more = _arrays([kept[i]], {*outer, *made})
        if _elements(more) > MOST_MORE * math.prod(kept[i].shape):
            kept[i] = emitter.array(results[i])
            more = _arrays([kept[i]], outer)
        made |= more
    return kept


def _elements(arrays: Mapping[int, Any]) -> int:
    return sum(array.size for array in arrays.values())


def _is_uneven(value: Value) -> bool:
    """Whether a value has along a dimension another number of rows than an array that they come from, and not few of them."""
    dims = range(len(np.shape(value)))
    return any(
        one.size != value.shape[dim] for dim in dims if not has_few(value, dim) for one in alignments(value, dim)
    )


def _is_constant(value: Value) -> bool:
    """Whether a value takes rows from no array."""
    return isinstance(value, Lazy) and value.is_constant


def _arrays(values: Sequence[Value], outer: Collection[int]) -> dict[int, Any]:
    """The arrays that values are made of, but for some, by `id`."""
    found, seen, left = dict[int, Any](), set[int](), [*reversed(values)]
    while left:
        one = left.pop()
        if id(one) not in seen and isinstance(one, Lazy):
            left += reversed(one.below())
        elif isinstance(one, jax.Array) and id(one) not in outer:
            found[id(one)] = one
        seen.add(id(one))
    return found


def on_stacks(
    emitter: Emitter, op: Op, operands: Sequence[Value], shape: tuple[int, ...], dtype: Any
) -> Stacked | None:
    """An op on the elements of what a loop stacked: the stack of what the op makes in each turn. None where it is too deep."""
    own, arrays = list[Value](), dict[int, Any]()
    for operand in operands:
        if isinstance(operand, Stacked):
            own.append(operand.value)
            arrays |= operand.arrays
        elif not np.shape(operand):
            own.append(emitter.array(operand))
        elif (scalar := scalar_of(operand)) is not None:
            own.append(Spread(shape[1:], operand.dtype, scalar, ()))
        else:
            turn = jax.ShapeDtypeStruct(shape[1:], operand.dtype)
            own.append(turn)
            arrays[id(turn)] = emitter.array(operand)
    value = Elementwise(shape[1:], dtype, op, tuple(own))
    if len(shape) == 1 or value.depth > DEEPEST:
        return None
    made = _together(emitter, [value], arrays, shape[0])
    return Stacked(shape, dtype, value, arrays, functools.partial(made, 0))


def _stacked(emitter: Emitter, values: Sequence[Value], stacks: dict[int, Any], length: int) -> Iterator[Value]:
    """What is stacked of each value. The arrays of those that are none are made together, as they share much."""
    lazy = [one for one in values if isinstance(one, Lazy)]

    def own(values: Sequence[Value]) -> dict[int, Any]:
        return {at: stacks[at] for at in _arrays(values, ()) if at in stacks}

    made, numbers = _together(emitter, lazy, own(lazy), length), itertools.count()
    for one in values:
        if isinstance(one, Lazy):
            make = functools.partial(made, next(numbers))
            yield Stacked((length, *one.shape), one.dtype, one, own([one]), make)
        else:
            yield stacks[id(one)] if id(one) in stacks else jnp.broadcast_to(one, (length, *np.shape(one)))


def _together(emitter: Emitter, values: Sequence[Value], stacks: dict[int, Any], length: int) -> Callable[[int], Any]:
    """What makes the stack of a value, by number, of the stacks of the arrays in it, by `id`; of all values at once."""

    def of_turn(arrays: dict[int, Any]) -> list[Any]:
        with emitter.inside_trace():
            return [emitter.array(one) for one in anew(values, lambda one: arrays.get(id(one)))]

    return lambda number: emitter.once(stacks, ("stacks",), jax.vmap(of_turn, axis_size=length), stacks)[number]

"""Values that go into and out of loops without being made.

Reverse differentiation stacks, in one loop, what another one reads turn by turn: often a padded array, whose shards are uneven.
The arrays that it is made of are stacked in its place, and the loop that reads it makes it of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn.ir.rewrite import scan_counts
from shardfn.movement.emit import Emitter
from shardfn.movement.values import Known, Lazy, Stacked, Value, alignments, anew, has_few

MOST_MORE = 2
"""Elements of the arrays that are stacked in the place of a value, to one of the value."""

Evaluate = Callable[[Any, Sequence[Any], Sequence[Value]], list[Value]]
"""Takes a jaxpr, its constants and its arguments, and gives its results."""


def scanned(emitter: Emitter, eqn: Any, operands: Sequence[Value], values: Evaluate) -> list[Value]:
    """The results of a scan."""
    p, closed, (constants, carries) = eqn.params, eqn.params["jaxpr"], scan_counts(eqn)
    consts = [_outside(emitter, o) for o in operands[:constants]]
    carry = [emitter.array(o) for o in operands[constants : constants + carries]]
    xs = [o if isinstance(o, Stacked) else emitter.array(o) for o in operands[constants + carries :]]
    arrays = {id(a): a for x in xs for a in (x.arrays.values() if isinstance(x, Stacked) else (x,))}
    outer = {*map(id, closed.consts), *_arrays(consts, ())}
    kept, pieces = list[Value](), dict[int, Any]()

    def of_turn(x: Value, turn: dict[int, Any]) -> Value:
        if not isinstance(x, Stacked):
            return turn[id(x)]
        return anew(x.value, lambda one: turn[id(x.arrays[id(one)])] if id(one) in x.arrays else None)

    def step(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, Any]:
        kept.clear()
        pieces.clear()
        turn = dict(zip(arrays, rows, strict=True))
        with emitter.inside_trace():
            results = values(closed.jaxpr, closed.consts, [*map(anew, consts), *carry, *(of_turn(x, turn) for x in xs)])
            last = tuple(emitter.array(one) for one in results[:carries])
            kept.extend(_kept(emitter, results[carries:], outer))
        pieces.update(_arrays(kept, outer))
        return last, tuple(pieces.values())

    last, stacks = jax.lax.scan(
        step, tuple(carry), tuple(arrays.values()), length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
    )
    stacked = dict(zip(pieces, stacks, strict=True))
    return [*last, *(_stacked(emitter, one, stacked, p["length"]) for one in kept)]


def _outside(emitter: Emitter, value: Value) -> Value:
    """A value that each turn of a loop reads: what is computed in it is computed once."""
    if isinstance(value, Known):
        return value
    return emitter.on_settled(value) if _is_uneven(value) else emitter.array(value)


def _kept(emitter: Emitter, results: Sequence[Value], outer: Collection[int]) -> list[Value]:
    """What is stacked: values of arrays that hold not many more elements than they do, and the arrays of the others."""
    kept = [emitter.on_settled(one) if _is_uneven(one) else emitter.array(one) for one in results]
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
    """Whether a value has another number of rows than an array that they come from, and not few of them."""
    dims = range(len(np.shape(value)))
    is_other = any(one.size != value.shape[dim] for dim in dims for one in alignments(value, dim))
    return is_other and not any(has_few(value, dim) for dim in dims)


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


def _stacked(emitter: Emitter, value: Value, stacks: dict[int, Any], length: int) -> Value:
    if not isinstance(value, Lazy):
        return stacks[id(value)] if id(value) in stacks else jnp.broadcast_to(value, (length, *np.shape(value)))
    own = {own: stacks[own] for own in _arrays([value], ()) if own in stacks}

    def of_turn(arrays: dict[int, Any]) -> Any:
        with emitter.inside_trace():
            return emitter.array(anew(value, lambda one: arrays.get(id(one))))

    shape = (length, *value.shape)
    return Stacked(shape, value.dtype, value, own, lambda: jax.vmap(of_turn, axis_size=length)(own))

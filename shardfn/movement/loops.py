"""Values that go into and out of loops without being made.

Reverse differentiation stacks, in one loop, what another one reads turn by turn: often a padded array, whose shards are uneven.
The arrays that it is made of are stacked in its place, and the loop that reads it makes it of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shardfn.ir.rewrite import scan_counts
from shardfn.movement.emit import Emitter
from shardfn.movement.values import Known, Lazy, Stacked, Value, alignments, anew, has_few

Evaluate = Callable[[Any, Sequence[Any], Sequence[Value]], list[Value]]
"""Takes a jaxpr, its constants and its arguments, and gives its results."""


def scanned(emitter: Emitter, eqn: Any, operands: Sequence[Value], values: Evaluate) -> list[Value]:
    """The results of a scan."""
    p, closed, (constants, carries) = eqn.params, eqn.params["jaxpr"], scan_counts(eqn)
    consts = [o if isinstance(o, Known) else emitter.array(o) for o in operands[:constants]]
    carry = [emitter.array(o) for o in operands[constants : constants + carries]]
    xs = [o if isinstance(o, Stacked) else emitter.array(o) for o in operands[constants + carries :]]
    arrays = {id(a): a for x in xs for a in (x.arrays.values() if isinstance(x, Stacked) else (x,))}
    outer = {*map(id, [*consts, *closed.consts])}
    kept, pieces = list[Value](), dict[int, Any]()

    def of_turn(x: Value, turn: dict[int, Any]) -> Value:
        if not isinstance(x, Stacked):
            return turn[id(x)]
        return anew(x.value, lambda one: turn[id(x.arrays[id(one)])] if id(one) in x.arrays else None)

    def step(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, Any]:
        kept.clear()
        pieces.clear()
        around, emitter.made = emitter.made, {}
        turn = dict(zip(arrays, rows, strict=True))
        own = [anew(o) if isinstance(o, Known) else o for o in consts]
        results = values(closed.jaxpr, closed.consts, [*own, *carry, *(of_turn(x, turn) for x in xs)])
        last = tuple(emitter.array(one) for one in results[:carries])
        kept.extend(emitter.on_settled(one) if _is_uneven(one) else emitter.array(one) for one in results[carries:])
        for one in kept:
            pieces.update((id(array), array) for array in _arrays(one) if id(array) not in outer)
        emitter.made = around
        return last, tuple(pieces.values())

    last, stacks = jax.lax.scan(
        step, tuple(carry), tuple(arrays.values()), length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
    )
    stacked = dict(zip(pieces, stacks, strict=True))
    return [*last, *(_stacked(emitter, one, stacked, p["length"]) for one in kept)]


def _is_uneven(value: Value) -> bool:
    """Whether a value has another number of rows than an array that they come from, and not few of them."""
    dims = range(len(np.shape(value)))
    is_other = any(one.size != value.shape[dim] for dim in dims for one in alignments(value, dim))
    return is_other and not any(has_few(value, dim) for dim in dims)


def _arrays(value: Value) -> list[Any]:
    """The arrays that a value is made of."""
    if isinstance(value, Lazy) and not isinstance(value, Known):
        return [array for one in value.below() for array in _arrays(one)]
    return [value] if isinstance(value, jax.Array) else []


def _stacked(emitter: Emitter, value: Value, stacks: dict[int, Any], length: int) -> Value:
    if not isinstance(value, Lazy):
        return stacks[id(value)] if id(value) in stacks else jax.numpy.broadcast_to(value, (length, *np.shape(value)))
    own = {id(array): stacks[id(array)] for array in _arrays(value) if id(array) in stacks}

    def of_turn(arrays: dict[int, Any]) -> Any:
        around, emitter.made = emitter.made, {}
        found = emitter.array(anew(value, lambda one: arrays.get(id(one))))
        emitter.made = around
        return found

    shape = (length, *value.shape)
    return Stacked(shape, value.dtype, value, own, lambda: jax.vmap(of_turn, axis_size=length)(own))

"""The function with its static movement as shifts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.extend import core, source_info_util
from jax.sharding import NamedSharding

from shardfn.ir.rewrite import OPEN, RebindRules, bind_one, inner, is_identity, leading_inputs
from shardfn.movement.components import grids_of
from shardfn.movement.constants import LARGEST, folded
from shardfn.movement.emit import Emitter
from shardfn.movement.loops import scanned
from shardfn.movement.mapped import anew
from shardfn.movement.rules import RULES, RULES_OF_MANY, Call
from shardfn.movement.rules.elements import ELEMENTWISE
from shardfn.movement.rules.windows import is_stencil
from shardfn.movement.values import Known, Lazy, Spread, Stacked, Value
from shardfn.movement.winners import Winners

_PLACES = {"gather": (1, 2), "scatter": (1, 2), "scatter-add": (1, 2), "scatter-sub": (1, 2), "scatter-mul": (1, 2),
           "scatter-min": (1, 2), "scatter-max": (1, 2), "dynamic_slice": (1, None),
           "dynamic_update_slice": (2, None)}  # fmt: skip
"""Primitives that move rows at places: which of their operands these are."""
_MOVING = frozenset({"slice", "pad", "concatenate", "rev", "split"})


def may_move(jaxpr: Any, known: Collection[Any] = ()) -> bool:
    """Whether a function has static movement that `with_shifts` looks at.

    Args:
      jaxpr: the function.
      known: the arguments that depend on no argument of the whole program.
    """
    known = {*jaxpr.constvars, *known}
    for eqn in jaxpr.eqns:
        name, fixed = eqn.primitive.name, [isinstance(v, core.Literal) or v in known for v in eqn.invars]
        if name in _MOVING or (name in _PLACES and all(fixed[slice(*_PLACES[name])])):
            return True
        if name == "conv_general_dilated" and is_stencil(eqn):
            return True
        for inside, leading in leading_inputs(eqn):
            if may_move(inside, [v for v, i in zip(inside.invars, leading, strict=False) if fixed[i]]):
                return True
        if all(fixed):
            known.update(eqn.outvars)
    return False


def is_still(jaxpr: Any) -> bool:
    """Whether a function makes no numbers with gradients but by ops on elements, sums, products of matrices and the like: no row
    moves, in its derivatives neither.

    >>> import jax.numpy as jnp
    >>> [is_still(jax.make_jaxpr(f)(jnp.ones(4)).jaxpr) for f in (lambda x: jnp.tanh(x).sum(), lambda x: x[1:])]
    [True, False]
    """
    for eqn in jaxpr.eqns:
        has_gradient = any(jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact) for v in eqn.outvars)
        if not has_gradient or eqn.primitive.name in _STILL:
            continue
        if eqn.primitive.name not in _OPENED or not all(map(is_still, inner(eqn))):
            return False
    return True


def shifted(closed: Any) -> Any:
    """A closed jaxpr with its static movement as shifts and selects; None if it has none."""
    if not may_move(closed.jaxpr):
        return None
    args = [jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak_type) for v in closed.in_avals]
    emitter = _emitter(closed)
    made = _emitted(emitter, closed, args)
    if not emitter.shifted and may_move(made.jaxpr):
        return None
    return _emitted(_emitter(closed, emitter.wanted), closed, args) if emitter.is_moved_again else made


def _emitter(closed: Any, known: Mapping[tuple[int, int], set[int]] | None = None) -> Emitter:
    return Emitter(grids_of(closed.jaxpr), known=known or {})


def _emitted(emitter: Emitter, closed: Any, args: Sequence[Any]) -> Any:
    return jax.make_jaxpr(functools.partial(_results_of, emitter, closed))(*args)


def _results_of(emitter: Emitter, closed: Any, *args: Any) -> list[Any]:
    return _evaluate(emitter, closed.jaxpr, closed.consts, args, _rules(emitter), 0)


def _rules(emitter: Emitter) -> RebindRules:
    return RebindRules(lambda eqn, number: False, lambda eqn, xs, number: [], lambda eqn: None, None,
                       functools.partial(_evaluate, emitter), (Known,))  # fmt: skip


def with_shifts(function: Callable[..., Any], static_argnums: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`function` with its static movement as shifts and selects.

    Args:
      function: the function, of positional arguments.
      static_argnums: as in `jax.jit`.

    >>> import jax.numpy as jnp
    >>> with_shifts(lambda x: x.at[1:].add(x[:-1]))(jnp.arange(4))
    Array([0, 1, 3, 5], dtype=int32)
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, static_argnums=static_argnums, return_shape=True)(*args)
        flat = tree_util.tree_leaves([a for i, a in enumerate(args) if i not in static_argnums])
        first = _emitter(closed)
        if may_move(closed.jaxpr):
            _emitted(first, closed, flat)
        results = _results_of(_emitter(closed, first.wanted), closed, *flat)
        return tree_util.tree_unflatten(tree_util.tree_structure(shape), results)

    return run


def _evaluate(
    emitter: Emitter, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rules: RebindRules, number: int
) -> list[Any]:
    """The arrays of a jaxpr's results."""
    known = iter(anew([a for a in args if isinstance(a, Known)]))
    args = [next(known) if isinstance(a, Known) else a for a in args]
    with emitter.inside_trace():
        return [emitter.array(value) for value in _values(emitter, jaxpr, consts, args, rules)]


def _values(
    emitter: Emitter,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Value],
    rules: RebindRules,
    call: Any = None,
) -> list[Value]:
    """The values of a jaxpr's results; `call` is where it is called from inside another one."""
    env: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_constant, consts), *args], strict=True))

    def read(v: Any) -> Value:
        return v.val if isinstance(v, core.Literal) else env[v]

    winners = Winners(lambda v: _known(read(v)))
    for written in jaxpr.eqns:
        eqn = winners.asked_of_operands(written)
        source = eqn.source_info if call is None else _source(eqn, call)
        names = source_info_util.current_name_stack() + source.name_stack
        with source_info_util.user_context(source.traceback, name_stack=names):
            found = _results(emitter, eqn, [read(v) for v in eqn.invars], rules)
            _at_line(found, source.replace(name_stack=names))
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _source(eqn: Any, call: Any) -> Any:
    """Where an equation inside a call stands: in a function of JAX, which has no line of the user's, at the line of the call."""
    source = eqn.source_info
    return source if source_info_util.summarize(source) else source.replace(traceback=call.traceback)


def _at_line(values: Sequence[Value], source: Any) -> None:
    """Values that are new come from a line of the user's program."""
    left = [*values]
    while left:
        one = left.pop()
        if isinstance(one, Lazy) and one.source is None:
            one.source = source
            left += one.below()


def _constant(array: Any) -> Value:
    """A constant of a jaxpr: known if it is small, of integers or bools, and no tracer."""
    if isinstance(array, Tracer) or not hasattr(array, "dtype") or np.size(array) > LARGEST:
        return array
    if not jnp.issubdtype(array.dtype, jnp.integer) and array.dtype != bool:
        return array
    return Known(tuple(array.shape), array.dtype, np.asarray(array), lambda: array)


def _results(emitter: Emitter, eqn: Any, operands: list[Value], rules: RebindRules) -> list[Value]:
    if is_identity(eqn):  # the function is written alike whether or not its arguments come with a mesh
        return operands
    name = eqn.primitive.name
    if name == "reduce_sum" and 0 in eqn.invars[0].aval.shape and 0 not in eqn.outvars[0].aval.shape:
        out = eqn.outvars[0].aval
        return [Spread(out.shape, out.dtype, np.zeros((), out.dtype), ())]
    if not eqn.effects and not any(0 in v.aval.shape for v in _with_elements(eqn) if hasattr(v.aval, "shape")):
        known = [array for o in operands if (array := _known(o)) is not None]
        if len(known) == len(operands) and (array := folded(eqn, known)) is not None:
            out = eqn.outvars[0].aval
            return [Known(out.shape, out.dtype, array, lambda: bind_one(eqn, [emitter.array(o) for o in operands])[0])]
        if name in RULES_OF_MANY:
            results = RULES_OF_MANY[name](Call(eqn, tuple(operands), emitter))
            if results is not None:
                return [emitter.bounded(found) for found in results]
        rule = RULES.get(name)
        if rule is not None and len(eqn.outvars) == 1:
            shaped = (
                o if hasattr(o, "shape") else np.asarray(o, v.aval.dtype)
                for o, v in zip(operands, eqn.invars, strict=True)
            )
            found = rule(Call(eqn, tuple(operands if name in ELEMENTWISE else shaped), emitter))
            if found is not None:
                return [emitter.bounded(found)]
    if name == "closed_call" or (name in ("jit", "pjit") and _is_plain(eqn)):
        closed = eqn.params["call_jaxpr" if name == "closed_call" else "jaxpr"]
        return _values(emitter, closed.jaxpr, closed.consts, operands, rules, source_info_util.current())
    inside = leading_inputs(eqn)
    captured = {i for _, own in inside for i in own if isinstance(operands[i], Known) and name not in ("jit", "pjit")}
    moves = name in OPEN and any(
        may_move(jaxpr, [v for v, i in zip(jaxpr.invars, own, strict=False) if i in captured]) for jaxpr, own in inside
    )
    if name == "scan" and (moves or any(isinstance(o, Stacked) for o in operands)):
        return scanned(emitter, eqn, operands, functools.partial(_values, emitter, rules=rules))
    inputs = [o if i in captured else emitter.array(o) for i, o in enumerate(operands)]
    if moves:
        return OPEN[name](eqn, inputs, rules, 0)
    return bind_one(eqn, [emitter.array(o) for o in inputs])


def _with_elements(eqn: Any) -> Sequence[Any]:
    """The operands and results that have elements if an equation moves any. The place of an update of a whole array has none."""
    name = eqn.primitive.name
    if name in ("concatenate", "split"):
        return eqn.outvars if name == "concatenate" else eqn.invars
    start, stop = _PLACES.get(name, (0, 0))
    behind = [] if stop is None else eqn.invars[stop:]
    return [*eqn.invars[:start], *behind, *eqn.outvars]


def _known(operand: Value) -> np.ndarray | None:
    if isinstance(operand, Known):
        return operand.array
    if isinstance(operand, Lazy | jax.Array):
        return None
    return np.asarray(operand)


def _is_plain(eqn: Any) -> bool:
    """Whether a `jit` inside says nothing about shardings or donation, so that its equations can stand in its place."""
    p = eqn.params
    named = [s for s in (*p["in_shardings"], *p["out_shardings"]) if isinstance(s, NamedSharding)]
    return not named and not any(p.get("donated_invars", ())) and not p.get("compiler_options_kvs")


_STILL = ELEMENTWISE | {
    "broadcast_in_dim", "dot_general", "expand_dims", "iota", "name", "optimization_barrier", "random_bits", "reduce_max",
    "reduce_min", "reduce_sum", "reshape", "sharding_constraint", "squeeze", "transpose",
}  # fmt: skip
_OPENED = frozenset({"jit", "pjit", "scan", "while", "cond", "checkpoint", "remat", "remat2", "custom_jvp_call"})

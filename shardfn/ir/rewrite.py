"""Rewriting a jaxpr: chosen equations are bound again by another function.

Loops, branches, `jit`, `checkpoint`, linear solves and functions with derivative rules of their own are opened where an equation
inside is chosen; all else is bound as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from jax.extend import core, source_info_util

from shardfn.ir.derivative_rules import open_jvp, open_vjp

Bind = Callable[[Any, list[Any], int], list[Any]]
"""Takes an equation, its inputs and its number, and gives its outputs."""


@dataclasses.dataclass(frozen=True)
class RebindRules:
    """Which equations are bound again and by what, and the callback for those that are not reached."""

    wanted: Callable[[Any, int], bool]
    bind: Bind
    unreached: Callable[[Any], None]
    constant: Callable[[Any], Any] | None = None
    """What takes the place of a constant; None leaves them as they are."""
    interpret: Callable[..., list[Any]] | None = None
    """What evaluates the jaxprs inside an opened equation in the place of this module: it takes a jaxpr, its constants, its
    arguments, these rules and a number."""
    captured: tuple[type, ...] = ()
    """What `interpret` also takes in the place of an array: no argument of what is opened, but known to the jaxprs inside."""

    def constants(self, closed: Any) -> list[Any]:
        """The constants of a closed jaxpr."""
        return [self.constant(c) for c in closed.consts] if self.constant else list(closed.consts)


def equation_line(eqn: Any) -> str:
    """`file:line` of the user's code that an equation comes from; empty where it is not known."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    mine = (f for f in frames if "/jax/" not in f.file_name and "/shardfn/" not in f.file_name)
    frame = next(mine, None)
    return f"{frame.file_name.rpartition('/')[2]}:{frame.line_num}" if frame else ""


def rebind(
    function: Callable[..., Any],
    wanted: Callable[[Any, int], bool],
    bind: Bind,
    static_argnums: tuple[int, ...] = (),
    unreached: Callable[[Any], None] = lambda eqn: None,
) -> Callable[..., Any]:
    """`function` with every equation that is `wanted` bound by `bind`; positional arguments only.

    An equation's number counts all equations before it in the text of the program, those inside others included
    (`equations`). `unreached` is told of each equation that holds a wanted one and is not opened. In a `shard_map`
    nothing is wanted: what runs there is each device's own.

    >>> import jax.numpy as jnp
    >>> twice = lambda eqn, xs, number: [2 * y for y in bind_one(eqn, xs)]
    >>> double = rebind(lambda x: jnp.cos(x) + 1, lambda eqn, number: eqn.primitive.name == "cos", twice)
    >>> float(double(jnp.float32(0)))
    3.0
    """

    return _rewritten(function, RebindRules(wanted, bind, unreached), 0, static_argnums)


def _rewritten(
    function: Callable[..., Any], how: RebindRules, number: int, static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """A function as its jaxpr is evaluated by some rules; `number` is that of its first equation."""

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, static_argnums=static_argnums, return_shape=True)(*args)
        dynamic = [a for i, a in enumerate(args) if i not in static_argnums]
        flat = _function(closed, how, number)(*tree_util.tree_leaves(dynamic))
        return tree_util.tree_unflatten(tree_util.tree_structure(shape), flat)

    return run


def constants(closed: Any) -> list[Any]:
    """The constants of a closed jaxpr and of those inside it."""
    return [*closed.consts, *(c for eqn in closed.jaxpr.eqns for c in _constants_inside(eqn))]


def evaluate_with_constants(closed: Any, constant: Callable[[Any], Any], args: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr for flat arguments, with `constant(c)` in the place of each constant `c`.

    Those inside functions with their own derivative rules, which may not close over what is differentiated, stay as they are.
    """
    rules = RebindRules(lambda eqn, number: False, lambda eqn, inputs, number: [], lambda eqn: None, constant)
    return _evaluate(closed.jaxpr, rules.constants(closed), args, rules, 0)


def _constants_inside(eqn: Any) -> list[Any]:
    found: list[Any] = []
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                found += constants(one)
            elif isinstance(one, core.Jaxpr):
                found += [c for inside in one.eqns for c in _constants_inside(inside)]
    return found


def bind_one(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of an equation as it stands."""
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def equations(jaxpr: Any, start: int = 0, is_reached: bool = True) -> Iterator[tuple[int, Any, bool]]:
    """All equations of a jaxpr, each before those inside it: number, equation, whether all around it can be opened."""
    for eqn in jaxpr.eqns:
        if _is_uncounted(eqn):
            continue
        yield start, eqn, is_reached
        start += 1
        for inside in inner(eqn):
            yield from equations(inside, start, is_reached and eqn.primitive.name in OPEN)
            start += _size(inside)


def inserted() -> Any:
    """A context in which a rewrite binds what it adds to a program: these equations are not counted, so that all others keep
    their numbers."""
    return jax.named_scope(_INSERTED)


def barred(values: Any) -> Any:
    """Values behind an inserted optimization barrier."""
    with inserted():
        return jax.lax.optimization_barrier(values)


def _is_uncounted(eqn: Any) -> bool:
    """Whether JAX puts an equation in where an argument comes with a mesh, or in a `shard_map`, where arrays have types of their
    own: the same function traces with it or without. Or a rewrite did (`inserted`)."""
    scopes = eqn.source_info.name_stack.stack
    return _is_of_types(eqn) or any(scope.name == _INSERTED for scope in scopes)


def _is_of_types(eqn: Any) -> bool:
    name = eqn.primitive.name
    is_same = name in ("reshape", "reduce_sum") and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    is_transpose = eqn.params.get("dimensions") is not None
    return (is_same and not is_transpose) or name in ("reshard", "mesh_cast", "pvary")


def is_identity(eqn: Any) -> bool:
    """Whether an equation is JAX's own and gives its operand as it is: it names no axis of a mesh, as with Auto axes."""
    if eqn.primitive.name == "reshard":
        return not any(eqn.params["dst_sharding"].spec)
    return _is_of_types(eqn) and eqn.primitive.name not in ("mesh_cast", "pvary")


def _size(jaxpr: Any) -> int:
    return sum(map(_count, jaxpr.eqns))


def first_numbers(jaxpr: Any) -> list[int]:
    """The number of each equation of a jaxpr, those inside others aside (`equations`); of an uncounted one that of the next."""
    return list(itertools.accumulate(map(_count, jaxpr.eqns[:-1]), initial=0))


def _count(eqn: Any) -> int:
    return 0 if _is_uncounted(eqn) else 1 + sum(map(_size, inner(eqn)))


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], how: RebindRules, number: int) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        source = eqn.source_info  # the user's line, and the names of scopes
        names = source_info_util.current_name_stack() + source.name_stack
        with source_info_util.user_context(source.traceback, name_stack=names):
            outputs = _outputs(eqn, [read(v) for v in eqn.invars], how, number)
        env.update(zip(eqn.outvars, outputs, strict=True))
        number += _count(eqn)
    return [read(v) for v in jaxpr.outvars]


def _outputs(eqn: Any, inputs: list[Any], how: RebindRules, number: int) -> list[Any]:
    opened = None if how.constant and eqn.primitive.name in _WITH_RULES else OPEN.get(eqn.primitive.name)
    if _is_uncounted(eqn):
        return bind_one(eqn, inputs)
    if how.wanted(eqn, number):
        return how.bind(eqn, inputs, number)
    if opened is not None and _holds(eqn, number, how):
        return opened(eqn, inputs, how, number + 1)
    if eqn.primitive.name != "shard_map" and _holds(eqn, number, how):
        how.unreached(eqn)
    return bind_one(eqn, inputs)


def inner(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters, in order."""
    found = []
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                found.append(one.jaxpr)
            elif isinstance(one, core.Jaxpr):
                found.append(one)
    return found


def _holds(eqn: Any, number: int, how: RebindRules) -> bool:
    if how.constant and _constants_inside(eqn):
        return True
    number += 1
    for jaxpr in inner(eqn):
        if any(how.wanted(e, n) for n, e, _ in equations(jaxpr, number)):
            return True
        number += _size(jaxpr)
    return False


def leading_inputs(eqn: Any) -> list[tuple[Any, range]]:
    """The jaxprs inside an equation, and of each the inputs that its first variables are, in all turns of a loop.

    >>> import jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x, c: jax.lax.scan(lambda y, _: (y * c, None), x, length=3))(1.0, 2.0)
    >>> leading_inputs(jaxpr.eqns[0])[0][1]
    range(0, 1)
    """
    name, found = eqn.primitive.name, inner(eqn)
    if name == "scan":
        ranges = [range(scan_counts(eqn)[0])]
    elif name == "while":
        first = eqn.params["cond_nconsts"]
        ranges = [range(first), range(first, first + eqn.params["body_nconsts"])]
    elif name == "cond":
        ranges = [range(1, len(eqn.invars))] * len(found)
    else:
        ranges = [range(len(eqn.invars) if name in _CALLS else 0)] * len(found)
    return list(zip(found, ranges, strict=True))


def _function(closed: Any, how: RebindRules, number: int) -> Callable[..., list[Any]]:
    interpret = how.interpret or _evaluate
    return lambda *args: interpret(closed.jaxpr, how.constants(closed), args, how, number)


def _capturing(function: Callable[..., Any], inputs: Sequence[Any], how: RebindRules) -> Callable[..., Any]:
    """A function of those inputs that are not captured."""

    def of_arrays(*arrays: Any) -> Any:
        rest = iter(arrays)
        return function(*(x if isinstance(x, how.captured) else next(rest) for x in inputs))

    return of_arrays


def _arrays(inputs: Sequence[Any], how: RebindRules) -> list[Any]:
    return [x for x in inputs if not isinstance(x, how.captured)]


def _open_jit(eqn: Any, inputs: list[Any], how: RebindRules, number: int) -> list[Any]:
    params = eqn.params
    opened = jax.jit(
        lambda *args: tuple(_function(params["jaxpr"], how, number)(*args)),
        in_shardings=tuple(params["in_shardings"]),
        out_shardings=tuple(params["out_shardings"]),
    )
    return list(opened(*inputs))


def _open_call(eqn: Any, inputs: list[Any], how: RebindRules, number: int) -> list[Any]:
    return _function(eqn.params["call_jaxpr"], how, number)(*inputs)


def _open_scan(eqn: Any, inputs: list[Any], how: RebindRules, number: int) -> list[Any]:
    p = eqn.params
    closed = p["jaxpr"]
    constants, carries = scan_counts(eqn)
    consts, carry, xs = inputs[:constants], inputs[constants : constants + carries], inputs[constants + carries :]
    body = _function(closed, how, number)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        out = body(*consts, *carry, *x)
        return tuple(out[:carries]), tuple(out[carries:])

    last, ys = jax.lax.scan(step, tuple(carry), tuple(xs), length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
    return [*last, *ys]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of the constants and of the carries of a scan."""
    closed = eqn.params["jaxpr"]
    # What is scanned over, or stacked, has one dim more outside than in the body.
    stacked = sum(v.aval.shape != a.shape for v, a in zip(eqn.outvars, closed.out_avals, strict=True))
    scanned = sum(v.aval.shape != a.shape for v, a in zip(eqn.invars, closed.in_avals, strict=True))
    carries = len(eqn.outvars) - stacked
    return len(eqn.invars) - scanned - carries, carries


def _open_while(eqn: Any, inputs: list[Any], how: RebindRules, number: int) -> list[Any]:
    p = eqn.params
    a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    condition = _function(p["cond_jaxpr"], how, number)
    body = _function(p["body_jaxpr"], how, number + _size(p["cond_jaxpr"].jaxpr))
    is_batched = bool(p["cond_jaxpr"].out_avals[0].shape)

    def goes_on(carry: Any) -> Any:
        return condition(*inputs[:a], *carry)[0]

    def step(carry: Any) -> Any:
        new = tuple(body(*inputs[a:b], *carry))
        return _where_each(goes_on(carry), new, carry) if is_batched else new

    any_goes_on = (lambda carry: goes_on(carry).any()) if is_batched else goes_on
    return list(jax.lax.while_loop(any_goes_on, step, tuple(inputs[b:])))


def _where_each(goes_on: Any, new: Sequence[Any], old: Sequence[Any]) -> tuple[Any, ...]:
    """The new values of the loops of a batch that go on, and the old values of the others, as JAX lowers `vmap` of a loop."""
    return tuple(
        jnp.where(jnp.reshape(goes_on, goes_on.shape + (1,) * (x.ndim - goes_on.ndim)), x, y)
        for x, y in zip(new, old, strict=True)
    )


def _open_cond(eqn: Any, inputs: list[Any], how: RebindRules, number: int) -> list[Any]:
    branches = []
    for branch in eqn.params["branches"]:
        branches.append(_capturing(_function(branch, how, number), inputs[1:], how))
        number += _size(branch.jaxpr)
    return list(jax.lax.switch(inputs[0], branches, *_arrays(inputs[1:], how)))


def _open_checkpoint(eqn: Any, inputs: list[Any], how: RebindRules, number: int) -> list[Any]:
    p = eqn.params
    body = _capturing(_function(core.ClosedJaxpr(p["jaxpr"], []), how, number), inputs, how)
    inputs = _arrays(inputs, how)
    opened = jax.checkpoint(body, prevent_cse=p["prevent_cse"], policy=p["policy"])
    if not p["differentiated"]:
        return list(opened(*inputs))
    made = jax.make_jaxpr(opened)(*inputs)  # what a gradient recomputes, behind barriers

    def bind(own: Any, xs: list[Any], number: int) -> list[Any]:
        return own.primitive.bind(*xs, **{**own.params, "differentiated": True})

    rules = RebindRules(lambda own, n: own.primitive.name == eqn.primitive.name and n == 0, bind, lambda own: None)
    return _evaluate(made.jaxpr, made.consts, inputs, rules, 0)


def _open_custom(
    opened: Callable[..., list[Any]], eqn: Any, inputs: list[Any], how: RebindRules, number: int
) -> list[Any]:
    value = _function(eqn.params["call_jaxpr"], how, number)
    return opened(lambda *xs: bind_one(eqn, xs), value, lambda rule: _rewritten(rule, how, _UNNUMBERED), inputs)


def _open_linear_solve(eqn: Any, inputs: list[Any], how: RebindRules, number: int) -> list[Any]:
    found = []
    for closed in eqn.params["jaxprs"]:
        if closed is not None:
            closed, before = jax.make_jaxpr(_function(closed, how, number))(*closed.in_avals), closed
            number += _size(before.jaxpr)
        found.append(closed)
    jaxprs = type(eqn.params["jaxprs"])(*found)
    return eqn.primitive.bind(*inputs, **{**eqn.params, "jaxprs": jaxprs})


_INSERTED = "shardfn_inserted"
_UNNUMBERED = -(1 << 40)
"""The number of the first equation of what is not in the program: the derivatives that a rule makes."""
_CALLS = frozenset({"closed_call", "jit", "pjit", "checkpoint", "remat", "remat2"})
_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_linear_solve"})

OPEN: dict[str, Callable[..., list[Any]]] = {
    "custom_jvp_call": functools.partial(_open_custom, open_jvp),
    "custom_vjp_call": functools.partial(_open_custom, open_vjp),
    "custom_linear_solve": _open_linear_solve,
    "closed_call": _open_call,
    "jit": _open_jit,
    "pjit": _open_jit,
    "scan": _open_scan,
    "while": _open_while,
    "cond": _open_cond,
    "checkpoint": _open_checkpoint,
    "remat": _open_checkpoint,
    "remat2": _open_checkpoint,
}
"""What opens an equation, by primitive: the equation, its inputs, the rules and its number."""

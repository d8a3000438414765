"""Constraints inside a function: its jaxpr is walked, and chosen equations are bound anew.

Loops, branches, `jit` and `checkpoint` are opened where an equation inside is wanted; all else is bound as it stands.
What has derivative rules of its own (custom_vjp, custom_jvp) is never opened, so that it keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.extend import core

How = tuple[frozenset[str], "Bind", Callable[[Any], None]]
Bind = Callable[[Any, list[Any]], list[Any]]
"""Takes an equation and its inputs, and gives its outputs."""


def rebound(
    function: Callable[..., Any],
    wanted: frozenset[str],
    bind: Bind,
    static_argnums: tuple[int, ...] = (),
    unreached: Callable[[Any], None] = lambda eqn: None,
) -> Callable[..., Any]:
    """`function` with every equation of a primitive in `wanted` bound by `bind`; positional arguments only.

    `unreached` is told of each equation that holds a wanted one and is not opened. In a `shard_map` nothing is wanted:
    what runs there is each device's own.

    >>> import jax.numpy as jnp
    >>> twice = lambda eqn, xs: [2 * y for y in bind_one(eqn, xs)]
    >>> double = rebound(lambda x: jnp.cos(x) + 1, frozenset({"cos"}), twice)
    >>> float(double(jnp.float32(0)))
    3.0
    """

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, static_argnums=static_argnums, return_shape=True)(*args)
        dynamic = [a for i, a in enumerate(args) if i not in static_argnums]
        flat = _evaluate(closed.jaxpr, closed.consts, tree_util.tree_leaves(dynamic), (wanted, bind, unreached))
        return tree_util.tree_unflatten(tree_util.tree_structure(shape), flat)

    return run


def bind_one(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of an equation as it stands."""
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], how: How) -> list[Any]:
    wanted, bind, unreached = how
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        opened = _OPEN.get(eqn.primitive.name)
        if eqn.primitive.name in wanted:
            outputs = bind(eqn, inputs)
        elif opened is not None and _holds(eqn, wanted):
            outputs = opened(eqn, inputs, how)
        else:
            if eqn.primitive.name != "shard_map" and _holds(eqn, wanted):
                unreached(eqn)
            outputs = bind_one(eqn, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters."""
    found = []
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                found.append(one.jaxpr)
            elif isinstance(one, core.Jaxpr):
                found.append(one)
    return found


def _holds(eqn: Any, wanted: frozenset[str]) -> bool:
    return any(e.primitive.name in wanted or _holds(e, wanted) for jaxpr in _inner(eqn) for e in jaxpr.eqns)


def _function(closed: Any, how: How) -> Callable[..., list[Any]]:
    return lambda *args: _evaluate(closed.jaxpr, closed.consts, args, how)


def _open_jit(eqn: Any, inputs: list[Any], how: How) -> list[Any]:
    params = eqn.params
    inner = jax.jit(
        lambda *args: tuple(_function(params["jaxpr"], how)(*args)),
        in_shardings=tuple(params["in_shardings"]),
        out_shardings=tuple(params["out_shardings"]),
    )
    return list(inner(*inputs))


def _open_scan(eqn: Any, inputs: list[Any], how: How) -> list[Any]:
    p = eqn.params
    closed = p["jaxpr"]
    # What is scanned over, or stacked, has one dim more outside than in the body.
    stacked = sum(v.aval.shape != a.shape for v, a in zip(eqn.outvars, closed.out_avals, strict=True))
    scanned = sum(v.aval.shape != a.shape for v, a in zip(eqn.invars, closed.in_avals, strict=True))
    carries = len(eqn.outvars) - stacked
    constants = len(inputs) - scanned - carries
    consts, carry, xs = inputs[:constants], inputs[constants : constants + carries], inputs[constants + carries :]
    body = _function(closed, how)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        out = body(*consts, *carry, *x)
        return tuple(out[:carries]), tuple(out[carries:])

    last, ys = jax.lax.scan(step, tuple(carry), tuple(xs), length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
    return [*last, *ys]


def _open_while(eqn: Any, inputs: list[Any], how: How) -> list[Any]:
    p = eqn.params
    a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    condition, body = _function(p["cond_jaxpr"], how), _function(p["body_jaxpr"], how)
    return list(
        jax.lax.while_loop(
            lambda c: condition(*inputs[:a], *c)[0], lambda c: tuple(body(*inputs[a:b], *c)), tuple(inputs[b:])
        )
    )


def _open_cond(eqn: Any, inputs: list[Any], how: How) -> list[Any]:
    branches = [_function(branch, how) for branch in eqn.params["branches"]]
    return list(jax.lax.switch(inputs[0], branches, *inputs[1:]))


def _open_checkpoint(eqn: Any, inputs: list[Any], how: How) -> list[Any]:
    p = eqn.params
    inner = _function(core.ClosedJaxpr(p["jaxpr"], []), how)
    return list(jax.checkpoint(inner, prevent_cse=p["prevent_cse"], policy=p["policy"])(*inputs))


_OPEN: dict[str, Callable[..., list[Any]]] = {
    "jit": _open_jit,
    "pjit": _open_jit,
    "scan": _open_scan,
    "while": _open_while,
    "cond": _open_cond,
    "checkpoint": _open_checkpoint,
    "remat": _open_checkpoint,
    "remat2": _open_checkpoint,
}

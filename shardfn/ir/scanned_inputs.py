"""The inputs of a program whose rows a scan takes one by one: the stacked parameters of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from shardfn.ir.rewrite import inner


def scanned_inputs(jaxpr: Any) -> dict[int, int]:
    """By position of an input the length of the scan that takes its rows, dimension 0, in order.

    The input may have been cast or scaled before, and the scan may stand in other functions, loops and branches.

    >>> import jax, jax.numpy as jnp
    >>> layers = lambda x, ws: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws.astype("bfloat16"))[0]
    >>> scanned_inputs(jax.make_jaxpr(jax.jit(layers))(jnp.ones((2, 4), "bfloat16"), jnp.ones((6, 4, 4))).jaxpr)
    {1: 6}
    """
    found: dict[int, int] = {}
    _walk(jaxpr, {v: i for i, v in enumerate(jaxpr.invars)}, [v.aval for v in jaxpr.invars], found)
    return dict(sorted(found.items()))


def _walk(jaxpr: Any, origin: dict[Any, int], types: Sequence[Any], found: dict[int, int]) -> list[int | None]:
    """Collect the inputs that scans take; of each result the input that it is made of on elements. `origin` grows."""

    def of(v: Any) -> int | None:
        return None if isinstance(v, core.Literal) else origin.get(v)

    for eqn in jaxpr.eqns:
        made = [_made_of(eqn, v, origin) for v in eqn.outvars]
        if eqn.primitive.name == "scan":  # the body gets rows of what is scanned, and all of the rest
            rows = [v for v, b in zip(eqn.invars, inner(eqn)[0].invars, strict=True) if v.aval.shape != b.aval.shape]
            found |= {i: eqn.params["length"] for v in rows if (i := of(v)) is not None}
        for body in inner(eqn):
            operands = _operands(eqn, body)
            if len(body.invars) == len(operands):
                inside = {b: i for b, v in zip(body.invars, operands, strict=True) if (i := of(v)) is not None}
                made = _walk(body, inside, types, found)
        for v, i in zip(eqn.outvars, made, strict=False):
            if i is not None and v.aval.shape == types[i].shape:
                origin[v] = i
    return [of(v) for v in jaxpr.outvars]


def _operands(eqn: Any, body: Any) -> Sequence[Any]:
    """What an equation gives a jaxpr of its parameters."""
    params, given = eqn.params, eqn.invars
    if eqn.primitive.name == "while":
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        is_condition = body is params["cond_jaxpr"].jaxpr
        own = given[:of_condition] if is_condition else given[of_condition : of_condition + of_body]
        return [*own, *given[of_condition + of_body :]]
    return given[1:] if eqn.primitive.name == "cond" else given  # a branch does not get the choice


def _made_of(eqn: Any, result: Any, origin: Mapping[Any, int]) -> int | None:
    """The only input of the result's shape that an equation reads."""
    arrays = [v for v in eqn.invars if not isinstance(v, core.Literal) and v.aval.shape == result.aval.shape]
    read = {origin[v] for v in arrays if v in origin}
    return next(iter(read)) if len(read) == 1 else None

"""A jaxpr as one flat list of numbered equations, with the bodies of calls inlined where the caller asks for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core


@dataclasses.dataclass(frozen=True)
class FlatEquation:
    """An equation between numbered values; a literal among the inputs stays a literal."""

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    label: Any = None
    """What `label_of` gave for the innermost inlined call around it."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The numbered values among the inputs."""
        return tuple(v for v in self.inputs if not isinstance(v, core.Literal))


@dataclasses.dataclass(frozen=True)
class FlatJaxpr:
    """Values 0, 1, ... are the parameters' leaves, then the other inputs, then constants and results of equations."""

    params: int
    inputs: int
    """The number of inputs, parameters included."""
    consts: Mapping[int, Any]
    equations: tuple[FlatEquation, ...]
    outputs: tuple[Any, ...]
    avals: tuple[Any, ...]

    @functools.cached_property
    def makers(self) -> dict[int, int]:
        """The equation that computes each value."""
        return {v: i for i, one in enumerate(self.equations) for v in one.outputs}


def flatten_jaxpr(
    closed: Any, params: int, inlines: Callable[[Any], bool], label_of: Callable[[Any], Any] = lambda eqn: None
) -> FlatJaxpr:
    """Flatten a closed jaxpr.

    Args:
      closed: the jaxpr.
      params: how many of its inputs, the first ones, are parameters.
      inlines: whether the body of a call replaces the call; asked once for each call, in program order.
      label_of: the label for the equations of an inlined call; None keeps that of the call around it.

    >>> import jax
    >>> closed = jax.make_jaxpr(lambda w, x: jax.jit(lambda w, x: w * x)(w, x) + 1.0)(1.0, 2.0)
    >>> [e.eqn.primitive.name for e in flatten_jaxpr(closed, 1, lambda eqn: 'jaxpr' in eqn.params).equations]
    ['mul', 'add']
    """
    avals: list[Any] = []
    consts: dict[int, Any] = {}
    equations: list[FlatEquation] = []

    def new(aval: Any) -> int:
        avals.append(aval)
        return len(avals) - 1

    def walk(closed: Any, inputs: list[Any], label: Any) -> list[Any]:
        env = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[v] = new(v.aval)
            consts[env[v]] = value
        read = lambda v: v if isinstance(v, core.Literal) else env[v]  # noqa: E731
        for eqn in closed.jaxpr.eqns:
            given = list(map(read, eqn.invars))
            if inlines(eqn):
                outputs = walk(body_of(eqn), given, label_of(eqn) or label)
            else:
                outputs = [new(v.aval) for v in eqn.outvars]
                equations.append(FlatEquation(eqn, tuple(given), tuple(outputs), label))
            env.update(zip(eqn.outvars, outputs, strict=True))
        return list(map(read, closed.jaxpr.outvars))

    arguments = [new(v.aval) for v in closed.jaxpr.invars]
    outputs = walk(closed, arguments, None)
    return FlatJaxpr(params, len(arguments), consts, tuple(equations), tuple(outputs), tuple(avals))


def body_of(eqn: Any) -> Any:
    """The closed jaxpr that a call runs."""
    body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())

"""Functions with derivative rules of their own, with other equations inside: they keep their rules.

The rules are those of the equation that JAX traced; what they compute is rewritten where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

Rewrite = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Rewrites a function of trees of arrays."""


def open_jvp(
    original: Callable[..., list[Any]], value: Callable[..., list[Any]], rewrite: Rewrite, inputs: Sequence[Any]
) -> list[Any]:
    """The outputs of a `jax.custom_jvp`. Its rule is told which arguments have a tangent: some rules refuse others.

    Args:
      original: the function with its rule.
      value: what computes its outputs.
      rewrite: rewrites what its rule computes.
      inputs: its arguments, flat.
    """
    function = jax.custom_jvp(lambda *xs: tuple(value(*xs)))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        active = [i for i, tangent in enumerate(tangents) if not _is_zero(tangent)]

        def tangents_of(primals: Sequence[Any], own: Sequence[Any]) -> list[Any]:
            made = jax.jvp(_of_some(original, primals, active), tuple(primals[i] for i in active), tuple(own))[1]
            return [t for t in made if t.dtype != jax.dtypes.float0]

        results = function(*primals)
        found = iter(rewrite(tangents_of)([*primals], [tangents[i] for i in active]))
        return results, tuple(next(found) if _is_inexact(y) else _zero(y) for y in results)

    function.defjvp(derivative, symbolic_zeros=True)
    return list(function(*inputs))


def open_vjp(
    original: Callable[..., list[Any]], value: Callable[..., list[Any]], rewrite: Rewrite, inputs: Sequence[Any]
) -> list[Any]:
    """The outputs of a `jax.custom_vjp`; the arguments and what its rule is told are as in `open_jvp`."""
    function = jax.custom_vjp(lambda *xs: tuple(value(*xs)))
    kept: list[Any] = []

    def forward(*primals: Any) -> tuple[tuple[Any, ...], list[Any]]:
        active = [i for i, x in enumerate(primals) if x.perturbed and _is_inexact(x.value)]

        def values_and_residuals(*xs: Any) -> tuple[Any, list[Any]]:
            results, pullback = jax.vjp(_of_some(original, xs, active), *(xs[i] for i in active))
            leaves, structure = tree_util.tree_flatten(pullback)
            kept[:] = [structure, active, [_is_inexact(y) for y in results]]
            return results, leaves

        results, leaves = rewrite(values_and_residuals)(*(x.value for x in primals))
        return tuple(results), leaves

    def backward(leaves: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        structure, active, inexact = kept

        def pulled_back(leaves: list[Any], own: list[Any]) -> list[Any]:
            given = iter(own)
            whole = [
                next(given) if is_own else np.zeros(c.shape, jax.dtypes.float0)
                for c, is_own in zip(cotangents, inexact, strict=True)
            ]
            return list(tree_util.tree_unflatten(structure, leaves)(whole))

        own = [c for c, is_own in zip(cotangents, inexact, strict=True) if is_own]
        found = rewrite(pulled_back)(leaves, [jnp.zeros(c.shape, c.dtype) if _is_zero(c) else c for c in own])
        gradients = dict(zip(active, found, strict=True))
        return tuple(gradients.get(i) for i in range(len(inputs)))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return list(function(*inputs))


def _of_some(function: Callable[..., Any], xs: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """A function of the arguments at some places; the others are as they are."""

    def of_some(*own: Any) -> Any:
        whole = [*xs]
        for i, x in zip(places, own, strict=True):
            whole[i] = x
        return function(*whole)

    return of_some


def _is_zero(derivative: Any) -> bool:
    """Whether a tangent or a cotangent is known to be zero."""
    return isinstance(derivative, jax.custom_derivatives.SymbolicZero) or derivative.dtype == jax.dtypes.float0


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _zero(x: Any) -> Any:
    """The tangent of what has none, or a zero one."""
    return jnp.zeros_like(x) if _is_inexact(x) else np.zeros(np.shape(x), jax.dtypes.float0)

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
    """The outputs of a `jax.custom_jvp`.

    Args:
      original: the function with its rule.
      value: what computes its outputs.
      rewrite: rewrites what its rule computes.
      inputs: its arguments, flat.
    """
    function = jax.custom_jvp(lambda *xs: tuple(value(*xs)))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        inexact = [i for i, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]

        def tangents_of(primals: Sequence[Any], own: Sequence[Any]) -> list[Any]:
            whole = [_zero(x) for x in primals]
            for i, tangent in zip(inexact, own, strict=True):
                whole[i] = tangent
            made = jax.jvp(original, tuple(primals), tuple(whole))[1]
            return [t for t in made if t.dtype != jax.dtypes.float0]

        results = function(*primals)
        found = iter(rewrite(tangents_of)([*primals], [tangents[i] for i in inexact]))
        return results, tuple(next(found) if _is_inexact(y) else _zero(y) for y in results)

    function.defjvp(derivative)
    return list(function(*inputs))


def open_vjp(
    original: Callable[..., list[Any]], value: Callable[..., list[Any]], rewrite: Rewrite, inputs: Sequence[Any]
) -> list[Any]:
    """The outputs of a `jax.custom_vjp`; the arguments are those of `open_jvp`."""
    function = jax.custom_vjp(lambda *xs: tuple(value(*xs)))
    kept: list[Any] = []

    def forward(*xs: Any) -> tuple[tuple[Any, ...], list[Any]]:
        def values_and_residuals(*xs: Any) -> tuple[Any, list[Any]]:
            results, pullback = jax.vjp(original, *xs)
            leaves, structure = tree_util.tree_flatten(pullback)
            kept[:] = [structure]
            return results, leaves

        results, leaves = rewrite(values_and_residuals)(*xs)
        return tuple(results), leaves

    def backward(leaves: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        (structure,) = kept

        def pulled_back(leaves: list[Any], own: list[Any]) -> list[Any]:
            given = iter(own)
            whole = [next(given) if c.dtype != jax.dtypes.float0 else c for c in cotangents]
            made = tree_util.tree_unflatten(structure, leaves)(whole)
            return [c for c in made if c.dtype != jax.dtypes.float0]

        found = iter(rewrite(pulled_back)(leaves, [c for c in cotangents if c.dtype != jax.dtypes.float0]))
        return tuple(next(found) if _is_inexact(x) else None for x in inputs)

    function.defvjp(forward, backward)
    return list(function(*inputs))


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _zero(x: Any) -> Any:
    """The tangent of what has none, or a zero one."""
    return jnp.zeros_like(x) if _is_inexact(x) else np.zeros(np.shape(x), jax.dtypes.float0)

"""The trace that planning makes is what the call compiles: the user's function runs once in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.core import Tracer
from jax.extend import core as jex_core

from shardfn.frontend.ambient_mesh import has_types
from shardfn.frontend.arguments import signature
from shardfn.frontend.trace import TracedJaxpr


def _nothing() -> None:
    return None


def settings() -> Any:
    """An object that stands for all settings which JAX's cache of traces knows: x64, matmul precision, meshes and so on."""
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):  # none set is the same as an empty one
        return jax.jit(_nothing).trace().jaxpr


def replayed(
    pure: Callable[..., Any], traced: TracedJaxpr, values: Sequence[Any], statics: Sequence[int], closed: Any = None
) -> Callable[..., Any]:
    """`pure`, which runs the equations of its first trace where a trace of it would give the same.

    JAX traces a function again for arguments that differ in nothing but their committed shardings. It runs in Python again for
    other values or weak types, under other settings, with arrays instead of tracers, and if it has effects.

    Args:
      pure: a function of values in order (`pure_function`).
      traced: its trace.
      values: what it was traced with.
      statics: positions of static values.
      closed: what is run in the place of the trace.
    """
    closed, expected = closed or traced.stage.jaxpr, signature(values, statics)
    weak = [getattr(aval, "weak_type", None) for aval in closed.in_avals]
    if closed.effects or traced.is_rewritten or None in weak:
        return pure
    results, context = tree_util.tree_structure(traced.stage.out_info), settings()
    run = jex_core.jaxpr_as_fun(closed)

    @functools.wraps(pure)
    def replay(*flat: Any) -> Any:
        leaves = tree_util.tree_leaves([value for i, value in enumerate(flat) if i not in statics])
        is_same = (
            all(isinstance(leaf, Tracer) for leaf in leaves)
            and signature(flat, statics) == expected
            and [jax.typeof(leaf).weak_type for leaf in leaves] == weak
            and not has_types(flat)
            and settings() is context
        )
        return tree_util.tree_unflatten(results, run(*leaves)) if is_same else pure(*flat)

    return replay

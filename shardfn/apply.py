"""A plan to a function that runs: `jax.jit` with the plan's shardings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import NamedSharding

from shardfn.plan import Decision, Plan


def shardings(plan: Plan, decisions: Sequence[Decision]) -> list[NamedSharding]:
    """The `NamedSharding` of each decision, all on one mesh."""
    mesh = plan.mesh()
    return [NamedSharding(mesh, d.partition_spec) for d in decisions]


def apply(
    plan: Plan,
    function: Callable[..., Any],
    args: Sequence[Any],
    results: Any,
    static_argnums: tuple[int, ...] = (),
    donate_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """`function` as a jitted function whose arguments and results lie as planned.

    Args:
      plan: decisions in the order of the leaves of the dynamic `args` and of `results`.
      args: the arguments of the call, or their shapes, for their structure.
      results: the pytree of result shapes.
    """
    dynamic = tuple(a for i, a in enumerate(args) if i not in static_argnums)
    ins = tree_util.tree_unflatten(tree_util.tree_structure(dynamic), shardings(plan, plan.inputs))
    outs = tree_util.tree_unflatten(tree_util.tree_structure(results), shardings(plan, plan.outputs))
    return jax.jit(
        function, in_shardings=ins, out_shardings=outs, static_argnums=static_argnums, donate_argnums=donate_argnums
    )


def moved(values: Sequence[Any], targets: Sequence[NamedSharding]) -> tuple[list[Any], list[int]]:
    """Put the arrays that lie elsewhere where they belong; also says which ones were moved.

    `jax.jit` refuses an array that was committed to another layout; tracers are left to it.
    """
    out, which = [], []
    for i, (value, target) in enumerate(zip(values, targets, strict=True)):
        if lies_elsewhere(value, target):
            value = jax.device_put(value, target)
            which.append(i)
        out.append(value)
    return out, which


def lies_elsewhere(value: Any, target: NamedSharding) -> bool:
    """Whether `value` is a concrete JAX array in another layout than `target`."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    return not value.sharding.is_equivalent_to(target, value.ndim)

"""From a plan to a function that runs: `jax.jit` with the plan's shardings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardfn.frontend.meshes import partition_spec
from shardfn.planning.op_constraints import apply_constraints
from shardfn.planning.plan import Decision, Plan
from shardfn.planning.plan_mesh import PlanMesh


def shardings(decisions: Sequence[Decision], mesh: PlanMesh) -> list[NamedSharding]:
    """The `NamedSharding` of each decision, all on one mesh."""
    return [
        NamedSharding(mesh.mesh, partition_spec([[p for a in dim for p in mesh.parts[a]] for dim in d.spec]))
        for d in decisions
    ]


def apply(
    plan: Plan,
    function: Callable[..., Any],
    args: Sequence[Any],
    results: Any,
    static_argnums: tuple[int, ...],
    donate_argnums: tuple[int, ...],
    mesh: PlanMesh,
    nested: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`jax.jit` of a function with the planned shardings of arguments and results.

    Args:
      plan: decisions in the order of the leaves of the dynamic `args` and of `results`.
      function: the function.
      args: the arguments of the call, or their shapes, for their structure.
      results: the pytree of result shapes.
      static_argnums: positions in `args`, as in `jax.jit`.
      donate_argnums: the same.
      mesh: the mesh of the shardings.
      nested: whether it is for calls inside a transformation. Results then get constraints: `out_shardings` would also
        apply to their cotangents, which may have any sharding.
      compiler_options: XLA options; a nested function has none of its own.
    """
    dynamic = tuple(a for i, a in enumerate(args) if i not in static_argnums)
    ins = tree_util.tree_unflatten(tree_util.tree_structure(dynamic), shardings(plan.inputs, mesh))
    outs = tree_util.tree_unflatten(tree_util.tree_structure(results), shardings(plan.outputs, mesh))
    if plan.constraints:
        function = functools.wraps(function)(
            apply_constraints(function, plan.constraints, mesh.mesh, mesh.parts, static_argnums)
        )
    if nested:

        @functools.wraps(function)
        def constrained(*flat: Any) -> Any:
            return tree_util.tree_map(jax.lax.with_sharding_constraint, function(*flat), outs)

        return jax.jit(constrained, in_shardings=ins, static_argnums=static_argnums)
    return jax.jit(
        function, in_shardings=ins, out_shardings=outs, static_argnums=static_argnums, donate_argnums=donate_argnums,
        compiler_options=dict(compiler_options) if compiler_options else None,
    )  # fmt: skip


def moved(
    values: Sequence[Any], targets: Sequence[NamedSharding], replaced: Collection[int] = frozenset()
) -> list[Any]:
    """Transfer the arrays that are committed to another sharding, which `jax.jit` refuses, and uncommitted ones at `replaced`.

    The next call passes a result at these positions. Committed now, the array does not cause a second compile then.
    """
    return [
        jax.device_put(v, target) if lies_elsewhere(v, target) or (i in replaced and is_loose(v, target)) else v
        for i, (v, target) in enumerate(zip(values, targets, strict=True))
    ]


def is_loose(value: Any, target: NamedSharding) -> bool:
    """Whether `value` is an uncommitted array that this process can transfer to `target`."""
    is_array = isinstance(value, jax.Array | np.ndarray) and not isinstance(value, Tracer)
    return is_array and not getattr(value, "committed", False) and target.is_fully_addressable


def lies_elsewhere(value: Any, target: NamedSharding) -> bool:
    """Whether `value` is a concrete JAX array that is committed to another sharding than `target`."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or not value.committed:
        return False
    return not value.sharding.is_equivalent_to(target, value.ndim)

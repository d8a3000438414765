"""A plan to a function that runs: `jax.jit` with the plan's shardings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardfn.frontend.meshes import abstract_mesh, mesh_on, partition_spec
from shardfn.planning import mesh_inference
from shardfn.planning.op_constraints import held
from shardfn.planning.plan import Decision, Plan


@dataclasses.dataclass(frozen=True)
class Grid:
    """A mesh, and for each axis of a plan the mesh's axes that make it up, major to minor."""

    mesh: Mesh | AbstractMesh
    parts: dict[str, tuple[str, ...]]


def whole(plan: Plan) -> Grid:
    """The plan's own grid."""
    mesh = plan.mesh
    return Grid(mesh, {name: (name,) for name in mesh.axis_names})


def on_paper(axes: Sequence[tuple[str, int]]) -> Grid:
    """A grid before there is a plan: on an `AbstractMesh`."""
    names, sizes = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    return Grid(AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(axes)), {name: (name,) for name in names})


def finest(plan: Plan) -> Grid:
    """The plan's grid with every axis taken apart into its prime factors."""
    mesh = plan.mesh
    axes, parts = mesh_inference.finest(tuple(mesh.shape.items()))
    return Grid(abstract_mesh(axes) if isinstance(mesh, AbstractMesh) else mesh_on(mesh.devices, axes), parts)


def has_other_grids(plan: Plan, grids: Sequence[tuple[int, ...]]) -> bool:
    """Whether the function uses grids inside whose axes the plan's grid cannot express."""
    return any(math.prod(g) == plan.hardware.count and not mesh_inference.expresses(plan.axes, g) for g in grids)


def shardings(decisions: Sequence[Decision], grid: Grid) -> list[NamedSharding]:
    """The `NamedSharding` of each decision, all on one mesh."""
    return [
        NamedSharding(grid.mesh, partition_spec([[p for a in dim for p in grid.parts[a]] for dim in d.spec]))
        for d in decisions
    ]


def apply(
    plan: Plan,
    function: Callable[..., Any],
    args: Sequence[Any],
    results: Any,
    static_argnums: tuple[int, ...],
    donate_argnums: tuple[int, ...],
    grid: Grid,
    nested: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`function` as a jitted function whose arguments and results lie as planned.

    A `nested` one, for calls inside a transformation, lays its results out by constraints inside: what `jit` itself
    demands of results it demands of their cotangents too, which may come from anywhere.

    Args:
      plan: decisions in the order of the leaves of the dynamic `args` and of `results`.
      args: the arguments of the call, or their shapes, for their structure.
      results: the pytree of result shapes.
      static_argnums: positions in `args`, as in `jax.jit`.
      donate_argnums: the same.
      grid: the mesh to name the layouts on.
      compiler_options: what XLA is told for this compile; a nested one is compiled with what it is part of.
    """
    dynamic = tuple(a for i, a in enumerate(args) if i not in static_argnums)
    ins = tree_util.tree_unflatten(tree_util.tree_structure(dynamic), shardings(plan.inputs, grid))
    outs = tree_util.tree_unflatten(tree_util.tree_structure(results), shardings(plan.outputs, grid))
    if plan.constraints:
        function = functools.wraps(function)(held(function, plan.constraints, grid.mesh, grid.parts, static_argnums))
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
    """Put arrays where they belong: those committed to another layout, which `jax.jit` refuses, and at positions whose place
    a result takes those that are not committed yet. The next call brings the result: a function that saw the first state
    as it came would be compiled again then."""
    return [
        jax.device_put(v, target) if lies_elsewhere(v, target) or (i in replaced and is_loose(v, target)) else v
        for i, (v, target) in enumerate(zip(values, targets, strict=True))
    ]


def is_loose(value: Any, target: NamedSharding) -> bool:
    """Whether `value` is an array that may still go anywhere, and to the devices of `target` from this process."""
    is_array = isinstance(value, jax.Array | np.ndarray) and not isinstance(value, Tracer)
    return is_array and not getattr(value, "committed", False) and target.is_fully_addressable


def lies_elsewhere(value: Any, target: NamedSharding) -> bool:
    """Whether `value` is a concrete JAX array, committed to another layout than `target`."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or not value.committed:
        return False
    return not value.sharding.is_equivalent_to(target, value.ndim)

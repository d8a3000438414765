"""The meshes on which a plan's shardings are written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, AxisType, Mesh

from shardfn.frontend.meshes import abstract_mesh, mesh_on
from shardfn.planning import mesh_inference
from shardfn.planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class PlanMesh:
    """A mesh, and for each mesh axis of a plan the axes of `mesh` that make it up, major to minor."""

    mesh: Mesh | AbstractMesh
    parts: dict[str, tuple[str, ...]]


def own_mesh(plan: Plan) -> PlanMesh:
    """The plan's own mesh."""
    mesh = plan.mesh
    return PlanMesh(mesh, {name: (name,) for name in mesh.axis_names})


def unplanned_mesh(axes: Sequence[tuple[str, int]]) -> PlanMesh:
    """An `AbstractMesh`, for a trace before there is a plan."""
    names, sizes = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(axes))
    return PlanMesh(mesh, {name: (name,) for name in names})


def prime_mesh(plan: Plan) -> PlanMesh:
    """The plan's mesh with every axis split into its prime factors."""
    mesh = plan.mesh
    axes, parts = mesh_inference.finest(tuple(mesh.shape.items()))
    return PlanMesh(abstract_mesh(axes) if isinstance(mesh, AbstractMesh) else mesh_on(mesh.devices, axes), parts)


def lacks_axes_for(plan: Plan, mesh_shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether the function itself uses a mesh whose axes the plan's mesh cannot express."""
    return any(math.prod(s) == plan.hardware.count and not mesh_inference.expresses(plan.axes, s) for s in mesh_shapes)

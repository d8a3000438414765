"""The meshes on which a plan's shardings are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.frontend.meshes import abstract_mesh, mesh_on, partition_spec
from shardfn.ir.model import Spec
from shardfn.planning.meshes.mesh_inference import finest, split_axes


@dataclasses.dataclass(frozen=True)
class PlanMesh:
    """A mesh, and for each mesh axis of a plan the axes of `mesh` that make it up, major to minor."""

    mesh: Mesh | AbstractMesh
    parts: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> PlanMesh:
        """A mesh whose axes are the plan's own."""
        return cls(mesh, {name: (name,) for name in mesh.axis_names})

    @classmethod
    def with_prime_axes(cls, mesh: Mesh | AbstractMesh) -> PlanMesh:
        """The plan's mesh with every axis split into its prime factors."""
        axes, parts = finest(tuple(mesh.shape.items()))
        return cls(abstract_mesh(axes) if isinstance(mesh, AbstractMesh) else mesh_on(mesh.devices, axes), parts)

    def sharding(self, spec: Spec, memory_kind: str | None = None) -> NamedSharding:
        """The `NamedSharding` of a spec over the plan's axes."""
        return NamedSharding(self.mesh, partition_spec(split_axes(spec, self.parts)), memory_kind=memory_kind)

"""The meshes on which a plan's shardings are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.meshes import abstract_mesh, mesh_on, partition_spec, wired
from shardfn.ir.model import Axes, Spec
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


def device_mesh(hardware: Hardware, axes: Axes, order: Sequence[int] | None) -> Mesh | AbstractMesh:
    """The mesh of a plan: its axes on the devices; an `AbstractMesh` where these are not here.

    Args:
      hardware: the devices.
      axes: the mesh axes, none for one device.
      order: `Plan.order`.
    """
    axes = axes or (("a", 1),)
    devices, given = hardware.devices, hardware.mesh
    if devices is None:
        return abstract_mesh(axes)
    if isinstance(given, Mesh) and tuple(given.shape.items()) == axes:
        return mesh_on(given.devices, axes)
    if hardware.platform == "tpu" and order is None:
        return wired(devices, axes)
    return mesh_on([devices[i] for i in order or range(len(devices))], axes)

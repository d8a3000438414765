"""Integers and meshes: from strategies to mesh axes and a sharding for each array.

| module | holds |
|---|---|
| `mesh_inference` | integer strategies and dimension groups to mesh axes |
| `given_mesh` | integer strategies on the axes of a mesh that the user gave |
| `named_shardings` | entries that name axes of a mesh: layouts, `PartitionSpec`s, `NamedSharding`s |
| `plan_mesh` | the meshes on which the shardings of a plan are written |
"""

from shardfn.planning.meshes.mesh_inference import Placement, expresses, finest, place, split_axes
from shardfn.planning.meshes.named_shardings import mesh_of, names_axes, place_named, without_mesh
from shardfn.planning.meshes.plan_mesh import PlanMesh, device_mesh

__all__ = [
    "Placement", "PlanMesh", "device_mesh", "expresses", "finest", "mesh_of", "names_axes", "place", "place_named",
    "split_axes", "without_mesh",
]  # fmt: skip

"""What the partitioner knows of a mesh, whatever the program's shardings: kept between the programs of one function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

from shardfn.ir.model import Spec, axes_of
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.resharding import joined_axes, split_axes
from shardfn.partition.sharded_op import OpPartitioning


class PartitionedMesh:
    """A mesh with its axes in parts, and what is known of shardings on it, whatever the program.

    Args:
      axes: the mesh.
      used: names that shardings use: axes, and parts of them.
    """

    def __init__(self, axes: Mapping[str, int], used: Iterable[str]):
        self.sizes, parts = split_axes(axes, used)
        self.join: Callable[[tuple[str, ...]], tuple[str, ...]] = functools.cache(
            lambda names: joined_axes(names, axes)
        )
        self.in_parts: Callable[[Spec], Spec] = functools.cache(
            lambda spec: tuple(tuple(p for a in dim for p in parts.get(a, ())) for dim in spec)
        )
        self.joined: Callable[[Spec], Spec] = functools.cache(lambda spec: tuple(map(self.join, spec)))
        self.partitionings: dict[object, tuple[OpPartitioning, bool, object]] = {}
        """How an op is partitioned, and whether without a collective, by all that its rule depends on.

        Keys hold the identities of objects, which are compared faster than their contents. The last element of a value keeps
        these objects alive."""


class PartitionCache:
    """Results for other shardings of the same function: by platform, mesh and the names that shardings use."""

    def __init__(self) -> None:
        self.meshes: dict[object, PartitionedMesh] = {}

    def of(self, partitioned: PartitionedProgram, platform: str) -> PartitionedMesh:
        """What is known of a program's mesh."""
        used = frozenset({a for spec in set(partitioned.specs) for a in axes_of(spec)})
        key = platform, tuple(partitioned.axes.items()), used
        if key not in self.meshes:
            self.meshes[key] = PartitionedMesh(partitioned.axes, used)
        return self.meshes[key]

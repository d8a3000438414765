"""The shardings of a training step: the mesh, and the mesh axes of each dimension of every array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax import tree_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.frontend.meshes import partition_spec
from shardfn.ir.model import Spec
from shardfn.train.steps.options import StepOptions


@dataclasses.dataclass(frozen=True)
class StepShardings:
    """The mesh and, for each leaf, the mesh axes of its dimensions."""

    mesh: Mesh | AbstractMesh
    batch_axes: tuple[str, ...]
    """The axes that shard the batch."""
    params: tuple[Spec, ...]
    """Of the model's arrays as the loss uses them."""
    opt_state: tuple[Spec, ...]
    batch: tuple[Spec, ...]
    stored: tuple[Spec, ...] = ()
    """Of the model's arrays between steps; with optimizer level 3 sharded further than `params`."""
    updates: tuple[Spec, ...] = ()
    """Of the optimizer's updates; with optimizer parallel sharded further than `params`."""

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each mesh axis."""
        return tuple(self.mesh.shape.items())

    @property
    def count(self) -> int:
        """The number of shards of the batch."""
        return math.prod(self.mesh.shape[a] for a in self.batch_axes)

    def named(self, spec: Spec) -> NamedSharding:
        """The sharding of an array with these axes."""
        return NamedSharding(self.mesh, partition_spec(spec))


def is_per_device(options: StepOptions, shardings: StepShardings) -> bool:
    """Whether the loss is called on each device's part of the batch."""
    return shardings.count > 1 and (options.mode.per_device or options.cross_batch or options.micro_batches > 1)


def tree_of(like: Any, leaves: Sequence[Any]) -> Any:
    """A pytree with the structure of another."""
    return tree_util.tree_unflatten(tree_util.tree_structure(like), leaves)

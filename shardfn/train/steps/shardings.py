"""Where everything of a training step lies: the grid, and the axes that cut each dim of each array."""

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
    """A layout for every array: the grid, the axes that cut the batch, and for each leaf the axes that cut its dims."""

    mesh: Mesh | AbstractMesh
    data: tuple[str, ...]
    params: tuple[Spec, ...]
    opt_state: tuple[Spec, ...]
    batch: tuple[Spec, ...]

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each axis of the grid."""
        return tuple(self.mesh.shape.items())

    @property
    def count(self) -> int:
        """Into how many parts the batch is cut."""
        return math.prod(self.mesh.shape[a] for a in self.data)

    def named(self, spec: Spec) -> NamedSharding:
        """The sharding of an array whose dims are cut by these axes."""
        return NamedSharding(self.mesh, partition_spec(spec))


@dataclasses.dataclass(frozen=True)
class Cut:
    """The layouts with optimizer parallel."""

    params: tuple[Spec, ...]
    states: tuple[Spec, ...]
    """Of what is worked out for each parameter in the optimizer."""
    opt_state: tuple[Spec, ...]


def is_per_device(training: StepOptions, drawn: StepShardings) -> bool:
    """Whether the loss is called on each device's part of the batch."""
    return drawn.count > 1 and (training.mode.per_device or training.cross_batch or training.micro_batches > 1)


def tree_of(like: Any, leaves: Sequence[Any]) -> Any:
    """A pytree with the structure of another."""
    return tree_util.tree_unflatten(tree_util.tree_structure(like), leaves)

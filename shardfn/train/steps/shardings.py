"""The shardings of a training step; optimizer parallel (ZeRO, HSDP) shards them over devices with replicas."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import tree_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.frontend.meshes import partition_spec
from shardfn.frontend.paths import join, tidy
from shardfn.frontend.training_settings import TrainingSettings
from shardfn.ir.model import Spec
from shardfn.ir.specs import strategy_of


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
    has_optimizer_parallel: bool = False
    """Whether optimizer parallel shards an array further."""
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why an argument of the step is sharded as it is, by path; where there is none, the mode is the reason."""

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


def tree_of(like: Any, leaves: Sequence[Any]) -> Any:
    """A pytree with the structure of another."""
    return tree_util.tree_unflatten(tree_util.tree_structure(like), leaves)


@dataclasses.dataclass(frozen=True)
class OptimizerParallel:
    """Which arrays are sharded further, and from which size on; MindSpore's `parallel_optimizer_config`.

    Attributes:
      level: 1 shards the optimizer's states (ZeRO-1), 2 gradients too (ZeRO-2), 3 parameters too (ZeRO-3, FSDP).
      threshold: the smallest size, in kilobytes per device, of a parameter that is sharded.
      shard_size: the number of shards; -1 for all devices with replicas.
      accumulation_shard: True keeps the gradient sums of micro-batches sharded, and reduces each micro-batch's gradients.
    """

    level: int = 1
    threshold: int = 64
    shard_size: int = -1
    accumulation_shard: bool = False


def optimizer_parallel_of(settings: TrainingSettings) -> OptimizerParallel | None:
    """Optimizer parallel as in the settings; None if it is off.

    >>> optimizer_parallel_of(TrainingSettings(enable_parallel_optimizer=True)).level
    1
    """
    if not settings.enable_parallel_optimizer:
        return None
    config = settings.parallel_optimizer_config
    size = config["optimizer_weight_shard_size"]
    size = settings.optimizer_weight_shard_size if size == -1 else size
    level = int(config["optimizer_level"].removeprefix("level"))
    return OptimizerParallel(level, config["parallel_optimizer_threshold"], size, config["gradient_accumulation_shard"])


def shard_further(
    shape: Sequence[int], itemsize: int, spec: Spec, axes: Sequence[tuple[str, int]], how: OptimizerParallel
) -> Spec:
    """The spec of an optimizer state: the parameter's, sharded further over the axes along which it is replicated.

    These axes shard the first dimension that they divide, or fewer axes do; arrays below the threshold stay as they are.
    (MindSpore shards dimension 0 or nothing.)

    >>> shard_further((6, 64, 256), 4, ((), (), ("b",)), [("a", 4), ("b", 2)], OptimizerParallel())
    ((), ('a',), ('b',))
    >>> shard_further((64,), 4, ((),), [("replica", 2), ("data", 2)], OptimizerParallel(threshold=0, shard_size=2))
    (('data',),)
    """
    sizes = dict(axes)
    shards = strategy_of(spec, sizes)
    if 0 in shape or _is_small(shape, itemsize, shards, how):
        return spec
    free = [a for a, n in axes if n > 1 and not any(a in dim for dim in spec)]
    for count in range(len(free), 0, -1):
        # shards over neighbours, replicas across groups of them: of axes of one size, the last ones
        for chosen in [*itertools.combinations(free, count)][:: 1 if how.shard_size == -1 else -1]:
            more = math.prod(sizes[a] for a in chosen)
            if how.shard_size != -1 and more != how.shard_size:
                continue
            for i, (size, count_here) in enumerate(zip(shape, shards, strict=True)):
                if size % (count_here * more) == 0:
                    return (*spec[:i], (*spec[i], *chosen), *spec[i + 1 :])
    return spec


def _is_small(shape: Sequence[int], itemsize: int, shards: Sequence[int], how: OptimizerParallel) -> bool:
    return math.prod(shape) * itemsize // math.prod(shards) < how.threshold * 1024


def reason_with(
    reason: str, x: Any, before: Spec, after: Spec, axes: Sequence[tuple[str, int]], how: OptimizerParallel
) -> str:
    """Why an array is sharded as it is, where optimizer parallel may shard it further.

    Args:
      reason: that of the sharding before.
      x: the array, or its shape.
      before: its sharding without optimizer parallel.
      after: with it.
      axes: the mesh.
      how: the optimizer parallel.

    >>> import numpy as np
    >>> reason_with("mode='data_parallel'", np.ones(64), ((),), (("a",),), [("a", 8)], OptimizerParallel())
    "optimizer_level='level1' shards it"
    >>> reason_with("mode='data_parallel'", np.ones(64), ((),), ((),), [("a", 8)], OptimizerParallel())
    "mode='data_parallel'; smaller than parallel_optimizer_threshold=64 (kB)"
    """
    level = f"optimizer_level='level{how.level}'"
    if after != before:
        return f"{reason}, and {level} shards it further" if any(before) else f"{level} shards it"
    free = [axis for axis, size in axes if size > 1 and not any(axis in dim for dim in after)]
    if not x.shape or not free:
        return reason
    is_small = _is_small(x.shape, x.dtype.itemsize, strategy_of(before, dict(axes)), how)
    rest = (
        f"smaller than parallel_optimizer_threshold={how.threshold} (kB)" if is_small else f"no dimension fits {level}"
    )
    return f"{reason}; {rest}"


def mirrored_paths(opt_state: Any, params: Mapping[str, tuple[int, ...]]) -> list[str | None]:
    """For each leaf of an optimizer's state, the path of the parameter with its shape and place, else None.

    >>> import optax, numpy as np
    >>> mirrored_paths(optax.adam(1.0).init({"w": np.ones((2, 3))}), {"w": (2, 3)})
    [None, 'w', 'w']
    """
    found = []
    for key, leaf in tree_util.tree_flatten_with_path(opt_state)[0]:
        path = tidy(join("", key))
        ends = [p for p in params if path == p or path.endswith("/" + p)]
        best = max(ends, key=len, default=None)
        found.append(best if best is not None and params[best] == tuple(leaf.shape) else None)
    return found

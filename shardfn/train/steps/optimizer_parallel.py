"""Optimizer parallel (ZeRO, HSDP): states, gradients and parameters cut over the devices that would hold copies."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import tree_util

from shardfn.frontend.paths import join, tidy
from shardfn.frontend.training_settings import TrainingSettings
from shardfn.ir.model import Spec


@dataclasses.dataclass(frozen=True)
class OptimizerParallel:
    """What is cut, and from which size on; MindSpore's `parallel_optimizer_config`."""

    level: int = 1
    """1: the optimizer's states. 2: gradients too, reduced into pieces. 3: parameters too, gathered for use."""
    threshold: int = 64
    """Kilobytes that a device's piece of a parameter has at least, to be cut."""
    shard_size: int = -1
    """Over how many devices each is cut; -1 over all that hold copies."""
    accumulation_shard: bool = False
    """Keep the sums of micro-batches in pieces too; each micro-batch's gradients are then reduced on their own."""


def optimizer_parallel_of(settings: TrainingSettings) -> OptimizerParallel | None:
    """What the settings ask for; None for nothing.

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


def cut_further(
    shape: Sequence[int], itemsize: int, spec: Spec, axes: Sequence[tuple[str, int]], how: OptimizerParallel
) -> Spec:
    """The layout of a state of a parameter: the parameter's, cut further by axes along which it would be copied.

    The first dim that they divide is cut, whichever it is; where none does, by fewer axes; below the threshold not at
    all. (MindSpore cuts dim 0 or nothing.)

    >>> cut_further((6, 64, 256), 4, ((), (), ("b",)), [("a", 4), ("b", 2)], OptimizerParallel())
    ((), ('a',), ('b',))
    """
    sizes = dict(axes)
    cuts = [math.prod(sizes[a] for a in dim) for dim in spec]
    if 0 in shape or math.prod(shape) * itemsize // math.prod(cuts) < how.threshold * 1024:
        return spec
    free = [a for a, n in axes if n > 1 and not any(a in dim for dim in spec)]
    for count in range(len(free), 0, -1):
        for chosen in itertools.combinations(free, count):
            pieces = math.prod(sizes[a] for a in chosen)
            if how.shard_size != -1 and pieces != how.shard_size:
                continue
            for i, (size, cut) in enumerate(zip(shape, cuts, strict=True)):
                if size % (cut * pieces) == 0:
                    return (*spec[:i], (*spec[i], *chosen), *spec[i + 1 :])
    return spec


def mirrored(opt_state: Any, params: Mapping[str, tuple[int, ...]]) -> list[str | None]:
    """For each leaf of an optimizer's state, the path of the parameter whose shape and place it has; else None.

    >>> import optax, numpy as np
    >>> mirrored(optax.adam(1.0).init({"w": np.ones((2, 3))}), {"w": (2, 3)})
    [None, 'w', 'w']
    """
    found = []
    for key, leaf in tree_util.tree_flatten_with_path(opt_state)[0]:
        path = tidy(join("", key))
        ends = [p for p in params if path == p or path.endswith("/" + p)]
        best = max(ends, key=len, default=None)
        found.append(best if best is not None and params[best] == tuple(leaf.shape) else None)
    return found

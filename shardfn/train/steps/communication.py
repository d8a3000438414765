"""The collectives between the devices of a training step: which gradients and parameters, fused how, and XLA's options."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import tree_util
from jax.sharding import PartitionSpec

from shardfn.errors import raise_problems, warn
from shardfn.frontend.paths import unmet
from shardfn.ir.model import Spec
from shardfn.train.collectives import KINDS, Bucket, buckets, compiler_options, ignored_fusion
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps.gradients import GradientSync, LeafSync, ShardedDim
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shardings import StepShardings
from shardfn.train.steps.state import ModelParts


def is_per_device(options: StepOptions, shardings: StepShardings) -> bool:
    """Whether the loss is called on each device's part of the batch."""
    return shardings.count > 1 and (options.mode.per_device or options.cross_batch or options.micro_batches > 1)


def gradient_sync(options: StepOptions, parts: ModelParts, shardings: StepShardings) -> GradientSync | None:
    """The collectives of gradients and parameters where each device works on its part of the batch; None elsewhere."""
    if not is_per_device(options, shardings):
        return None
    zero, axes = options.zero, shardings.batch_axes
    # XLA partitions over the axes that do not shard the batch: it cannot scatter along them without a gather before.
    is_all = set(axes) == set(shardings.mesh.axis_names)
    scatters = is_all and zero is not None and zero.level > 1
    leaves = []
    for i in (i for i, mine in enumerate(parts.trained) if mine):
        before = shardings.params[i]
        scattered = _added(before, shardings.updates[i]) if scatters else None
        gathered = _added(before, shardings.stored[i]) if is_all else None
        others = PartitionSpec(*(tuple(a for a in dim if a not in axes) or None for dim in before))
        leaves.append(LeafSync(parts.paths[i], parts.own[i], scattered, gathered, others))
    return GradientSync(
        shardings.mesh, axes, tuple(leaves), options.fusion, options.parallel_optimizer_comm_recompute,
        options.settings.gradients_mean, options.settings.gradient_fp32_sync,
    )  # fmt: skip


def update_sync(
    options: StepOptions, parts: ModelParts, shardings: StepShardings, sync: GradientSync | None
) -> GradientSync | None:
    """The gathers of updated parameters, if the step makes them in buckets; None where XLA does."""
    zero = options.zero
    if sync is None or zero is None or zero.level > 2 or sync.fusion is None or sync.is_partial:
        return None
    specs = zip(shardings.params, shardings.updates, parts.trained, strict=True)
    further = [_added(before, after) for before, after, mine in specs if mine]
    leaves = (dataclasses.replace(leaf, gathered=at) for leaf, at in zip(sync.leaves, further, strict=True))
    return dataclasses.replace(sync, leaves=tuple(leaves))


def fusion_options(options: StepOptions, sync: GradientSync | None) -> dict[str, Any]:
    """XLA's options for fused collectives; `sync` is None where its partitioner inserts them all."""
    hardware = options.hardware()
    platform = hardware.chip.platform
    explicit = [] if sync is None else ["all-reduce"] if sync.is_partial else list(KINDS.values())
    ignored = ignored_fusion(options.fusion, platform, explicit)
    if ignored and hardware.count > 1:
        piped = isinstance(options.loss_fn, Pipeline)
        warn(
            f"fusion has no effect on {', '.join(ignored)}: {'in a pipeline' if piped else f'in mode {options.mode.name!r}'} "
            f"XLA chooses which collectives to fuse, and has no such option on {platform}; "
            + ("leave it out" if piped else 'use mode="data_parallel", or cross_batch=True')
        )
    return compiler_options(options.fusion, platform, explicit)


def step_buckets(
    options: StepOptions, params: Any, sync: GradientSync | None, updated: GradientSync | None
) -> tuple[tuple[Bucket, tuple[str, ...]], ...]:
    """The fused collectives of a step, each with the paths of its operands; none unless fusion was asked for."""
    if sync is None or sync.fusion is None:
        return ()
    paths = [leaf.path for leaf in sync.leaves]
    raise_problems(list(unmet("fusion", sync.fusion.ids, paths, "trained parameter")))
    found = []
    for one, gathers in ((updated or sync, True), (sync, False)):
        local = []
        for x, leaf in zip(tree_util.tree_leaves(params), one.leaves, strict=True):
            shape = one.shard_shape(x.shape, leaf.gathered if gathers else None)
            local.append(jax.ShapeDtypeStruct(shape[leaf.own :], options.compute_dtype or x.dtype))
        members = list(one.members(local, gathers).values())
        found += [(b, tuple(members[i].path for i in b.members)) for b in buckets(members, sync.fusion)]
    return tuple(found)


def _added(before: Spec, after: Spec) -> ShardedDim:
    """The dimension that `after` shards further, and by which axes."""
    pairs = enumerate(zip(before, after, strict=True))
    return next(((i, b[len(a) :]) for i, (a, b) in pairs if a != b), None)

"""The collectives between the devices of a training step: which gradients and parameters, fused how, and XLA's options."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax import tree_util
from jax.sharding import PartitionSpec

from shardfn.errors import warn
from shardfn.ir.model import Spec
from shardfn.train.collectives.buckets import KINDS, Bucket, buckets, check_ids, compiler_options, ignored_fusion
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps.gradients import GradientSync, ShardedDim
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shardings import StepShardings
from shardfn.train.steps.state import ModelParts


def gradient_sync(options: StepOptions, parts: ModelParts, shardings: StepShardings) -> GradientSync:
    """The collectives of gradients and parameters where each device works on its part of the batch."""
    zero, trained = options.zero, [i for i, mine in enumerate(parts.trained) if mine]
    # XLA partitions over the axes that do not shard the batch: it cannot scatter along them without a gather before.
    is_all = set(shardings.batch_axes) == set(shardings.mesh.axis_names)
    scatters = is_all and zero is not None and zero.level > 1
    before, stored, updates = shardings.params, shardings.stored, shardings.updates
    return GradientSync(
        shardings.mesh,
        shardings.batch_axes,
        scattered=tuple(_added(before[i], updates[i]) if scatters else None for i in trained),
        gathered=tuple(_added(before[i], stored[i]) if is_all else None for i in trained),
        own=tuple(shardings.own[i] for i in trained),
        paths=tuple(parts.paths[i] for i in trained),
        other_specs=tuple(
            PartitionSpec(*(tuple(a for a in axes if a not in shardings.batch_axes) or None for axes in before[i]))
            for i in trained
        ),
        fusion=options.fusion,
        regathers=options.gathers_again,
        reduction=options.reduction,
    )


def update_sync(options: StepOptions, parts: ModelParts, shardings: StepShardings) -> GradientSync | None:
    """The gathers of updated parameters, if the step makes them in buckets; None where XLA does."""
    sync, zero = gradient_sync(options, parts, shardings), options.zero
    if zero is None or zero.level > 2 or sync.fusion is None or sync.is_partial:
        return None
    pairs = zip(shardings.params, shardings.updates, parts.trained, strict=True)
    return dataclasses.replace(sync, gathered=tuple(_added(a, b) for a, b, mine in pairs if mine))


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
    options: StepOptions, parts: ModelParts, params: Any, shardings: StepShardings
) -> tuple[tuple[Bucket, tuple[str, ...]], ...]:
    """The fused collectives of a step, each with the paths of its operands; none unless fusion was asked for."""
    sync = gradient_sync(options, parts, shardings)
    if sync.fusion is None:
        return ()
    check_ids(sync.fusion, sync.paths)
    leaves = tree_util.tree_leaves(parts.split(params)[0])
    found = []
    for one, gathers in ((update_sync(options, parts, shardings) or sync, True), (sync, False)):
        local = []
        for x, at, own in zip(leaves, one.gathered, sync.own, strict=True):
            shape = list(x.shape)
            if gathers and at is not None:
                shape[at[0]] //= math.prod(sync.mesh.shape[a] for a in at[1])
            local.append(jax.ShapeDtypeStruct(shape[1:] if own else shape, options.compute_dtype or x.dtype))
        members = [m for m in one.members(local, gathers) if m is not None]
        found += [(b, tuple(members[i].path for i in b.members)) for b in buckets(members, sync.fusion)]
    return tuple(found)


def _added(before: Spec, after: Spec) -> ShardedDim:
    """The dimension that `after` shards further, and by which axes."""
    pairs = enumerate(zip(before, after, strict=True))
    return next(((i, b[len(a) :]) for i, (a, b) in pairs if a != b), None)

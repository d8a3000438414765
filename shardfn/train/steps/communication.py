"""What travels between the devices of a training step: which gradients and parameters, how, and what XLA is told of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import PartitionSpec

from shardfn.errors import warn
from shardfn.ir.model import Spec
from shardfn.train.collectives.buckets import KINDS, Bucket, buckets, check_ids, compiler_options, unheard
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps.gradients import At, Parts
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shardings import Cut, StepShardings
from shardfn.train.steps.state import ModelParts


def parts_of(training: StepOptions, parts: ModelParts, drawn: StepShardings, cut: Cut, own: Sequence[bool]) -> Parts:
    """How gradients travel where each device works on its part of the batch."""
    zero = training.zero
    rows = [row for row, mine in zip(zip(drawn.params, cut.params, cut.states, own, parts.paths, strict=True), parts.trained,
                                     strict=True) if mine]  # fmt: skip
    # Axes that are not those of the batch are XLA's: it cannot scatter along them without a gather before.
    is_all = set(drawn.data) == set(drawn.mesh.axis_names)
    scatters = is_all and zero is not None and zero.level > 1
    return Parts(
        drawn.mesh,
        drawn.data,
        scattered=tuple(_added(whole, pieces) if scatters else None for whole, _, pieces, *_ in rows),
        gathered=tuple(_added(whole, kept) if is_all else None for whole, kept, *_ in rows),
        own=tuple(mine for *_, mine, _ in rows),
        paths=tuple(path for *_, path in rows),
        cuts=tuple(_beside(whole, drawn.data) for whole, *_ in rows),
        fusion=training.fusion,
        again=training.gathers_again,
    )


def regathered(training: StepOptions, parts: ModelParts, drawn: StepShardings, cut: Cut, how: Parts) -> Parts | None:
    """The same with the pieces that updated parameters are put together from; None where XLA does that."""
    zero = training.zero
    if zero is None or zero.level > 2 or how.fusion is None or how.is_partial:
        return None
    pairs = zip(drawn.params, cut.states, parts.trained, strict=True)
    return dataclasses.replace(how, gathered=tuple(_added(a, b) for a, b, mine in pairs if mine))


def told(training: StepOptions, how: Parts | None) -> dict[str, Any]:
    """What XLA is told of the collectives; `how` None where its partitioner makes them."""
    hardware = training.hardware()
    platform = hardware.chip.platform
    explicit = KINDS.values() if how is not None and not how.is_partial else ["all-reduce"] if how is not None else []
    missed = unheard(training.fusion, platform, explicit)
    if missed and hardware.count > 1:
        piped = isinstance(training.loss_fn, Pipeline)
        warn(
            f"fusion has no effect on {', '.join(missed)}: {'in a pipeline' if piped else f'in mode {training.mode.name!r}'} XLA "
            f"puts collectives together as it likes, and on {platform} it takes no such option; "
            + ("leave it out" if piped else 'use mode="data_parallel", or cross_batch=True')
        )
    return compiler_options(training.fusion, platform, explicit)


def fused(
    training: StepOptions, parts: ModelParts, params: Any, drawn: StepShardings, cut: Cut, how: Parts
) -> tuple[tuple[Bucket, tuple[str, ...]], ...]:
    """The buckets of a step, each with the paths of what it takes; none where nothing was asked for."""
    if training.fusion is None:
        return ()
    check_ids(training.fusion, how.paths)
    leaves = [
        jax.ShapeDtypeStruct(x.shape, training.compute_dtype or x.dtype)
        for x in tree_util.tree_leaves(parts.split(params)[0])
    ]
    sizes, found = dict(how.mesh.shape), []
    for one, gathers in ((regathered(training, parts, drawn, cut, how) or how, True), (how, False)):
        local = [_local_shape(x, at if gathers else None, own, sizes)
                 for x, at, own in zip(leaves, one.gathered, how.own, strict=True)]  # fmt: skip
        tensors = [t for t in one.tensors(local, training.reduction, gathers) if t is not None]
        found += [(b, tuple(tensors[i].path for i in b.members)) for b in buckets(tensors, training.fusion)]
    return tuple(found)


def _local_shape(x: Any, at: At, own: bool, sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    shape = list(x.shape)
    if at is not None:
        shape[at[0]] //= math.prod(sizes[a] for a in at[1])
    return jax.ShapeDtypeStruct(shape[1:] if own else shape, x.dtype)


def _beside(spec: Spec, data: Sequence[str]) -> PartitionSpec:
    """A layout without the axes that cut the batch."""
    return PartitionSpec(*(tuple(a for a in axes if a not in data) or None for axes in spec))


def _added(before: Spec, after: Spec) -> At:
    """The dim that `after` cuts further, and by which axes."""
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if a != b:
            return i, b[len(a) :]
    return None

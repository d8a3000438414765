"""Parameters in flat buffers, one for each stage, so that a device holds the parameters of its own stages only.

Stages hold different parameters, but an array of one program has a shard on every device. So the leaves of a stage are
concatenated, by dtype, into a buffer as long as the longest stage's, and the buffers are sharded over the stages. A leaf
that several stages read (a tied weight) stays outside the buffers and is replicated.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

ALIGNMENT = 128
"""Buffers are padded to a multiple of this many elements, so that they can be sharded further."""

SHARDED = "_sharded"
"""Ends the name of buffers whose leaves are sharded over the tensor axis."""


@dataclasses.dataclass(frozen=True)
class LeafSlot:
    """The place of a parameter: in its stage's buffer from element `start` on, or outside (`stage` is -1)."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    stage: int = -1
    start: int = 0
    sharded_dim: int = -1
    """The dimension that is sharded over the tensor axis; -1 for none."""

    @property
    def buffer(self) -> str:
        """The name of its buffer."""
        return self.dtype if self.sharded_dim < 0 else self.dtype + SHARDED


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The slot of every parameter.

    `devices` stages run at a time, each device holds `chunks` of them, and `shards` is the number of tensor shards;
    `lengths` gives the elements of each buffer (of one tensor shard, where sharded).
    """

    treedef: Any
    slots: tuple[LeafSlot, ...]
    devices: int
    chunks: int
    shards: int
    lengths: tuple[tuple[str, int], ...]

    def of_stage(self, stage: int) -> list[int]:
        """The leaves in a stage's buffers; for -1 those outside."""
        return [i for i, slot in enumerate(self.slots) if slot.stage == stage]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Eight letters that differ between layouts which place leaves differently."""
        return hashlib.sha256(repr((self.slots, self.devices, self.chunks, self.shards)).encode()).hexdigest()[:8]


@tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class PackedParameters:
    """Parameters in flat buffers, a pytree; `Pipeline.pack` makes it.

    Attributes:
      buffers: by dtype, arrays of shape [devices, chunks, elements], or [devices, chunks, tensor shards, elements] under
        the name "..._sharded".
      shared: by path, the parameters that several stages read, and integers and random keys.
      layout: the place of every parameter.
    """

    buffers: Mapping[str, Any]
    shared: Mapping[str, Any]
    layout: FlatLayout

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children with their keys; the layout's fingerprint in the path lets a checkpoint detect another layout."""
        keys = tree_util.GetAttrKey(f"buffers_{self.layout.fingerprint}"), tree_util.GetAttrKey("shared")
        return tuple(zip(keys, (dict(self.buffers), dict(self.shared)), strict=True)), self.layout

    @classmethod
    def tree_unflatten(cls, layout: FlatLayout, children: Any) -> PackedParameters:
        """The inverse of `tree_flatten_with_keys`."""
        buffers, shared = children
        return cls(buffers, shared, layout)


def flat_layout(
    params: Any, paths: Sequence[str], stages: Sequence[int], dims: Sequence[int], devices: int, chunks: int, shards: int,
) -> FlatLayout:  # fmt: skip
    """Give every parameter a slot.

    Args:
      params: a pytree of arrays or shapes.
      paths: its leaves' paths.
      stages: for each leaf its stage; -1 for outside the buffers.
      dims: for each leaf the dimension with `shards` tensor shards, -1 for none.
      devices: as in `FlatLayout`.
      chunks: as in `FlatLayout`.
      shards: as in `FlatLayout`.
    """
    leaves, treedef = tree_util.tree_flatten(params)
    ends: dict[tuple[int, str], int] = {}
    slots = []
    for path, leaf, stage, dim in zip(paths, leaves, stages, dims, strict=True):
        stage = stage if jnp.issubdtype(leaf.dtype, jnp.inexact) else -1  # integers and random keys are shared
        slot = LeafSlot(path, tuple(leaf.shape), str(leaf.dtype), stage, 0, dim if shards > 1 else -1)
        if stage >= 0:
            start = ends.get((stage, slot.buffer), 0)
            ends[stage, slot.buffer] = start + _elements(slot, shards)
            slot = dataclasses.replace(slot, start=start)
        slots.append(slot)
    lengths: dict[str, int] = {}
    for (_, buffer), end in ends.items():
        lengths[buffer] = max(lengths.get(buffer, 0), -(-end // ALIGNMENT) * ALIGNMENT)
    return FlatLayout(treedef, tuple(slots), devices, chunks, shards, tuple(sorted(lengths.items())))


def pack(layout: FlatLayout, params: Any) -> PackedParameters:
    """Parameters in flat buffers."""
    leaves = layout.treedef.flatten_up_to(params)
    stages = layout.devices * layout.chunks
    each = [stage_buffers(layout, stage, [leaves[i] for i in layout.of_stage(stage)]) for stage in range(stages)]
    buffers = {}
    for name, _ in layout.lengths:
        stacked = jnp.stack([stage[name] for stage in each])  # stage = chunk * devices + device
        buffers[name] = jnp.swapaxes(stacked.reshape(layout.chunks, layout.devices, *stacked.shape[1:]), 0, 1)
    return PackedParameters(buffers, {layout.slots[i].path: leaves[i] for i in layout.of_stage(-1)}, layout)


def unpack(packed: PackedParameters) -> Any:
    """The inverse of `pack`."""
    layout = packed.layout
    leaves = {i: packed.shared[layout.slots[i].path] for i in layout.of_stage(-1)}
    for stage in range(layout.devices * layout.chunks):
        buffers = {k: x[stage % layout.devices, stage // layout.devices] for k, x in packed.buffers.items()}
        leaves |= zip(layout.of_stage(stage), stage_leaves(layout, stage, buffers), strict=True)
    return tree_util.tree_unflatten(layout.treedef, [leaves[i] for i in range(len(leaves))])


def stage_buffers(
    layout: FlatLayout, stage: int, leaves: Sequence[Any], dtype: Callable[[Any], Any] = lambda d: d
) -> dict[str, Any]:
    """The leaves of a stage, concatenated by buffer and cast by `dtype`."""
    buffers = {}
    slots = [layout.slots[i] for i in layout.of_stage(stage)]
    for name, length in layout.lengths:
        kept = dtype(jnp.dtype(name.removesuffix(SHARDED)))
        flat = [_flat(s, x, layout.shards).astype(kept) for s, x in zip(slots, leaves, strict=True) if s.buffer == name]
        lead = (layout.shards,) if name.endswith(SHARDED) else ()
        flat.append(jnp.zeros((*lead, length - sum(x.shape[-1] for x in flat)), kept))
        buffers[name] = jnp.concatenate(flat, -1)
    return buffers


def stage_leaves(layout: FlatLayout, stage: int, buffers: Mapping[str, Any]) -> list[Any]:
    """The inverse of `stage_buffers`."""
    slots = [layout.slots[i] for i in layout.of_stage(stage)]
    return [_unflat(slot, buffers[slot.buffer], layout.shards) for slot in slots]


def _elements(slot: LeafSlot, shards: int) -> int:
    return math.prod(slot.shape) // (shards if slot.sharded_dim >= 0 else 1)


def _flat(slot: LeafSlot, leaf: Any, shards: int) -> Any:
    d, shape = slot.sharded_dim, slot.shape
    if d < 0:
        return jnp.reshape(leaf, (-1,))
    split = jnp.reshape(leaf, (*shape[:d], shards, shape[d] // shards, *shape[d + 1 :]))
    return jnp.reshape(jnp.moveaxis(split, d, 0), (shards, -1))


def _unflat(slot: LeafSlot, buffer: Any, shards: int) -> Any:
    d, shape = slot.sharded_dim, slot.shape
    part = jax.lax.slice_in_dim(buffer, slot.start, slot.start + _elements(slot, shards), axis=buffer.ndim - 1)
    if d >= 0:
        part = jnp.moveaxis(jnp.reshape(part, (shards, *shape[:d], shape[d] // shards, *shape[d + 1 :])), 0, d)
    return jnp.reshape(part, shape)

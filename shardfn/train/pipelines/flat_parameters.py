"""Parameters as one row for each stage, so that a device holds those of its own stages and no others.

Stages differ in what they hold, and arrays of one program lie on all of its devices: so the leaves of a stage are laid end to
end, by dtype, in a row as long as the longest stage's, and the rows are cut over the devices. A leaf that several stages read
(a tied weight) stands beside the rows, once and whole.
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

ALIGNED = 128
"""Rows are padded to a multiple of this many elements, so that they can be cut further."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a leaf lies: in a row from an element on, or beside the rows (`stage` is -1)."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    stage: int = -1
    start: int = 0
    cut_dim: int = -1
    """The dim that is cut over the tensor axis; -1 for none."""

    @property
    def kind(self) -> str:
        """The name of the rows it lies in."""
        return self.dtype if self.cut_dim < 0 else f"{self.dtype}_cut"


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """Where every leaf of the parameters lies.

    `devices` is how many stages work at a time, `chunks` how many each device holds, `ways` over how many devices a
    stage's leaves are cut where they are; `lengths` the elements of a row (of each of its `ways` pieces), by kind.
    """

    treedef: Any
    places: tuple[Place, ...]
    devices: int
    chunks: int
    ways: int
    lengths: tuple[tuple[str, int], ...]

    def of_stage(self, stage: int) -> list[int]:
        """The leaves in a stage's row."""
        return [i for i, place in enumerate(self.places) if place.stage == stage]

    @functools.cached_property
    def mark(self) -> str:
        """Eight letters that differ for rows which hold other leaves, or hold them elsewhere."""
        return hashlib.sha256(repr((self.places, self.devices, self.chunks, self.ways)).encode()).hexdigest()[:8]

    @property
    def beside(self) -> list[int]:
        """The leaves beside the rows."""
        return self.of_stage(-1)


@tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class PackedParameters:
    """Parameters in rows: `rows` by kind, `shared` by path; a pytree.

    A row array has dims (devices, chunks, elements), or (devices, chunks, tensor ways, elements) where leaves are cut.
    """

    rows: Mapping[str, Any]
    shared: Mapping[str, Any]
    layout: FlatLayout

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Both maps are children; the layout is not, but rows have its mark in their path, by which a checkpoint knows them."""
        keys = tree_util.GetAttrKey(f"rows_{self.layout.mark}"), tree_util.GetAttrKey("shared")
        return tuple(zip(keys, (dict(self.rows), dict(self.shared)), strict=True)), self.layout

    @classmethod
    def tree_unflatten(cls, layout: FlatLayout, children: Any) -> PackedParameters:
        """The inverse."""
        rows, shared = children
        return cls(rows, shared, layout)


def layout_of(
    params: Any, paths: Sequence[str], homes: Sequence[int], cuts: Sequence[int], devices: int, chunks: int, ways: int
) -> FlatLayout:
    """Lay out parameters.

    Args:
      params: a pytree of arrays or shapes.
      paths: its leaves' names.
      homes: for each leaf the stage whose row it lies in; -1 for beside them.
      cuts: for each leaf the dim that is cut `ways` ways, -1 for none.
    """
    leaves, treedef = tree_util.tree_flatten(params)
    ends: dict[tuple[int, str], int] = {}
    places = []
    for path, leaf, home, cut in zip(paths, leaves, homes, cuts, strict=True):
        home = home if jnp.issubdtype(leaf.dtype, jnp.inexact) else -1  # numbers and keys of all kinds lie beside
        place = Place(path, tuple(leaf.shape), str(leaf.dtype), home, 0, cut if ways > 1 else -1)
        if home >= 0:
            key = home, place.kind
            start = ends.get(key, 0)
            ends[key] = start + math.prod(place.shape) // (ways if place.cut_dim >= 0 else 1)
            place = dataclasses.replace(place, start=start)
        places.append(place)
    lengths: dict[str, int] = {}
    for (_, kind), end in ends.items():
        lengths[kind] = max(lengths.get(kind, 0), -(-end // ALIGNED) * ALIGNED)
    return FlatLayout(treedef, tuple(places), devices, chunks, ways, tuple(sorted(lengths.items())))


def pack(layout: FlatLayout, params: Any) -> PackedParameters:
    """Parameters in rows."""
    leaves = layout.treedef.flatten_up_to(params)
    stages = layout.devices * layout.chunks
    each = [row_of(layout, stage, [leaves[i] for i in layout.of_stage(stage)]) for stage in range(stages)]
    rows = {}
    for kind, _ in layout.lengths:
        stacked = jnp.stack([row[kind] for row in each])  # stage = chunk * devices + device
        rows[kind] = jnp.swapaxes(stacked.reshape(layout.chunks, layout.devices, *stacked.shape[1:]), 0, 1)
    return PackedParameters(rows, {layout.places[i].path: leaves[i] for i in layout.beside}, layout)


def unpack(packed: PackedParameters) -> Any:
    """The inverse of `pack`."""
    layout = packed.layout
    leaves: list[Any] = [None] * len(layout.places)
    for i in layout.beside:
        leaves[i] = packed.shared[layout.places[i].path]
    for stage in range(layout.devices * layout.chunks):
        row = {k: rows[stage % layout.devices, stage // layout.devices] for k, rows in packed.rows.items()}
        for i, leaf in zip(layout.of_stage(stage), leaves_of(layout, stage, row), strict=True):
            leaves[i] = leaf
    return tree_util.tree_unflatten(layout.treedef, leaves)


def row_of(
    layout: FlatLayout, stage: int, leaves: Sequence[Any], dtype: Callable[[Any], Any] = lambda d: d
) -> dict[str, Any]:
    """The leaves of a stage end to end, by kind."""
    row = {}
    places = [layout.places[i] for i in layout.of_stage(stage)]
    for kind, length in layout.lengths:
        mine = [(p, x) for p, x in zip(places, leaves, strict=True) if p.kind == kind]
        kept = dtype(jnp.dtype(kind.removesuffix("_cut")))
        lead = (layout.ways,) if kind.endswith("_cut") else ()
        flat = [_flat(p, x, layout.ways).astype(kept) for p, x in mine]
        filled = sum(x.shape[-1] for x in flat)
        flat.append(jnp.zeros((*lead, length - filled), kept))
        row[kind] = jnp.concatenate(flat, -1)
    return row


def leaves_of(layout: FlatLayout, stage: int, row: Mapping[str, Any]) -> list[Any]:
    """The inverse of `row_of`."""
    return [_shaped(layout.places[i], row[layout.places[i].kind], layout.ways) for i in layout.of_stage(stage)]


def _flat(place: Place, leaf: Any, ways: int) -> Any:
    d = place.cut_dim
    if d < 0:
        return jnp.reshape(leaf, (-1,))
    shape = place.shape
    split = jnp.reshape(leaf, (*shape[:d], ways, shape[d] // ways, *shape[d + 1 :]))
    return jnp.reshape(jnp.moveaxis(split, d, 0), (ways, -1))


def _shaped(place: Place, row: Any, ways: int) -> Any:
    d, shape = place.cut_dim, place.shape
    size = math.prod(shape) // (ways if d >= 0 else 1)
    piece = jax.lax.slice_in_dim(row, place.start, place.start + size, axis=row.ndim - 1)
    if d < 0:
        return jnp.reshape(piece, shape)
    split = jnp.reshape(piece, (ways, *shape[:d], shape[d] // ways, *shape[d + 1 :]))
    return jnp.reshape(jnp.moveaxis(split, 0, d), shape)

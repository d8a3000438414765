"""A mesh as the label model sees it: axes with their links, and layouts, which give each axis the dimension that it shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from shardfn.cost.devices.chips import Chip, Hardware
from shardfn.cost.devices.links import Link, link_over, links
from shardfn.cost.platforms import backend_of
from shardfn.ir.model import Axes, Spec, mesh_sizes
from shardfn.partition.platforms import CollectiveRules, collective_rules
from shardfn.solver.labelling import Array


@dataclasses.dataclass(frozen=True)
class MeshModel:
    """The axes that labels refer to, the link of each, and the chip.

    `over_all`: the link of all axes together. `torus`: the dimensions of a torus, none elsewhere.
    """

    axes: Axes
    links: tuple[Link, ...]
    chip: Chip
    over_all: Link
    torus: tuple[int, ...] = ()

    @classmethod
    def on(cls, hardware: Hardware, axes: Axes) -> MeshModel:
        """The model of a mesh on the hardware."""
        over_all = link_over(hardware, axes, [name for name, _ in axes])
        return cls(axes, links(hardware, axes), hardware.chip, over_all, hardware.topology)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return mesh_sizes(self.axes)

    @property
    def rules(self) -> CollectiveRules:
        """How the chip's backend communicates."""
        return collective_rules(self.chip.platform)

    @property
    def max_reduced_gather_bytes(self) -> float:
        """Bytes of an array up to which a gather over all axes is an all-reduce."""
        return self.rules.max_reduced_gather_bytes(self.torus)

    def scatters_to(self, shape: Sequence[int], bits: int, made: Array, over: Array) -> Array:
        """Whether the compiler scatters a sum, for each label; else it all-reduces and slices.

        Args:
          shape: the result's.
          bits: those of one element.
          made: [labels, axes], the dimension of the result that each axis shards, -1 for none.
          over: [labels, axes], the axes over which it would scatter.
        """
        rules = self.rules
        if rules.scatters_shard is None or not shape:  # the same for all labels
            return np.full(len(made), rules.makes_reduce_scatters)
        counts = [shard_count(np.where(made == dim, 0, -1), self.sizes) for dim in range(len(shape))]
        shards = np.stack([-(-n // count) for n, count in zip(shape, counts, strict=True)], axis=1).astype(int).tolist()
        spans = np.where(over, self.sizes, 1).prod(axis=1) == math.prod(self.sizes)
        found = np.zeros(len(made), bool)
        for at in np.flatnonzero(over.any(axis=1)):
            dims = set(made[at, over[at]].tolist())
            found[at] = rules.scatters(tuple(shards[at]), dims, bits, bool(spans[at]), self.torus)
        return found

    @property
    def merges(self) -> Mapping[str, float]:
        """Kinds of collectives that the compiler merges, and the most bytes of a merged one."""
        return backend_of(self.chip.platform).combined_bytes

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names."""
        return tuple(name for name, _ in self.axes)


def shard_count(layouts: Array, sizes: tuple[int, ...]) -> Array:
    """The number of shards of each layout [labels, axes]: the product of the axes that shard a dimension.

    >>> shard_count(np.array([[-1, 0], [1, 0]]), (4, 2)).tolist()
    [2.0, 8.0]
    """
    return np.prod(np.where(layouts >= 0, np.array(sizes, float), 1.0), axis=-1)


def label_of_spec(spec: Spec, names: Sequence[str]) -> list[int]:
    """A sharding as the dimension that each axis shards, -1 for none.

    >>> label_of_spec((("b",), (), ("a",)), ("a", "b", "c"))
    [2, 0, -1]
    """
    where = {axis: dim for dim, axes in enumerate(spec) for axis in axes}
    return [where.get(name, -1) for name in names]


def spec_of_label(row: Sequence[int], rank: int, names: Sequence[str]) -> Spec:
    """The inverse of `label_of_spec`.

    >>> spec_of_label([2, 0, -1], 3, ("a", "b", "c"))
    (('b',), (), ('a',))
    """
    return tuple(tuple(n for n, d in zip(names, row, strict=True) if d == dim) for dim in range(rank))

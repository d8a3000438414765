"""The cost of reducing partial sums over mesh axes, as XLA does it.

Bytes are what one device sends; seconds are bytes over each axis's own link plus its latency. Sums take the inner axes first,
while the shards are large: outer links are slower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from shardfn.search.labels.mesh_model import MeshModel
from shardfn.solver.labelling import Array


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """The partial sums of an op under each of its labels, by factor."""

    work: Array
    """[labels, axes], the factor that each axis shards for the work; -1 for none."""
    out: Array
    """The same for the result; an axis that is a sum for the work scatters it along this factor."""
    is_sum: Array
    """Where the work leaves partial sums."""
    apart: Sequence[int]
    """The factors that are summed over, in the order in which XLA reduces them. Only the last may be scattered."""
    in_turn: bool
    """Where the result is scattered: whether XLA reduces each axis by itself, whichever factor it shards. Otherwise it
    all-reduces or scatters each sum over all its axes at once."""
    is_last: bool
    """Whether no matmul depends on the sums, so that XLA merges their collectives with those of other ops."""

    def cost(self, partial: Array, scatters: Array, mesh: MeshModel) -> tuple[Array, Array]:
        """Bytes sent and seconds, for each label: of `partial` bytes on one device, where the compiler `scatters` or not."""
        sent, seconds = np.zeros(len(partial)), np.zeros(len(partial))
        sliced = (self.out >= 0) & ~_inside(self.work, self.out)
        at_once = (self.in_turn & sliced & self.is_sum).any(axis=1, keepdims=True)
        masks = [self.is_sum & at_once, *(self.is_sum & ~at_once & (self.work == factor) for factor in self.apart)]
        for at, mask in enumerate(masks):
            before = [(other & (self.out >= 0)).any(axis=1) for other in masks[:at]]
            after = [other.any(axis=1) for other in masks[at + 1 :]]
            is_alone = ~np.any([*before, *after, np.zeros(len(partial), bool)], axis=0)
            scattered = mask & sliced & is_alone[:, None]
            is_mixed: Array = np.logical_and(scattered.any(axis=1), (mask & ~scattered).any(axis=1))
            is_spread = np.zeros(len(partial), bool)
            if self.in_turn:
                is_spread = _on_several(np.where(scattered, self.out, -1))
            else:
                scattered = scattered & ~is_mixed[:, None]
            is_sliced = is_mixed | is_spread | ~scatters
            parts = reduction_cost(partial, mask & ~scattered, scattered, mesh, self.is_last, is_sliced, is_spread)
            sent, seconds = sent + parts[0], seconds + parts[1]
        return sent, seconds


def reduction_cost(
    local_bytes: Array, reduced: Array, scattered: Array, mesh: MeshModel, together: bool, slice_after: Array, slice_last: Array
) -> tuple[Array, Array]:  # fmt: skip
    """Bytes sent and seconds to reduce partial sums: reduce-scatters first, then all-reduces of what is left.

    Args:
      local_bytes: [labels], of the partial result on one device.
      reduced: [labels, axes], the axes over which every device gets the sum.
      scattered: [labels, axes], the axes over which each device gets its shard of it.
      mesh: axes and links.
      together: whether XLA merges the collectives with others, so that each pays a part of a launch (`MeshModel.merges`).
      slice_after: [labels], where XLA all-reduces over `scattered` too, and slices.
      slice_last: [labels], where of these it slices only after the last axis.
    """
    left = np.array(local_bytes, float)
    sent, seconds = np.zeros_like(left), np.zeros_like(left)
    for mask, rate, kind in ((scattered, 1.0 + slice_after, "reduce-scatter"), (reduced, 2.0, "all-reduce")):
        most = mesh.merges.get(kind) if together else None
        for axis in reversed(range(len(mesh.sizes))):
            size, link, here = mesh.sizes[axis], mesh.links[axis], mask[:, axis]
            if not here.any():
                continue
            part = np.where(here, rate * (size - 1) / size * left, 0.0)
            sent += part
            seconds += part / link.bytes_s
            less = np.where(here & ~slice_last, left / size, left)
            result = less if mask is scattered else left
            launches = 1.0 if most is None else np.minimum(1.0, result / most)
            seconds += np.where(here, link.latency_s * launches, 0.0)
            left = less
    return sent, seconds


def _inside(work: Array, out: Array) -> Array:
    """Where a sum would be scattered along a factor that a later axis shards for the work: the shards would nest the other way
    round than in the layout, so XLA all-reduces.

    >>> _inside(np.array([[2, 0], [0, 2]]), np.array([[0, 0], [0, 0]])).tolist()
    [[True, False], [False, False]]
    """
    later = [(work[:, at + 1 :] == out[:, at : at + 1]).any(axis=1) for at in range(work.shape[1])]
    return np.stack(later, axis=1) & (work != out)


def _on_several(factors: Array) -> Array:
    """Whether the axes of each row are on more than one factor; -1 is none.

    >>> _on_several(np.array([[2, -1], [2, 2], [2, 0]])).tolist()
    [False, False, True]
    """
    high = factors.max(axis=1, initial=-1)
    return ((factors >= 0) & (factors < high[:, None])).any(axis=1)

"""What it costs to add up partial sums on the axes of a grid, as XLA does it.

Bytes are what one device sends; seconds are bytes over each axis's own link plus its latency. Sums take the inner axes
first, while the pieces are large: outer links are the slower ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from shardfn.search.resharding_costs import Array, MeshModel


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """The partial sums of an op, for each of its labels: how it is cut for the work and how its result lies, by factor."""

    work: Array
    """[labels, axes], the factor that each axis cuts for the work; -1 for none."""
    out: Array
    """The same of the result; a sum is left in pieces along the factor where that axis is a sum for the work."""
    is_sum: Array
    """Where the work leaves partial sums."""
    apart: Sequence[int]
    """Factors whose sums are added up one after the other, of which only the last may be left in pieces; if there are none,
    all are at once."""
    in_turn: bool
    """Whether each axis is added up by itself; else all of a sum is, or each device gets its part of it."""
    is_last: bool
    """Whether nothing waits for it, so that the collectives of several ops are one."""

    def cost(self, partial: Array, grid: MeshModel) -> tuple[Array, Array]:
        """Bytes sent and seconds; `partial` are the bytes of the partial result on one device, for each label."""
        sent, seconds = np.zeros(len(partial)), np.zeros(len(partial))
        sliced = (self.out >= 0) & ~_inside(self.work, self.out)
        masks = [self.is_sum & (self.work == factor) for factor in self.apart] or [self.is_sum]
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
            is_cut = is_mixed | is_spread | (not grid.scatters)
            parts = add_up(partial, mask & ~scattered, scattered, grid, self.is_last, is_cut, is_spread)
            sent, seconds = sent + parts[0], seconds + parts[1]
        return sent, seconds


def add_up(
    local_bytes: Array, reduced: Array, scattered: Array, grid: MeshModel, together: bool, cut_after: Array, cut_last: Array
) -> tuple[Array, Array]:  # fmt: skip
    """Bytes sent and seconds to add up partial sums: reduce-scatters first, then all-reduces of what is left.

    Args:
      local_bytes: [labels], of the partial result on one device.
      reduced: [labels, axes], the axes over which everyone gets the sum.
      scattered: [labels, axes], those over which each gets its part of it.
      together: the collectives are parts of larger ones, as XLA merges those that do not wait for each other: each has as much
        of a launch as it has of the bytes of a full one (`MeshModel.merges`).
      cut_after: [labels], where everyone gets the sum over `scattered` too, and cuts its part from that.
      cut_last: [labels], where of these everyone keeps all of it until the last axis is added up.
    """
    left = np.array(local_bytes, float)
    if grid.never_scatters_over:
        cut_after = cut_after | scattered[:, np.array(grid.sizes) > 1].all(axis=1)
    sent, seconds = np.zeros_like(left), np.zeros_like(left)
    for mask, rate, kind in ((scattered, 1.0 + cut_after, "reduce-scatter"), (reduced, 2.0, "all-reduce")):
        most = grid.merges.get(kind) if together else None
        for axis in reversed(range(len(grid.sizes))):
            size, link, here = grid.sizes[axis], grid.links[axis], mask[:, axis]
            if not here.any():
                continue
            part = np.where(here, rate * (size - 1) / size * left, 0.0)
            sent += part
            seconds += part / link.bytes_s
            less = np.where(here & ~cut_last, left / size, left)
            result = less if mask is scattered else left
            launches = 1.0 if most is None else np.minimum(1.0, result / most)
            seconds += np.where(here, link.latency_s * launches, 0.0)
            left = less
    return sent, seconds


def _inside(work: Array, out: Array) -> Array:
    """Where a sum would be left in pieces along a factor that a later axis cuts for the work: its pieces would lie inside
    those of that axis, the other way round than in the layout, so that all of the sum goes to everyone.

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

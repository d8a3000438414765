"""What it costs to change the layout of a value, and to add up partial sums, on the axes of a grid.

Bytes are what one device sends; seconds are bytes over each axis's own link plus its latency. Gathers take the outer
axes first, while the pieces are small, and reductions the inner axes first: outer links are the slower ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from shardfn.cost.hardware import Chip, Hardware, Link, links
from shardfn.graph.model import Pin, Spec

Array = np.ndarray
Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """The axes that labels speak of, one link each, and the chip that prices the work.

    `scatters` says whether the compiler makes reduce-scatters; XLA on CPU keeps an all-reduce and a slice. `narrows`:
    whether `f32` is gathered for a product as `bf16`, in which the product reads it.
    """

    axes: Axes
    links: tuple[Link, ...]
    chip: Chip
    scatters: bool = True
    narrows: bool = False

    @classmethod
    def on(cls, hardware: Hardware, axes: Axes) -> Grid:
        """The grid of these axes on the hardware."""
        platform = hardware.platform
        return cls(axes, links(hardware, axes), hardware.chip, platform != "cpu", platform == "tpu")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names."""
        return tuple(name for name, _ in self.axes)


def pieces(layouts: Array, sizes: tuple[int, ...]) -> Array:
    """How many pieces each layout makes: the product of the axes that cut something.

    >>> pieces(np.array([[-1, 0], [1, 0]]), (4, 2)).tolist()
    [2.0, 8.0]
    """
    return np.prod(np.where(layouts >= 0, np.array(sizes, float), 1.0), axis=-1)


def change(before: Array, after: Array, full_bytes: float, grid: Grid, share: float = 1.0) -> tuple[Array, Array]:
    """Bytes sent and seconds to change the layout of a value, for all pairs: [before, after].

    Slices come first (free), then all-to-alls, then all-gathers from the piece that is left. Where a major axis leaves a
    dim, the minor ones on it are gathered too and sliced again; where one comes, the pieces change places.

    Args:
      before: [labels, axes] of the dim that each axis cuts, -1 for none.
      after: the same, wanted.
      full_bytes: of the whole value.
      share: how much of its bytes travels in gathers, 0 to 1.
    """
    b, a = before[:, None, :], after[None, :, :]
    piece = full_bytes / np.prod(np.where((b >= 0) | (a >= 0), np.array(grid.sizes, float), 1.0), axis=-1)
    swapped = (b >= 0) & (a >= 0) & (a != b)
    gathered = (b >= 0) & (a < 0)
    kept = (b >= 0) & (a == b)
    turned = np.zeros(piece.shape, bool)
    for minor in range(1, len(grid.sizes)):
        for major in range(minor):
            left = (b[..., major] == b[..., minor]) & (a[..., major] != b[..., major])
            came = (a[..., major] == b[..., minor]) & (b[..., major] != a[..., major])
            gathered[..., minor] |= kept[..., minor] & left
            turned |= kept[..., minor] & came
    sent, seconds = np.zeros_like(piece), np.zeros_like(piece)
    for axis, (size, link) in enumerate(zip(grid.sizes, grid.links, strict=True)):
        part = np.where(swapped[..., axis], (size - 1) / size * piece, 0.0)
        sent += part
        seconds += part / link.exchange_bytes_s + np.where(swapped[..., axis], link.latency_s, 0.0)
    slowest = min(grid.links, key=lambda link: link.exchange_bytes_s, default=None)
    if slowest is not None and turned.any():
        sent += np.where(turned, piece, 0.0)
        seconds += np.where(turned, piece / slowest.exchange_bytes_s + slowest.latency_s, 0.0)
    for axis, (size, link) in enumerate(zip(grid.sizes, grid.links, strict=True)):
        part = np.where(gathered[..., axis], (size - 1) * piece, 0.0)
        sent += share * part
        seconds += share * part / link.bytes_s + np.where(gathered[..., axis], link.latency_s, 0.0)
        piece = piece + part
    return sent, seconds


def add_up(
    local_bytes: Array, reduced: Array, scattered: Array, grid: Grid, together: bool = False
) -> tuple[Array, Array]:
    """Bytes sent and seconds to add up partial sums: reduce-scatters first, then all-reduces of what is left.

    Args:
      local_bytes: [labels], of the partial result on one device.
      reduced: [labels, axes], the axes over which everyone gets the sum.
      scattered: [labels, axes], those over which each gets its part of it.
      together: the all-reduce is one with others, as XLA merges those that do not wait for each other: no latency.
    """
    left = np.array(local_bytes, float)
    sent, seconds = np.zeros_like(left), np.zeros_like(left)
    for mask, times in ((scattered, 1), (reduced, 2)):
        for axis in reversed(range(len(grid.sizes))):
            size, link, here = grid.sizes[axis], grid.links[axis], mask[:, axis]
            if not here.any():
                continue
            part = np.where(here, times * (size - 1) / size * left, 0.0)
            sent += part
            seconds += part / link.bytes_s
            if times == 1 or not together:
                seconds += np.where(here, link.latency_s, 0.0)
            left = np.where(here, left / size, left)
    return sent, seconds


def merged(axes: Axes, specs: Sequence[Spec], pins: Mapping[int, Pin]) -> tuple[Axes, list[Spec], dict[int, Pin]]:
    """Neighbouring axes that always cut together, in order, as one.

    >>> merged((("a", 2), ("b", 2)), [(("a", "b"), ())], {})[:2]
    ((('a', 4),), [(('a',), ())])
    """
    every = [*specs, *(s for pin in pins.values() for s in (*pin.operands, *pin.results) if s is not None)]
    dims = {dim for spec in every for dim in spec}
    groups: list[list[tuple[str, int]]] = []
    for axis in axes:
        last = groups[-1][-1][0] if groups else ""
        if groups and all((last in dim) == (axis[0] in dim) and
                          (last not in dim or dim.index(axis[0]) == dim.index(last) + 1) for dim in dims):  # fmt: skip
            groups[-1].append(axis)
        else:
            groups.append([axis])
    names = [chr(ord("a") + i) for i in range(len(groups))]
    first = {group[0][0]: name for group, name in zip(groups, names, strict=True)}

    def renamed(spec: Spec) -> Spec:
        return tuple(tuple(first[a] for a in dim if a in first) for dim in spec)

    sizes = tuple((name, math.prod(size for _, size in group)) for group, name in zip(groups, names, strict=True))
    held = {i: Pin(tuple(s if s is None else renamed(s) for s in p.operands),
                   tuple(s if s is None else renamed(s) for s in p.results)) for i, p in pins.items()}  # fmt: skip
    return sizes, [renamed(spec) for spec in specs], held

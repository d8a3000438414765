"""What a group of devices communicates over: torus rings, a switch, or the network between nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from shardfn.cost.devices.chips import Hardware
from shardfn.ir.model import axis_part


@dataclasses.dataclass(frozen=True)
class Link:
    """How fast a group of devices communicates, for each of them while all do so.

    Seconds of a collective: bytes that one device sends (`cost.collectives.bytes_sent`) over the rate, plus latency.
    """

    name: str
    bytes_s: float
    """Sent by one device in a ring's collectives: all-gather, reduce-scatter, all-reduce."""
    latency_s: float
    """An empty collective."""
    exchange_bytes_s: float
    """The same for all-to-all and collective-permute, which reach beyond the neighbours."""

    def seconds(self, kind: str, sent: float) -> float:
        """Seconds of one collective of a kind (`cost.collectives.COLLECTIVE_KINDS`) in which one device sends `sent` bytes."""
        rate = self.exchange_bytes_s if kind in ("all-to-all", "collective-permute") else self.bytes_s
        return sent / rate + self.latency_s


def links(hardware: Hardware, axes: Sequence[tuple[str, int]]) -> tuple[Link, ...]:
    """One link for each mesh axis.

    Args:
      hardware: devices in row-major order: those of a node follow each other; on a torus its last dimension is fastest.
      axes: (name, size) in row-major order, the last axis fastest.

    `link_over` has the formulas.

    >>> from shardfn.cost.devices.chips import CHIPS
    >>> [link.name for link in links(CHIPS["h100"].pod(64), (("data", 8), ("model", 8)))]
    ['network', 'switch']
    >>> [link.bytes_s / 1e9 for link in links(CHIPS["tpu-v5e"].pod("16x8"), (("data", 16), ("model", 8)))]
    [100.0, 50.0]
    """
    return tuple(link_over(hardware, axes, (name,)) for name, _ in axes)


def are_alike(several: Sequence[Link]) -> bool:
    """Whether links carry as much, so that it does not matter which axis of a mesh is the outer one.

    >>> from shardfn.cost.devices.chips import CHIPS
    >>> [are_alike(links(CHIPS["h100"].pod(n), (("a", 8), ("b", n // 8)))) for n in (16, 64)]
    [False, False]
    """
    return len({(link.bytes_s, link.exchange_bytes_s) for link in several}) == 1


def link_over(hardware: Hardware, axes: Sequence[tuple[str, int]], names: Iterable[str], size: int = 1) -> Link:
    """The link of groups that span several mesh axes.

    Args:
      hardware: as for `links`.
      axes: as for `links`.
      names: axes, or parts of them as Shardy writes them (`a:(2)4`).
      size: devices in a group where no axes are named: those that follow each other.

    Rates of `n` devices, `w` bytes per second over one link in one direction (Austin et al., "How to Scale Your
    Model", 2025, for the torus; Chan et al. 2007 for rings):

    * torus: a dim that closes to a ring gives `2w`, a line `w`, a part of a dim with stride `s` the `s`-th of it; dims
      add up. All-to-all crosses the middle of each dim: `n/4` times the bytes at that dim's rate, the slowest dim counts.
    * switch: `w`.
    * nodes with a network of `v` per device: a group with `k` members in each node has `k` cards, so rings run at the
      least of `w` and `k·v`; in an all-to-all `(n-k)/(n-1)` of the bytes leave by one's own card.
    """
    parts = tuple(p for p in _parts(axes, names) if p[1] > 1) or ((1, size),)
    if math.prod(n for _, n in parts) <= 1:
        return Link("none", math.inf, 0.0, math.inf)
    return _torus(hardware, parts) if hardware.topology else _switch(hardware, parts)


_Parts = tuple[tuple[int, int], ...]
"""(stride, size) in device numbers."""


def _parts(axes: Sequence[tuple[str, int]], names: Iterable[str]) -> Iterable[tuple[int, int]]:
    sizes = dict(axes)
    every = list(sizes)
    for name in names:
        axis, before, size = axis_part(name, sizes)
        if axis in sizes:  # devices along the axes after it, and along the rest of this one
            yield math.prod(map(sizes.__getitem__, every[every.index(axis) :])) // (before * size), size


def _switch(hardware: Hardware, parts: _Parts) -> Link:
    chip = hardware.chip
    count = math.prod(n for _, n in parts)
    inside = math.prod(min(n, max(1, chip.node // stride)) for stride, n in parts) if chip.node else count
    if inside >= count:
        name = "host" if chip.platform == "cpu" else "switch"
        return Link(name, chip.link_bytes_s, chip.latency_s, chip.link_bytes_s)
    own, net = chip.link_bytes_s, chip.network_bytes_s
    # NCCL's trees over the nodes: a further launch floor for each level.
    latency = chip.latency_s * (1 + math.ceil(math.log2(count / inside)))
    outside = (count - inside) / (count - 1)
    exchange = 1 / (outside / net + (1 - outside) / own)
    return Link("network" if inside == 1 else "switch and network", min(own, inside * net), latency, exchange)


def _torus(hardware: Hardware, parts: _Parts) -> Link:
    chip, dims = hardware.chip, hardware.topology
    full = len(dims) == chip.torus or chip.torus < 3
    closes = [d % chip.ring == 0 and d > 2 for d in dims]
    if chip.torus == 3:  # blocks of 4x4x4 are joined by optical switches, all at once
        closes = [full and all(d % chip.ring == 0 for d in dims)] * len(dims)
    rate = latency = slowest = 0.0
    names = []
    for dim, stride, n in _along(dims, parts):
        ring = closes[dim] and stride * n == dims[dim]
        mine = chip.link_bytes_s * (2 if ring else 1) / stride
        rate += mine
        slowest = max(slowest, max(1.0, n / 4) / mine)
        latency += chip.latency_s * (n // 2 if ring else n - 1) * stride
        names.append(f"{'ring' if ring else 'line'} of {n}" + (f", every {stride}" if stride > 1 else ""))
    return Link(" and ".join(names), rate, latency, 1 / slowest)


def _along(dims: tuple[int, ...], parts: _Parts) -> list[tuple[int, int, int]]:
    """The parts (torus dim, stride in it, size) that a group takes; a size that divides no dim is one line of its stride."""
    found: list[tuple[int, int, int]] = []
    for stride, size in sorted(parts):
        left, step = size, stride
        for dim in reversed(range(len(dims))):
            below = math.prod(dims[dim + 1 :])
            if left == 1 or step >= below * dims[dim]:
                continue
            inner = max(1, step // below)
            here = math.gcd(dims[dim] // inner, left)
            if here > 1:
                if found and found[-1][0] == dim and found[-1][1] * found[-1][2] == inner:
                    found[-1] = (dim, found[-1][1], found[-1][2] * here)
                else:
                    found.append((dim, inner, here))
                left //= here
                step = below * dims[dim]
        if left > 1:
            found.append((0, 1, left))
    return found

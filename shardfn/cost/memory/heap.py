"""The size of the block of memory in which XLA places all temporaries of a program: with the space between them.

XLA knows when each buffer is live, and gives each a place once. The largest first (or the longest-lived first, where that takes
less), each goes into the smallest gap in which it fits beside those that are live at the same time (best fit,
`GlobalDecreasingSizeBestFitHeap` in XLA). So a block can be larger than what is live at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from shardfn.cost.memory.live_ranges import LiveBuffer

LEFT_OUT = 1e-3
"""Small buffers, of so much of what is live at once together, count as if they lay in gaps: placing them takes time."""


def heap_bytes(buffers: Sequence[LiveBuffer], live: int) -> int:
    """The bytes of the block.

    Args:
      buffers: the temporaries.
      live: the most bytes of them that are live at once.

    >>> one, two, long = LiveBuffer((0,), 0, 1, 4), LiveBuffer((1,), 2, 3, 3), LiveBuffer((2,), 1, 2, 3)
    >>> heap_bytes([one, two, long], 7), heap_bytes([one, two, long, LiveBuffer((3,), 3, 4, 5)], 8)
    (7, 11)
    """
    by_size = sorted(buffers, key=lambda b: b.bytes)
    tail = itertools.accumulate(b.bytes for b in by_size)
    large = by_size[sum(total <= LEFT_OUT * live for total in tail) :]
    left_out = sum(b.bytes for b in by_size) - sum(b.bytes for b in large)
    found = _placed(large, lambda b: (-b.bytes, b.start - b.end))
    if found + left_out > live:
        found = min(found, _placed(large, lambda b: (b.start - b.end, -b.bytes)))
    return max(live, found)


def _placed(buffers: Sequence[LiveBuffer], order: Callable[[LiveBuffer], tuple[int, int]]) -> int:
    """The end of the block when buffers get their places in an order."""
    every = sorted(buffers, key=order)
    starts, ends, sizes = (np.array([getattr(b, name) for b in every]) for name in ("start", "end", "bytes"))
    places, top = np.zeros(len(every), np.int64), 0
    for n, size in enumerate(sizes.tolist()):
        beside = np.flatnonzero((starts[:n] <= ends[n]) & (ends[:n] >= starts[n]))
        if len(beside):
            beside = beside[np.argsort(places[beside], kind="stable")]
            after = np.maximum.accumulate(places[beside] + sizes[beside])
            gaps = places[beside] - np.append(0, after[:-1])
            fitting = np.flatnonzero(gaps >= size)
            best = fitting[np.argmin(gaps[fitting])] if len(fitting) else -1
            places[n] = after[-1] if best < 0 else after[best - 1] if best else 0
        top = max(top, int(places[n]) + size)
    return top

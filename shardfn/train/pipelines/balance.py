"""Contiguous splits of a chain of costs: minimise the largest part, then the bytes sent between parts."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np


def split_chain(costs: Sequence[float], parts: int, sent: Sequence[float] = (), slack: float = 0.0) -> list[int]:
    """Split a chain into parts of at least one link, by a dynamic program.

    Args:
      costs: of each link, not negative.
      parts: at most as many as links.
      sent: for each link what is sent if a part begins with it; zeros if left out.
      slack: how much larger than the least possible the largest part may be, as a fraction, to send less.

    Returns:
      For each part but the first, the link that it begins with. Among splits whose largest part is within `slack` of
      the least possible it sends the least.

    >>> split_chain([4, 1, 1, 1, 5], 3)
    [1, 4]
    >>> split_chain([1, 1, 1, 1, 1, 1], 2, sent=[9, 9, 9, 9, 1, 9], slack=0.4)
    [4]
    """
    n = len(costs)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    weights = np.zeros(n) if not len(sent) else np.asarray(sent, float)
    limit = least_largest(costs, parts) * (1 + slack) * (1 + 1e-12)
    best = np.where(total <= limit, 0.0, np.inf)  # best[j]: least sent with links 0..j-1 in the parts so far
    best[0] = np.inf
    came_from = np.zeros((parts, n + 1), int)
    for part in range(1, parts):
        now = np.full(n + 1, np.inf)
        for j in range(part + 1, n + 1):
            low = max(part, int(np.searchsorted(total, total[j] - limit)))  # the part is low..j-1 at most
            while total[j] - total[low] > limit:
                low += 1
            if low < j:
                options = best[low:j] + weights[low:j]
                i = low + int(np.argmin(options))
                now[j], came_from[part, j] = options[i - low], i
        best = now
    begins, j = [], n
    for part in range(parts - 1, 0, -1):
        j = int(came_from[part, j])
        begins.append(j)
    return begins[::-1]


def least_largest(costs: Sequence[float], parts: int) -> float:
    """The cost of the largest part in the best contiguous split into `parts` of at least one link each.

    >>> least_largest([1, 2, 3, 4], 2)
    6.0
    """
    n = len(costs)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    largest = total.copy()  # of links 0..j-1 in one part
    for part in range(1, parts):
        now = np.full(n + 1, np.inf)
        for j in range(part + 1, n + 1):
            # the largest part before grows with the boundary and the last part shrinks: the optimum is where they meet
            i = bisect.bisect_left(range(part, j), True, key=lambda i, j=j: largest[i] >= total[j] - total[i]) + part
            now[j] = min(max(largest[k], total[j] - total[k]) for k in (i - 1, i) if part <= k < j)
        largest = now
    return float(largest[n])

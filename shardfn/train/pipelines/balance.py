"""Contiguous cuts of a chain of costs: the largest piece as small as can be, then as little as can be sent between."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np


def balanced(costs: Sequence[float], pieces: int, sent: Sequence[float] = (), slack: float = 0.0) -> list[int]:
    """Where to cut a chain into pieces of at least one link: for each but the first, the link it begins with.

    A dynamic program. No cut has a smaller largest piece; of those whose largest piece is within `slack` of that,
    it is one that sends least.

    Args:
      costs: of each link, none negative.
      pieces: how many, as many as links at most.
      sent: for each link what is sent where a piece begins with it; nothing if left out.
      slack: a part of the least largest cost that may be given away for less sent.

    >>> balanced([4, 1, 1, 1, 5], 3)
    [1, 4]
    >>> balanced([1, 1, 1, 1, 1, 1], 2, sent=[9, 9, 9, 9, 1, 9], slack=0.4)
    [4]
    """
    n = len(costs)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    weights = np.zeros(n) if not len(sent) else np.asarray(sent, float)
    limit = least_largest(costs, pieces) * (1 + slack) * (1 + 1e-12)
    best = np.where(total <= limit, 0.0, np.inf)  # best[j]: least sent with links 0..j-1 in the pieces so far
    best[0] = np.inf
    came = np.zeros((pieces, n + 1), int)
    for piece in range(1, pieces):
        now = np.full(n + 1, np.inf)
        for j in range(piece + 1, n + 1):
            low = max(piece, int(np.searchsorted(total, total[j] - limit)))  # the piece is low..j-1 at most
            while total[j] - total[low] > limit:
                low += 1
            if low < j:
                options = best[low:j] + weights[low:j]
                i = low + int(np.argmin(options))
                now[j], came[piece, j] = options[i - low], i
        best = now
    cuts, j = [], n
    for piece in range(pieces - 1, 0, -1):
        j = int(came[piece, j])
        cuts.append(j)
    return cuts[::-1]


def least_largest(costs: Sequence[float], pieces: int) -> float:
    """The cost of the largest piece in the best contiguous cut into `pieces` of at least one link each.

    >>> least_largest([1, 2, 3, 4], 2)
    6.0
    """
    n = len(costs)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    largest = total.copy()  # of links 0..j-1 in one piece
    for piece in range(1, pieces):
        now = np.full(n + 1, np.inf)
        for j in range(piece + 1, n + 1):
            # what comes before grows with the cut, the last piece shrinks: the best cut is where they meet
            i = bisect.bisect_left(range(piece, j), True, key=lambda i, j=j: largest[i] >= total[j] - total[i]) + piece
            now[j] = min(max(largest[k], total[j] - total[k]) for k in (i - 1, i) if piece <= k < j)
        largest = now
    return float(largest[n])

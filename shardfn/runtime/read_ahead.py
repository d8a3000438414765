"""Reading ahead: what the next steps need is prepared in another thread while a step runs."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jax import tree_util


def read_ahead(prepare: Any, items: Iterable[Any], ahead: int) -> Iterator[Any]:
    """`map(prepare, items)`, with the next `ahead` items prepared in another thread.

    NumPy arrays in the items are copied, so that a generator may fill its arrays again.

    >>> list(read_ahead(abs, [-1, -2, -3], 1))
    [1, 2, 3]
    """
    items = iter(items)
    with concurrent.futures.ThreadPoolExecutor(1, "read-ahead") as pool:
        waiting: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
        for item in items:
            kept = tree_util.tree_map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, item)
            waiting.append(pool.submit(prepare, kept))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

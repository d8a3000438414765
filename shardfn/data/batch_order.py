"""The records of each batch, and the read-ahead of batches. The only user of Grain.

The order is over record numbers and equal on every process. Each process computes it and reads what its devices hold, so
that one number is the position in the data, for any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardfn.data.sources import PADDING
from shardfn.runtime.extras import need


def batch_rows(records: int, batch_size: int, *, seed: int | None, epochs: int | None, drop: bool) -> Any:
    """The record numbers of each batch, as a Grain dataset of int arrays of length `batch_size`.

    No batch spans two epochs. An incomplete batch is dropped with `drop`, else filled up with `PADDING`. With a `seed` each
    epoch has another order; `epochs` None never ends.

    >>> rows = batch_rows(5, 2, seed=None, epochs=1, drop=False)
    >>> [rows[i].tolist() for i in range(len(rows))]
    [[0, 1], [2, 3], [4, -1]]
    """
    rows = need("grain", "data").MapDataset.range(records)
    if seed is not None:
        rows = rows.seed(seed).shuffle()
    rows = rows.batch(batch_size, drop_remainder=drop)
    rows = rows.map(lambda found: np.pad(found, (0, batch_size - len(found)), constant_values=PADDING))
    return rows if epochs == 1 else rows.repeat(epochs)


def read_ahead(rows: Any, read: Callable[[np.ndarray], Any], batches: int) -> Any:
    """Grain's iterator over `read(rows[0])`, `read(rows[1])`, …, with `batches` read ahead by as many threads.

    Its `get_state` and `set_state` hold the number of the next batch.
    """
    options = need("grain", "data").ReadOptions(num_threads=batches, prefetch_buffer_size=batches)
    return iter(rows.map(read).to_iter_dataset(options))

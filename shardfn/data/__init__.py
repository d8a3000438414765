"""Batches and large images as global, sharded arrays; each process and device reads only its part.

| module | holds |
|---|---|
| `loader` | `load`: batches of a source; their order and read-ahead, with Grain |
| `shards` | `read`: one large array, window by window; `reads`: what that would read |
| `dataset_strategy` | `input_shardings`: the sharding of every array of a batch |
| `sources` | arrays and sequences of records as sources |

`load` needs the extra `data` (Grain); importing this package does not.
"""

from shardfn.data.dataset_strategy import input_shardings
from shardfn.data.loader import Batches, Loader, load
from shardfn.data.shards import read, reads
from shardfn.data.sources import Read

__all__ = ["Batches", "Loader", "Read", "input_shardings", "load", "read", "reads"]

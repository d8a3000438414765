"""Data on a grid: batches and large images as global arrays, of which each process and device reads only its part.

`load` needs the extra `data` (Grain); importing this does not.
"""

from shardfn.data.dataset_strategy import input_shardings
from shardfn.data.loader import Batches, Loader, load
from shardfn.data.shards import read, reads
from shardfn.data.sources import Read
from shardfn.data.tiff import Tiff

__all__ = ["Batches", "Loader", "Read", "Tiff", "input_shardings", "load", "read", "reads"]

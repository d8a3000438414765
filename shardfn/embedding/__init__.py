"""Embedding tables: split unevenly over devices, or larger than a device.

| module | holds |
|---|---|
| `split`, `layouts` | `UnevenRows`, `pack`, `unpack`; splits in layout files |
| `lookup`, `compare` | `lookup` without communication; what a split saves |
| `table` | `Table`: fetch, update, save, restore |
| `store`, `cache`, `devices` | rows on the host, in files, on devices; a device cache of hot rows; their sharding |
| `rowwise` | `sgd`, `adagrad`, `adam`, `lamb` of the rows of a batch |
| `saves` | incremental saves, in a database |
| `processes` | a table of several processes: each has a share of the rows |
| `checks` | what is wrong with options and ids |

`train.step` takes tables among its parameters. `shardfn.cluster.TableServers` keeps their rows on parameter servers.
"""

from shardfn.embedding.cache import CacheCounts
from shardfn.embedding.compare import Comparison, SplitCost, compare
from shardfn.embedding.layouts import splits_of, with_splits
from shardfn.embedding.lookup import Placement, lookup, placement
from shardfn.embedding.rowwise import RowOptimizer, adagrad, adam, lamb, sgd
from shardfn.embedding.split import UnevenRows, pack, unpack
from shardfn.embedding.table import Fetched, Table

__all__ = [
    "CacheCounts", "Comparison", "Fetched", "Placement", "RowOptimizer", "SplitCost", "Table", "UnevenRows", "adagrad",
    "adam", "compare", "lamb", "lookup", "pack", "placement", "sgd", "splits_of", "unpack", "with_splits",
]  # fmt: skip

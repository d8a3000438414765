"""Embedding tables: split unevenly over devices, or larger than a device."""

from shardfn.embedding.compare import Comparison, SplitCost, compare
from shardfn.embedding.layouts import splits_of, with_splits
from shardfn.embedding.lookup import lookup, placement
from shardfn.embedding.split import UnevenRows, pack, unpack

__all__ = [
    "Comparison",
    "SplitCost",
    "UnevenRows",
    "compare",
    "lookup",
    "pack",
    "placement",
    "splits_of",
    "unpack",
    "with_splits",
]

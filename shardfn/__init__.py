"""Shard any JAX function from integers: cuts become a mesh and PartitionSpecs, XLA does the rest, and you see it."""

import importlib
from typing import Any

from shardfn.api import explain, load_layout, plan, reshard, shard
from shardfn.cost.devices.chips import Chip
from shardfn.errors import ShardError
from shardfn.frontend.strategy import AUTO
from shardfn.planning.plan import Plan
from shardfn.planning.tags import tag
from shardfn.report.report import Report
from shardfn.runtime.sharded_function import ShardedFunction
from shardfn.search import register as register_search

__version__ = "0.1.0"

__all__ = [
    "AUTO",
    "Chip",
    "Plan",
    "Report",
    "ShardError",
    "ShardedFunction",
    "explain",
    "load_layout",
    "plan",
    "register_search",
    "reshard",
    "shard",
    "tag",
]

_PARTS = ("checkpoint", "data", "halo", "mindspore", "train")
"""Packages of the library that are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

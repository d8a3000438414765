"""Shard a JAX function by integers: the number of shards of each dimension of each argument."""

import importlib
from typing import Any

from shardfn.api import explain, load_layout, plan, reshard, shard
from shardfn.cost.devices.chips import Chip
from shardfn.errors import ShardError
from shardfn.frontend import missing_names
from shardfn.frontend.other_words import missing
from shardfn.frontend.strategy import AUTO, DATA_PARALLEL, REPLICATED
from shardfn.planning.inside import tag
from shardfn.planning.plan import Plan
from shardfn.report.layouts import compare
from shardfn.report.report import Report
from shardfn.runtime.sharded_function import ShardedFunction
from shardfn.search import register as register_search

__version__ = "0.1.0"

__all__ = [
    "AUTO",
    "DATA_PARALLEL",
    "REPLICATED",
    "Chip",
    "Plan",
    "Report",
    "ShardError",
    "ShardedFunction",
    "compare",
    "explain",
    "load_layout",
    "plan",
    "register_search",
    "reshard",
    "shard",
    "tag",
]

_PARTS = ("checkpoint", "cluster", "data", "draw", "embedding", "experts", "halo", "mindspore", "train")
"""Packages of the library that are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise missing(__name__, name, __dir__())


missing_names.install()


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS, "__version__"])

"""Shard any JAX function from integers: cuts become a mesh and PartitionSpecs, XLA does the rest, and you see it."""

import importlib
from typing import Any

from shardfn.api import explain, load_layout, plan, reshard, shard
from shardfn.cost.devices.chips import Chip
from shardfn.errors import ShardError
from shardfn.frontend.strategy import AUTO
from shardfn.mindspore.cell import Cell
from shardfn.mindspore.context import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    ParallelMode,
    auto_parallel,
    get_algo_parameters,
    get_auto_parallel_context,
    get_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    set_algo_parameters,
    set_auto_parallel_context,
    set_context,
)
from shardfn.mindspore.layout import Layout
from shardfn.planning.plan import Plan
from shardfn.planning.tags import tag
from shardfn.report.report import Report
from shardfn.runtime.sharded_function import ShardedFunction
from shardfn.search import register as register_search

__version__ = "0.1.0"

__all__ = [
    "AUTO",
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "Cell",
    "Chip",
    "Layout",
    "ParallelMode",
    "Plan",
    "Report",
    "ShardError",
    "ShardedFunction",
    "auto_parallel",
    "explain",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_context",
    "load_layout",
    "plan",
    "register_search",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "reshard",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_context",
    "shard",
    "tag",
]

_PARTS = ("checkpoint", "data", "halo", "mindspore", "train")
"""Packages of the library that are imported when they are first used."""

_LATER = {"infer_predict_layout": "mindspore.inference", "load_distributed_checkpoint": "mindspore.inference"}
"""Functions that come from one of them."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

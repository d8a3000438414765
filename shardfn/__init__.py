"""Shard any JAX function from integers: cuts become a mesh and PartitionSpecs, XLA does the rest, and you see it.

The modules beside the packages, by the road that a call takes:

- a call: `api`, then `sharded` (the callable), `program` (one kind of call) and `entry` (its plan), or `cell`; what is called and
  with what: `callee`, `call`, `ends`; what was asked: `options`, `optioncheck`, `wishes`, `amounts`, and of the context
  `context`, `context_keys`, `algo`
- what the user wrote of an array: `strategy`, `cuts`, `layout`, `given`, and `paths` that name arrays; layout files:
  `layoutfile`, `layouttext`, `layoutrules`, `layoutcheck`, `planfile`, `strategyfile`
- to a plan: `trace`, `place`, `make`, which asks `search` and spreads its choice by `flows`; ops held inside: `pins`, `tags`, put
  there by `rebind`, and where XLA is wrong by `guard`; the plan: `plan`, of `decisions` by `decided`, with what else was
  `priced`, and `study` for more questions; compiled beside others: `finalists`
- to a report: `report`, of `sections` and `tables`, shown by `render`; what is said of a plan: `findings`, `causes`,
  `unpredicted`; beside what XLA made: `targets`, `verify`, `comparison`
- run: `apply`, on `meshes`; what XLA made of it: `compiled` and `branches`, of `hlo`; windows over cut dims: `halo`
- the command line: `__main__`, `cli`, `cli_arguments`, `cli_checkpoint`, `demo`
- everywhere: `errors`, `extras`, `progress`
"""

import importlib
from typing import Any

from shardfn.api import explain, load, plan, reshard, shard
from shardfn.cell import Cell
from shardfn.context import (
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
from shardfn.cost.chips import Chip
from shardfn.errors import ShardError
from shardfn.layout import Layout
from shardfn.plan import Plan, diff
from shardfn.report import Report
from shardfn.search import register as register_search
from shardfn.sharded import ShardedFunction
from shardfn.strategy import AUTO
from shardfn.tags import tag

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
    "diff",
    "explain",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_context",
    "load",
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

_PARTS = ("checkpoint", "data", "halo", "train", "inference")
"""Packages of the library that are imported when they are first used."""

_LATER = {"infer_predict_layout": "inference", "load_distributed_checkpoint": "inference"}
"""Functions that come from one of them."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""For MindSpore users: `import shardfn.mindspore as ms` has MindSpore's names and order of arguments."""

from typing import Any

from shardfn.api import reshard
from shardfn.frontend.other_words import missing
from shardfn.mindspore.cell import Cell
from shardfn.mindspore.communication import get_group_size, get_rank, init
from shardfn.mindspore.context import (
    ParallelContext,
    auto_parallel,
    get_algo_parameters,
    get_auto_parallel_context,
    get_context,
    get_ps_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    reset_context,
    reset_ps_context,
    set_algo_parameters,
    set_auto_parallel_context,
    set_context,
    set_ps_context,
)
from shardfn.mindspore.context_keys import GRAPH_MODE, PYNATIVE_MODE, ParallelMode
from shardfn.mindspore.gather import EmbeddingLookup, Gather, SparseGatherV2, slice_strategies
from shardfn.mindspore.inference import PredictLayout, WeightLayout, infer_predict_layout, load_distributed_checkpoint
from shardfn.mindspore.layout import Layout
from shardfn.mindspore.names import IN_MODULE
from shardfn.mindspore.parallel import get_strategy, layout_of, shard
from shardfn.mindspore.parameter_server import parameter_server, ps_parameters
from shardfn.mindspore.rank_checkpoints import merge_sliced_parameter, rank_list_for_transform, transform_checkpoints

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "Cell",
    "EmbeddingLookup",
    "Gather",
    "Layout",
    "ParallelContext",
    "ParallelMode",
    "PredictLayout",
    "SparseGatherV2",
    "WeightLayout",
    "auto_parallel",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_context",
    "get_group_size",
    "get_ps_context",
    "get_rank",
    "get_strategy",
    "infer_predict_layout",
    "init",
    "layout_of",
    "load_distributed_checkpoint",
    "merge_sliced_parameter",
    "parameter_server",
    "ps_parameters",
    "rank_list_for_transform",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "reset_context",
    "reset_ps_context",
    "reshard",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_context",
    "set_ps_context",
    "shard",
    "slice_strategies",
    "transform_checkpoints",
]


def __getattr__(name: str) -> Any:
    if name in IN_MODULE:
        raise AttributeError(f"shardfn.mindspore has no {name}: the model is written in JAX; use {IN_MODULE[name]}")
    raise missing(__name__, name, __all__)


def __dir__() -> list[str]:
    return __all__

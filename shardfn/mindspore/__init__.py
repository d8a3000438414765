"""For MindSpore users: `import shardfn.mindspore as ms` has MindSpore's names and order of arguments.

The functions on checkpoints are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardfn.api import reshard
from shardfn.mindspore.cell import Cell
from shardfn.mindspore.context import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    ParallelContext,
    ParallelMode,
    auto_parallel,
    get_algo_parameters,
    get_auto_parallel_context,
    get_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    reset_context,
    set_algo_parameters,
    set_auto_parallel_context,
    set_context,
)
from shardfn.mindspore.layout import Layout
from shardfn.mindspore.parallel import get_strategy, layout_of, shard

if TYPE_CHECKING:
    from shardfn.mindspore.inference import (
        PredictLayout,
        WeightLayout,
        infer_predict_layout,
        load_distributed_checkpoint,
    )
    from shardfn.mindspore.rank_checkpoints import (
        merge_sliced_parameter,
        rank_list_for_transform,
        transform_checkpoints,
    )

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "Cell",
    "Layout",
    "ParallelContext",
    "ParallelMode",
    "PredictLayout",
    "WeightLayout",
    "auto_parallel",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_context",
    "get_strategy",
    "infer_predict_layout",
    "layout_of",
    "load_distributed_checkpoint",
    "merge_sliced_parameter",
    "rank_list_for_transform",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "reset_context",
    "reshard",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_context",
    "shard",
    "transform_checkpoints",
]

_LATER = {
    name: f"{__name__}.{module}"
    for module, names in {
        "inference": ("PredictLayout", "WeightLayout", "infer_predict_layout", "load_distributed_checkpoint"),
        "rank_checkpoints": ("merge_sliced_parameter", "rank_list_for_transform", "transform_checkpoints"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

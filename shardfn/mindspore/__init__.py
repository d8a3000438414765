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

_REPLACED = {
    "nn": "the layers of Flax or Equinox, or a `Cell` whose `construct` is written in jax.numpy",
    "ops": "jax.numpy and jax.lax",
    "mint": "jax.numpy and jax.lax",
    "numpy": "jax.numpy",
    "Parameter": "a jax.Array as an attribute of a `Cell`, or in a dict of parameters",
    "Tensor": "a jax.Array: jnp.asarray(x)",
    "dtype": "jax.numpy: jnp.float32, jnp.bfloat16",
    "AutoParallel": "cell.shard(...), or shardfn.train.step, which makes a training step",
    "PipelineCell": "shardfn.train.pipeline(net, micro_size)",
    "Pipeline": "shardfn.train.pipeline(net, micro_size)",
    "set_seed": "key = jax.random.key(1), passed on and split",
    "TrainOneStepCell": "shardfn.train.step(loss, optimizer)",
    "Model": "shardfn.train.step, which makes a training step",
    "dataset": "shardfn.data.load, or any iterator of arrays",
    "value_and_grad": "jax.value_and_grad, or shardfn.train.step",
    "grad": "jax.grad, or shardfn.train.step",
    "jit": "shardfn.shard, or jax.jit",
    "save_checkpoint": "shardfn.checkpoint.save",
    "load_checkpoint": "shardfn.checkpoint.restore; `load_distributed_checkpoint` reads MindSpore's files",
    "load_param_into_net": "shardfn.checkpoint.restore, with `like=` the state",
    "float32": "jnp.float32",
    "float16": "jnp.float16",
    "bfloat16": "jnp.bfloat16",
    "int32": "jnp.int32",
}
"""What takes the place of MindSpore's names: models are written in JAX."""


def __getattr__(name: str) -> Any:
    if name in _REPLACED:
        raise AttributeError(f"shardfn.mindspore has no {name}: the model is written in JAX; use {_REPLACED[name]}")
    raise missing(__name__, name, __all__)


def __dir__() -> list[str]:
    return __all__

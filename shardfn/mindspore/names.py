"""What takes the place of MindSpore's names: models are written in JAX."""

from __future__ import annotations

_LAYERS = ("Dense", "Conv1d", "Conv2d", "Embedding", "LayerNorm", "BatchNorm1d", "BatchNorm2d", "Dropout", "ReLU", "GELU",
           "Softmax", "Flatten", "MaxPool2d", "AvgPool2d")  # fmt: skip
_STEP = "shardfn.train.step, which makes a training step"
_SAVE = "shardfn.checkpoint.save(folder, state, step=i, keep=3)"
_HOOK = "`bprop` of a Cell, or jax.custom_vjp"
_COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "AlltoAll", "AllSwap", "NeighborExchange")

IN_MODULE = {
    "nn": "the layers of Flax or Equinox, or a `Cell` whose `construct` is written in jax.numpy",
    **dict.fromkeys(_LAYERS, "the layers of Flax or Equinox, or jax.numpy and jax.nn in a `Cell`"),
    **dict.fromkeys(("SequentialCell", "CellList"), "flax.nnx.Sequential, or a list of Cells in an attribute of a `Cell`"),
    **dict.fromkeys(("ops", "mint", "Primitive"), "jax.numpy and jax.lax"),
    **dict.fromkeys(("MatMul", "BatchMatMul"), "jnp.matmul; shard(jnp.matmul, ((2, 4), (4, 1))) gives it a strategy"),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), "jnp.mean and jnp.sum"),
    "numpy": "jax.numpy",
    "initializer": "jax.nn.initializers: normal()(key, shape)",
    "Parameter": "a jax.Array as an attribute of a `Cell`, or in a dict of parameters",
    "ParameterTuple": "cell.parameters_dict(), a dict of arrays by path",
    "Tensor": "a jax.Array: jnp.asarray(x)",
    "dtype": "jax.numpy: jnp.float32, jnp.bfloat16",
    **{name: f"jnp.{name}" for name in ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "bool_")},
    **dict.fromkeys(("MSELoss", "L1Loss"), "jnp.mean((p - y) ** 2), or optax's losses"),
    "SoftmaxCrossEntropyWithLogits": "optax.softmax_cross_entropy_with_integer_labels",
    **dict.fromkeys(("Adam", "AdamWeightDecay", "Lamb", "SGD"), "optax: optax.adam(lr), optax.adamw, optax.lamb, optax.sgd"),
    "Momentum": "optax.sgd(lr, momentum=0.9)",
    "cosine_decay_lr": "optax.cosine_decay_schedule",
    "clip_by_global_norm": "optax.clip_by_global_norm",
    "set_seed": "key = jax.random.key(1), passed on and split",
    "jit": "shardfn.shard, or jax.jit",
    "vmap": "jax.vmap",
    "value_and_grad": "jax.value_and_grad, or shardfn.train.step",
    **dict.fromkeys(("grad", "GradOperation"), "jax.grad, or shardfn.train.step"),
    "HookBackward": _HOOK,
    "InsertGradientOf": _HOOK,
    "recompute": "cell.recompute(), or shardfn.train.recompute(function)",
    "Model": _STEP,
    "train": "shardfn.train: train.step makes a training step",
    **dict.fromkeys(("TrainOneStepCell", "TrainOneStepWithLossScaleCell", "WithLossCell", "WithGradCell"), _STEP),
    "GradAccumulationCell": "micro_batches= of shardfn.train.step",
    "accumulate_n": "micro_batches= of shardfn.train.step",
    **dict.fromkeys(("DistributedGradReducer", "PipelineGradReducer"), "nothing: shardfn.train.step and XLA reduce gradients"),
    "parameter_broadcast": "shardfn.train.step(loss, optimizer, parameter_broadcast=True)",
    **dict.fromkeys(("amp", "auto_mixed_precision", "build_train_network"), "compute_dtype=jnp.bfloat16 of shardfn.train.step"),
    **dict.fromkeys(("LossMonitor", "TimeMonitor", "Callback"), "your loop: state, value = step(state, *batch)"),
    **dict.fromkeys(("ModelCheckpoint", "CheckpointConfig", "save_checkpoint"), _SAVE),
    "load_checkpoint": "shardfn.checkpoint.restore; `load_distributed_checkpoint` reads MindSpore's files",
    "load_param_into_net": "shardfn.checkpoint.restore, with `like=` the state",
    **dict.fromkeys(("convert_model", "export"), "jax.export, of a jax.jit of the function"),
    "dataset": "shardfn.data.load, or any iterator of arrays",
    "SlicePatches": "shardfn.data.load, with sharded rows and columns",
    "AutoParallel": "cell.shard(...), or shardfn.train.step, which makes a training step",
    **dict.fromkeys(("PipelineCell", "Pipeline", "MicroBatchInterleaved"), "shardfn.train.pipeline(net, micro_size)"),
    **dict.fromkeys(("set_op_strategy_config", "save_operator_strategy_file", "load_operator_strategy_file"),
                    'plan.save("plan.toml"), then shard(f, layout="plan.toml")'),
    **dict.fromkeys(("create_group", "destroy_group", *_COLLECTIVES),
                    "nothing, XLA inserts collectives; by hand jax.lax.psum and jax.lax.all_gather in jax.shard_map"),
    "set_device": 'shardfn.mindspore.set_context(device_target="CPU"), or device= of a call',
}  # fmt: skip
"""By what MindSpore's modules have."""

ON_CELLS = {
    **dict.fromkeys(("trainable_params", "get_parameters", "parameters_and_names"), "parameters_dict()"),
    "untrainable_params": "parameters_dict(), and frozen= of shardfn.train.step, which says what is not trained",
    "set_train": "an argument of `construct` that says whether it trains",
    "set_grad": "jax.grad or jax.value_and_grad",
    "to_float": "compute_dtype of shardfn.train.step",
    **dict.fromkeys(("cells", "name_cells", "cells_and_names"), "vars(cell)"),
    "insert_child_to_cell": "an attribute: cell.name = other",
    "update_parameters_name": "nothing: a parameter's path is its name",
    "set_comm_fusion": 'fusion={"<path of the cell>/*": 2} of shardfn.train.step',
    **dict.fromkeys(("register_backward_hook", "register_backward_pre_hook"), _HOOK),
    **dict.fromkeys(("register_forward_hook", "register_forward_pre_hook"), "code in `construct`"),
    "parameter_layout_dict": "shardfn.mindspore.layout_of(plan, path), or plan.inputs",
    "add_flags": "arguments of `construct`, or attributes",
    "set_inputs": "nothing: jax.jit and shard take the shapes of each call",
    "compile": "jax.jit(cell).lower(...).compile(), or cell.plan(...)",
}
"""By what MindSpore's cells have."""

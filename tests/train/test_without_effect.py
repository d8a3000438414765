"""What is asked of a step or of the context and does nothing is said once, with the reason; what acts says nothing."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import shardfn.mindspore as ms
from shardfn import AUTO, train
from shardfn.errors import ContextError

X, Y, W = jnp.ones((16, 8)), jnp.ones((16, 4)), jnp.ones((8, 4))
ONE = jax.devices()[:1]


def loss(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def said(make):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make()
    return [str(w.message) for w in told if "no effect" in str(w.message)]


def step(**options):
    context = options.pop("context", {})

    def make():
        with ms.auto_parallel(**context):
            stage = options.pop("stage", None)
            of = loss if stage is None else train.pipeline(loss, 2, pipeline_stages=1, auto_pipeline=True)
            made = train.step(of, optax.adam(1e-2), **options)
            made(made.init({"w": W}, X, Y), X, Y)

    return said(make)


LEVEL2 = {"gradient_accumulation_shard": True, "optimizer_level": "level2", "parallel_optimizer_threshold": 0}
DATA = {"mode": "data_parallel"}
CASES = {
    "parameter_broadcast": ({"parameter_broadcast": True}, "there is one process"),
    "accumulation without micro-batches": ({**DATA, "parallel_optimizer_config": LEVEL2}, "there is one micro-batch"),
    "accumulation at level 1": (
        {**DATA, "micro_batches": 2,
         "parallel_optimizer_config": {"gradient_accumulation_shard": True, "parallel_optimizer_threshold": 0}},
        "at optimizer_level \"level1\" gradients are not sharded",
    ),
    "accumulation on one device": (
        {"device": ONE, "micro_batches": 2, "parallel_optimizer_config": LEVEL2},
        "there is one device, which holds",
    ),
    "accumulation along some axes": (
        {"micro_batches": 2, "parallel_optimizer_config": LEVEL2, "in_strategy": ((4, 1), (4, 1)),
         "parameter_plan": {"w": (2, 1)}},
        "the batch is sharded over some of the mesh's axes only",
    ),
    "a threshold without optimizer parallel": (
        {"parallel_optimizer_config": {"parallel_optimizer_threshold": 1}, "enable_parallel_optimizer": False},
        "optimizer parallel is off",
    ),
    "gradient_fp32_sync": ({"gradient_fp32_sync": False}, "XLA inserts the sums of gradients"),
    "loss_repeated_mean": ({**DATA, "loss_repeated_mean": False}, "no two devices compute the same loss"),
    "fusion on one device": ({"device": ONE, "fusion": {"w": 1}}, "one device sends nothing"),
    "comm_fusion on CPU": (
        {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}}, "has no such option on cpu"),
    "cross_batch": ({**DATA, "cross_batch": True}, "each device works on its part of the batch anyway"),
    "stages of the context": ({"context": {"pipeline_stages": 2}}, "the loss of this step is no pipeline"),
    "dataset_strategy": (
        {**DATA, "context": {"dataset_strategy": ((4, 1), (4, 1))}}, "shards dimension 0 of the batch over all devices"),
    "sum of one loss": ({"device": ONE, "gradients_mean": False}, "no two devices share the batch"),
    "sum in a pipeline": ({"stage": 1, "gradients_mean": False}, "a pipeline returns one loss"),
    "float32 gradients": ({**DATA, "gradient_fp32_sync": False}, "no gradient has 16 bits"),
    "loss_repeated_mean of a sharded batch": (
        {"mode": "semi_auto_parallel", "loss_repeated_mean": False}, "no two devices compute the same loss"),
    "cross_batch of a batch that is not sharded": (
        {"cross_batch": True, "mode": "semi_auto_parallel", "in_strategy": ((1, 1), (1, 1)), "parameter_plan": {"w": (8, 1)}},
        "no mesh axis shards the batch"),
    "optimizer parallel of small arrays": ({**DATA, "enable_parallel_optimizer": True}, "at least 64 kB per device"),
    "optimizer parallel in one shard": (
        {**DATA, "parallel_optimizer_config": {"optimizer_weight_shard_size": 1, "parallel_optimizer_threshold": 0}},
        "no array that is replicated"),
    "level of data parallelism": ({**DATA, "level": "time"}, "mode 'data_parallel' has its own shardings"),
    "search_mode of the context": (
        {**DATA, "context": {"search_mode": "dynamic_programming"}}, "mode 'data_parallel' has its own shardings"),
    "level in a pipeline": ({"stage": 1, "level": 2}, "a pipeline has its own shardings"),
    "auto_pipeline of the context": ({"context": {"auto_pipeline": True}}, "the loss of this step is no pipeline"),
    "pinned_host": ({**DATA, "opt_state_memory_kind": "pinned_host"}, "host and device memory are the same"),
    "style of given shardings": (
        {"mode": "semi_auto_parallel", "style": "fsdp", "parameter_plan": {"w": (8, 1)}}, "others are replicated"),
    "reuse": ({"reuse": True}, "`reuse` has no effect"),
    "stages of a pipeline's data": (
        {"stage": 1, "context": {"dataset_strategy": ((4, 1), (4, 1))}}, "a pipeline shards dimension 0 of the batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_setting_without_effect_is_said_once(name):
    options, reason = CASES[name]
    (told,) = step(**options)
    assert reason in told


ACT = {
    "nothing": {},
    "accumulation": {**DATA, "micro_batches": 2, "parallel_optimizer_config": LEVEL2},
    "fp32": {**DATA, "gradient_fp32_sync": False, "compute_dtype": jnp.bfloat16},
    "sum": {**DATA, "gradients_mean": False},
    "repeated": {
        "mode": "semi_auto_parallel",
        "in_strategy": ((2, 1), (2, 1)),
        "parameter_plan": {"w": (1, 4)},
        "loss_repeated_mean": False,
    },
    "level of a search": {"level": 0},
    "style of a search": {"style": "fsdp"},
    "style of open entries": {"mode": "semi_auto_parallel", "style": "fsdp", "parameter_plan": {"w": AUTO}},
    "fusion": {**DATA, "fusion": {"w": 1}},
    "optimizer parallel": {"parallel_optimizer_config": {"parallel_optimizer_threshold": 0}},
    "cross_batch": {"cross_batch": True, "mode": "semi_auto_parallel"},
}


@pytest.mark.parametrize("stage", [None, 1])
def test_a_layout_file_of_the_context_is_not_read_where_the_mode_gives_all_shardings(stage, tmp_path):
    planned = train.step(loss, optax.adam(1e-2), mode="semi_auto_parallel", parameter_plan={"w": (8, 1)})
    planned.plan(planned.init({"w": W}, X, Y), X, Y).save(path := str(tmp_path / "layout.toml"))
    mode = {} if stage else {"mode": "data_parallel"}
    (told,) = step(**mode, stage=stage, context={"strategy_ckpt_load_file": path})
    assert "strategy_ckpt_load_file" in told and "has its own shardings" in told


@pytest.mark.parametrize("name", ACT)
def test_a_setting_that_acts_is_not_warned_of(name):
    assert step(**ACT[name]) == []


def test_fully_use_devices_counts_no_axis_of_one_device():
    def make():
        ms.set_algo_parameters(fully_use_devices=True)
        made = train.step(train.pipeline(loss, 2, pipeline_stages=1, auto_pipeline=True), optax.adam(1e-2))
        made.lower(made.init({"w": W}, X, Y), X, Y)

    with ms.auto_parallel(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make()
    assert [text for w in told if "fully_use_devices" in (text := str(w.message)) and "no effect" not in text] == []


OF_THE_CONTEXT = {
    "size": (lambda: ms.set_algo_parameters(tensor_slice_align_size=8), "shards are not aligned"),
    "epsilon": (lambda: ms.set_algo_parameters(algo_approxi_epsilon=0.5), "no approximate solution"),
    "follow": (lambda: ms.set_algo_parameters(elementwise_op_strategy_follow=False), "always sharded as their input"),
    "graphs": (lambda: ms.set_context(save_graphs_path="graphs"), "no graphs are saved"),
    "trainable": (
        lambda: ms.set_auto_parallel_context(strategy_ckpt_config={"only_trainable_params": False}), "none is"),
    "overwrite": (
        lambda: ms.set_auto_parallel_context(parallel_mode="data_parallel", out_strategy_mode="overwrite"),
        "overwrite an out_strategy",
    ),
    "primitive_target": (
        lambda: ms.Gather().add_prim_attr("primitive_target", "CPU"), "the lookup runs on the devices"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_THE_CONTEXT)
def test_a_setting_of_the_context_without_effect_is_said(name):
    call, reason = OF_THE_CONTEXT[name]
    with ms.auto_parallel():
        (told,) = said(call)
    assert reason in told


def test_what_acts_in_the_context_is_not_warned_of():
    def make():
        ms.set_algo_parameters(tensor_slice_align_enable=True, tensor_slice_align_size=8)
        ms.set_algo_parameters(enable_algo_approxi=True, algo_approxi_epsilon=0.5, elementwise_op_strategy_follow=True)
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", out_strategy_mode="overwrite")

    with ms.auto_parallel():
        assert said(make) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy_ckpt_load_file": "./"},
        {"strategy_ckpt_save_file": "./"},
        {"strategy_ckpt_config": {"save_file": "folder/"}},
        {"strategy_ckpt_config": {"load_file": "."}},
    ],
)
def test_a_folder_is_no_strategy_file(settings):
    with pytest.raises(ContextError, match="it is a folder, not a file"):
        ms.set_auto_parallel_context(**settings)

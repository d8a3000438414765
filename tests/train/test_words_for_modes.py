"""The words of other libraries for modes, devices and names are answered with the right ones, and these work."""

import contextvars

import jax.numpy as jnp
import optax
import pytest

import shardfn.mindspore as ms
from shardfn import shard, train
from shardfn.cost.devices.hardware import resolve
from shardfn.errors import ContextError, DeviceError


def loss(params, x):
    return ((x @ params["w"]) ** 2).mean()


WORDS = {
    "ddp": 'mode="data_parallel"',
    "DDP": 'mode="data_parallel"',
    "fsdp": 'mode="auto_parallel", style="fsdp"',
    "zero-3": 'mode="auto_parallel", style="fsdp"',
    "zero1": 'mode="auto_parallel", style="zero1"',
    "ZeRO_2": "level2",
    "hsdp": "optimizer_weight_shard_size",
    "tensor_parallel": 'style="tensor_parallel"',
    "auto": 'mode="auto_parallel"',
}


@pytest.mark.parametrize("word", WORDS)
def test_the_words_of_other_libraries_name_options_that_work(word):
    with pytest.raises(ContextError) as error:
        train.step(loss, optax.adam(1e-3), mode=word)
    fix = error.value.problems[0].fix
    assert fix.startswith("write ") and WORDS[word] in fix
    options = eval(f"dict({fix.removeprefix('write ').partition('; or ')[0]})")
    step = train.step(loss, optax.adam(1e-3), **options)
    state = step.init({"w": jnp.ones((64, 64))}, jnp.ones((64, 64)))
    assert jnp.isfinite(step(state, jnp.ones((64, 64)))[1])


@pytest.mark.parametrize(("level", "kind"), [("level1", "ZeRO-1"), ("level2", "ZeRO-2"), ("level3", "FSDP")])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_reports_have_the_words_of_other_libraries_for_optimizer_levels(level, kind, micro_batches):
    config = {"optimizer_level": level, "parallel_optimizer_threshold": 0}
    step = train.step(
        loss, optax.adam(1e-3), mode="data_parallel", parallel_optimizer_config=config, micro_batches=micro_batches
    )
    state = step.init({"w": jnp.ones((64, 64))})
    assert step.plan(state, jnp.ones((64, 64))).kind.startswith(f"{kind} over ")


def test_other_words_have_the_list():
    with pytest.raises(ContextError, match="use one of stand_alone, data_parallel"):
        train.step(loss, optax.adam(1e-3), mode="fast")


@pytest.mark.parametrize("name", ["cuda:0", "cuda:3", "gpu:0", "tpu:0"])
def test_a_single_device_by_its_number_is_a_list(name):
    kind, _, number = name.partition(":")
    with pytest.raises(DeviceError) as error:
        resolve(name)
    code = f'[jax.devices("{kind}")[{number}]]'
    assert f"device={code}" in error.value.problems[0].fix
    assert resolve("cpu:8").count == 8


@pytest.mark.parametrize(("name", "words"), [("nn", "Cell"), ("ops", "jax.numpy"), ("Parameter", "jax.Array"),
                                             ("Tensor", "jnp.asarray"), ("Layot", "'Layout'")])  # fmt: skip
def test_names_of_mindspore_say_what_takes_their_place(name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(ms, name)
    assert not hasattr(ms, "__path_of_nothing__")


def test_a_device_target_that_is_not_here_is_named_where_it_was_set():
    def call():
        ms.set_context(device_target="Ascend")
        shard(jnp.sin)(jnp.ones(8))

    with pytest.raises(DeviceError) as error:
        contextvars.Context().run(call)
    assert error.value.problems[0].where.startswith("set_context(device_target=")


@pytest.mark.parametrize(
    ("name", "words"),
    [("trainable_params", "parameters_dict"), ("set_train", "construct"), ("other", "no attribute 'other'$")],
)
def test_methods_of_cells_say_what_takes_their_place(name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(ms.Cell(), name)


@pytest.mark.parametrize("name", ["AutoParallel", "PipelineCell", "set_seed"])
def test_classes_of_mindspore_say_what_takes_their_place(name):
    with pytest.raises(AttributeError, match="use "):
        getattr(ms, name)

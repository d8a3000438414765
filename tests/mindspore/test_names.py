"""What MindSpore's names are answered with, as an attribute and in an import."""

import importlib
import pathlib
import re

import pytest

import shardfn.mindspore as ms
from shardfn import data, train
from shardfn.errors import ShardError
from shardfn.mindspore.context import _KEYS

PAGE = pathlib.Path(__file__).parents[2] / "docs/from/mindspore.md"
OTHERS = {
    "mpirun", "msrun", "MSJob", "shuffle", "num_shards", "shard_id", "level", "fusion", "cross_batch", "manual_split",
    "layerwise_parallel", "pipeline_stage", "enc_key", "dec_key", "vocab_cache_size", "seqpipe", "seqvpp", "seqsmartvpp",
    "zero_bubble_v", "bprop", "construct", "param", "x", "mindspore", "step_parallel_end", "get_", "reset_",
}  # fmt: skip
"""Words of the page that no module or cell has: options, schedulers, commands, and what a program defines."""


def names():
    for row in re.findall(r"^\|([^|]*)\|", PAGE.read_text(), re.M):
        yield from re.findall(r"`@?(?:nn\.|ops\.|amp\.|cell\.|Cell\.|mindspore\.)?([A-Za-z_]\w*)[^`]*`", row)


def test_every_name_of_the_page_has_an_answer():
    cell = ms.Cell()
    for name in set(names()) - OTHERS - set(_KEYS):
        texts = []
        for owner in (ms, cell):
            try:
                getattr(owner, name)
                texts.append("use it")
            except AttributeError as error:
                texts.append(str(error))
        assert any("; use " in text or text == "use it" for text in texts), (name, texts)


@pytest.mark.parametrize(("name", "said"), [
    ("ModelCheckpoint", "checkpoint.save"), ("LossMonitor", "your loop"), ("train", "train.step"), ("amp", "compute_dtype"),
    ("ParameterTuple", "parameters_dict"), ("GradAccumulationCell", "micro_batches"), ("HookBackward", "bprop"),
    ("set_device", "set_context"), ("vmap", "jax.vmap"), ("recompute", "cell.recompute"), ("convert_model", "jax.export"),
    ("CheckpointConfig", "checkpoint.save"), ("parameter_broadcast", "parameter_broadcast=True"),
])  # fmt: skip
def test_names_of_modules(name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(ms, name)


@pytest.mark.parametrize(("name", "said"), [
    ("set_comm_fusion", "fusion="), ("register_backward_hook", "bprop"), ("cells", "vars"), ("untrainable_params", "frozen="),
    ("parameter_layout_dict", "layout_of"), ("add_flags", "construct"),
])  # fmt: skip
def test_names_of_cells(name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(ms.Cell(), name)


@pytest.mark.parametrize("code", [
    "from shardfn.mindspore import nn", "from shardfn.mindspore import Layout, nn, ops", "import shardfn.mindspore.nn",
    "from shardfn.mindspore.nn import Dense",
])  # fmt: skip
def test_an_import_says_what_the_attribute_says(code):
    with pytest.raises(ImportError, match=r"has no nn: .* the layers of Flax"):
        exec(code)


def test_imports_of_what_is_there_or_nowhere():
    from shardfn import data, mindspore

    assert data and mindspore is ms and not hasattr(ms, "nn")
    with pytest.raises(ImportError, match=r"use shardfn\.shard"):
        importlib.import_module("shardfn.pjit")
    with pytest.raises(ImportError, match=r"No module named 'shardfn\.shard'"):
        importlib.import_module("shardfn.shard")
    with pytest.raises(ImportError, match=r"No module named 'jax\.nn2'"):
        importlib.import_module("jax.nn2")


def test_keys_of_the_context():
    with pytest.raises(ShardError, match="did you mean 'gradients_mean'"):
        ms.set_auto_parallel_context(mirror_mean=True)
    with pytest.raises(ShardError, match=r"use one of device_num, .*gradients_mean, .*comm_fusion, .*pipeline_stages"):
        ms.set_auto_parallel_context(foo=True)


def test_calls_as_in_mindspore():
    with pytest.raises(ShardError) as error:
        data.load(range(8), batch_size=4, num_shards=8, shard_id=0, drop_remainder=True)
    assert all(part in str(error.value) for part in ("each process reads only", "use last"))
    with pytest.raises(ShardError, match=r"2 arguments by position, not 3[\s\S]*step\.init\(net"):
        train.step(print, print, print)

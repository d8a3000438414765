"""The words of other libraries for options, styles, objectives and names are answered with ours."""

import jax.numpy as jnp
import optax
import pytest

import shardfn
from shardfn import checkpoint, shard, train
from shardfn.api import OPTION_NAMES
from shardfn.errors import ShardError
from shardfn.frontend import other_words
from shardfn.search.generators import STYLES
from shardfn.search.problem import OBJECTIVES
from shardfn.train.steps.checks import _OF_SHARD
from shardfn.train.steps.options import StepOptions


def fix(call):
    with pytest.raises(ShardError) as error:
        call()
    return error.value.problems[0].fix


@pytest.mark.parametrize(
    ("word", "style"),
    [("ddp", "data_parallel"), ("fully_shard", "fsdp"), ("ZeRO-3", "fsdp"), ("megatron", "tensor_parallel"), ("2d", "fsdp_tensor_parallel")],
)  # fmt: skip
def test_styles(word, style):
    assert fix(lambda: shard(jnp.dot, style=word)) == f"did you mean {style}?"


@pytest.mark.parametrize("word", ["zero2", "hsdp"])
def test_a_scheme_that_is_no_style_is_a_setting_of_a_step(word):
    text = fix(lambda: shard(jnp.dot, style=word))
    options = eval(f"dict({text.partition('optimizer, ')[2]}")
    assert train.step(lambda params, x: (x @ params).sum(), optax.sgd(0.1), **options)


@pytest.mark.parametrize(("word", "level"), [("speed", "time"), ("HBM", "memory"), ("bandwidth", "communication")])
def test_objectives(word, level):
    assert fix(lambda: shard(jnp.dot, level=word)) == f"did you mean {level!r}?"


@pytest.mark.parametrize(
    ("value", "level"), [("zero3", "level3"), ("FSDP", "level3"), (2, "level2"), ("zero-1", "level1")]
)
def test_optimizer_levels(value, level):
    with pytest.raises(ShardError) as error:
        train.step(jnp.dot, optax.sgd(0.1), mode="data_parallel", parallel_optimizer_config={"optimizer_level": value})
    assert error.value.problems[0].fix == f'write "{level}"'


@pytest.mark.parametrize(
    ("word", "option"),
    [("accumulate_grad_batches", "micro_batches"), ("mixed_precision", "compute_dtype"), ("placements", "in_strategy")],
)
def test_options(word, option):
    assert fix(lambda: train.step(jnp.dot, optax.sgd(0.1), **{word: 1})) == f"did you mean {option}?"
    of_shard = fix(lambda: shard(jnp.dot, **{word: 1}))
    assert of_shard == (
        f"did you mean {option}?" if option in OPTION_NAMES else f"train.step has it, by the name {option}"
    )


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (shardfn, "fully_shard", 'style="fsdp"'), (shardfn, "distribute_tensor", "jax.device_put"), (shardfn, "shrad", "'shard'"),
        (checkpoint, "load", "shardfn.checkpoint.restore"), (checkpoint, "resore", "'restore'"),
    ],
)  # fmt: skip
def test_names(module, name, text):
    with pytest.raises(AttributeError, match=text):
        getattr(module, name)
    assert not hasattr(module, name)


def test_the_tables_name_what_there_is():
    of_step = {*StepOptions.__dataclass_fields__, *_OF_SHARD, "parallel_optimizer_comm_recompute", "comm_fusion"}
    assert set(other_words.OPTIONS.values()) <= {"in_strategy", "out_strategy", "device", "level", *OPTION_NAMES}
    assert set(other_words.OF_STEPS.values()) <= of_step
    assert {scheme.style for scheme in other_words.SCHEMES if scheme.style} == set(STYLES)
    assert {level for _, level in other_words.OBJECTIVES} == set(OBJECTIVES)


def test_all_unknown_options_are_said_at_once():
    with pytest.raises(ShardError) as error:
        shard(jnp.dot, mesh=1, in_specs=2, out_specs=3)
    text = str(error.value)
    assert all(f"did you mean {name}?" in text for name in ("device", "in_strategy", "out_strategy"))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"search_mode": "propagation"}, "sharding_propagation"), ({"layout": "zero3"}, 'style="fsdp"')],
)
def test_values(options, text):
    with pytest.raises(ShardError) as error:
        shard(jnp.dot, **options).plan(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert text in error.value.problems[0].fix

"""The words of other libraries for options, styles, objectives and names are answered with ours."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardfn
from shardfn import checkpoint, data, halo, shard, train
from shardfn.api import OPTION_NAMES
from shardfn.errors import ShardError
from shardfn.frontend import other_words
from shardfn.search.generators import STYLES
from shardfn.search.problem import OBJECTIVES
from shardfn.train.steps.checks import _OF_SHARD
from shardfn.train.steps.options import StepOptions
from tests.messages import refusal


def fix(call):
    with pytest.raises(ShardError) as error:
        call()
    return error.value.problems[0].fix


@pytest.mark.parametrize(
    ("word", "style"),
    [("ddp", "data_parallel"), ("fully_shard", "fsdp"), ("ZeRO-3", "fsdp"), ("megatron", "tensor_parallel"), ("2d", "fsdp_tensor_parallel")],
)  # fmt: skip
def test_styles(word, style):
    assert fix(lambda: shard(jnp.dot, style=word)) == f"did you mean '{style}'?"


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
    assert fix(lambda: train.step(jnp.dot, optax.sgd(0.1), **{word: 1})) == f"did you mean '{option}'?"
    of_shard = fix(lambda: shard(jnp.dot, **{word: 1}))
    assert of_shard == (
        f"did you mean '{option}'?" if option in OPTION_NAMES else f"train.step has it, by the name {option}"
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
    assert all(f"did you mean '{name}'?" in text for name in ("device", "in_strategy", "out_strategy"))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"search_mode": "propagation"}, "sharding_propagation"), ({"layout": "zero3"}, 'style="fsdp"')],
)
def test_values(options, text):
    with pytest.raises(ShardError) as error:
        shard(jnp.dot, **options).plan(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert text in error.value.problems[0].fix


ROWS = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec(None, None, "a"))
NEAR = {
    "level": (lambda: shard(jnp.dot, level="tiem"), "did you mean 'time'?"),
    "budget": (lambda: shard(jnp.dot, budget="fsat"), "did you mean 'fast'?"),
    "style": (lambda: shard(jnp.dot, style="fdsp"), "did you mean 'fsdp'?"),
    "a part of a style": (lambda: shard(jnp.dot, style="data"), "did you mean 'data_parallel'?"),
    "a part of a search": (lambda: shard(jnp.dot, search_mode="propagate"), "did you mean 'sharding_propagation'?"),
    "closed over": (lambda: shard(jnp.dot, closed_over="arguments"), "did you mean 'argument'?"),
    "candidates": (lambda: shard(jnp.dot, compile_candidates="atuo"), "did you mean 'auto'?"),
    "detail": (lambda: shardfn.explain(abs, jnp.ones(8), detail="ful"), "did you mean 'full'?"),
    "mode": (lambda: train.step(jnp.dot, optax.sgd(0.1), mode="stand_alon"), "did you mean 'stand_alone'?"),
    "memory kind": (
        lambda: train.step(jnp.dot, optax.sgd(0.1), opt_state_memory_kind="pined_host"), "did you mean 'pinned_host' or 'unpinned_host'?",
    ),
    "schedule": (lambda: train.pipeline([jnp.tanh], 2, schedule="gpip"), "did you mean 'gpipe'?"),
    "loss": (lambda: train.pipeline([jnp.tanh], 2, loss="men"), "did you mean 'mean'?"),
    "strategy of a batch": (
        lambda: data.load({"x": jnp.ones((8, 2))}, batch_size=8, strategy="data_paralel"), "did you mean 'data_parallel'?",
    ),
    "padding": (
        lambda: halo.conv(jnp.ones((1, 1, 8)), jnp.ones((1, 1, 3)), (1,), "SAM", layout=ROWS), "did you mean 'SAME'?",
    ),
}  # fmt: skip
"""Every option that is one of a few words asks for the word that a misspelt one is near."""


@pytest.mark.parametrize("name", NEAR)
def test_a_misspelt_word_is_asked_for(name):
    call, text = NEAR[name]
    assert text in [problem.fix for problem in refusal(call).problems]


def test_a_word_that_is_near_none_gets_them_all():
    assert fix(lambda: shard(jnp.dot, search_mode="best")).startswith("use one of auto, ")

"""Loops of unknown length: counted once, or as often as the user says."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cli.main import main
from shardfn.compiled.comparison import compare
from shardfn.runtime.verify import compile_plan

S = jax.ShapeDtypeStruct
X, W = S((1024, 1024), "float32"), S((1024, 1024), "float32")
SUMMED = {"in_strategy": ((1, 8), (8, 1)), "device": "h100:8"}


def until(x, w):
    return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1.0, lambda x: jnp.tanh(x @ w), x)


def nested(x, w):
    return jax.lax.fori_loop(0, 3, lambda _, x: until(x, w), x)


def counted(x, w):
    return jax.lax.fori_loop(0, 10, lambda _, x: jnp.tanh(x @ w), x)


def sent(function, **options):
    return shardfn.plan(function, X, W, **SUMMED, **options).cost.bytes_sent


def said(made):
    return [text for text in made.diagnostics if "unknown length" in text]


@pytest.mark.parametrize("function", [until, nested])
def test_loops_of_unknown_length_count_as_often_as_assumed(function):
    assert 9 * sent(function) < sent(function, assumed_trips=10) <= 10 * sent(function)


def test_loops_of_known_length_count_as_they_are():
    assert sent(counted) == sent(counted, assumed_trips=7)


def test_the_diagnostic_names_the_option_and_then_what_was_assumed():
    (text,) = said(shardfn.plan(until, X, W, **SUMMED))
    assert "counted once" in text and "assumed_trips=100" in text
    (text,) = said(shardfn.plan(until, X, W, assumed_trips=100, **SUMMED))
    assert "counted 100 times" in text
    assert not said(shardfn.plan(counted, X, W, **SUMMED))


@pytest.mark.parametrize("device", ["here", "elsewhere"])
def test_the_compiled_program_counts_them_alike(device):
    x = S((64, 64), "float32")
    device = jax.devices()[:8] if device == "here" else "cpu:16"
    made = [
        shardfn.plan(until, x, x, in_strategy=((1, 8), (8, 1)), device=device, assumed_trips=count) for count in (1, 10)
    ]
    once, ten = (compile_plan(plan) for plan in made)
    assert sum(c.total_bytes for c in ten.collectives) > 9 * sum(c.total_bytes for c in once.collectives) > 0
    assert ten.flops == 10 * once.flops > 0
    assert [text for text in ten.diagnostics if "counted 10 times, as assumed_trips says" in text]
    for plan, found in zip(made, (once, ten), strict=True):
        assert compare(plan, found).matrix_flops.ratio == 1.0


def test_explain_counts_the_compiled_loop_alike():
    sharded = shardfn.shard(until, in_strategy=((1, 8), (8, 1)), assumed_trips=10)
    report = sharded.explain(jnp.ones((64, 64)), jnp.ones((64, 64)), compiled=True)
    assert "counted 10 times" in report.to_text()


def test_the_command_line_has_it(capsys):
    command = [
        "explain", f"{__name__}:until", "--shapes", "f32[1024,1024]", "f32[1024,1024]", "--device", "h100:8",
        "--in-strategy", "((1, 8), (8, 1))", "--assumed-trips", "100",
    ]  # fmt: skip
    assert main(command) == 0
    assert "counted 100 times, as assumed_trips says" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("wrong", [0, -3, 1.5, "ten", True])
def test_a_wrong_count_is_refused(wrong):
    with pytest.raises(shardfn.ShardError, match="assumed_trips"):
        shardfn.shard(until, assumed_trips=wrong)

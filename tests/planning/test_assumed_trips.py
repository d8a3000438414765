"""Loops of unknown length: counted once, or as often as the user says."""

import jax
import jax.numpy as jnp
import pytest

import shardfn

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


@pytest.mark.parametrize("wrong", [0, -3, 1.5, "ten", True])
def test_a_wrong_count_is_refused(wrong):
    with pytest.raises(shardfn.ShardError, match="assumed_trips"):
        shardfn.shard(until, assumed_trips=wrong)

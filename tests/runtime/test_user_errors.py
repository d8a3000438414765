"""A user's own error shows the user's frames, and not those of this library."""

import traceback

import jax
import jax.numpy as jnp
import optax
import pytest

import shardfn
from shardfn import train
from shardfn.errors import StrategyError

X = jnp.ones((8, 4))


def inner(x):
    return jnp.ones(3) + x


def wrong(x):
    return inner(x)


def frames(error):
    return [frame for frame in traceback.extract_tb(error.__traceback__) if "/shardfn/" in frame.filename]


def own(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]


CALLS = {
    "call": lambda: shardfn.shard(wrong)(X),
    "plan": lambda: shardfn.shard(wrong).plan(X),
    "shardfn.plan": lambda: shardfn.plan(wrong, X),
    "explain": lambda: shardfn.explain(wrong, X),
    "lower": lambda: shardfn.shard(wrong).lower(X),
    "jit around": lambda: jax.jit(shardfn.shard(wrong))(X),
    "grad around": lambda: jax.grad(lambda x: shardfn.shard(wrong)(x).sum())(X),
    "sharded inside": lambda: shardfn.shard(lambda x: shardfn.shard(wrong)(x))(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_frames_begin_in_the_users_function(name):
    with pytest.raises((TypeError, ValueError), match="shapes") as caught:
        CALLS[name]()
    assert own(caught.value)[-2:] == ["wrong", "inner"]
    assert len(frames(caught.value)) <= (4 if name == "sharded inside" else 3)


def test_a_step_shows_few():
    def loss(params, x):
        return wrong(x @ params["w"]).mean()

    step = train.step(loss, optax.sgd(0.1), mode="auto_parallel")
    state = step.init({"w": jnp.ones((4, 4))})
    with pytest.raises((TypeError, ValueError)) as caught:
        step(state, X)
    assert own(caught.value)[-3:] == ["loss", "wrong", "inner"] and len(frames(caught.value)) <= 8


def test_all_frames_are_there_where_jax_shows_its_own():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises((TypeError, ValueError)) as caught:
            shardfn.plan(wrong, X)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert len(frames(caught.value)) > 6


def test_errors_of_this_library_keep_theirs():
    with pytest.raises(StrategyError) as caught:
        shardfn.plan(jnp.sin, X, in_strategy=((3, 1),))
    assert frames(caught.value)


def test_an_error_keeps_its_cause():
    def caused(x):
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second") from error

    with pytest.raises(RuntimeError, match="second") as caught:
        shardfn.shard(caused)(X)
    assert isinstance(caught.value.__cause__, KeyError)

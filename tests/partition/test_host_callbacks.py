"""Callbacks into Python run on one device: what is sent for them, compared with what XLA sends."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import shardfn
from shardfn import compiled

X = jax.ShapeDtypeStruct((256, 64), "float32")


def watched(x):
    jax.debug.callback(lambda v: None, x)
    return jnp.tanh(x)


def watched_in_loop(x):
    def body(i, h):
        jax.debug.callback(lambda v: None, h)
        return jnp.tanh(h)

    return jax.lax.fori_loop(0, 3, body, x)


def computed(x):
    return io_callback(np.asarray, X, x) + 1


def chained(x):
    """The first result is read by the second callback alone, which is on the same device."""
    return jax.pure_callback(np.asarray, X, jax.pure_callback(np.asarray, X, x)) + 1


def checked(x):
    """As `equinox.error_if` writes it."""
    return jax.lax.cond(jnp.any(x < 0), lambda x: jax.pure_callback(np.asarray, X, x), jnp.zeros_like, x) * 2


@pytest.mark.parametrize("entry", [(8, 1), (2, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("fn", [watched, watched_in_loop, computed, chained, checked], ids=lambda f: f.__name__)
def test_callbacks_gather_operands_and_reduce_results(fn, entry):
    function: Any = shardfn.shard(fn, (entry,), device=jax.devices()[:8])
    real = compiled.read(function.lower(X).compile())
    assert sum(c.total_bytes for c in function.plan(X).collectives) == sum(c.total_bytes for c in real.collectives)

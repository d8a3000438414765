"""Arrays that are donated and used again: one clear error instead of JAX's, or of a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn import shard
from shardfn.errors import StrategyError


def step(params, x):
    return jax.tree.map(lambda p: p + x.sum(), params), x.sum()


@pytest.fixture
def sharded():
    function = shard(step, ((8, 1), (8, 1)), donate_argnums=(0,))
    params, x = jnp.ones((8, 8)), jnp.ones((8, 8))
    return function, *jax.device_put((params, x), function.plan(params, x).in_shardings)


def test_donated_array_of_an_earlier_call_is_refused(sharded):
    function, params, x = sharded
    after, _ = function(params, x)
    for _ in range(2):
        with pytest.raises(StrategyError, match=r"(?s)no memory any more.*where: params"):
            function(params, x)
    np.testing.assert_allclose(function(after, x)[0], 129.0)


def test_array_that_is_donated_and_read_in_one_call_is_refused(sharded):
    function, params, x = sharded
    for before in ((), (params,)):  # the first call, and one after a call that was fine
        for array in before:
            function(array, x)
        with pytest.raises(StrategyError, match=r"(?s)takes one array twice.*where: params is x"):
            function(x, x)
    assert not x.is_deleted()


def test_array_that_is_passed_twice_without_donation_is_accepted():
    x = jnp.ones((8, 8))
    np.testing.assert_allclose(shard(step)(x, x)[0], 65.0)

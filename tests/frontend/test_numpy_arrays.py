"""NumPy arrays that a call reads: a change in place is seen, or refused where JAX keeps a copy."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn import shard
from shardfn.errors import StrategyError
from shardfn.mindspore import Cell

X = jnp.arange(16.0).reshape(8, 2)


class Own:
    def __init__(self, table):
        self.table = table

    def __call__(self, x):
        return jnp.asarray(self.table) * x


class OwnOfCell(Own, Cell):
    pass


class Nested(Own):
    def __init__(self, table):
        self.cfg = types.SimpleNamespace(table=table)

    def __call__(self, x):
        return jnp.asarray(self.cfg.table) * x


def in_default(table):
    return lambda x, table=table: x * table


def of_function(table):
    def function(x):
        return function.table * x

    function.table = table
    return function


WATCHED = [Nested, in_default, of_function, lambda table: functools.partial(lambda t, x: t * x, table)]


def read_only(array):
    view = array[:]
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("make", [Own, OwnOfCell])
@pytest.mark.parametrize("dtype", ["float64", "int64", "float32"])
def test_an_array_of_the_object_itself_is_read_at_each_call(make, dtype):
    table = np.full(2, 2, dtype)
    call = shard(make(table))
    for by in (2, 3):
        table[:] = by
        np.testing.assert_allclose(call(X), by * X)


@pytest.mark.parametrize("make", WATCHED)
@pytest.mark.parametrize("view", [np.asarray, read_only])
def test_a_change_in_place_of_an_array_that_jax_takes_as_it_is_is_seen(make, view):
    table = np.full(2, 2, np.float32)
    call = shard(make(view(table)))
    for by in (2, 3):
        table[:] = by
        np.testing.assert_allclose(call(X), by * X)


@pytest.mark.parametrize("make", WATCHED)
@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_a_change_in_place_of_an_array_that_jax_converts_is_refused(make, dtype):
    table = np.full(2, 2, dtype)
    call = shard(make(table))
    np.testing.assert_allclose(call(X), 2 * X)
    table[:] = 3
    with pytest.raises(StrategyError, match=rf"a {dtype} array that was changed in place") as error:
        call(X)
    assert "put a new array in its place" in error.value.problems[0].fix
    table[:] = 2
    np.testing.assert_allclose(call(X), 2 * X)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_another_array_in_its_place_is_seen(dtype):
    made = Nested(np.full(2, 2, dtype))
    call = shard(made)
    for by in (2, 3):
        made.cfg.table = np.full(2, by, dtype)
        np.testing.assert_allclose(call(X), by * X)


def test_64_bit_arrays_are_seen_where_jax_computes_in_64_bits():
    table = np.full(2, 2.0)
    with jax.enable_x64(True):
        call = shard(Nested(table))
        for by in (2, 3):
            table[:] = by
            np.testing.assert_allclose(call(X), by * X)

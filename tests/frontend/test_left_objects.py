"""Arrays that a call writes where they are not written back: an error, and the objects stay what they were."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardfn import shard
from shardfn.errors import StrategyError
from shardfn.mindspore import Cell

X = jnp.arange(16.0).reshape(8, 2)


class Inner:
    cache = None

    def __init__(self):
        self.k, self.w, self.seen, self.table = 2.0, jnp.ones(2), [], {1: None, "a": None}

    @functools.cached_property
    def twice(self):
        return 2 * self.k

    @functools.cached_property
    def row(self):
        return self.k * jnp.arange(2.0)


class Net:
    def __init__(self):
        self.inner, self.total = Inner(), jnp.zeros(2)

    def new(self, x):
        self.inner.cache = 2 * x

    def new_and_used(self, x):
        if self.inner.cache is None:
            self.inner.cache = 2 * x
        return self.inner.cache

    def another(self, x):
        self.inner.w = self.inner.w + x.sum(0)

    def appended(self, x):
        self.inner.seen.append(x)

    def entry(self, x):
        self.inner.table["a"] = x

    def property(self, x):
        return self.inner.row * x


class CellNet(Net, Cell):
    pass


class NnxNet(Net, nnx.Module):
    def __init__(self):
        self.inner, self.total = Inner(), nnx.Param(jnp.zeros(2))


PLACES = {
    "new": "cache",
    "new_and_used": "cache",
    "another": "w",
    "appended": "seen",
    "entry": "table",
    "property": "row",
}


@pytest.mark.parametrize("kind", [Net, CellNet, NnxNet])
@pytest.mark.parametrize("name", PLACES)
def test_an_array_in_an_inner_object_is_refused(name, kind):
    net = kind()
    before = dict(vars(net.inner))
    for _ in range(2):
        with pytest.raises(
            StrategyError, match=rf"writes arrays to an object.*\n.*self\.inner\.{PLACES[name]}\n"
        ) as error:
            shard(getattr(net, name))(X)
    assert "return the array" in error.value.problems[0].fix
    assert vars(net.inner).keys() == before.keys() and all(vars(net.inner)[k] is before[k] for k in before)


def test_an_array_in_an_attribute_of_a_function_is_refused():
    def f(x):
        f.cache = 2 * x
        return x

    for f.cache in (None, jnp.ones(2)):
        kept = f.cache
        with pytest.raises(StrategyError, match=r"writes arrays to an object.*\n.*function\.cache"):
            shard(f)(X)
        assert f.cache is kept


def test_a_number_in_an_inner_object_is_refused_at_every_call():
    class Sets(Net):
        def __call__(self, x):
            self.inner.k = 3.0
            return x

    call = shard(Sets())
    for _ in range(2):
        with pytest.raises(StrategyError, match=r"changes what is no array.*\n.*self\.inner\.k"):
            call(X)


def test_what_is_kept_or_computed_once_is_no_error():
    class Keeps(Net):
        @shard
        def __call__(self, x):
            self.total = self.total + x.sum(0)
            return self.inner.twice * x

    net = Keeps()
    for times in (1, 2):
        np.testing.assert_allclose(net(X), 4 * X)
        np.testing.assert_allclose(net.total, times * X.sum(0))


def test_traced_arrays_of_an_outer_trace_may_be_there():
    class Reads:
        def __init__(self, w):
            self.inner = Inner()
            self.inner.w = w

        def __call__(self, x):
            return self.inner.w * x

    gradient = jax.grad(lambda w: jax.jit(lambda x: shard(Reads(w))(x))(X).sum())(jnp.ones(2))
    np.testing.assert_allclose(gradient, X.sum(0))


SEEN: list[object] = []


class Logs:
    def helper(self, x):
        SEEN.append(x)
        return 2 * x

    def __call__(self, x):
        return self.helper(x)

    @shard
    def apply(self, x):
        return self(x)


@pytest.mark.parametrize(
    "call", [shard(Logs()), shard(Logs().helper), Logs().apply], ids=["object", "method", "decorated"]
)
def test_arrays_that_a_method_puts_into_a_global_are_its_own(call):
    SEEN.clear()
    for _ in range(2):
        np.testing.assert_array_equal(call(X), 2 * X)
    assert len(SEEN) == 1

"""`Cell.bprop`: a cell's own gradient holds wherever the cell is called."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardfn import shard, train
from shardfn.errors import StrategyError
from shardfn.mindspore import Cell

X = jnp.arange(16.0).reshape(8, 2)


class Stop(Cell):
    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (jnp.zeros_like(x),)


class Scaled(Cell):
    """Its own gradient reads the weight, the input, the result and its cotangent."""

    def __init__(self):
        self.w = jnp.full((2, 2), 3.0)

    def construct(self, x, by=2.0, *, square=False):
        return (x @ self.w) ** 2 * by if square else x @ self.w * by

    def bprop(self, x, by, square, out, dout):
        return dout @ self.w * 10 + out * 0 + x * 0, None, None


class Outer(Cell):
    def __init__(self):
        self.inner, self.w = Scaled(), jnp.ones((2, 2))

    def __call__(self, x):
        return self.inner(x @ self.w, 3.0, square=True)


def gradient(f, x=X):
    return jax.grad(lambda x: f(x).sum())(x)


@pytest.mark.parametrize("call", [
    lambda cell: cell, lambda cell: jax.jit(lambda x: cell(x)), lambda cell: jax.vmap(lambda x: cell(x)), shard,
    lambda cell: cell.shard(in_strategy=((8, 1),)), lambda cell: cell.recompute(),
    lambda cell: lambda x: jax.lax.scan(lambda c, r: (c, cell(r)), 0, x)[1],
])  # fmt: skip
def test_a_cell_gives_its_own_gradient(call):
    np.testing.assert_array_equal(gradient(call(Stop())), 0)
    np.testing.assert_array_equal(call(Stop())(X), X * 2)
    np.testing.assert_array_equal(gradient(call(Scaled())), 60)


def test_a_cell_inside_a_sharded_one():
    for cell in Outer(), Outer().shard(in_strategy=((8, 1),)):
        np.testing.assert_array_equal(gradient(cell), 120)


def test_arrays_of_the_cell_get_no_gradient():
    outer = Outer()
    found = jax.grad(lambda p: outer.with_parameters(p)(X).sum())(outer.parameters_dict())
    assert not found["inner/w"].any() and found["w"].any()


def test_in_a_training_step():
    step = train.step(lambda net, x: jnp.mean(net(x)), optax.sgd(1.0), mode="data_parallel")
    state, _ = step(step.init(Outer(), X), X)
    after = jax.tree.leaves(state.params)
    assert sorted(bool((leaf == 3).all()) for leaf in after) == [False, True]


def test_inputs_that_are_trees_or_integers():
    class Pick(Cell):
        def construct(self, pair, ids):
            return pair["a"][ids] + pair["b"][ids], ids

        def bprop(self, pair, ids, out, dout):
            return {"a": jnp.ones_like(pair["a"]), "b": None}, jnp.zeros_like(ids)

    grad = jax.grad(lambda pair: Pick()(pair, jnp.arange(3))[0].sum())({"a": X[:, 0], "b": X[:, 1]})
    assert grad["a"].all() and not grad["b"].any()


@pytest.mark.parametrize(("given", "said"), [
    (lambda x: jnp.zeros_like(x), "returns a jax.Array, not a tuple of 1"),
    (lambda x: (x, x), "returns a tuple of 2, not a tuple of 1"),
    (lambda x: (x[0],), "another shape than its input"),
    (lambda x: ((x, x),), "another shape than its input"),
])  # fmt: skip
def test_a_wrong_gradient_is_an_error(given, said):
    class Wrong(Stop):
        def bprop(self, x, out, dout):
            return given(x)

    with pytest.raises(StrategyError, match=said):
        gradient(Wrong())


@pytest.mark.parametrize(("name", "value", "said"), [
    ("requires_grad", False, r'frozen=\["inner/w"\]'), ("layerwise_parallel", True, r'layerwise_parallel=\["inner/w"\]'),
    ("comm_fusion", 2, r'fusion={"inner/w": 2}'), ("parallel_optimizer", False, "parallel_optimizer_threshold"),
])  # fmt: skip
def test_attributes_of_parameters_are_no_silent_switches(name, value, said):
    outer = Outer()
    setattr(outer.inner.w, name, value)
    step = train.step(lambda net, x: jnp.mean(net(x)), optax.sgd(1.0))
    for see in (outer.parameters_dict, lambda: step.init(outer, X), lambda: step.init({"net": outer}, X)):
        with pytest.raises(StrategyError, match=said):
            see()
    setattr(outer.inner.w, name, {"requires_grad": True, "comm_fusion": 1}.get(name, not value))
    outer.parameters_dict()


def test_a_cell_that_shall_not_be_trained():
    cell = Scaled()
    cell.requires_grad = True
    with pytest.raises(StrategyError, match="frozen="):
        cell.requires_grad = False


def test_arrays_that_a_call_changes_are_kept():
    class Counts(Stop):
        def __init__(self):
            self.calls = jnp.zeros(())

        def construct(self, x):
            self.calls = self.calls + 1
            return x * 2

    cell = Counts()
    cell(X)
    assert cell.calls == 1


class Times(Cell):
    def __init__(self, by):
        self.by = by

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        return (dout * self.by,)


class Deep(Cell):
    def __init__(self, *factors):
        self.layers = [(Scaled(), Times(by)) for by in factors]

    def construct(self, x):
        for scaled, times in self.layers:
            x = times(jnp.tanh(x @ scaled.w / 8))
        return jnp.mean(x)


@pytest.mark.parametrize(("factors", "runs"), [((5, 5, 5, 5), 1), ((2, 3, 4, 5), 0)])
def test_layers_are_scanned_where_their_gradients_are_equal(factors, runs):
    deep = Deep(*factors)
    before = {path: np.asarray(w) for path, w in deep.parameters_dict().items()}
    wanted = jax.grad(lambda p: deep.with_parameters(p)(X))(deep.parameters_dict())
    step = train.step(deep, optax.sgd(1.0), mode="data_parallel", donate=False, reuse=True)
    with pytest.warns(UserWarning) if not runs else contextlib.nullcontext():
        state, _ = step(step.init(deep, X), X)
    assert len(step.scanned_layers.runs) == runs
    after = step.scanned_layers.unstack(state.params) if runs else state.params
    for path, gradient in wanted.items():
        np.testing.assert_allclose(before[path] - after[path], gradient, rtol=1e-3, atol=1e-5)


def test_in_a_pipeline():
    deep = Deep(5, 7)
    for stage, (scaled, _) in enumerate(deep.layers):
        scaled.pipeline_stage = stage
    pipe = train.pipeline(deep, micro_size=2, pipeline_stages=2)
    wanted = jax.grad(lambda p: deep.with_parameters(p)(X))(deep.parameters_dict())
    found = jax.grad(lambda p: pipe(p, X))(deep.parameters_dict())
    for path, gradient in wanted.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-3, atol=1e-5)


def test_of_a_flax_module():
    class Block(Cell, nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            return self.dense(x)

        def bprop(self, x, out, dout):
            return (dout * 3,)

    np.testing.assert_array_equal(gradient(Block(nnx.Rngs(0))), 3)
    np.testing.assert_array_equal(gradient(Block(nnx.Rngs(0)).shard(in_strategy=((8, 1),))), 3)

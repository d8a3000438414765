"""Class-style code: what `Cell.shard` shards, and that its copies, its inner Cells and its switches count."""

import copy
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardfn
from shardfn.errors import StrategyError
from shardfn.mindspore import Cell

X = jax.random.normal(jax.random.key(1), (8, 16))


class Dense(Cell):
    def __init__(self, seed=0, double=False):
        self.w = jax.random.normal(jax.random.key(seed), (16, 16)) / 4
        self.double = double

    def construct(self, x):
        return x @ self.w * (2 if self.double else 1)


class Two(Cell):
    def __init__(self):
        self.first, self.second = Dense(1), Dense(2)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class Plus(Dense):
    def __call__(self, x):
        return super().__call__(x) + 1


class Block(Cell, nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(16, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.dense(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.block1, self.block2 = Block(rngs), Block(rngs)

    def __call__(self, x):
        return self.block2(self.block1(x))


def kinds(plan):
    return sorted(c.kind for c in plan.collectives)


def plans(cell):
    return len(cell._sharded()._calls.entries)


def test_construct_gives_the_plan_its_names():
    cell = Dense().shard(in_strategy=((1, 8),))
    assert inspect.signature(Dense.__call__).parameters.keys() == {"self", "x"}
    made = cell.plan(X)
    assert (made.function, [d.path for d in made.inputs]) == ("Dense", ["w", "x"])


def test_a_method_that_calls_its_parent():
    cell = Plus()
    wanted = cell(X)
    np.testing.assert_allclose(cell.shard(in_strategy=((1, 8),))(X), wanted, atol=1e-5)


def test_another_switch_is_another_program():
    cell = Dense().shard(in_strategy=((8, 1),))
    once = cell(X)
    cell.double = True
    np.testing.assert_allclose(cell(X), 2 * once, rtol=1e-6)
    assert plans(cell) == 2


def test_a_cell_inside_a_sharded_cell_keeps_its_own_strategy():
    outer, both = Two(), Two()
    wanted = outer(X)
    outer.shard(in_strategy=((8, 1),), out_strategy=((8, 1),))
    assert kinds(outer.plan(X)) == []
    both.first.shard(in_strategy=((1, 8),), out_strategy=((1, 8),))
    both.shard(in_strategy=((8, 1),), out_strategy=((8, 1),))
    assert kinds(both.plan(X)) != [], "the inner strategy cuts what the outer one leaves whole"
    np.testing.assert_allclose(both(X), wanted, atol=1e-5)


def test_gradients_by_parameters_pass_through_the_sharded_call():
    cell, plain = Two(), Two()
    cell.first.shard(in_strategy=((1, 8),), out_strategy=(None,))

    def loss(parameters, cell):
        return (cell.with_parameters(parameters)(X) ** 2).sum()

    assert sorted(cell.parameters_dict()) == ["first/w", "second/w"]
    for _ in range(2):  # the second call makes another copy, but no other plan
        grads = jax.grad(loss)(cell.parameters_dict(), cell)
    assert plans(cell.first) == 1
    wanted = jax.grad(loss)(plain.parameters_dict(), plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), grads, wanted)


def test_with_parameters_knows_its_names():
    with pytest.raises(StrategyError, match="first/w"):
        Two().with_parameters({"frist/w": X})


def test_nnx_gradients_pass_through_the_sharded_call():
    net = Net(nnx.Rngs(0))
    net.eval()
    plain = copy.deepcopy(net)
    net.block1.shard(in_strategy=((1, 8),), out_strategy=(None,), parameter_plan={"dense/kernel": (8, 1)})

    def loss(net):
        return (net(X) ** 2).mean()

    for _ in range(2):
        value, grads = nnx.value_and_grad(loss)(net)
    assert plans(net.block1) == 1, "nnx.value_and_grad calls copies of the block: all of one plan"
    wanted, wanted_grads = nnx.value_and_grad(loss)(plain)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, wanted_grads)


@pytest.mark.parametrize("as_cell", [True, False])
def test_train_and_eval_are_two_programs(as_cell):
    block = Block(nnx.Rngs(0))
    call = block.shard(in_strategy=((8, 1),)) if as_cell else shardfn.shard(block, ((8, 1),))
    first, second = call(X), call(X)
    assert (first == 0).any() and (first != second).any(), "the random state moves on"
    block.eval()
    assert not (call(X) == 0).any()
    block.train()
    assert (call(X) == 0).any()


def test_a_decorated_method_plans_once_for_all_instances():
    class Doubled(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(16))

        @shardfn.shard(in_strategy=((8, 1),))
        def __call__(self, x):
            return x @ self.w[...]

    net = Doubled()
    for _ in range(2):
        grads = nnx.grad(lambda net: net(X).sum())(net)
    assert len(Doubled.__dict__["__call__"]._calls.entries) == 1
    np.testing.assert_allclose(grads["w"][...], X.sum(0)[:, None] * jnp.ones((16, 16)), atol=1e-5)


def test_copies_stay_sharded():
    cell = Dense().shard(in_strategy=((1, 8),))
    for other in (copy.copy(cell), copy.deepcopy(cell)):
        np.testing.assert_allclose(other(X), X @ cell.w, atol=1e-5)
    assert plans(cell) == 1


def test_a_path_from_the_class_around_the_cell():
    cell = Two().first.shard(in_strategy=((8, 1),), parameter_plan={"self.first.w": (1, 8)})
    assert cell.plan(X).decision("w").strategy == (1, 8)


@pytest.mark.parametrize("path", ["self.third.weight", "self.net.third.weight"])
def test_a_path_from_the_class_around_names_whole_paths_of_the_cell(path):
    class Dense(Cell):
        def __init__(self):
            self.weight = jnp.ones((32, 32))

        def construct(self, x):
            return x @ self.weight

    class Two(Cell):
        def __init__(self):
            self.first, self.second = Dense(), Dense()

        def construct(self, x):
            return self.second(self.first(x))

    cell = Two().shard(in_strategy=((8, 1),), parameter_plan={path: (1, 8)})
    with pytest.raises(StrategyError, match="third"):
        cell(jnp.ones((16, 32)))

"""A sharded function of a part, which its whole holds, follows the part's arrays."""

import collections
import copy
import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardfn.mindspore as ms
from shardfn import shard, train
from shardfn.mindspore import Cell

X, Y = jnp.arange(64.0).reshape(8, 8) / 64, jnp.ones((8, 8))
W1, W2 = jnp.eye(8) + 0.1, jnp.eye(8) - 0.1
STRATEGY = ((8, 1),)


def close(got, wanted, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, wanted)


class Block(Cell):
    def __init__(self, w):
        self.w = w

    def construct(self, x):
        return jnp.tanh(x @ self.w)

    def other(self, x, by=1.0):
        return jnp.tanh(x @ self.w) * by


class Net(Cell):
    """MindSpore's Net2: it calls its first block by a sharded function alone."""

    def __init__(self, hold=lambda graph: graph, of=lambda block: ms.shard(block, in_strategy=STRATEGY)):
        self.block1, self.block2 = Block(W1), Block(W2)
        self.block1_graph = hold(of(self.block1))

    def construct(self, x):
        graph = self.block1_graph
        while not callable(graph):
            graph = graph["graph"] if isinstance(graph, dict) else graph[0]
        return self.block2(graph(x))


def plain(parameters, x):
    return jnp.tanh(jnp.tanh(x @ parameters["block1/w"]) @ parameters["block2/w"])


def loss(parameters, net, call=lambda net, parameters: net.with_parameters(parameters)(X)):
    return ((call(net, parameters) - Y) ** 2).mean()


HOLDS = {
    "an attribute": lambda graph: graph,
    "a list": lambda graph: [graph],
    "a tuple in a dict": lambda graph: {"graph": (graph, 1)},
    "a dict in a list": lambda graph: [{"graph": graph}],
    "a deque": lambda graph: collections.deque([graph], maxlen=2),
}
OF = {
    "a cell": lambda block: ms.shard(block, in_strategy=STRATEGY),
    "construct": lambda block: ms.shard(block.construct, in_strategy=STRATEGY),
    "another method": lambda block: ms.shard(block.other, in_strategy=STRATEGY),
    "a partial": lambda block: ms.shard(functools.partial(block.other, by=1.0), in_strategy=STRATEGY),
    "a sharded cell": lambda block: block.shard(in_strategy=STRATEGY),
    "a bound method": lambda block: block.other,
    "a recomputed method": lambda block: train.recompute(block.other),
    "a partial of a sharded function": lambda block: functools.partial(
        ms.shard(block.other, in_strategy=STRATEGY), by=1.0
    ),
}


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("of", OF)
def test_a_cell_trains_through_a_function_that_it_holds(hold, of):
    if hold != "an attribute" and of not in ("a cell", "another method"):
        pytest.skip("one container is enough")
    net = Net(HOLDS[hold], OF[of])
    parameters = net.parameters_dict()
    assert sorted(parameters) == ["block1/w", "block2/w"]
    wanted = jax.value_and_grad(lambda p: ((plain(p, X) - Y) ** 2).mean())(parameters)
    for other in (net, copy.deepcopy(net)):
        close(jax.value_and_grad(loss)(parameters, other), wanted)
    changed = {path: w + 1 for path, w in parameters.items()}
    close(net.with_parameters(changed)(X), plain(changed, X))
    close(net(X), plain(parameters, X))


def test_copies_and_pickles_are_of_their_own_block():
    net = Net()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other.block1.w = 2 * W1
        close(other(X), plain({"block1/w": 2 * W1, "block2/w": W2}, X))
    close(net(X), plain({"block1/w": W1, "block2/w": W2}, X))


def test_a_nest_of_cells():
    class Outer(Cell):
        def __init__(self):
            self.net = Net()
            self.graph = ms.shard(self.net, in_strategy=STRATEGY)

        def construct(self, x):
            return self.graph(x)

    outer = Outer()
    parameters = {path.removeprefix("net/"): w for path, w in outer.parameters_dict().items()}
    grads = jax.grad(loss)(outer.parameters_dict(), outer)
    wanted = jax.grad(lambda p: ((plain(p, X) - Y) ** 2).mean())(parameters)
    close({path.removeprefix("net/"): g for path, g in grads.items()}, wanted)


def test_a_cell_that_only_a_sharded_function_holds():
    class Only(Cell):
        def __init__(self):
            self.graph = ms.shard(Block(W1), in_strategy=STRATEGY)

        def construct(self, x):
            return self.graph(x)

    only = Only()
    assert list(only.parameters_dict()) == ["graph/w"]
    close(only.with_parameters({"graph/w": 2 * W1})(X), jnp.tanh(X @ (2 * W1)))


def trained(model, loss_fn, steps=3):
    step = train.step(loss_fn, optax.sgd(0.5))
    state = step.init(model, X, Y)
    values = []
    for _ in range(steps):
        state, value = step(state, X, Y)
        values.append(float(value))
    return values


def by_hand(parameters, steps=3):
    values = []
    for _ in range(steps):
        value, grads = jax.value_and_grad(lambda p: ((plain(p, X) - Y) ** 2).mean())(parameters)
        parameters = jax.tree.map(lambda p, g: p - 0.5 * g, parameters, grads)
        values.append(float(value))
    return values


def test_train_step_moves_the_block():
    wanted = by_hand({"block1/w": W1, "block2/w": W2})
    close(trained(Net(), lambda net, x, y: ((net(x) - y) ** 2).mean()), wanted)


def test_the_sharded_whole_follows_too():
    net = Net().shard(in_strategy=STRATEGY)
    close(net(X), plain({"block1/w": W1, "block2/w": W2}, X))
    net.block1.w = 2 * W1
    close(net(X), plain({"block1/w": 2 * W1, "block2/w": W2}, X))
    assert len(net._sharded()._calls.entries) == 1
    assert [d.path for d in net.plan(X).inputs] == ["block1/w", "block2/w", "x"]


class NnxBlock(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...])

    def other(self, x):
        return jnp.tanh(x @ self.w[...])


class NnxNet(nnx.Module):
    def __init__(self, of, hold=lambda graph: graph):
        self.block1, self.block2 = NnxBlock(W1), NnxBlock(W2)
        self.graph = hold(of(self.block1))

    def __call__(self, x):
        graph = self.graph if callable(self.graph) else self.graph[0]
        return self.block2(graph(x))


NNX_OF = {
    "a module": lambda block: shard(block, STRATEGY),
    "a method": lambda block: shard(block.other, STRATEGY),
    "a partial": lambda block: shard(functools.partial(block.other), STRATEGY),
}


@pytest.mark.parametrize("hold", [lambda graph: graph, lambda graph: nnx.List([graph])])
@pytest.mark.parametrize("of", NNX_OF)
def test_an_nnx_module_trains_through_a_function_that_it_holds(of, hold):
    net = NnxNet(NNX_OF[of], hold)
    parameters = {"block1/w": W1, "block2/w": W2}
    wanted = jax.grad(lambda p: ((plain(p, X) - Y) ** 2).mean())(parameters)
    grads = nnx.grad(lambda net: ((net(X) - Y) ** 2).mean())(net)
    close({"block1/w": grads["block1"]["w"][...], "block2/w": grads["block2"]["w"][...]}, wanted)
    definition, state = nnx.split(net)
    other = nnx.merge(definition, jax.tree.map(lambda w: 2 * w, state))
    close(other(X), plain({"block1/w": 2 * W1, "block2/w": 2 * W2}, X))
    assert other.block1.w[...] is not net.block1.w[...]
    whole = shard(net, STRATEGY)
    close(whole(X), plain(parameters, X))
    net.block1.w[...] = 2 * W1
    close(whole(X), plain({"block1/w": 2 * W1, "block2/w": W2}, X))
    copied = copy.deepcopy(net)
    copied.block1.w[...] = W1
    close(copied(X), plain(parameters, X))


def test_train_step_moves_an_nnx_block():
    net = NnxNet(NNX_OF["a module"])
    close(trained(net, lambda net, x, y: ((net(x) - y) ** 2).mean()), by_hand({"block1/w": W1, "block2/w": W2}))


class EqxBlock(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jnp.tanh(x @ self.w)

    def other(self, x):
        return jnp.tanh(x @ self.w)


class EqxNet(eqx.Module):
    graph: object
    block2: EqxBlock

    def __call__(self, x):
        return self.block2(self.graph(x))


@pytest.mark.parametrize("of", ["a module", "a method"])
def test_an_equinox_module_trains_through_a_function_that_it_holds(of):
    net = EqxNet(NNX_OF[of](EqxBlock(W1)), EqxBlock(W2))
    parameters = {"block1/w": W1, "block2/w": W2}
    wanted = jax.grad(lambda p: ((plain(p, X) - Y) ** 2).mean())(parameters)
    grads = eqx.filter_grad(lambda net: ((net(X) - Y) ** 2).mean())(net)
    close(jax.tree.leaves(grads), [*wanted.values()])
    moved = eqx.apply_updates(net, jax.tree.map(lambda g: -0.5 * g, grads))
    close(moved(X), plain(jax.tree.map(lambda p, g: p - 0.5 * g, parameters, wanted), X))
    whole = shard(net, STRATEGY)
    close(whole(X), plain(parameters, X))
    close(trained(net, lambda net, x, y: ((net(x) - y) ** 2).mean()), by_hand(parameters))
    close(pickle.loads(pickle.dumps(net))(X), plain(parameters, X))


class LinenNet(linen.Module):
    is_sharded: bool
    of: str = "__call__"

    def setup(self):
        self.block1, self.block2 = linen.Dense(8), linen.Dense(8)
        self.graph = shard(getattr(self.block1, self.of), STRATEGY) if self.is_sharded else self.block1

    def __call__(self, x):
        return self.block2(jnp.tanh(self.graph(x)))


def test_a_linen_module_trains_through_a_function_that_it_holds():
    variables = {"params": {"block1": {"kernel": W1, "bias": Y[0]}, "block2": {"kernel": W2, "bias": Y[0]}}}

    def loss(variables, net):
        return ((net.apply(variables, X) - Y) ** 2).mean()

    for times in (1, 2):
        own = jax.tree.map(lambda w: times * w, variables)  # noqa: B023
        wanted = jax.value_and_grad(loss)(own, LinenNet(False))
        close(jax.value_and_grad(loss)(own, LinenNet(True)), wanted)
        net = LinenNet(True)
        for _ in range(2):
            close(shard(net.apply)(own, X), LinenNet(False).apply(own, X))

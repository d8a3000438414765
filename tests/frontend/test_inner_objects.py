"""Plain objects inside an object: their Cells are trained and followed, and what refers to the object refers to it in a call."""

import copy
import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardfn import shard, train
from shardfn.errors import StrategyError
from shardfn.mindspore import Cell

X, Y = jnp.arange(16.0).reshape(8, 2) / 16, jnp.ones((8, 2))


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


class Linear(Cell):
    def __init__(self, by=1.0):
        self.w, self.calls = by * jnp.eye(2), 0

    def construct(self, x):
        return x @ self.w


class Held:
    def __init__(self, part):
        self.part, self.scale, self.own = part, 1.0, np.ones(2, "float32")


class Slots:
    __slots__ = ("part",)

    def __init__(self, part):
        self.part = part


@dataclasses.dataclass(frozen=True)
class Frozen:
    part: object


HOLDERS = {
    "an object": (lambda part: Held(part), lambda held: held.part),
    "slots": (lambda part: Slots(part), lambda held: held.part),
    "a frozen dataclass": (lambda part: Frozen(part), lambda held: held.part),
    "a namespace": (lambda part: types.SimpleNamespace(part=part), lambda held: held.part),
    "a list in an object": (lambda part: Held([part]), lambda held: held.part[0]),
    "an object in a dict in an object": (lambda part: Held({"a": Slots(part)}), lambda held: held.part["a"].part),
    "a method": (lambda part: Held(part.construct), lambda held: held.part.__self__),
}


class Net(Cell):
    def __init__(self, holder):
        self.holder, self.held, self.last = holder, HOLDERS[holder][0](Linear(0.5)), Linear()

    def construct(self, x):
        return self.last(jnp.tanh(HOLDERS[self.holder][1](self.held)(x)))


@pytest.mark.parametrize("holder", HOLDERS)
def test_cells_in_plain_objects_are_parameters(holder):
    get, net = HOLDERS[holder][1], Net(holder)
    (name,) = net.parameters_dict().keys() - {"last/w"}

    def plain(parameters, x):
        return jnp.tanh(x @ parameters[name]) @ parameters["last/w"]

    def loss(parameters, call):
        return ((call(parameters) - Y) ** 2).mean()

    parameters = net.parameters_dict()
    found = jax.grad(lambda p: loss(p, lambda p: net.with_parameters(p)(X)))(parameters)
    close(found, jax.grad(lambda p: loss(p, lambda p: plain(p, X)))(parameters))
    sharded = shard(net)
    close(sharded(X), plain(parameters, X))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))) if holder != "a method" else (net,):
        get(other.held).w = 3.0 * jnp.eye(2)
        close(shard(other)(X), plain({**parameters, name: 3.0 * jnp.eye(2)}, X))
    close(sharded(X), plain(net.parameters_dict(), X))


@pytest.mark.parametrize("made", [True, False])
def test_training_moves_cells_in_plain_objects(made):
    net = Net("slots")
    step = train.step(lambda net, x: ((net(x) - Y) ** 2).mean(), optax.sgd(0.1))
    state = step.init((lambda: Net("slots")) if made else net, X)
    parameters = net.parameters_dict()
    for _ in range(2):
        state, value = step(state, X)
        wanted, gradients = jax.value_and_grad(lambda p: ((net.with_parameters(p)(X) - Y) ** 2).mean())(parameters)
        parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)
        close(value, wanted)
    close(step.model(state).parameters_dict(), parameters)


def test_an_array_of_a_plain_object_in_a_model_that_is_made_is_refused():
    class Own(Net):
        def __init__(self):
            super().__init__("slots")
            self.part = types.SimpleNamespace(config=Config())

    class Config:
        def __init__(self):
            self.own = jnp.ones(2)

    step = train.step(lambda net, x: ((net(x) - Y) ** 2).mean(), optax.sgd(0.1))
    with pytest.raises(StrategyError, match=r"Config\.own is an array of an object inside Own that is no Cell"):
        step.init(Own, X)


def test_a_call_changes_cells_in_plain_objects():
    class Counts(Cell):
        def __init__(self):
            self.held = Slots(Linear())

        def construct(self, x):
            self.held.part.w = self.held.part.w + 1
            return self.held.part(x)

    class Numbers(Counts):
        def construct(self, x):
            self.held.part.calls += 1
            return self.held.part(x)

    counts = Counts()
    sharded = shard(counts)
    sharded(X), sharded(X)
    close(counts.held.part.w, jnp.eye(2) + 2)
    numbers = Numbers()
    with pytest.raises(StrategyError, match="changes what is no array"):
        shard(numbers)(X)
    assert numbers.held.part.calls == 0


class Part:
    def __init__(self, whole):
        self.whole, self.k = whole, 1.0

    def by(self, x, whole):
        return x * (self.k if self.whole is whole else -1.0)


class Whole:
    def __init__(self):
        self.w, self.part, self.parts = jnp.ones(2), Part(self), {"a": [Part(self)]}
        self.kept = self.itself

    def itself(self):
        return self

    @shard
    def __call__(self, x):
        assert self.kept() is self and self.parts["a"][0].whole is self
        return self.part.by(x, self) * self.part.whole.w

    @shard
    def writes(self, x):
        self.part.whole.w = self.part.whole.w + x.sum()
        return x

    @shard
    def counts(self, x):
        self.part.k = 2.0
        return x


def test_what_refers_to_the_object_refers_to_it_in_a_call():
    whole = Whole()
    close(whole(X), X)
    whole.w = 2 * whole.w
    close(whole(X), 2 * X)
    whole.part.k = 3.0
    close(whole(X), 6 * X)
    whole.writes(X)
    close(whole.w, jnp.ones(2) * 2 + X.sum())
    with pytest.raises(StrategyError, match=r"self\.part\.k"):
        whole.counts(X)
    assert whole.part.k == 3.0 and whole.part.whole is whole

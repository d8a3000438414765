"""Containers and other objects of the standard library keep their class in a call, and a call sees what changes in them."""

import array
import collections
import contextvars
import functools
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardfn import shard, train
from shardfn.mindspore import Cell

X = jnp.arange(16.0).reshape(8, 2)
TWO = jnp.float32(2)


class Named(collections.namedtuple("Named", "a b")):
    def sum(self):
        return self.a + self.b


class Doubled(collections.namedtuple("Doubled", "a b")):
    def __new__(cls, a):
        return super().__new__(cls, a, a)


class Tagged(list):
    def __init__(self, tag, items):
        super().__init__(items)
        self.tag = tag


class Config(dict):
    def __init__(self, tag, **entries):
        super().__init__(**entries)
        self.tag = tag


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")

    def __copy__(self):
        return self


class ByAttribute(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


CONTAINERS = {
    "a Counter": (lambda: collections.Counter(a=2, b=3), lambda c: c["a"] + c["b"] + c["absent"] - 1),
    "a Counter with an array": (lambda: collections.Counter(a=TWO, b=3), lambda c: c["a"] + c["b"] + c["absent"] - 1),
    "a Counter in a list": (lambda: [{"c": collections.Counter(a=TWO)}], lambda v: v[0]["c"]["a"] * 2 + v[0]["c"]["b"]),
    "an OrderedDict": (lambda: collections.OrderedDict(b=2.0, a=TWO), lambda c: (c.move_to_end, next(iter(c.values())) * 2)[1]),
    "a defaultdict": (lambda: collections.defaultdict(lambda: 2.0, a=TWO), lambda c: c["a"] + c.default_factory()),
    "a dict of a class": (lambda: Config(2.0, a=TWO), lambda c: c["a"] + c.tag),
    "a dict that refuses changes": (lambda: Frozen(a=TWO), lambda c: 2 * c["a"]),
    "a dict that is its attributes": (lambda: ByAttribute(a=TWO), lambda c: c.a + c["a"]),
    "a list of a class": (lambda: Tagged(2.0, [TWO]), lambda c: c[0] + c.tag),
    "numbers of a class": (lambda: Tagged(2.0, [2.0]), lambda c: c[0] + c.tag),
    "a namedtuple of a class": (lambda: Named(TWO, 2.0), lambda c: c.sum()),
    "a namedtuple with a constructor": (lambda: Doubled(TWO), lambda c: c.a + c.b),
    "a deque": (lambda: collections.deque([TWO], maxlen=2), lambda c: c[0] * c.maxlen),
    "a UserDict": (lambda: collections.UserDict(a=TWO), lambda c: 2 * c["a"]),
}  # fmt: skip


class Holds(Cell):
    def __init__(self, held, value):
        self.held, self.value, self.w = held, value, jnp.ones(2)

    def construct(self, x):
        return self.value(self.held) * x * self.w

    @shard
    def decorated(self, x):
        return self.value(self.held) * x


class Plain:
    def __init__(self, held, value):
        self.held, self.value = held, value

    @shard
    def __call__(self, x):
        return self.value(self.held) * x


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_class(name):
    make, value = CONTAINERS[name]
    for call in (shard(Holds(make(), value)), Plain(make(), value)):
        np.testing.assert_allclose(call(X), 4 * X)
    cell = Holds(make(), value)
    moved = cell.with_parameters({"w": jnp.full(2, 2.0)})
    np.testing.assert_allclose(moved(X), 8 * X)
    assert type(moved.held) is type(make())


def test_recomputed_submodules_in_containers_keep_their_class():
    class Block(Cell):
        def construct(self, x):
            return jnp.sin(x)

    class Net(Cell):
        def __init__(self):
            self.blocks = collections.defaultdict(list, a=Block())
            self.pair = Named(Block(), 2.0)

        def construct(self, x):
            return self.pair.b * self.pair.a(self.blocks["a"](x))

    net = train.recompute(Net(), paths=("blocks/*", "pair/*"))
    assert net.blocks.default_factory is list
    np.testing.assert_allclose(net(X), 2 * jnp.sin(jnp.sin(X)), rtol=1e-6)


class Number(float):
    pass


class Text(str):
    pass


class Object:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Renamed(Object):
    """Reads one attribute under the name of another."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, "_k" if name == "k" else name)


class Remembers:
    """A descriptor that keeps its values by object."""

    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, instance, owner=None):
        return self if instance is None else self.values[instance]

    def __set__(self, instance, value):
        self.values[instance] = value


class Described:
    k = Remembers()

    def __init__(self, k):
        self.k = k


def with_default(c=Object(k=2.0)):  # noqa: B008
    return c.k


def with_keyword(*, c=Object(k=2.0)):  # noqa: B008
    return c.k


def with_list(x, k=[2.0]):  # noqa: B006
    return k[0] * x


KEPT, NEAR = Object(k=2.0), Object(k=2.0)
SEEN = contextvars.ContextVar("SEEN", default=2.0)
TABLE = {"k": 2.0}


@functools.singledispatch
def chosen(value):
    return 2.0


CHANGES = {
    "an attribute of a list": (lambda: Tagged(2.0, [1]), lambda v: v.tag, lambda v: setattr(v, "tag", 3.0)),
    "an attribute of a dict": (lambda: Config(2.0, a=1), lambda v: v.tag, lambda v: setattr(v, "tag", 3.0)),
    "a dict that is its attributes": (lambda: ByAttribute(k=2.0), lambda v: v.k, lambda v: v.update(k=3.0)),
    "an entry of a Counter": (lambda: collections.Counter(k=2), lambda v: v["k"], lambda v: v.update(k=1)),
    "the factory of a defaultdict": (
        lambda: collections.defaultdict(lambda: 2.0),
        lambda v: v.default_factory(),
        lambda v: setattr(v, "default_factory", lambda: 3.0),
    ),
    "a UserDict": (lambda: collections.UserDict(k=2.0), lambda v: v["k"], lambda v: v.update(k=3.0)),
    "a ChainMap": (lambda: collections.ChainMap({}, {"k": 2.0}), lambda v: v["k"], lambda v: v.update(k=3.0)),
    "the items of a dict": (lambda: TABLE.items(), lambda v: dict(v)["k"], lambda v: TABLE.update(k=3.0)),
    "a number of a class": (lambda: [Number(2)], lambda v: v[0] * 1.0, lambda v: v.__setitem__(0, Number(3))),
    "a text of a class": (lambda: [Text("2")], lambda v: float(v[0]), lambda v: v.__setitem__(0, Text("3"))),
    "an array.array": (lambda: array.array("d", [2.0]), lambda v: v[0], lambda v: v.__setitem__(0, 3.0)),
    "a memoryview": (lambda: memoryview(bytearray(b"\2")), lambda v: v[0], lambda v: v.__setitem__(0, 3)),
    "a weak reference": (lambda: weakref.ref(KEPT), lambda v: v().k, lambda v: setattr(KEPT, "k", 3.0)),
    "a weak proxy": (lambda: weakref.proxy(NEAR), lambda v: v.k, lambda v: setattr(NEAR, "k", 3.0)),
    "a context variable": (lambda: SEEN, lambda v: v.get(), lambda v: v.set(3.0)),
    "an attribute by another name": (lambda: Renamed(_k=2.0), lambda v: v.k, lambda v: setattr(v, "_k", 3.0)),
    "a descriptor with values of its own": (lambda: Described(2.0), lambda v: v.k, lambda v: setattr(v, "k", 3.0)),
    "a default": (lambda: with_default, lambda v: v(), lambda v: setattr(v.__defaults__[0], "k", 3.0)),
    "a keyword's default": (lambda: with_keyword, lambda v: v(), lambda v: setattr(v.__kwdefaults__["c"], "k", 3.0)),
    "a function that chooses": (lambda: chosen, lambda v: v(1), lambda v: v.register(int)(lambda _: 3.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_sees_what_changed_inside(name):
    make, value, change = CHANGES[name]
    held = make()
    calls = Plain(held, value), Plain(types.SimpleNamespace(held=held), lambda v: value(v.held))
    for call in calls:
        np.testing.assert_allclose(call(X), 2 * X)
    change(held)
    for call in calls:
        np.testing.assert_allclose(call(X), 3 * X)


def test_defaults_of_the_function_itself_are_seen():
    call, made = shard(with_list), Object(k=2.0)

    def by_object(x, *, c=made):
        return c.k * x

    other = shard(by_object)
    np.testing.assert_allclose((call(X), other(X)), (2 * X, 2 * X))
    with_list.__defaults__[0][0] = made.k = 3.0
    np.testing.assert_allclose((call(X), other(X)), (3 * X, 3 * X))
    np.testing.assert_allclose(call(X, 4.0 * jnp.ones(1)), 4 * X)


class NnxScale(nnx.Module):
    def __init__(self, cfg):
        self.cfg, self.w = cfg, nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return self.cfg.k * self.w[...] * x


class EqxScale(eqx.Module):
    w: jax.Array
    cfg: object = eqx.field(static=True)

    def __call__(self, x):
        return self.cfg.k * self.w * x


@jax.tree_util.register_pytree_node_class
class TreeScale:
    def __init__(self, w, cfg):
        self.w, self.cfg = w, cfg

    def tree_flatten(self):
        return (self.w,), self.cfg

    @classmethod
    def tree_unflatten(cls, cfg, children):
        return cls(*children, cfg)

    def __call__(self, x):
        return self.cfg.k * self.w * x


OF_ARGUMENTS = {
    "a static argument": (lambda cfg: cfg, {"static_argnums": 0}, lambda cfg, x: cfg.k * x),
    "an NNX module": (NnxScale, {}, lambda module, x: module(x)),
    "an NNX module in a dict": (lambda cfg: {"m": NnxScale(cfg)}, {}, lambda modules, x: modules["m"](x)),
    "an Equinox module": (lambda cfg: EqxScale(jnp.ones(2), cfg), {}, lambda module, x: module(x)),
    "a pytree": (lambda cfg: [TreeScale(jnp.ones(2), cfg)], {}, lambda trees, x: trees[0](x)),
}


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_objects_that_arguments_hold_are_seen(name):
    make, options, function = OF_ARGUMENTS[name]
    cfg = Object(k=2.0, unread=1)
    call = shard(function, **options)
    for cfg.k in (2.0, 3.0):
        for _ in range(2):
            np.testing.assert_allclose(call(make(cfg), X), cfg.k * X)
        cfg.unread += 1
    assert len(call._calls.entries) == 2


def test_an_nnx_module_with_a_plain_object_that_holds_a_numpy_array():
    class Net(nnx.Module):
        def __init__(self):
            self.cfg = types.SimpleNamespace(scale=np.full(2, 2.0, np.float32))
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            return self.cfg.scale * self.w[...] * x

    net = Net()
    call = shard(net)
    for by in (2, 3):
        net.cfg.scale[:] = by
        for _ in range(2):
            np.testing.assert_allclose(call(X), by * X)
    assert len(call._calls.entries) == 2
    gradient = jax.grad(lambda w: shard(nnx.merge(*parts(net, w)))(X).sum())(jnp.ones(2))
    np.testing.assert_allclose(gradient, 3 * X.sum(0))


def parts(net, w):
    definition, state = nnx.split(net)
    return definition, jax.tree.map(lambda _: w, state)

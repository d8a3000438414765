"""A call sees what Python state is now, whatever kind of object holds it; and what it does not read costs nothing."""

import argparse
import collections
import copy
import dataclasses
import enum
import functools
import gc
import random
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardfn import shard
from shardfn.errors import StrategyError
from shardfn.mindspore import Cell

X = jnp.arange(16.0).reshape(8, 2)


def scaled(call, by):
    for _ in range(2):
        np.testing.assert_allclose(call(X), by * X, rtol=1e-6)


class Scale:
    k = 2.0

    def __init__(self, **attributes):
        vars(self).update(attributes)

    @shard
    def decorated(self, x):
        return self.factor() * x

    def plain(self, x):
        return self.factor() * x

    def __call__(self, x):
        return self.factor() * x

    def factor(self):
        return self.k


class Config:
    def __init__(self, k=2.0):
        self.k = k


class Mode(enum.Enum):
    TWO, THREE = 2.0, 3.0


@dataclasses.dataclass
class Data(Scale):
    k: float = 2.0


@dataclasses.dataclass(slots=True)
class Slots:
    k: float = 2.0

    @shard
    def decorated(self, x):
        return self.k * x

    def plain(self, x):
        return self.k * x

    def __call__(self, x):
        return self.k * x


class Nested(Scale):
    def factor(self):
        return self.cfg.inner.k


class Listed(Scale):
    def factor(self):
        return sum(self.ks) + self.named["more"]["k"]


class Property(Scale):
    @property
    def factor_(self):
        return self._cfg.k

    def factor(self):
        return self.factor_


class Dynamic(Scale):
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._held[name]

    def factor(self):
        return self.by


class ThroughFunction(Scale):
    def factor(self):
        return self.act.k


class ThroughPartial(Scale):
    def factor(self):
        return self.made()


class ThroughMethod(Scale):
    def factor(self):
        return self.other()


class ThroughDict(Scale):
    def factor(self):
        return vars(self)["by"]


class Optional(Scale):
    def factor(self):
        return getattr(self, "by", 2.0)


class OfMode(Scale):
    def factor(self):
        return self.mode.value


class Cached(Scale):
    @functools.cached_property
    def twice(self):
        return 2 * self.k

    def factor(self):
        return self.twice / 2


class CellScale(Scale, Cell):
    pass


def act(x):
    return x


def set_attribute(name):
    return lambda o: setattr(o, name, 3.0)


def plain_objects():
    """Name: a maker of an object that scales by 2, and what makes it scale by 3."""
    by_k = set_attribute("k")
    cell = CellScale(w=jnp.ones(3))
    act.k = 2.0
    yield "an attribute", Scale(k=2.0), by_k
    yield "a number in a Cell", cell, by_k
    yield "of an object with arrays", Scale(k=2.0, w=jnp.ones(4)), by_k
    yield "a class attribute that is hidden later", Scale(), by_k
    yield "a dataclass's field", Data(), by_k
    yield "slots", Slots(), by_k
    yield "nested", Nested(cfg=types.SimpleNamespace(inner=Config())), lambda o: setattr(o.cfg.inner, "k", 3.0)
    yield (
        "a nested object in the place of another",
        Nested(cfg=types.SimpleNamespace(inner=Config())),
        (lambda o: setattr(o.cfg, "inner", Config(3.0))),
    )
    yield "argparse", Nested(cfg=argparse.Namespace(inner=Config())), lambda o: setattr(o.cfg.inner, "k", 3.0)
    yield "a list", Listed(ks=[0.5, 0.5], named={"more": {"k": 1.0}}), lambda o: o.ks.append(1.0)
    yield (
        "a dict in a dict",
        Listed(ks=[0.5, 0.5], named={"more": {"k": 1.0}}),
        (lambda o: o.named["more"].update(k=2.0)),
    )
    yield "a deque", Listed(ks=collections.deque([1.0]), named={"more": {"k": 1.0}}), lambda o: o.ks.append(1.0)
    yield "a property", Property(_cfg=Config()), lambda o: setattr(o._cfg, "k", 3.0)
    yield "attributes by name", Dynamic(_held={"by": 2.0}), lambda o: o._held.update(by=3.0)
    yield "a function's attribute", ThroughFunction(act=act), lambda o: setattr(act, "k", 3.0)
    yield (
        "a partial",
        ThroughPartial(made=functools.partial(lambda c: c.k, Config())),
        (lambda o: setattr(o.made.args[0], "k", 3.0)),
    )
    yield (
        "a method of another object",
        ThroughMethod(other=Scale(k=2.0).factor),
        (lambda o: setattr(o.other.__self__, "k", 3.0)),
    )
    yield "its __dict__", ThroughDict(by=2.0), set_attribute("by")
    yield "an attribute that was not there", Optional(), set_attribute("by")
    yield "an enum", OfMode(mode=Mode.TWO), lambda o: setattr(o, "mode", Mode.THREE)
    yield (
        "an object in a list",
        Nested(cfg=types.SimpleNamespace(inner=Config())),
        (lambda o: setattr(o.cfg, "inner", types.SimpleNamespace(k=3.0))),
    )
    yield "a cached property", Cached(k=2.0), by_k


NAMES = [name for name, *_ in plain_objects()]


@pytest.mark.parametrize("way", ["decorated", "plain", "object"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_sees_what_changed(name, way):
    _, made, change = next(row for row in plain_objects() if row[0] == name)
    call = made.decorated if way == "decorated" else shard(made.plain if way == "plain" else made)
    scaled(call, 2)
    change(made)
    scaled(made.decorated if way == "decorated" else call, 3)
    assert len(call._calls.entries) == 2 or name == "of an object with arrays", (
        "once for each value; objects with arrays share"
    )


class Counts:
    """What a call does not read may change as it likes."""

    def __init__(self):
        self.k, self.losses, self.steps, self.cfg = 2.0, [], 0, Config()

    @shard
    def __call__(self, x):
        return self.k * x


def test_what_is_not_read_is_not_watched():
    counts = Counts()
    for step in range(4):
        scaled(counts, 2)
        counts.losses.append(step)
        counts.steps += 1
        counts.cfg.k = counts.other = step
    assert len(Counts.__call__.__get__(counts)._calls.entries) == 1


@pytest.mark.parametrize("by_class", [False, True])
def test_class_attributes(by_class):
    class Base:
        k = 2.0

    class Net(Base):
        @shard
        def __call__(self, x):
            return (type(self).k if by_class else self.k) * x

        @classmethod
        def of_class(cls, x):
            return cls.k * x

    net, of_class = Net(), shard(Net.of_class)
    scaled(net, 2)
    scaled(of_class, 2)
    Base.k = 3.0
    scaled(net, 3)
    scaled(of_class, 3)
    Net.k = 4.0
    scaled(net, 4)
    scaled(of_class, 4)
    Net.__call__ = shard(lambda self, x: 5 * x)
    scaled(net, 5)


def test_another_method_of_the_class():
    class Net:
        def factor(self):
            return 2.0

        @shard
        def __call__(self, x):
            return self.factor() * x

    net = Net()
    scaled(net, 2)
    Net.factor = lambda self: 3.0
    scaled(net, 3)
    net.factor = lambda: 4.0
    scaled(net, 4)


def test_attributes_of_functions():
    @shard
    def f(x):
        return f.k * x

    def g(x):
        return g.cfg.k * x

    f.k, g.cfg, h = 2.0, Config(), shard(g)
    scaled(f, 2)
    scaled(h, 2)
    f.k = g.cfg.k = 3.0
    scaled(f, 3)
    scaled(h, 3)
    assert f.k == f.fn.k == 3.0


@pytest.mark.parametrize("wrap", [jax.vmap, lambda f: functools.partial(f), functools.lru_cache, lambda f: f.__call__])
def test_an_object_behind_a_wrapper(wrap):
    if wrap is functools.lru_cache:
        pytest.skip("it keeps results itself")
    made = Scale(k=2.0)
    call = shard(wrap(made))
    scaled(call, 2)
    made.k = 3.0
    scaled(call, 3)


class Whole(nnx.Module):
    k = 2.0

    def __init__(self):
        self.w, self.cfg, self.parts = (
            nnx.Param(jnp.ones(2)),
            Config(2.0),
            nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))]),
        )

    def __call__(self, x):
        self.parts[0](x)
        return self.k * self.cfg.k * self.w[...] * x


def test_nnx_modules():
    module = Whole()
    call = shard(module)
    scaled(call, 4)
    module.cfg.k = 3.0
    scaled(call, 6)
    Whole.k = 1.0
    scaled(call, 3)
    module.w[...] = 2 * jnp.ones(2)
    scaled(call, 6)
    Whole.k = 2.0
    assert len(call._calls.entries) == 3


class Tree(eqx.Module):
    w: jax.Array
    cfg: Config = eqx.field(static=True)
    k = 2.0

    def __call__(self, x):
        return self.k * self.cfg.k * self.w * x


def test_equinox_modules():
    module = Tree(jnp.ones(2), Config())
    call = shard(module)
    scaled(call, 4)
    module.cfg.k = 3.0
    scaled(call, 6)
    Tree.k = 1.0
    scaled(call, 3)
    Tree.k = 2.0
    assert len(call._calls.entries) == 3


def test_numbers_that_are_equal_but_not_the_same():
    class Sign:
        def __init__(self, k):
            self.k = k

        @shard
        def __call__(self, x):
            return x * (1.0 if str(self.k) == "1" else np.copysign(2.0, self.k))

    sign = Sign(1)
    for value, wanted in ((1, 1), (True, 2), (1.0, 2), (0.0, 2), (-0.0, -2), (float("nan"), 2)):
        sign.k = value
        scaled(sign, wanted)


def test_numpy_arrays():
    class Table:
        small = np.full(2, 2.0, np.float32)
        large = np.zeros(1 << 17, np.float32)

        @shard
        def __call__(self, x):
            return self.small * x

        @shard
        def of_large(self, x):
            return x + self.large[:2]

    table = Table()
    scaled(table, 2)
    Table.small[:] = 3
    scaled(table, 3)
    with pytest.raises(StrategyError, match="writeable NumPy array of 524,288 bytes"):
        table.of_large(X)
    Table.large.flags.writeable = False
    scaled(table.of_large, 1)


def test_an_array_of_a_nested_object_is_seen():
    made = Nested(cfg=types.SimpleNamespace(inner=Config(jnp.float32(2))))
    scaled(made.decorated, 2)
    made.cfg.inner.k = jnp.float32(3)
    scaled(made.decorated, 3)


@pytest.mark.parametrize(
    "value",
    [(n for n in (2.0, 3.0)), iter([2.0]), random.Random(0), np.random.default_rng(0), np.random.RandomState(0)],
)
def test_what_cannot_be_watched_is_refused(value):
    class Reads:
        def __init__(self, held):
            self.held = held

        @shard
        def __call__(self, x):
            return x * (next(self.held) if hasattr(self.held, "__next__") else self.held.normal())

        @shard
        def other(self, x):
            return 2 * x

    scaled(Reads(value).other, 2)
    with pytest.raises(StrategyError, match=r"the call reads self\.held, a .*, which changes when it is used"):
        Reads(value)(X)


def test_a_change_by_the_call_is_refused():
    class Counting:
        def __init__(self):
            self.count, self.cfg = 0, Config()

        @shard
        def __call__(self, x):
            self.count += 1
            return x

        @shard
        def deep(self, x):
            self.cfg.k += 1
            return x

    for call, place in ((Counting(), "count"), (Counting().deep, r"self\.cfg\.k")):
        with pytest.raises(StrategyError, match=f"changes what is no array.*\n.*{place}"):
            call(X)


def test_a_sharded_method_in_a_sharded_method():
    class Outer:
        def __init__(self):
            self.inner = Scale(k=2.0)

        @shard
        def __call__(self, x):
            return self.inner.decorated(x)

    outer = Outer()
    scaled(outer, 2)
    outer.inner.k = 3.0
    scaled(outer, 3)
    other = copy.deepcopy(outer)
    other.inner.k = 4.0
    scaled(other, 4)
    scaled(outer, 3)


def test_a_sharded_object_in_a_sharded_function():
    made = Scale(k=2.0)

    @shard
    def outer(x):
        return made.decorated(x)

    scaled(outer, 2)
    made.k = 3.0
    scaled(outer, 3)


def test_values_that_change_at_every_call_are_named():
    made = Scale(k=0.0)
    with pytest.warns(UserWarning, match=r"planned 8 times because self\.k changes"):
        for k in range(9):
            made.k = float(k)
            np.testing.assert_allclose(made.decorated(X), k * X)


def test_arrays_that_come_later_are_arguments():
    class Late:
        w = None

        @shard
        def __call__(self, x):
            return 2 * x if self.w is None else self.w * x

    late = Late()
    scaled(late, 2)
    for k in (3.0, 4.0, 5.0):
        late.w = jnp.float32(k)
        scaled(late, k)
    assert len(Late.__call__.__get__(late)._calls.entries) == 2, "the array is an argument"


def test_closed_over_arguments_are_watched_too():
    made, table = Scale(k=2.0), jnp.ones((8, 2))
    made.use = lambda x: made.k * x * table
    call = shard(ThroughMethodOf(made), closed_over="argument")
    scaled(call, 2)
    made.k = 3.0
    scaled(call, 3)


class ThroughMethodOf:
    def __init__(self, made):
        self.made = made

    def __call__(self, x):
        return self.made.use(x) * self.made.k / self.made.k


def test_a_class_is_as_it_was_after_a_trace():
    before = dict(vars(Scale))
    scaled(Scale(k=2.0).decorated, 2)
    assert dict(vars(Scale)) == before and Scale.__getattribute__ is object.__getattribute__


class PerObject:
    """A descriptor that keeps the values of its objects itself."""

    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, obj, kind=None):
        if obj is None:
            raise TypeError("no value of the class")
        return self.values.get(obj, 1.0)

    def __set__(self, obj, value):
        self.values[obj] = value


class ByDescriptor:
    k = PerObject()

    def __init__(self, **attributes):
        vars(self).update(attributes)

    @shard
    def __call__(self, x):
        return self.k * x


@pytest.mark.parametrize("attributes", [{}, {"w": X}])
def test_descriptors_that_keep_values_by_object(attributes):
    one, other = ByDescriptor(**attributes), ByDescriptor(**attributes)
    one.k = 2.0
    scaled(one, 2)
    scaled(other, 1)
    one.k, other.k = 3.0, 4.0
    scaled(one, 3)
    scaled(other, 4)
    scaled(shard(one.__call__), 3)


def test_a_weak_dictionary_may_lose_a_key_while_a_call_is_traced():
    class Collecting(ByDescriptor):
        @shard
        def __call__(self, x):
            factor = self.k
            gc.collect()
            return factor * x

    lost, one = Collecting(), Collecting()
    lost.k, lost.itself, one.k = 5.0, lost, 2.0
    del lost  # it waits for the collector
    scaled(one, 2)
    scaled(one, 2)
    one.k = 3.0
    scaled(one, 3)


def test_an_object_is_itself_in_a_call():
    factors, seen = {}, []

    class Net:
        def __init__(self):
            self.w = jnp.ones(2)

        @functools.cache  # noqa: B019
        def table(self):
            seen.append(self)
            return factors[self]

        @shard
        def __call__(self, x):
            return self.table() * self.w * x

    net = Net()
    factors[net] = 2.0
    scaled(net, 2)
    assert net.table() == 2 and hash(net) == object.__hash__(net) and net == net and net != Net()
    net.w = 3 * net.w
    scaled(net, 6)
    other = Net()
    factors[other] = 5.0
    scaled(other, 5)
    scaled(net, 6)
    assert "__eq__" not in vars(Net) and "__hash__" not in vars(Net)


class OfClasses(type):
    shared = 2.0

    @property
    def factor(cls):
        return cls.shared * cls.own


@pytest.mark.parametrize("name", ["shared", "factor"])
def test_attributes_of_a_metaclass(name):
    kind = OfClasses("Kinds", (OfClasses,), {}) if name == "shared" else OfClasses

    class Net(metaclass=kind):
        own = 1.0

        @shard
        def __call__(self, x):
            return (type(self).shared if name == "shared" else type(self).factor) * x

    net = Net()
    scaled(net, 2)
    kind.shared = 3.0
    try:
        scaled(net, 3)
        Net.own = 2.0
        scaled(net, 3 if name == "shared" else 6)
    finally:
        OfClasses.shared = 2.0


@pytest.mark.parametrize("bind", [lambda f: f, classmethod, staticmethod, property])
def test_a_method_behind_super(bind):
    of = {classmethod: lambda cls: 2.0, staticmethod: lambda: 2.0}
    others = {classmethod: lambda cls: 3.0, staticmethod: lambda: 3.0}

    class Base:
        factor = bind(of.get(bind, lambda self: 2.0))

    class Net(Base):
        factor = 5.0

        @shard
        def __call__(self, x):
            return (super().factor if bind is property else super().factor()) * x

    net = Net()
    scaled(net, 2)
    Base.factor = bind(others.get(bind, lambda self: 3.0))
    scaled(net, 3)

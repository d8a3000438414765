"""A call sees what values of all kinds hold now: containers, objects of the standard library, what is read around attributes."""

import array
import collections
import configparser
import copy
import ctypes
import dataclasses
import decimal
import enum
import functools
import inspect
import os
import queue
import threading
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from shardfn import shard
from shardfn.errors import StrategyError
from tests.frontend.test_watch import Config, Scale, X, scaled


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({0.0: 1}, {-0.0: 1}),
        ({1: 1}, {True: 1}),
        ({(1, 0.0): 1}, {(True, 0.0): 1}),
        ({(1, 0.0): 1}, {(1, -0.0): 1}),
        ({"a": {1: 2}}, {"a": {1.0: 2}}),
        (collections.OrderedDict({1: 1}), collections.OrderedDict({1.0: 1})),
        ({1, 2}, {True, 2}),
        ({0.0}, {-0.0}),
        (frozenset({(0.0, "a")}), frozenset({(-0.0, "a")})),
        ([0.0, "a"], [-0.0, "a"]),
        ((1, (2,)), (True, (2,))),
        (range(0, 3, 2), range(0, 4, 2)),
        (decimal.Decimal("0"), decimal.Decimal("-0")),
        (array.array("i", [0, 1065353216]), array.array("f", [0.0, 1.0])),
        (memoryview(b"\0\0\0\0"), memoryview(b"\0\0\0\0").cast("i")),
    ],
    ids=lambda value: repr(value.tolist() if isinstance(value, memoryview) else value),
)
@pytest.mark.parametrize("nan", [False, True])
def test_containers_that_are_equal_but_not_the_same(before, after, nan):
    traced = []

    def call(self, x):
        traced.append(repr(list(self.k) if isinstance(self.k, memoryview) else self.k))
        return x * len(traced)

    made = Scale(k=before)
    call = shard(types.MethodType(call, made))
    for value in (before, copy.copy(before) if type(before) is not memoryview else before, after, before):
        made.k = [value, {float("nan"): 1}] if nan else value
        call(X)
    assert len(traced) == (4 if nan else 2) and (nan or traced[0] != traced[1])


class Equinox(eqx.Module):
    held: Any = eqx.field(static=True)
    w: jax.Array


@struct.dataclass
class Struct:
    w: jax.Array
    held: Any = struct.field(pytree_node=False)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["held"])
@dataclasses.dataclass
class Registered:
    w: jax.Array
    held: Any


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, w, held):
        self.w, self.held = w, held

    def tree_flatten(self):
        return (self.w,), self.held

    @classmethod
    def tree_unflatten(cls, held, children):
        return cls(*children, held)


CONTAINERS = {
    "dict": (lambda: {"k": 2.0}, lambda c: c["k"], lambda c, k: c.update(k=k)),
    "list": (lambda: [2.0], lambda c: c[0], lambda c, k: c.__setitem__(0, k)),
    "longer": (lambda: [1.0, 1.0], lambda c: sum(c), lambda c, k: c.append(k - sum(c))),
    "set": (lambda: {2.0}, lambda c: max(c), lambda c, k: (c.clear(), c.add(k))),
    "inside": (lambda: {"a": [{"k": 2.0}]}, lambda c: c["a"][0]["k"], lambda c, k: c["a"][0].update(k=k)),
    "in a tuple": (lambda: (1, [2.0]), lambda c: c[1][0], lambda c, k: c[1].__setitem__(0, k)),
    "ordered": (lambda: collections.OrderedDict(k=2.0), lambda c: c["k"], lambda c, k: c.update(k=k)),
    "deque": (lambda: collections.deque([2.0]), lambda c: c[0], lambda c, k: c.__setitem__(0, k)),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", [Equinox, Struct, Registered, Node])
def test_containers_in_static_fields_of_arguments(kind, container):
    make, read, change = CONTAINERS[container]
    held = make()
    one, other = (kind(held=h, w=jnp.eye(2)) for h in (held, make()))
    call, nested = (
        shard(lambda m, x: x @ m.w * read(m.held)),
        shard(lambda m, x: x @ m["a"][0].w * read(m["a"][0].held)),
    )
    for value in (2.0, 3.0, 2.0, 4.0):
        change(held, value)
        scaled(lambda x: call(one, x), value)
        scaled(lambda x: nested({"a": [one]}, x), value)
        scaled(lambda x: call(other, x), 2)


def test_a_static_tuple_with_a_list_or_an_object():
    config = Config(2.0)
    call = shard(lambda x, held: x * held[0].k, static_argnums=1)
    scaled(lambda x: call(x, (config,)), 2)
    config.k = 3.0
    scaled(lambda x: call(x, (config,)), 3)


def test_values_of_a_thread_and_of_the_environment(monkeypatch):
    class Local(threading.local):
        def __init__(self):
            self.k = 2.0

    plain = threading.local()
    plain.k = 2.0
    monkeypatch.setenv("SHARDFN_TEST_K", "2")

    class Holder(Scale):
        def factor(self):
            return float(self.held["SHARDFN_TEST_K"]) if self.held is os.environ else self.held.k

    calls = [Holder(held=held).decorated for held in (plain, Local(), os.environ)]
    for call in calls:
        scaled(call, 2)
    for call in calls[:2]:
        call.fn.__self__.held.k = 3.0
    monkeypatch.setenv("SHARDFN_TEST_K", "3")
    for call in calls:
        scaled(call, 3)


class Library:
    """What objects of the standard library and of NumPy hold."""

    def __init__(self):
        self.config, self.flag, self.queue, self.number = (
            configparser.ConfigParser(),
            threading.Event(),
            queue.Queue(),
            ctypes.c_double(2.0),
        )
        self.config.read_string("[a]\nk = 2")
        self.queue.put(2.0)
        self.row, self.polynomial, self.semaphore = (ctypes.c_int * 2)(1, 2), np.poly1d([2.0]), threading.Semaphore(2)
        k = 2.0
        (self.variable,) = (lambda: k).__closure__


LIBRARY = {
    "config": (lambda o: float(o.config["a"]["k"]), lambda o: o.config.set("a", "k", "3")),
    "flag": (lambda o: 3.0 if o.flag.is_set() else 2.0, lambda o: o.flag.set()),
    "queue": (lambda o: 1.0 + o.queue.qsize(), lambda o: o.queue.put(1.0)),
    "number": (lambda o: o.number.value, lambda o: setattr(o.number, "value", 3.0)),
    "row": (lambda o: o.row[1], lambda o: o.row.__setitem__(1, 3)),
    "polynomial": (lambda o: float(o.polynomial(1.0)), lambda o: o.polynomial.__setitem__(0, 3.0)),
    "semaphore": (lambda o: o.semaphore._value, lambda o: o.semaphore.release()),
    "variable": (lambda o: o.variable.cell_contents, lambda o: setattr(o.variable, "cell_contents", 3.0)),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_objects_of_the_standard_library(name):
    read, change = LIBRARY[name]
    held = Library()
    call = shard(types.MethodType(lambda self, x: x * read(self.held), Scale(held=held)))
    scaled(call, 2)
    change(held)
    scaled(call, 3)
    taken = shard(types.MethodType(lambda self, x: x * self.held.queue.get(), Scale(held=held)))
    with pytest.raises(StrategyError, match="changes what is no array"):
        taken(X)


class Fields:
    """Values behind `__getattr__`, as in configurations."""

    def __init__(self, **fields):
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name):
        return object.__getattribute__(self, "_fields")[name]

    def __setattr__(self, name, value):
        object.__getattribute__(self, "_fields")[name] = value


class Behind:
    def __init__(self, k):
        self._k = k

    @property
    def k(self):
        return super().__getattribute__("_k")

    @k.setter
    def k(self, value):
        self._k = value


class Static(Behind):
    @property
    def k(self):
        return inspect.getattr_static(self, "_k")

    @k.setter
    def k(self, value):
        self._k = value


AROUND = {
    "fields": (lambda: Fields(k=2.0), lambda self: self.held.k),
    "super": (lambda: Behind(2.0), lambda self: self.held.k),
    "static": (lambda: Static(2.0), lambda self: self.held.k),
    "copy": (lambda: Config(2.0), lambda self: copy.copy(self.held).k),
    "deep copy": (lambda: Config(2.0), lambda self: copy.deepcopy([self.held])[0].k),
    "copy of the object": (lambda: Config(2.0), lambda self: copy.copy(self).held.k),
    "state": (lambda: Config(2.0), lambda self: self.held.__getstate__()["k"]),
    "object": (lambda: Config(2.0), lambda self: object.__getattribute__(self.held, "k")),
    "getattr_static": (lambda: Config(2.0), lambda self: inspect.getattr_static(self.held, "k")),
}


@pytest.mark.parametrize("name", AROUND)
def test_attributes_that_are_read_around_their_object(name):
    make, read = AROUND[name]

    class Reading(Scale):
        factor = read

    made = Reading(held=make())
    scaled(made.decorated, 2)
    made.held.k = 3.0
    scaled(made.decorated, 3)


class Foreign:
    """An array of another library."""

    shape, dtype, format = (2, 2), np.dtype(np.float32), "csr"


def test_arrays_of_other_libraries_and_classes_without_a_module_are_objects():
    made = Scale(foreign=Foreign())
    scaled(made.decorated, 2)
    names = {"shard": shard}
    exec("class Nameless:\n  k = 2.0\n  @shard\n  def f(self, x): return self.k * x\n", names)
    made = names["Nameless"]()
    assert type(made).__module__ == "builtins"
    scaled(made.f, 2)
    made.k = 3.0
    scaled(made.f, 3)


def test_methods_of_an_enum():
    class Op(enum.Enum):
        ADD, DOUBLE = 1, 2

        @shard
        def decorated(self, x):
            return self.plain(x)

        def plain(self, x):
            return x + 2 if self is Op.ADD else 2 * x

    for call in (Op.ADD.decorated, shard(Op.ADD.plain), shard(lambda x, op: op.decorated(x), static_argnums=1)):
        for _ in range(2):
            np.testing.assert_array_equal(call(X, *[Op.ADD] * (call.__name__ == "<lambda>")), X + 2)
    scaled(Op.DOUBLE.decorated, 2)


def test_arrays_with_a_mask_are_values():
    made = Scale(masked=np.ma.array([2.0, 3.0], mask=[False, True]))
    scaled(made.decorated, 2)
    call = shard(types.MethodType(lambda self, x: x * float(self.masked[0]), made))
    scaled(call, 2)
    made.masked[0] = 4.0
    scaled(call, 4)
    made.masked = np.array([2.0, "a"], dtype=object)
    with pytest.raises(StrategyError, match="a writeable NumPy array of dtype object"):
        shard(types.MethodType(lambda self, x: x * self.masked[0], made))(X)


@pytest.mark.parametrize("arrays", [{}, {"w": jnp.ones(2)}], ids=["no arrays", "arrays"])
def test_array_that_takes_the_place_of_what_the_call_read(arrays):
    def first(self, x):
        self.held = x if self.held is None else self.held + x
        return self.held

    def last(self, x):
        self.held = 2 * x
        return self.held

    def counts(self, x):
        self.held, self.k = 2 * x, self.k + 1
        return self.held

    made = Scale(held=None, **arrays)
    with pytest.warns(UserWarning, match="makes arrays in its call that are not kept: held"):
        scaled(shard(types.MethodType(last, made)), 2)
    for method, where in ((first, "held"), (counts, "k")):
        with pytest.raises(StrategyError, match=f"changes what is no array(.|\n)*where: .*{where}"):
            shard(types.MethodType(method, made))(X)
    assert made.held is None and made.k == 2


@pytest.mark.parametrize("of", ["itself", "base", "inside"])
@pytest.mark.parametrize("name", ["__call__", "__getitem__", "__len__", "__neg__"])
def test_methods_of_operators_that_are_replaced_in_a_class(name, of):
    class Base:
        def __call__(self, x):
            return 2 * x

        def __getitem__(self, i):
            return 2.0

        def __len__(self):
            return 2

        def __neg__(self):
            return 2.0

    class Holder(Base):
        inner = None

        @shard
        def apply(self, x):
            one = self.inner or self
            uses = {"__getitem__": lambda: one[0], "__len__": lambda: len(one), "__neg__": lambda: -one}
            return one(x) if name == "__call__" else x * uses[name]()

    made = Holder()
    if of == "inside":
        made.inner = Base()
    scaled(made.apply, 2)
    new = {"__call__": lambda self, x: 3 * x, "__getitem__": lambda self, i: 3.0}.get(name, lambda self: 3)
    setattr(Holder if of == "itself" else Base, name, new)
    scaled(made.apply, 3)

"""Callables: every kind becomes one function of arrays, and what a call changes in an object is written back.

Class-style code with `Cell.shard` is in mindspore/test_cell.py.
"""

import collections
import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import re
import weakref

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn import AUTO, shard
from shardfn.errors import StrategyTypeError
from shardfn.frontend.arguments import Slot, bind, split
from shardfn.frontend.callee import describe
from shardfn.mindspore import Cell

KEYS = jax.random.split(jax.random.key(0), 4)
RNG = np.random.default_rng(0)
X, W = jnp.asarray(RNG.normal(size=(8, 16)), jnp.float32), jnp.asarray(RNG.normal(size=(16, 8)) / 4, jnp.float32)


def close(found, wanted, tol=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol), found, wanted)


def paths(sharded, *args, **kwargs):
    return [d.path for d in sharded.plan(*args, **kwargs).inputs]


# ---- arguments


def f(a, b=2, /, c=3, *rest, d, e=5, **more):
    return a


def names_of(slots):
    return [(s.name, s.keyword, s.declared, s.is_static) for s in slots]


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "static", "slots", "values"),
    [
        (lambda x, w: x, (1, 2), {}, (), [("x", None, 0, False), ("w", None, 1, False)], [1, 2]),
        (lambda x, w: x, (1,), {"w": 2}, (), [("x", None, 0, False), ("w", None, 1, False)], [1, 2]),
        (lambda x, w: x, (), {"w": 2, "x": 1}, (), [("x", None, 0, False), ("w", None, 1, False)], [1, 2]),
        (lambda x, w=2: x, (1,), {}, (), [("x", None, 0, False)], [1]),
        (lambda x, a=1, b=2: x, (1,), {"b": 3}, (), [("x", None, 0, False), ("b", "b", 2, False)], [1, 3]),
        (lambda x, *, s: x, (1,), {"s": 2}, (), [("x", None, 0, False), ("s", "s", None, False)], [1, 2]),
        (lambda *a: a, (1, 2), {}, (1,), [("a/0", None, 0, False), ("a/1", None, 1, True)], [1, 2]),
        (lambda **k: k, (), {"z": 1, "a": 2}, (), [("a", "a", None, False), ("z", "z", None, False)], [2, 1]),
        (lambda x, n: x, (1, 2), {}, (1,), [("x", None, 0, False), ("n", None, 1, True)], [1, 2]),
        (lambda x, n: x, (1,), {"n": 2}, (1,), [("x", None, 0, False), ("n", None, 1, True)], [1, 2]),
        (lambda x, n: x, (1, 2), {}, ("n",), [("x", None, 0, False), ("n", None, 1, True)], [1, 2]),
        (f, (1,), {"d": 4}, (), [("a", None, 0, False), ("d", "d", None, False)], [1, 4]),
        (
            f, (1, 2, 3, 9), {"d": 4, "k": 6}, ("d", "k"),
            [("a", None, 0, False), ("b", None, 1, False), ("c", None, 2, False), ("rest/0", None, 3, False),
             ("d", "d", None, True), ("k", "k", None, True)], [1, 2, 3, 9, 4, 6],
        ),
    ],
)  # fmt: skip
def test_bind(function, args, kwargs, static, slots, values):
    numbers = frozenset(s for s in static if isinstance(s, int))
    found, bound = bind(inspect.signature(function), args, kwargs, numbers, frozenset(static) - numbers)
    assert (names_of(found), bound) == (slots, values)
    again, more = split(found, bound)
    assert inspect.signature(function).bind(*again, **more) == inspect.signature(function).bind(*args, **kwargs)


def test_bind_without_a_signature():
    found, values = bind(None, (1, 2), {"k": 3}, frozenset([1]))
    assert names_of(found) == [("arg0", None, 0, False), ("arg1", None, 1, True), ("k", "k", None, False)]
    assert values == [1, 2, 3]


@pytest.mark.parametrize("call", [lambda s: s(X), lambda s: s(X, W, W), lambda s: s(X, w=W, x=W), lambda s: s(X, v=W)])
def test_a_call_that_python_would_refuse_is_its_type_error(call):
    with pytest.raises(TypeError, match="argument"):
        call(shard(lambda x, w: x @ w))


def test_split_is_the_way_back():
    slots = (Slot("x", None, 0, False), Slot("b", "b", 2, False))
    assert split(slots, [1, 2]) == ((1,), {"b": 2})


# ---- kinds of callable


class Plain:
    def __init__(self, w):
        self.w = w

    def method(self, x, s=1.0):
        return x @ self.w * s

    def __call__(self, x, s=1.0):
        return jnp.dot(x, self.w) * s

    @staticmethod
    def static(x):
        return 2 * x

    @classmethod
    def of_class(cls, x):
        return 3 * x


class Dense(Cell):
    def __init__(self, w=W):
        self.w = w

    def __call__(self, x):
        return x @ self.w

    def twice(self, x):
        return 2 * (x @ self.w)


def scaled(by, x, w, power=1):
    return (by * (x @ w)) ** power


LINEAR = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
MLP = eqx.nn.MLP(16, 8, 8, 1, key=KEYS[2])
LINEN = nn.Dense(8)
PARAMS = LINEN.init(KEYS[3], X)
Point = collections.namedtuple("Point", "a b")

# callable, arguments, strategy, name, the paths of its arrays
CALLABLES = {
    "function": (lambda x, w: x @ w, (X, W), ((2, 1), (1, 4)), "<lambda>", ["x", "w"]),
    "partial": (functools.partial(scaled, 2.0), (X, W), ((2, 1), (1, 4)), "scaled", ["x", "w"]),
    "partial by keyword": (functools.partial(scaled, power=2), (2.0, X, W), ((), (8, 1), AUTO), "scaled",
                           ["by", "x", "w"]),
    "partial of a partial": (functools.partial(functools.partial(scaled, 2.0), X), (W,), ((1, 8),), "scaled", ["w"]),
    "partial that holds an array": (functools.partial(scaled, w=W), (2.0, X), ((), (8, 1)), "scaled", ["by", "x"]),
    "tree_util.Partial": (jax.tree_util.Partial(lambda w, x: x @ w, W), (X,), ((8, 1),), "<lambda>", ["x"]),
    "bound method": (Plain(W).method, (X,), ((8, 1),), "method", ["w", "x"]),
    "bound method, two arguments": (Plain(W).method, (X, 2.0), ((8, 1), ()), "method", ["w", "x", "s"]),
    "callable object": (Plain(W), (X,), ((8, 1),), "Plain", ["w", "x"]),
    "callable object without arrays": (Plain(3.0), (2.0,), ((),), "Plain", ["x"]),
    "partial of a callable object": (functools.partial(Plain(W), s=2.0), (X,), ((8, 1),), "Plain", ["w", "x"]),
    "static method": (Plain.static, (X,), ((8, 1),), "static", ["x"]),
    "class method": (Plain.of_class, (X,), ((8, 1),), "of_class", ["x"]),
    "a class": (Point, (X, X), ((8, 1), (1, 8)), "Point", ["a", "b"]),
    "jitted function": (jax.jit(scaled, static_argnames="power"), (2.0, X, W), ((), (8, 1), AUTO), "scaled",
                        ["by", "x", "w"]),
    "vmapped function": (jax.vmap(lambda x, w: x @ w, (0, None)), (X, W), ((8, 1), AUTO), "<lambda>", ["x", "w"]),
    "gradient": (jax.grad(lambda x, w: (x @ w).sum()), (X, W), ((2, 1), (1, 4)), "<lambda>", ["x", "w"]),
    "NumPy function": (jnp.matmul, (X, W), ((2, 1), (1, 4)), "matmul", ["a", "b"]),
    "ufunc": (jnp.add, (X, X), ((8, 1), (8, 1)), "add", ["args/0", "args/1"]),
    "lax function": (jax.lax.exp, (X,), ((8, 1),), "exp", ["x"]),
    "Cell": (Dense(), (X,), ((8, 1),), "Dense", ["w", "x"]),
    "another method of a Cell": (Dense().twice, (X,), ((8, 1),), "twice", ["w", "x"]),
    "nnx module": (LINEAR, (X,), ((8, 1),), "Linear", ["bias", "kernel", "inputs"]),
    "nnx method": (LINEAR.__call__, (X,), ((8, 1),), "Linear", ["bias", "kernel", "inputs"]),
    "equinox module": (MLP, (X[0],), (AUTO,), "MLP",
                       ["layers/0/bias", "layers/0/weight", "layers/1/bias", "layers/1/weight", "x"]),
    "vmapped equinox module": (jax.vmap(MLP), (X,), ((8, 1),), "MLP", ["x"]),
    "linen apply": (LINEN.apply, (PARAMS, X), (AUTO, (8, 1)), "apply",
                    ["variables/params/bias", "variables/params/kernel", "args/0"]),
}  # fmt: skip


@pytest.mark.parametrize(("function", "args", "strategy", "name", "arrays"), CALLABLES.values(), ids=CALLABLES)
def test_every_kind_of_callable(function, args, strategy, name, arrays):
    sharded = shard(function, strategy)
    wanted = function(*args)
    close(sharded(*args), wanted)
    close(sharded(*args), wanted)
    assert (sharded.plan(*args).function, paths(sharded, *args)) == (name, arrays)
    cuts = [d.strategy for d in sharded.plan(*args).inputs if d.source == "you"]
    assert cuts == [e for e in strategy if e is not AUTO]


def test_describe_reads_a_partial_once():
    callee = describe(functools.partial(functools.partial(scaled, 2.0, power=2), X, power=3))
    assert callee.bound == ((2.0, X), (("power", 3),))
    close(callee.call({}, (W,), {})[0], scaled(2.0, X, W, power=3))


def test_a_decorator_with_and_without_arguments():
    @shard
    def plain(x):
        """Doubles."""
        return 2 * x

    @shard(in_strategy=((8, 1),), out_strategy=((1, 8),))
    def cut(x):
        return 2 * x

    close((plain(X), cut(X)), (2 * X, 2 * X))
    assert (plain.__name__, plain.__doc__, list(inspect.signature(cut).parameters)) == ("plain", "Doubles.", ["x"])
    assert cut(X).sharding.shard_shape(X.shape) == (8, 2)
    assert repr(cut) == "shard(cut, in_strategy=((8, 1),), out_strategy=((1, 8),))"


def test_decorated_methods_of_plain_objects_do_not_share_what_is_compiled():
    class Scale:
        def __init__(self, by):
            self.by = by

        @shard(in_strategy=((8, 1),))
        def __call__(self, x):
            return self.by * x

        @staticmethod
        @shard(in_strategy=((8, 1),))
        def double(x):
            return 2 * x

    one, two = Scale(1.0), Scale(jnp.float32(2))
    for _ in range(2):
        close((one(X), two(X), one.double(X), Scale.double(X)), (X, 2 * X, 2 * X, 2 * X))


class Decorated:
    def __init__(self, w):
        self.w = w

    @shard(in_strategy=((8, 1),))
    def method(self, x):
        return x @ self.w if hasattr(self.w, "shape") else x * self.w


class DecoratedCell(Cell, Decorated):
    pass


@pytest.mark.parametrize("kind", [Decorated, DecoratedCell])
@pytest.mark.parametrize("w", [W, 2.0], ids=["an array", "a number"])
def test_decorated_methods_go_with_their_objects(kind, w):
    owner = kind(w)
    wanted = X @ W if w is W else 2 * X
    for _ in range(2):
        close(owner.method(X), wanted)
    assert len(owner.method._calls.entries) >= 1, "plans are kept"
    others = [copy.copy(owner), copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))]
    for other in others:
        other.w = other.w * 2
        close(other.method(X), 2 * wanted)
    close(owner.method(X), wanted)
    gone = [weakref.ref(owner), *map(weakref.ref, others)]
    del owner, others, other
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_a_decorated_method_of_an_object_that_cannot_be_hashed():
    @dataclasses.dataclass  # with __eq__, and so without __hash__
    class Scale:
        by: float

        @shard(in_strategy=((8, 1),))
        def scale(self, x):
            return self.by * x

    close((Scale(1.0).scale(X), Scale(2.0).scale(X)), (X, 2 * X))


def test_errors_speak_of_the_user_s_function():
    @shard
    def branches(x, flag):
        return x if flag else -x

    with pytest.raises(StrategyTypeError, match="argument `flag`") as caught:
        branches(X, True)
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)
    assert re.search(r"branches at .*test_callee.py", str(caught.value.__cause__))
    assert branches.fn.__name__ in shard(branches.fn, static_argnums=1).lower(X, True).as_text().split("\n")[0]


# ---- objects that hold arrays


class Counter(Cell):
    def __init__(self):
        self.count = jnp.zeros(())
        self.history = [jnp.zeros((8, 16)), "label"]
        self.seen = {"sum": jnp.zeros(()), "n": 0}
        self.order = collections.OrderedDict(a=jnp.ones(3))
        self.pair = Point(jnp.ones(()), 1)
        self.inner = Dense()
        self.layers = [Dense(), Dense()]

    def __call__(self, x):
        self.count = self.count + 1
        self.history[0] = self.history[0] + x
        self.seen["sum"] = self.seen["sum"] + x.sum()
        self.order["a"] = self.order["a"] * 2
        self.pair = self.pair._replace(a=self.pair.a + 1)
        self.inner.w = self.inner.w * 0.5
        self.layers[1].w = self.layers[1].w + 1
        return self.inner(x) + self.layers[0](x)


def test_what_a_cell_s_call_changes_is_written_back():
    cell, plain = Counter(), Counter()
    inner, layers, kept = cell.inner, list(cell.layers), cell.layers[0].w
    cell.shard(in_strategy=((8, 1),), parameter_plan={"inner/w": (1, 8), "order/a": (1,), "layers/*/w": (1, 4)})
    for _ in range(3):
        close(cell(X), plain(X), 1e-4)
    close(describe(cell).read(), describe(plain).read(), 1e-4)
    assert cell.seen["n"] == 0 and cell.history[1] == "label" and type(cell.order) is collections.OrderedDict
    assert cell.inner is inner and all(a is b for a, b in zip(cell.layers, layers, strict=True)), "objects stay"
    assert cell.layers[0].w is kept, "what the call did not change is not touched"
    assert cell.inner.w.sharding.shard_shape((16, 8)) == (16, 1), "and lies where the next call takes it"
    assert len(cell._sharded()._calls.entries) == 1


def test_arrays_are_found_in_every_container():
    found = describe(Counter()).read()
    assert sorted(found) == [
        "count", "history/0", "inner/w", "layers/0/w", "layers/1/w", "order/a", "pair/a", "seen/sum",
    ]  # fmt: skip


def test_a_cell_at_two_places_stays_one():
    class Tied(Cell):
        def __init__(self):
            self.first = Dense(jnp.eye(16))
            self.second, self.whole = self.first, self

        def __call__(self, x):
            y = self.first(x)
            self.second.w = 2 * self.second.w
            return y + self.whole.first(x)

    tied, plain = Tied(), Tied()
    tied.shard(in_strategy=((8, 1),))
    for _ in range(2):
        close(tied(X), plain(X))
    assert tied.first is tied.second and tied.whole is tied
    close(tied.first.w, plain.first.w)
    assert paths(tied, X) == ["first/w", "x"]


def test_attributes_that_are_no_arrays_are_part_of_the_program():
    class Switch(Cell):
        def __init__(self):
            self.act, self.table, self.half = jnp.tanh, np.ones(16, np.float32), None
            self.key = jax.random.key(0)

        def __call__(self, x):
            noise = jax.random.normal(self.key, x.shape)
            return self.act(x) * self.table + noise if self.half is None else x / 2

    cell = Switch()
    wanted = cell(X)
    cell.shard(in_strategy=((8, 1),))
    close(cell(X), wanted)
    assert paths(cell, X) == ["key", "table", "x"]
    cell.half = True
    close(cell(X), X / 2)
    cell.half = None
    close(cell(X), wanted)


def test_a_new_array_is_the_next_call_s():
    cell = Dense()
    sharded = shard(cell, ((8, 1),))
    close(sharded(X), X @ W)
    cell.w = 2 * W
    close(sharded(X), 2 * (X @ W))
    cell.w = jnp.ones((16, 3))
    close(sharded(X), X @ jnp.ones((16, 3)))


def test_arrays_made_in_a_call_are_not_kept_and_that_is_said():
    class Cache(Cell):
        def __call__(self, x):
            self.cache = 2 * x
            return x

    with pytest.warns(UserWarning, match="`Cache` makes arrays in its call that are not kept: cache") as told:
        Cache().shard(in_strategy=((8, 1),))(X)
    assert told[0].filename == __file__, "the caller's line, though JAX calls it in a trace"


def test_dataclass_cells():
    @dataclasses.dataclass(frozen=True)
    class Frozen(Cell):
        w: jax.Array

        def __call__(self, x):
            return x @ self.w

    cell = Frozen(W).shard(in_strategy=((8, 1),))
    close(cell(X), X @ W)
    assert cell(X).sharding.shard_shape((8, 8)) == (1, 8)


@pytest.mark.slow
def test_equinox_modules_as_cells_and_through_their_gradients():
    class Linear(Cell, eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return x @ self.w

    close(Linear(W).shard(in_strategy=((8, 1),))(X), X @ W)

    def loss(model, call):
        return (call(model)(X) ** 2).sum()

    wanted = eqx.filter_grad(loss)(MLP, jax.vmap)
    found = eqx.filter_grad(loss)(MLP, lambda model: shard(jax.vmap(model), ((8, 1),)))
    close(eqx.filter(found, eqx.is_array), eqx.filter(wanted, eqx.is_array), 1e-4)
    arrays, rest = eqx.partition(MLP, eqx.is_array)
    sharded = shard(lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x), (AUTO, (8, 1)))
    close(sharded(arrays, X), jax.vmap(MLP)(X))


class Noisy(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.norm = nnx.Linear(16, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.linear(x)))


def test_an_nnx_module_s_statistics_and_random_streams_move_on():
    module, plain = Noisy(), Noisy()
    sharded = shard(module, ((8, 1),), parameter_plan={"linear/kernel": (1, 8)})
    for _ in range(3):
        close(sharded(X), plain(X), 1e-4)
    close(nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)), nnx.to_pure_dict(nnx.state(plain, nnx.BatchStat)), 1e-4)
    assert module.drop.rngs.count[...] == plain.drop.rngs.count[...] == 3
    for either in (module, plain):
        either.eval()
    close(sharded(X), plain(X), 1e-4)


def test_nnx_inside_other_transformations():
    close(jax.jit(lambda x: shard(LINEAR, ((8, 1),))(x))(X), LINEAR(X))
    close(nnx.jit(lambda m, x: shard(m, ((8, 1),))(x))(LINEAR, X), LINEAR(X))
    definition, state = nnx.split(LINEAR)

    def loss(state, x):
        return (nnx.merge(definition, state)(x) ** 2).mean()

    close(shard(jax.grad(loss), (AUTO, (8, 1)))(state, X), jax.grad(loss)(state, X))


@pytest.mark.slow
def test_linen_with_statistics_and_dropout():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            return nn.Dropout(0.5, deterministic=not train)(x)

    net = Net()
    variables = net.init(KEYS[0], X, False)

    def train(variables, x, key):
        return net.apply(variables, x, True, mutable=["batch_stats"], rngs={"dropout": key})

    sharded = shard(train, (AUTO, (8, 1), AUTO), parameter_plan={"variables/params/Dense_0/kernel": (1, 8)})
    close(sharded(variables, X, KEYS[1]), train(variables, X, KEYS[1]), 1e-4)

    def loss(call):
        return lambda variables: (call(variables, X, KEYS[1])[0] ** 2).mean()

    close(jax.grad(loss(sharded))(variables), jax.grad(loss(train))(variables), 1e-4)
    static = shard(net.apply, (AUTO, (8, 1)), static_argnums=2, static_argnames="mutable")
    made = static.plan(variables, X, True, mutable=("batch_stats",), rngs={"dropout": KEYS[1]})
    assert [d.path for d in made.inputs][-2:] == ["args/0", "rngs/dropout"]


def test_an_immutable_pytree_that_changes_is_told():
    @jax.tree_util.register_pytree_node_class
    class Tree:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

        def __call__(self, x):
            self.w = 2 * self.w
            return x @ self.w

    with pytest.raises(TypeError, match="Tree is an immutable pytree"):
        shard(Tree(W), ((8, 1),))(X)

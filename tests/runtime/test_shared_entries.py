"""Sharded functions of one function with the same options share plans and programs."""

import copy
import functools
import gc
import pickle
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn import search
from shardfn.runtime import shared_entries

X = jnp.arange(64.0).reshape(8, 8)


def counted(made=lambda x: 2 * x):
    """A function, and how often it was traced."""
    traces = []

    def function(x):
        traces.append(x)
        return made(x)

    return function, traces


def test_second_shard_of_a_function_traces_and_plans_nothing():
    function, traces = counted()
    for _ in range(3):
        np.testing.assert_array_equal(shardfn.shard(function, ((8, 1),))(X), 2 * X)
    assert len(traces) == 1
    plans = {id(shardfn.shard(function, ((8, 1),)).plan(X)) for _ in range(2)}
    assert len(plans) == 1 and shardfn.shard(function, ((8, 1),)).plan(X) is shardfn.plan(
        function, X, in_strategy=((8, 1),)
    )


class Scale:
    by = 2.0

    def __init__(self, **arrays):
        vars(self).update(arrays)

    def __call__(self, x):
        TRACES.append(x)
        return self.by * x * getattr(self, "w", 1.0)


TRACES: list[object] = []


@pytest.mark.parametrize("kind", ["object", "with arrays", "partial", "partial of a partial", "partial of an object"])
def test_second_shard_of_an_object_or_a_partial_traces_nothing(kind):
    def scale(x, by):
        TRACES.append(x)
        return by * x

    made = {
        "object": lambda: Scale(),
        "with arrays": lambda: Scale(w=jnp.ones((8, 8))),
        "partial": lambda: functools.partial(scale, by=2.0),
        "partial of a partial": lambda: functools.partial(functools.partial(scale, by=3.0), by=2.0),
        "partial of an object": lambda: functools.partial(Scale()),
    }[kind]()
    TRACES.clear()
    for _ in range(3):
        np.testing.assert_array_equal(shardfn.shard(made, ((8, 1),))(X), 2 * X)
    assert len(TRACES) == 1
    np.testing.assert_array_equal(shardfn.shard(made, ((1, 8),))(X), 2 * X)
    assert len(TRACES) == 2
    held = made.func if kind == "partial of an object" else made
    if isinstance(held, Scale):
        held.by = 3.0
        np.testing.assert_array_equal(shardfn.shard(made, ((8, 1),))(X), 3 * X)
        np.testing.assert_array_equal(shardfn.shard(copy.copy(made), ((8, 1),))(X), 3 * X)
    kept = len(shared_entries._OF_OBJECTS)
    gone = weakref.ref(made)
    del made, held
    gc.collect()
    assert gone() is None and len(shared_entries._OF_OBJECTS) < kept


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __eq__(self, other):
        return vars(self) == vars(other)

    @shardfn.shard
    def apply(self, x):
        TRACES.append(x)
        return x * sum(vars(self).values())


@pytest.mark.parametrize("attributes", [{"by": 2.0}, {"by": 1.0, "w": jnp.ones(8)}], ids=["no arrays", "arrays"])
def test_sharded_method_leaves_nothing_in_its_object(attributes):
    made = Plain(**attributes)
    TRACES.clear()
    for _ in range(3):
        np.testing.assert_array_equal(made.apply(X), 2 * X)
    assert len(TRACES) == 1 and vars(made) == attributes
    assert made.apply == made.apply and len({made.apply, made.apply}) == 1
    other = copy.copy(made)
    assert made.apply != other.apply
    other.by += 1.0
    np.testing.assert_array_equal(other.apply(X), 3 * X)
    np.testing.assert_array_equal(made.apply(X), 2 * X)
    assert vars(copy.deepcopy(other)).keys() == vars(pickle.loads(pickle.dumps(other))).keys() == attributes.keys()
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_other_options_are_planned_anew():
    function, _ = counted()
    entries = {"x": (8, 1)}
    first = shardfn.shard(function, parameter_plan=entries).plan(X)
    entries["x"] = (1, 8)  # the same dictionary
    second = shardfn.shard(function, parameter_plan=entries).plan(X)
    assert first.in_shardings != second.in_shardings
    assert shardfn.shard(function, ((8, 1),), level=1).plan(X).level == 1
    assert shardfn.shard(function, ((4, 1),), device="cpu:4").plan(X).hardware.count == 4


def test_function_that_changed_is_another():
    names = {"jnp": jnp, "scale": 2.0}
    exec("def function(x): return scale * x", names)
    function, other = names["function"], lambda x: 5 * x
    assert shardfn.shard(function, ((8, 1),))(X)[0, 1] == 2
    names["scale"] = 3.0
    assert shardfn.shard(function, ((8, 1),))(X)[0, 1] == 3, "a global"
    function.__code__ = types.FunctionType(other.__code__, {}).__code__
    assert shardfn.shard(function, ((8, 1),))(X)[0, 1] == 5, "its code, as a notebook that reloads modules sets it"

    def closing():
        return factor * X

    factor = 2.0
    assert shardfn.shard(closing)()[0, 1] == 2
    factor = 4.0
    assert shardfn.shard(closing)()[0, 1] == 4, "a variable around it"


def test_wrapper_and_copy_keep_nothing_of_the_function():
    function, _ = counted()
    shardfn.shard(function, ((8, 1),))(X)

    @functools.wraps(function)
    def wrapper(x):
        return 7 * x

    assert shardfn.shard(wrapper, ((8, 1),))(X)[0, 1] == 7
    (held,) = [value for name, value in vars(function).items() if name.startswith("__shardfn")]
    assert not pickle.loads(pickle.dumps(held)).by_options and not copy.deepcopy(held).by_options


def test_what_is_kept_goes_with_the_function():
    function, _ = counted()
    shardfn.shard(function, ((8, 1),))(X)
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None


def test_registered_search_is_asked_again():
    asked = []

    def rows(problem):
        asked.append(problem)
        return search.MODES["sharding_propagation"](problem)

    shardfn.register_search("rows", rows)
    try:
        for _ in range(2):
            shardfn.shard(jnp_double, search_mode="rows").plan(X)
    finally:
        search.forget("rows")
    assert len(asked) == 2


def jnp_double(x):
    return jnp.add(x, x)


def test_clear_cache_forgets_what_is_shared():
    function, traces = counted()
    sharded = shardfn.shard(function, ((8, 1),))
    sharded(X)
    sharded.clear_cache()
    shardfn.shard(function, ((8, 1),))(X)
    assert len(traces) == 2

"""Strategies: entries meet arrays. What is refused is in tests/test_bad_input.py."""

import collections
import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardfn.frontend.parameter_plan import apply_parameter_plan
from shardfn.frontend.strategy import (
    AUTO,
    DATA_PARALLEL,
    REPLICATED,
    Argument,
    Leaf,
    is_entry,
    leaves_of,
    match,
    shape_of,
)
from shardfn.frontend.validation import check, completions
from shardfn.mindspore.layout import Layout

GRID = Layout((2, 4), ("dp", "mp"))
Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    w: object
    b: object


def zeros(*shape):
    return np.zeros(shape, np.float32)


def argument(value, name="p"):
    return Argument(name, f"argument 0 `{name}`", value)


def entries(value, entry):
    """Path and entry of each leaf, where all is well."""
    found = match([argument(value)], (entry,), "in_strategy", problems := [])
    assert not problems
    return {leaf.path: leaf.entry for leaf in found}


# ---- what is an array


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (zeros(2, 3), ((2, 3), "float32")),
        (np.zeros(3, np.float64), ((3,), "float32")),  # as JAX takes it, while x64 is off
        (np.zeros(3, np.int64), ((3,), "int32")),
        (np.float64(1), ((), "float32")),
        (1.0, ((), "float32")),
        (1, ((), "int32")),
        (True, ((), "bool")),
        (1j, ((), "complex64")),
        (jnp.zeros(2, jnp.bfloat16), ((2,), "bfloat16")),
        (jnp.zeros(2, jnp.float8_e4m3fn), ((2,), "float8_e4m3fn")),
        (jnp.zeros(2, jnp.int4), ((2,), "int4")),
        (jax.random.key(0), ((), "key<fry>")),
        (jax.ShapeDtypeStruct((4, 0), jnp.uint8), ((4, 0), "uint8")),
        ("text", None),
        (None, None),
        pytest.param(object(), None, id="object"),
        (len, None),
        (np.array([None]), None),
        (np.array(["a"]), None),
        (np.array(["2026"], "datetime64[Y]"), None),
        (np.zeros(2, [("x", "f4")]), None),
        (np.zeros(2, ">f4"), None),
    ],
    ids=str,
)
def test_shape_of(value, expected):
    assert shape_of(value) == expected


def test_shape_of_follows_x64():
    with jax.enable_x64(True):
        assert shape_of(np.zeros(3)) == ((3,), "float64")


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (zeros(2), ["p"]),
        ({"b": zeros(1), "a": [zeros(1), 2.0]}, ["p/a/0", "p/a/1", "p/b"]),
        (Pair(zeros(1), {"x": zeros(1)}), ["p/left", "p/right/x"]),
        (Weights(zeros(1), zeros(1)), ["p/w", "p/b"]),
        ((), []),
        (None, []),
    ],
)
def test_paths(value, paths):
    assert [leaf.path for leaf in leaves_of(argument(value), [])] == paths


# ---- which entry an array gets


@pytest.mark.parametrize(
    ("entry", "is_one"),
    [
        ((2, 1), True), ((), True), (None, True), (AUTO, True), (REPLICATED, True), (DATA_PARALLEL, True), ((AUTO, 1), True), (GRID("dp"), True), (P("dp"), True), (8, True),
        ("dp", True), ((2, "x"), True), ((np.int64(2), 1.5), True),
        (((2, 1), (1, 2)), False), ((None, 1), False), ((AUTO,), False), ([2, 1], False), ({"a": (2,)}, False),
        ((P("dp"), AUTO), False), (Pair((2,), None), False), (Pair(2, 1), False), (Weights((2,), AUTO), False),
    ],
    ids=str,
)  # fmt: skip
def test_is_entry(entry, is_one):
    assert is_entry(entry) == is_one


TREE = {"w": zeros(4, 4), "deep": {"b": zeros(4), "c": [zeros(4), zeros(4)]}}


@pytest.mark.parametrize(
    ("value", "entry", "expected"),
    [
        (zeros(4, 4), (2, 1), {"p": (2, 1)}),
        (zeros(4, 4), AUTO, {"p": AUTO}),
        (zeros(4, 4), (AUTO, 2), {"p": (AUTO, 2)}),
        (zeros(4, 4), (AUTO, AUTO), {"p": AUTO}),
        ((zeros(4), zeros(4)), (AUTO, AUTO), {"p/0": AUTO, "p/1": AUTO}),
        (TREE, REPLICATED, {"p/deep/b": (1,), "p/deep/c/0": (1,), "p/deep/c/1": (1,), "p/w": (1, 1)}),
        (
            TREE,
            {"w": DATA_PARALLEL, "deep": REPLICATED},
            {"p/deep/b": (1,), "p/deep/c/0": (1,), "p/deep/c/1": (1,), "p/w": None},
        ),
        (TREE, None, {"p/deep/b": None, "p/deep/c/0": None, "p/deep/c/1": None, "p/w": None}),
        (TREE, {"w": (1, 4), "deep": AUTO}, {"p/deep/b": AUTO, "p/deep/c/0": AUTO, "p/deep/c/1": AUTO, "p/w": (1, 4)}),
        (
            TREE,
            {"w": P("dp"), "deep": {"b": (2,), "c": [None, (4,)]}},
            {"p/deep/b": (2,), "p/deep/c/0": None, "p/deep/c/1": (4,), "p/w": P("dp")},
        ),
        (Pair(zeros(4), zeros(4)), Pair((2,), (4,)), {"p/left": (2,), "p/right": (4,)}),
        (Weights(zeros(4, 4), zeros(4)), Weights((2, 1), AUTO), {"p/w": (2, 1), "p/b": AUTO}),
        ([zeros(4), zeros(4)], ((2,), (4,)), {"p/0": (2,), "p/1": (4,)}),
        ((zeros(4), zeros(4)), (2,), {"p/0": (2,), "p/1": (2,)}),
        ((zeros(4),), ((2,),), {"p/0": (2,)}),
        ({}, AUTO, {}),
        (None, None, {}),
        (None, (1, 1), {}),
    ],
    ids=str,
)
def test_an_entry_is_a_pytree_prefix(value, entry, expected):
    assert entries(value, entry) == expected


def test_without_a_strategy_all_is_open():
    found = match([argument(TREE), argument(zeros(2), "x")], None, "in_strategy", problems := [])
    assert not problems and {leaf.entry for leaf in found} == {AUTO}


def test_every_leaf_knows_where_its_entry_stands():
    found = match([argument(TREE)], ({"w": (1, 4), "deep": {"b": AUTO, "c": [None, (4,)]}},), "in_strategy", [])
    assert [leaf.where for leaf in found] == [
        "in_strategy[0]['deep']['b']",
        "in_strategy[0]['deep']['c'][0]",
        "in_strategy[0]['deep']['c'][1]",
        "in_strategy[0]['w']",
    ]
    assert found[-1].source == "in_strategy[0]['w'] = (1, 4), p/w: float32[4, 4]"


# ---- parameter_plan

LEAVES = [
    Leaf(path, "", (4, 4), "float32", entry="before")
    for path in ("params/layers/0/w1", "params/layers/0/w2", "params/layers/1/w1", "params/b", "x")
]


@pytest.mark.parametrize(
    ("rules", "changed"),
    [
        ({}, {}),
        ({"x": (2, 1)}, {"x": (2, 1)}),
        ({"params/b": None}, {"params/b": None}),
        ({"b": AUTO}, {"params/b": AUTO}),
        ({"b": REPLICATED, "x": (AUTO, 2)}, {"params/b": (1, 1), "x": (AUTO, 2)}),
        ({"self.params.b": (1, 4)}, {"params/b": (1, 4)}),
        ({"self.b": (1, 4)}, {"params/b": (1, 4)}),
        ({"params.layers.0.w1": (4, 1)}, {"params/layers/0/w1": (4, 1)}),
        ({"params['layers'][0]['w1']": (4, 1)}, {"params/layers/0/w1": (4, 1)}),
        ({"['params']['layers'][0]['w1']": (4, 1)}, {"params/layers/0/w1": (4, 1)}),
        ({".params.layers[0].w1": (4, 1)}, {"params/layers/0/w1": (4, 1)}),
        ({"params/layers/[01]/w2": (4, 1)}, {"params/layers/0/w2": (4, 1)}),
        ({"params/layers/*/w1": (1, 4)}, {"params/layers/0/w1": (1, 4), "params/layers/1/w1": (1, 4)}),
        ({"layers/?/w2": (1, 4)}, {"params/layers/0/w2": (1, 4)}),
        ({"*w1": (1, 4)}, {"params/layers/0/w1": (1, 4), "params/layers/1/w1": (1, 4)}),
        ({"*/w1": (1, 4), "params/layers/0/w1": (2, 2)}, {"params/layers/0/w1": (2, 2), "params/layers/1/w1": (1, 4)}),
        ({"params/layers/0/w1": (2, 2), "*/w1": (1, 4)}, {"params/layers/0/w1": (2, 2), "params/layers/1/w1": (1, 4)}),
        ({"*/0/w1": (2, 2), "*/0/*1": (2, 2)}, {"params/layers/0/w1": (2, 2)}),
    ],
    ids=str,
)  # fmt: skip
def test_parameter_plan(rules, changed):
    found = apply_parameter_plan(LEAVES, rules, problems := [])
    assert not problems
    assert {leaf.path: leaf.entry for leaf in found if leaf.entry != "before"} == changed
    assert all(leaf.where.startswith("parameter_plan[") for leaf in found if leaf.entry != "before")


# ---- strategies


@pytest.mark.parametrize(
    ("shape", "entry", "devices", "expected"),
    [
        ((8, 16), (4, 2), 8, (4, 2)),
        ((8, 16), (np.int64(4), np.uint8(2)), 8, (4, 2)),
        ((), (), 8, ()),
        ((0, 16), (2, 1), 8, (2, 1)),
        ((12,), (6,), 12, (6,)),
        ((8, 16), (4, 2), 1, (4, 2)),
        ((8, 16), None, 8, (8, 1)),
        ((8, 16), None, 1, (1, 1)),
        ((4, 16), None, 8, (1, 1)),
        ((0, 16), None, 8, (1, 1)),
        ((), None, 8, ()),
        ((8, 16), AUTO, 8, None),
        ((8, 16), (4, AUTO), 8, None),
        ((8, 16), GRID, 8, None),
        ((8, 16), P("dp"), 8, None),
    ],
    ids=str,
)
def test_cuts_that_fit(shape, entry, devices, expected):
    found = check(Leaf("x", "x", shape, "float32", entry), devices, problems := [])
    assert (found, problems) == (expected, [])
    assert all(type(ways) is int for ways in found or ())


@pytest.mark.parametrize(
    ("size", "ways", "devices", "fix"),
    [
        (30, 4, 8, "use 1 or 2 there, or pad that dimension to 32"),
        (30, 4, 1, "use 1, 2, 3, 5, 6, 10, 15 or 30 there, or pad that dimension to 32"),
        (30, 4, 12, "use 1, 2, 3 or 6 there, or pad that dimension to 32"),
        (30, 7, 8, "use 1 or 2 there"),  # padding would not help: 8 devices cannot hold 7 shards evenly
    ],
)
def test_only_what_would_do_is_offered(size, ways, devices, fix):
    check(Leaf("x", "x", (size,), "float32", (ways,)), devices, problems := [])
    assert problems[0].fix == fix


@pytest.mark.parametrize("entry", [AUTO, REPLICATED, DATA_PARALLEL], ids=str)
def test_a_named_entry_copied_or_pickled_is_itself(entry):
    assert pickle.loads(pickle.dumps((entry, 1)))[0] is copy.deepcopy(entry) is entry


def test_completions_of_open_dimensions_divide_the_array_and_the_devices():
    leaf = Leaf("x", "x", (8, 6, 4), "float32", (AUTO, 2, AUTO))
    found = list(completions(leaf, 8))
    assert found[0] == (1, 2, 1) and set(found) == {(1, 2, 1), (2, 2, 1), (1, 2, 2), (4, 2, 1), (2, 2, 2), (1, 2, 4)}
    assert list(completions(leaf, 1)) == [(1, 2, 1)]

"""Placement: what the design decides, case by case. tests/properties/test_place.py holds what is always so."""

import itertools
import math
import time

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.errors import StrategyError
from shardfn.frontend.strategy import Leaf
from shardfn.ir.divisors import primes
from shardfn.mindspore.parallel import layout_of
from shardfn.planning.meshes import place


def placed(devices, *arrays):
    """Mesh and shardings of arrays given as ("ab", (4, 2)): a letter for each dimension's group; strategy None: open."""
    number = {letter: i for i, letter in enumerate("abcdefgh")}
    leaves = [Leaf(f"x{i}", f"argument {i} `x{i}`", (24,) * len(letters), "float32") for i, (letters, _) in enumerate(arrays)]  # fmt: skip
    groups = [tuple(number[letter] for letter in letters) for letters, _ in arrays]
    found = place(leaves, [strategies for _, strategies in arrays], groups, devices, problems := [])
    return found, problems


def spec_text(spec):
    return "open" if spec is None else " ".join("+".join(dim) or "-" for dim in spec)


# devices, arrays, sizes of the mesh, the sharding of each array: the axes of each dimension, - for unsharded
PLACEMENTS = {
    "a lone array: its strategy, and the rest of the devices as the last axis": [
        (8, [("ab", (4, 1))], (4, 2), ["a -"]),
        (8, [("ab", (1, 4))], (4, 2), ["- a"]),
        (8, [("ab", (2, 4))], (2, 4), ["a b"]),
        (8, [("ab", (8, 1))], (8,), ["a -"]),
        (8, [("abc", (2, 1, 2))], (2, 2, 2), ["a - b"]),
        (8, [("ab", (1, 1))], (8,), ["- -"]),
        (8, [("", ())], (8,), [""]),
    ],
    "MatMul: rows, the contracted dim, columns, in order of first appearance": [
        (8, [("ab", (2, 1)), ("bc", (1, 4))], (2, 4), ["a -", "- b"]),
        (8, [("ab", (2, 2)), ("bc", (2, 1))], (2, 2, 2), ["a b", "b -"]),
        (8, [("ab", (2, 2)), ("bc", (2, 2))], (2, 2, 2), ["a b", "b c"]),
        (8, [("ab", (1, 8)), ("bc", (8, 1))], (8,), ["- a", "a -"]),
        (8, [("ab", (4, 1)), ("bc", (1, 2))], (4, 2), ["a -", "- b"]),
        (8, [("ab", (1, 2)), ("bc", (2, 1))], (2, 4), ["- a", "a -"]),
    ],
    "one group, two strategies: the smaller takes the major part of the larger's axes": [
        (8, [("a", (4,)), ("a", (2,))], (2, 2, 2), ["a+b", "a"]),
        (8, [("a", (2,)), ("a", (4,))], (2, 2, 2), ["a", "a+b"]),
        (8, [("a", (8,)), ("a", (4,)), ("a", (2,))], (2, 2, 2), ["a+b+c", "a+b", "a"]),
        (12, [("a", (12,)), ("a", (3,))], (3, 4), ["a+b", "a"]),
        (12, [("a", (6,)), ("a", (4,))], (2, 2, 3), ["a+c", "a+b"]),
    ],
    "a 1 says unsharded, and conflicts with nothing": [
        (8, [("a", (8,)), ("a", (1,))], (8,), ["a", "-"]),
        (8, [("ab", (8, 1)), ("bc", (1, 1)), ("ac", (1, 8))], (8,), ["a -", "- -", "- a"]),
    ],
    "what is open stays open": [
        (8, [("ab", (2, 1)), ("bc", None)], (2, 4), ["a -", "open"]),
        (8, [("ab", None), ("bc", None)], (8,), ["open", "open"]),
    ],
    "groups share axes only where the device count forces it": [
        (8, [("ab", (8, 1)), ("bc", (1, 8))], (8,), ["a -", "- a"]),
        (16, [("ab", (8, 1)), ("bc", (1, 8))], (4, 2, 2), ["a+b -", "- a+c"]),
        (64, [("ab", (8, 1)), ("bc", (1, 8))], (8, 8), ["a -", "- b"]),
        (8, [("ab", (4, 1)), ("bc", (1, 4))], (2, 2, 2), ["a+b -", "- a+c"]),
    ],
    "never on one array": [
        (8, [("ab", (4, 2)), ("bc", (2, 4))], (4, 2), ["a b", "b a"]),
    ],
    "a group twice on one array (x @ x.T) gets an axis for each": [
        (4, [("aa", (2, 2))], (2, 2), ["a b"]),
        (8, [("aa", (2, 4))], (2, 4), ["a b"]),
    ],
    "any device count": [
        (1, [("ab", (4, 2)), ("bc", None)], (), ["- -", "open"]),
        (6, [("ab", (2, 3))], (2, 3), ["a b"]),
        (6, [("ab", (3, 1))], (3, 2), ["a -"]),
        (12, [("ab", (4, 3))], (4, 3), ["a b"]),
        (12, [("ab", (6, 1)), ("bc", (1, 2))], (6, 2), ["a -", "- b"]),
        (24, [("ab", (4, 3)), ("bc", (3, 2))], (4, 3, 2), ["a b", "b c"]),
        (24, [("ab", (2, 1)), ("bc", (1, 3))], (2, 3, 4), ["a -", "- b"]),
        (30, [("abc", (2, 3, 5))], (2, 3, 5), ["a b c"]),
        (7, [("a", (7,))], (7,), ["a"]),
        (4096, [("ab", (64, 1)), ("bc", (1, 64))], (64, 64), ["a -", "- b"]),
    ],
}
ROWS = [pytest.param(*row, id=f"{title}-{row[1]}-{row[0]}") for title, rows in PLACEMENTS.items() for row in rows]


@pytest.mark.parametrize(("devices", "arrays", "sizes", "layouts"), ROWS)
def test_placement(devices, arrays, sizes, layouts):
    found, problems = placed(devices, *arrays)
    assert not problems
    assert (tuple(size for _, size in found.axes), [spec_text(s) for s in found.specs]) == (sizes, layouts)
    assert [name for name, _ in found.axes] == [chr(ord("a") + i) for i in range(len(sizes))]
    assert found.order is None
    if devices > 1:
        assert math.prod(sizes) == devices
        for (_, strategies), spec in zip(arrays, found.specs, strict=True):
            if strategies is not None:
                assert tuple(math.prod(dict(found.axes)[a] for a in dim) for dim in spec) == strategies


@pytest.mark.parametrize(
    ("devices", "arrays", "blamed"),
    [
        (4, [("ab", (2, 2)), ("bc", (2, 2)), ("ac", (2, 2))], (0, 2)),
        (8, [("ab", (4, 2)), ("bc", (2, 4)), ("ac", (4, 2))], (0, 2)),
        (4, [("d", (2,)), ("ab", (2, 2)), ("bc", (2, 2)), ("ac", (2, 2)), ("e", (4,))], (1, 3)),
        (6, [("ab", (2, 3)), ("ac", (3, 2)), ("bc", (2, 3))], None),
    ],
)
def test_what_cannot_stand_together_names_two_arrays(devices, arrays, blamed):
    found, problems = placed(devices, *arrays)
    if blamed is None:
        assert not problems
        return
    assert set(found.specs) == {None}
    (problem,) = problems
    assert all(f"argument {i} `x{i}`" in problem.what for i in blamed)
    assert f"{devices} devices" in problem.what
    assert not placed(devices, *(a for i, a in enumerate(arrays) if i != blamed[1]))[1], (
        "the fix: leave the second open"
    )


@pytest.mark.parametrize(
    ("arrays", "layout"),
    [([(f"{i}", (8,)) for i in range(2000)], "a"), ([(f"x{i}", (2, 4)) for i in range(300)], "a b")],
    ids=["each of a group of its own", "all with one group in common"],
)
def test_many_arrays_are_placed_in_no_time(arrays, layout):
    number: dict[str, int] = {}
    leaves = [Leaf(name, name, (8,) * len(strategies), "float32") for name, strategies in arrays]
    groups = [(*[0] * (len(strategies) - 1), number.setdefault(name, len(number) + 1)) for name, strategies in arrays]
    start = time.perf_counter()
    found = place(leaves, [strategies for _, strategies in arrays], groups, 8, problems := [])
    assert time.perf_counter() - start < 10 and not problems
    assert {spec_text(spec) for spec in found.specs} == {layout}


@pytest.mark.parametrize(("n", "factors"), [(1, []), (2, [2]), (24, [2, 2, 2, 3]), (97, [97]), (4096, [2] * 12)])
def test_primes(n, factors):
    assert primes(n) == factors


# ---- on real functions, where Shardy says which dims are one


def shapes(*given):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in given]


def split(x, w):
    """Heads: (batch, 4 * 8) to (batch, 4, 8)."""
    return (x @ w).reshape(x.shape[0], 4, 8).sum(-1)


# function, shapes, strategies, device matrix, tensor maps of arguments and result (MindSpore's notation)
FUNCTIONS = [
    (lambda x: x + 1, [(8, 16)], [(4, 1)], (4, 2), [(1, -1), (1, -1)]),
    (jnp.matmul, [(8, 16), (16, 4)], [(2, 1), (1, 4)], (2, 4), [(1, -1), (-1, 0), (1, 0)]),
    (jnp.matmul, [(8, 16), (16, 4)], [(2, 2), (2, 1)], (2, 2, 2), [(2, 1), (1, -1), (2, -1)]),
    (lambda x, w: x @ w.T, [(8, 16), (4, 16)], [(2, 2), (2, 2)], (2, 2, 2), [(2, 1), (0, 1), (2, 0)]),
    (lambda x, y: x + y, [(8, 16), (8, 16)], [(4, 1), (1, 2)], (4, 2), [(1, -1), (-1, 0), (1, 0)]),
    (lambda x, y: x + y, [(8, 16), (16,)], [(4, 2), (2,)], (4, 2), [(1, 0), (0,), (1, 0)]),
    (lambda x, y: x + y.T, [(8, 16), (16, 8)], [(4, 1), (2, 1)], (4, 2), [(1, -1), (0, -1), (1, 0)]),
    (split, [(8, 16), (16, 32)], [(2, 1), (1, 4)], (2, 4), [(1, -1), (-1, 0), (1, 0)]),
    (lambda x: jnp.einsum("bhqd,bhkd->bhqk", x, x), [(4, 2, 8, 8)], [(4, 2, 1, 1)], (4, 2),
     [(1, 0, -1, -1), (1, 0, -1, -1)]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "strategies", "matrix", "maps"), FUNCTIONS)
def test_the_device_matrix_of_a_function(function, arguments, strategies, matrix, maps):
    made = shardfn.plan(function, *shapes(*arguments), in_strategy=tuple(strategies), device="cpu:8")
    assert made.mesh.axis_sizes == matrix
    paths = [d.path for d in (*made.inputs, *made.outputs)]
    assert [layout_of(made, path).tensor_map for path in paths] == maps
    assert tuple(d.strategy for d in made.inputs) == tuple(strategies)


@pytest.mark.parametrize(
    ("function", "strategies", "out"),
    [(jnp.matmul, ((4, 2), (2, 4)), (4, 2)), (lambda x, w: x @ w + 1, ((4, 2), (2, 4)), (4, 2))],
)
def test_a_clash_with_the_result_is_an_error(function, strategies, out):
    with pytest.raises(StrategyError, match=r"argument 0 `.*` and the output do not fit on one mesh"):
        shardfn.plan(function, *shapes((8, 16), (16, 8)), in_strategy=strategies, out_strategy=(out,), device="cpu:8")
    made = shardfn.plan(
        function, *shapes((8, 16), (16, 8)), in_strategy=strategies, out_strategy=(out,), device="cpu:16"
    )
    assert made.outputs[0].strategy == out


def test_given_integers_take_the_order_of_axes_that_costs_least():
    """The sums of gradients, which are the largest, stay inside a node of eight, whatever the order of the arguments."""
    shapes = {"x": (8192, 4096), "up": (4096, 16384), "down": (16384, 4096)}
    given = {"x": (8, 1), "up": (1, 8), "down": (8, 1)}
    costs = set()
    for names in itertools.permutations(shapes):

        def step(*args, names=names):
            of = dict(zip(names, args, strict=True))
            return jnp.sum(jax.nn.relu(of["x"] @ of["up"]) @ of["down"])

        args = [jax.ShapeDtypeStruct(shapes[name], "float32") for name in names]
        made = shardfn.plan(
            jax.grad(step, (0, 1, 2)), *args, in_strategy=tuple(given[name] for name in names), device="h100:64"
        )
        assert made.axes == (("a", 8), ("b", 8))
        assert made.inputs[names.index("up")].spec == ((), ("a",))
        assert [d.strategy for d in made.inputs] == [given[name] for name in names]
        costs.add(made.cost.time_s)
    assert max(costs) < 1.01 * min(costs)

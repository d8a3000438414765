"""Layouts: MindSpore's notation and errors, JAX's shardings, and the algebra between them."""

import copy
import dataclasses
import json
import math
import pathlib
import pickle
import time

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardfn.errors import DeviceError, LayoutError, LayoutTypeError
from shardfn.mindspore.layout import Layout
from tests.messages import refusal

MEASURED = json.loads((pathlib.Path(__file__).parents[1] / "conformance" / "layouts.json").read_text())
AB = Layout((2, 4), ("a", "b"))
CUBE = Layout((2, 2, 2), ("dp", "sp", "mp"))
VIRTUAL = Layout((2, 4, 2), ("dp", "mp", "interleaved_parallel"))


def pieces(layout: Layout, shape) -> list[list[tuple[int, int]]]:
    """What each rank holds, by counting: coordinates from a mixed radix, one rank after the other."""
    found = []
    for place in range(layout.size):
        coordinates, rest = {}, place
        for name, size in reversed(layout.axes):
            rest, coordinates[name] = divmod(rest, size)
        held = []
        for length, axes in zip(shape, layout.spec, strict=True):
            start, stop = 0, length
            for axis in axes:  # each axis cuts what the one before left
                part = (stop - start) // dict(layout.axes)[axis]
                start, stop = start + coordinates[axis] * part, start + (coordinates[axis] + 1) * part
            held.append((start, stop))
        found.append(held)
    return found


def as_pairs(slices, shape) -> list[tuple[int, int]]:
    return [piece.indices(length)[:2] for piece, length in zip(slices, shape, strict=True)]


def tuples(value):
    return tuple(map(tuples, value)) if isinstance(value, list) else value


# MindSpore


@pytest.mark.parametrize("row", MEASURED["arrays"], ids=str)
def test_an_array_lies_as_mindspore_says(row):
    matrix, tensor_map, shape, held = row
    layout = Layout.from_tensor_map(matrix, tensor_map)
    assert layout.tensor_map == tuples(tensor_map)
    assert layout.slice_shape(shape) == tuple(held)
    assert {tuple(s.stop - s.start for s in piece) for piece in layout.slices(shape)} == {tuple(held)}
    assert layout.slices(shape) == tuple(tuple(slice(*pair) for pair in held) for held in pieces(layout, shape))


def test_enough_rows_were_measured():
    assert len(MEASURED["arrays"]) >= 64
    assert any(isinstance(dim, list) for row in MEASURED["arrays"] for dim in row[1])


@pytest.mark.parametrize(("cuts", "devices", "matrix", "tensor_map"), MEASURED["lone"], ids=str)
def test_a_lone_array_lies_as_mindspore_says(cuts, devices, matrix, tensor_map):
    layout = Layout.from_strategy(tuple(cuts), devices)
    assert (layout.device_matrix, layout.tensor_map) == (tuple(matrix), tuple(tensor_map))


@pytest.mark.parametrize(
    ("cuts", "devices", "matrix", "tensor_map"),
    [
        ((1, 1), 8, (8,), (-1, -1)),
        ((1, 1), 1, (1,), (-1, -1)),
        ((), 1, (1,), ()),
        ((), 8, (8,), ()),
        ((2, 1, 4), 8, (2, 4), (1, -1, 0)),
        ((3, 1), 6, (3, 2), (1, -1)),
        ((3, 5), 60, (3, 5, 4), (2, 1)),
    ],
)
def test_a_lone_array(cuts, devices, matrix, tensor_map):
    layout = Layout.from_strategy(cuts, devices)
    assert (layout.device_matrix, layout.tensor_map, layout.strategy) == (matrix, tensor_map, cuts)


@pytest.mark.parametrize(
    ("layout", "matrix", "tensor_map", "virtual", "names", "ranks"),
    [
        (AB("None", "b"), (2, 4), (-1, 0), False, ("a", "b"), 8),
        (AB(("a", "b"), "None"), (2, 4), ((1, 0), -1), False, ("a", "b"), 8),
        (AB(("a", "None"), "b"), (2, 4), ((1, -1), 0), False, ("a", "b"), 8),
        (AB(("a",), ()), (2, 4), ((1,), ()), False, ("a", "b"), 8),
        (AB(), (2, 4), (), False, ("a", "b"), 8),
        (VIRTUAL("dp", "mp"), (2, 4, 2), (2, 1), True, ("dp", "mp", "interleaved_parallel"), 16),
    ],
    ids=str,
)
def test_to_dict(layout, matrix, tensor_map, virtual, names, ranks):
    written = layout.to_dict()
    assert list(written) == ["device_matrix", "tensor_map", "interleaved_parallel", "alias_name", "rank_list"]
    assert tuple(written.values()) == (matrix, tensor_map, virtual, names, list(range(ranks)))
    assert Layout(written["device_matrix"], written["alias_name"], written["rank_list"]) == Layout(matrix, names)


def test_ranks_of_the_users_are_kept():
    layout = Layout((2, 2), ("a", "b"), [3, 2, 1, 0])("a")
    assert layout.to_dict()["rank_list"] == [3, 2, 1, 0]
    assert repr(layout) == "Layout((2, 2), ('a', 'b'), [3, 2, 1, 0])('a')"


def test_the_virtual_axis_counts_no_devices():
    layout = VIRTUAL("dp", "mp")
    assert (layout.size, layout.axes, layout.strategy) == (8, (("dp", 2), ("mp", 4)), (2, 4))
    assert layout.slices((4, 4)) == Layout((2, 4), ("dp", "mp"))("dp", "mp").slices((4, 4))
    assert layout.abstract_mesh().axis_names == ("dp", "mp")


# The notation


@pytest.mark.parametrize(
    ("dims", "spec", "cuts", "partition_spec"),
    [
        (("dp", "None"), (("dp",), ()), (2, 1), P("dp", None)),
        ((("dp", "mp"), "sp"), (("dp", "mp"), ("sp",)), (4, 2), P(("dp", "mp"), "sp")),
        ((("mp", "dp"),), (("mp", "dp"),), (4,), P(("mp", "dp"))),
        ((("dp", "None"), ("None",), ()), (("dp",), (), ()), (2, 1, 1), P("dp", None, None)),
        ((), (), (), P()),
    ],
)
def test_one_layout_in_three_notations(dims, spec, cuts, partition_spec):
    layout = CUBE(*dims)
    assert (layout.spec, layout.strategy, layout.partition_spec) == (spec, cuts, partition_spec)
    assert len(layout.partition_spec) == len(dims)


def test_calling_makes_a_new_layout():
    first, second = CUBE("dp"), CUBE("sp")
    assert first != second != CUBE
    assert first("sp") == second
    assert repr(CUBE) == "Layout((2, 2, 2), ('dp', 'sp', 'mp'))"
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.device_matrix = (8,)  # pyright: ignore


def test_equal_by_value():
    assert AB("a", "None") == Layout((2, 4), ("a", "b"), list(range(8)))(("a",), ("None",))
    assert hash(AB("a", "None")) == hash(Layout((2, 4), ("a", "b"), list(range(8)))(("a",), ()))
    assert AB("a") != AB("a", "None")
    assert AB("a") != Layout((2, 4), ("a", "b"), [1, 0, 2, 3, 4, 5, 6, 7])("a")
    assert len({AB, AB("a"), AB(), AB("a")}) == 3


@st.composite
def layouts(draw, devices=None, ranks=True):
    """Layouts of a few axes; with `devices`, of exactly so many."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    if devices is not None:
        assume(devices % math.prod(sizes) == 0)
        sizes.append(devices // math.prod(sizes))
        sizes = draw(st.permutations(sizes))
    names = tuple("abcde"[: len(sizes)])
    count = math.prod(sizes)
    rank_list = list(draw(st.permutations(range(count)))) if ranks and draw(st.booleans()) else None
    dims = [[] for _ in range(draw(st.integers(0, 3)))]
    for axis in draw(st.permutations(names)):
        if dims and draw(st.booleans()):
            draw(st.sampled_from(dims)).append(axis)
    typed = [tuple(dim) if len(dim) > 1 else dim[0] if dim else "None" for dim in dims]
    return Layout(tuple(sizes), names, rank_list)(*typed)


@st.composite
def layouts_with_shapes(draw, **kwargs):
    layout = draw(layouts(**kwargs))
    return layout, tuple(cut * draw(st.integers(1, 3)) for cut in layout.strategy)


@given(layouts())
def test_repr_is_what_one_types(layout):
    again = eval(repr(layout), {"Layout": Layout})
    assert (again, hash(again), repr(again)) == (layout, hash(layout), repr(layout))
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout


@given(layouts_with_shapes(ranks=False))
def test_tensor_map_round_trip(case):
    layout, shape = case
    again = Layout.from_tensor_map(layout.device_matrix, layout.tensor_map)
    assert (again.tensor_map, again.strategy, again.slices(shape)) == (
        layout.tensor_map,
        layout.strategy,
        layout.slices(shape),
    )
    assert Layout.from_tensor_map(*json.loads(json.dumps([layout.device_matrix, layout.tensor_map]))) == again
    named = Layout(again.device_matrix, layout.alias_name)
    assert named(*layout._dims) == layout


@given(layouts(ranks=False))
def test_partition_spec_round_trip(layout):
    mesh = layout.abstract_mesh()
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert Layout.from_sharding(NamedSharding(mesh, layout.partition_spec), len(layout.spec)) == layout
    short = P(*layout.partition_spec[: len(layout.spec) - 1]) if layout.spec and not layout.spec[-1] else None
    if short is not None:  # JAX may leave whole dims at the end out
        assert Layout.from_sharding(NamedSharding(mesh, short), len(layout.spec)) == layout


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.integers(1, 4))
def test_strategy_round_trip(cuts, repeat):
    layout = Layout.from_strategy(cuts, math.prod(cuts) * repeat)
    assert layout.strategy == cuts
    assert layout.size == math.prod(cuts) * repeat
    assert Layout.from_tensor_map(layout.device_matrix, layout.tensor_map).strategy == cuts
    assert len({piece[:] for piece in map(str, layout.slices(cuts))}) == math.prod(cuts)
    # The devices left over are the fastest axis: neighbours hold the same piece.
    for first in range(0, layout.size, repeat):
        assert len({str(piece) for piece in layout.slices(cuts)[first : first + repeat]}) == 1


# The slices


@given(layouts_with_shapes())
def test_slices_tile_the_array(case):
    layout, shape = case
    held = np.zeros(shape, int)
    for piece in layout.slices(shape):
        held[piece] += 1
        assert tuple(s.stop - s.start for s in piece) == layout.slice_shape(shape)
    assert (held == layout.size // math.prod(layout.strategy)).all()
    assert [as_pairs(piece, shape) for piece in layout.slices(shape)] == pieces(layout, shape)


@given(layouts_with_shapes(devices=8))
def test_slices_are_jaxs(case):
    layout, shape = case
    devices = jax.devices()
    sharding = layout.sharding()
    assert isinstance(sharding.mesh, Mesh)
    placed = sharding.devices_indices_map(shape)
    for rank, piece in zip(layout.rank_list, layout.slices(shape), strict=True):
        assert as_pairs(placed[devices[rank]], shape) == as_pairs(piece, shape)
    assert sharding.shard_shape(shape) == layout.slice_shape(shape)
    assert list(sharding.mesh.devices.flat) == [devices[rank] for rank in layout.rank_list]
    assert set(sharding.mesh.axis_types) == {AxisType.Auto}
    assert Layout.from_sharding(sharding, len(shape)) == layout


def test_a_real_array_lies_so():
    layout = Layout((2, 4), ("dp", "mp"), [7, 6, 5, 4, 3, 2, 1, 0])("mp", "dp")
    array = np.arange(32).reshape(8, 4)
    placed = jax.device_put(array, layout.sharding())
    held = {shard.device: np.asarray(shard.data) for shard in placed.addressable_shards}
    for rank, piece in zip(layout.rank_list, layout.slices((8, 4)), strict=True):
        np.testing.assert_array_equal(held[jax.devices()[rank]], array[piece])


def test_some_of_the_devices():
    devices = jax.devices()
    layout = Layout((2,), ("a",), [5, 2])("a")
    assert list(layout.mesh().devices.flat) == [devices[5], devices[2]]
    assert Layout.from_sharding(layout.sharding(), 1) == layout
    assert list(AB.mesh(devices[::-1]).devices.flat) == devices[::-1]
    assert Layout.from_sharding(AB("a").sharding(devices[::-1]), 1, devices[::-1]) == AB("a")
    assert list(Layout((2,), ("a",)).mesh(np.array(devices)).devices.flat) == devices[:2]


def test_a_mesh_without_axes():
    mesh = Mesh(np.array(jax.devices()[3]).reshape(()), ())
    assert Layout.from_sharding(NamedSharding(mesh, P()), 1) == Layout((1,), ("repeat",), [3])("None")
    assert Layout.from_sharding(NamedSharding(AbstractMesh((), ()), P()), 0) == Layout((1,), ("repeat",))()


def test_other_axis_types_and_shapes_of_length_zero():
    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    assert Layout.from_sharding(NamedSharding(mesh, P("a")), 1).slices((0,)) == ((slice(0, 0),),) * 2
    assert AB().slices(()) == ((),) * 8
    assert AB("a").slice_shape((np.int64(6),)) == (3,)


def test_4096_ranks_take_no_time():
    start = time.perf_counter()
    layout = Layout((16, 16, 16), ("a", "b", "c"), list(range(4095, -1, -1)))("a", ("c", "b"), "None", "None")
    held = layout.slices((64, 4096, 128, 128))
    assert time.perf_counter() - start < 1
    assert held[0] == (slice(0, 4), slice(0, 16), slice(0, 128), slice(0, 128))
    assert held[16] == (slice(0, 4), slice(16, 32), slice(0, 128), slice(0, 128))
    assert held[1] == (slice(0, 4), slice(256, 272), slice(0, 128), slice(0, 128))


# What is wrong


def on_mesh(*spec, names=("dp", "mp")):
    return NamedSharding(AbstractMesh((2, 4), names, axis_types=(AxisType.Auto,) * 2), P(*spec))


ERRORS = {
    # MindSpore's own
    "device_matrix is a list": (LayoutTypeError, lambda: Layout([2, 4], ("a", "b"))),
    "device_matrix is an int": (LayoutTypeError, lambda: Layout(8, ("a",))),
    "alias_name is a string": (LayoutTypeError, lambda: Layout((2,), "a")),
    "a name is an int": (LayoutTypeError, lambda: Layout((2, 4), ("a", 1))),
    "a size is a float": (LayoutTypeError, lambda: Layout((2.0, 4), ("a", "b"))),
    "fewer names than sizes": (LayoutError, lambda: Layout((2, 4), ("a",))),
    "an empty name": (LayoutError, lambda: Layout((2, 4), ("a", ""))),
    "an axis called None": (LayoutError, lambda: Layout((2, 4), ("a", "None"))),
    "a name twice": (LayoutError, lambda: Layout((2, 4), ("a", "a"))),
    "the virtual axis first": (LayoutError, lambda: Layout((2, 4), ("interleaved_parallel", "a"))),
    "rank_list is a tuple": (LayoutTypeError, lambda: Layout((2,), ("a",), (0, 1))),
    "rank_list of strings": (LayoutTypeError, lambda: Layout((2,), ("a",), ["0", 1])),
    "rank_list of lists": (LayoutTypeError, lambda: Layout((2,), ("a",), [[0, 1]])),
    "rank_list too short": (LayoutError, lambda: Layout((2, 4), ("a", "b"), [0, 1])),
    "an unknown axis": (LayoutError, lambda: AB("z", "None")),
    "an axis on two dims": (LayoutError, lambda: AB("a", ("b", "a"))),
    "an axis twice on one dim": (LayoutError, lambda: AB(("a", "a"))),
    "None as a dim": (LayoutError, lambda: AB("a", None)),
    "None inside a dim": (LayoutError, lambda: AB(("a", None))),
    "no dims said": (LayoutError, lambda: AB.to_dict()),
    # what MindSpore lets pass
    "a size of zero": (LayoutError, lambda: Layout((0, 4), ("a", "b"))),
    "a negative size": (LayoutError, lambda: Layout((2, -4), ("a", "b"))),
    "a bool as size": (LayoutTypeError, lambda: Layout((True, 4), ("a", "b"))),
    "no axes": (LayoutError, lambda: Layout((), ())),
    "only a virtual axis": (LayoutError, lambda: Layout((2,), ("interleaved_parallel",))),
    "a rank twice": (LayoutError, lambda: Layout((4,), ("a",), [0, 1, 1, 1])),
    "a negative rank": (LayoutError, lambda: Layout((2,), ("a",), [0, -1])),
    "a bool as rank": (LayoutTypeError, lambda: Layout((2,), ("a",), [False, True])),
    "no ranks": (LayoutError, lambda: Layout((2,), ("a",), [])),
    "an int as a dim": (LayoutTypeError, lambda: AB(2, 4)),
    "a list as a dim": (LayoutTypeError, lambda: AB(["a", "b"])),
    "a dim over the virtual axis": (LayoutError, lambda: VIRTUAL(("dp", "interleaved_parallel"), "None")),
    "several things at once": (LayoutError, lambda: Layout((0, 4, 2), ("a", "a", "None", ""))),
    "several dims at once": (LayoutError, lambda: AB("z", None, 3)),
    # strategies, tensor maps, shardings
    "cuts as a list": (LayoutTypeError, lambda: Layout.from_strategy([4, 1], 8)),
    "a bool and a zero as cuts": (LayoutError, lambda: Layout.from_strategy((True, 0), 8)),
    "cuts that do not divide the devices": (LayoutError, lambda: Layout.from_strategy((3, 1), 8)),
    "no device": (LayoutError, lambda: Layout.from_strategy((1,), 0)),
    "devices that are no number": (LayoutTypeError, lambda: Layout.from_strategy((1,), "8")),
    "a tensor map as a string": (LayoutTypeError, lambda: Layout.from_tensor_map((2, 4), "a")),
    "a tensor map of names": (LayoutTypeError, lambda: Layout.from_tensor_map((2, 4), ("a", -1))),
    "a tensor map out of range": (LayoutError, lambda: Layout.from_tensor_map((2, 4), (2, -1))),
    "a tensor map below -1": (LayoutError, lambda: Layout.from_tensor_map((2, 4), (0, (1, -2)))),
    "a tensor map that uses an axis twice": (LayoutError, lambda: Layout.from_tensor_map((2, 4), (0, (1, 0)))),
    "a tensor map of no matrix": (LayoutTypeError, lambda: Layout.from_tensor_map(8, (0,))),
    "another sharding": (LayoutTypeError, lambda: Layout.from_sharding(SingleDeviceSharding(jax.devices()[0]), 1)),
    "a spec longer than the array": (LayoutError, lambda: Layout.from_sharding(on_mesh("dp", "mp"), 1)),
    "an open dim": (LayoutError, lambda: Layout.from_sharding(on_mesh(P.UNCONSTRAINED), 1)),
    "a mesh with a virtual axis": (
        LayoutError,
        lambda: Layout.from_sharding(on_mesh(names=("dp", "interleaved_parallel")), 1),
    ),
    "devices that are not listed": (
        DeviceError,
        lambda: Layout.from_sharding(AB("a").sharding(), 1, devices=jax.devices()[:4]),
    ),
    # arrays and devices
    "another number of dims": (LayoutError, lambda: AB("a", "b").slice_shape((8, 8, 8))),
    "a length that is not divisible": (LayoutError, lambda: AB("None", "b").slice_shape((8, 30))),
    "a length that nothing divides": (LayoutError, lambda: AB("b").slices((7,))),
    "two lengths that are not divisible": (LayoutError, lambda: AB("b", "a").slices((30, 5))),
    "a shape that is an int": (LayoutTypeError, lambda: AB("b").slices(8)),
    "a shape of floats": (LayoutTypeError, lambda: AB("b").slice_shape((8.0,))),
    "more devices than there are": (DeviceError, lambda: Layout((16,), ("a",)).mesh()),
    "a rank beyond the devices": (DeviceError, lambda: Layout((2,), ("a",), [0, 9])("a").sharding()),
    "a device twice": (DeviceError, lambda: Layout((2,), ("a",)).mesh([jax.devices()[0]] * 2)),
}


SHOWN = ("device_matrix is a list", "an axis on two dims", "two lengths that are not divisible")
"""The errors whose full text a reviewer reads in golden/messages_layout.txt."""


@pytest.mark.parametrize(("kind", "make"), ERRORS.values(), ids=list(ERRORS))
def test_bad_layout_is_refused_with_type_and_fix(kind, make):
    error = refusal(make)
    assert type(error) is kind
    assert isinstance(error, TypeError if kind is LayoutTypeError else ValueError)


def test_message_of_a_bad_layout_reads_as_the_golden_file(golden):
    golden("messages_layout", "\n\n".join(f"{ERRORS[name][0].__name__}: {refusal(ERRORS[name][1])}" for name in SHOWN))


def test_a_sum_that_is_not_done_is_no_layout():
    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    error = refusal(lambda: Layout.from_sharding(NamedSharding(mesh, P(None, unreduced={"a"})), 1))
    assert "reduce it first" in str(error)


@given(layouts_with_shapes())
def test_divisors_that_are_named_would_do(case):
    layout, shape = case
    assume(any(cut > 1 for cut in layout.strategy))
    wrong = tuple(n * cut + 1 if cut > 1 else n for n, cut in zip(shape, layout.strategy, strict=True))
    error = refusal(lambda: layout.slices(wrong))
    assert isinstance(error, LayoutError)
    assert len(error.problems) == sum(cut > 1 for cut in layout.strategy)
    for problem in error.problems:
        dim = int(problem.what.split()[1])
        assert int(problem.fix.rsplit(" ", 1)[1]) % layout.strategy[dim] == 0
        if "leave" not in problem.fix:
            ways = problem.fix.removeprefix("shard it ").split(" ways")[0].replace(" or ", ", ").split(", ")
            assert all(wrong[dim] % int(way) == layout.size % int(way) == 0 for way in ways)

"""Layouts, PartitionSpecs and NamedShardings brought onto one mesh: every device holds the shard that they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import AUTO
from shardfn.errors import StrategyError
from shardfn.frontend.strategy import Leaf
from shardfn.mindspore import Layout
from shardfn.planning.meshes import mesh_of, names_axes

DEVICES = jax.devices()
ON = Layout((2, 4), ("dp", "mp"))
BACK = Layout((2, 4), ("dp", "mp"), [7, 6, 5, 4, 3, 2, 1, 0])
MESH = Mesh(np.array(DEVICES).reshape(2, 4), ("dp", "mp"))
EXPLICIT = jax.make_mesh((2, 4), ("dp", "mp"), axis_types=(AxisType.Explicit,) * 2)
X, W = np.arange(128, dtype=np.float32).reshape(8, 16), np.arange(64, dtype=np.float32).reshape(16, 4)


def dense(x, w):
    return x @ w


def named(spec, mesh=MESH):
    return NamedSharding(mesh, spec)


def held(array):
    """Which shard each device holds."""
    return {s.device: tuple((i.start or 0, i.stop) for i in s.index) for s in array.addressable_shards}


# in_strategy, device, what the plan says of x and w
DRAWN = {
    "Layouts": ((ON("dp", "None"), ON("None", "mp")), None, [("dp",), ()], [(), ("mp",)]),
    "two axes on a dim": ((ON(("dp", "mp"), "None"), AUTO), None, [("dp", "mp"), ()], None),
    "two axes, the other way": ((ON(("mp", "dp"), "None"), AUTO), None, [("mp", "dp"), ()], None),
    "Layout and PartitionSpec": ((ON("dp", "mp"), P("mp")), None, [("dp",), ("mp",)], [("mp",), ()]),
    "PartitionSpecs and a mesh": ((P("dp"), P(None, "mp")), MESH, [("dp",), ()], [(), ("mp",)]),
    "an empty PartitionSpec": ((P(), P("mp")), MESH, [(), ()], [("mp",), ()]),
    "NamedShardings": ((named(P("mp")), named(P(None, "dp"))), None, [("mp",), ()], [(), ("dp",)]),
    "NamedSharding and PartitionSpec": ((named(P("dp")), P("mp")), None, [("dp",), ()], [("mp",), ()]),
    "NamedSharding and its mesh": ((named(P("dp")), AUTO), MESH, [("dp",), ()], None),
    "explicit axes": ((named(P("dp"), EXPLICIT), AUTO), None, [("dp",), ()], None),
    "an abstract mesh": ((named(P("dp"), AbstractMesh((2, 4), ("dp", "mp"))), AUTO), None, [("dp",), ()], None),
    "None beside: dim 0 over all": ((None, ON("None", "None")), None, [("dp", "mp"), ()], [(), ()]),
    "ones beside": ((ON("dp", "None"), (1, 1)), None, [("dp",), ()], [(), ()]),
    "nothing sharded": ((ON("None", "None"), ON("None", "None")), None, [(), ()], [(), ()]),
}


@pytest.mark.parametrize(("strategy", "device", "x_spec", "w_spec"), DRAWN.values(), ids=DRAWN)
def test_drawn_entries_are_taken_as_they_are(strategy, device, x_spec, w_spec):
    plan = shardfn.plan(dense, X, W, in_strategy=strategy, device=device)
    assert plan.axes == (("dp", 2), ("mp", 4))
    assert list(plan.inputs[0].spec) == x_spec
    assert w_spec is None or list(plan.inputs[1].spec) == w_spec
    assert [d.source == "you" for d in plan.inputs] == [True, w_spec is not None]


LAYOUTS = {
    "a Layout": (ON("dp", "mp"), None, ON("dp", "mp").sharding()),
    "a Layout with ranks": (BACK("dp", "mp"), None, BACK("dp", "mp").sharding()),
    "a Layout on a part of the devices": (
        Layout((2, 2), ("a", "b"))("b", "a"), DEVICES[4:], Layout((2, 2), ("a", "b"))("b", "a").sharding(DEVICES[4:]),
    ),
    "ranks on a part of the devices": (
        Layout((4,), ("a",), [2, 0, 3, 1])("a", "None"), DEVICES[2:6],
        Layout((4,), ("a",), [2, 0, 3, 1])("a", "None").sharding(DEVICES[2:6]),
    ),
    "a NamedSharding on devices in an order of its own": (
        named(P("dp", "mp"), Mesh(np.array(DEVICES[::-1]).reshape(4, 2), ("dp", "mp"))), None,
        named(P("dp", "mp"), Mesh(np.array(DEVICES[::-1]).reshape(4, 2), ("dp", "mp"))),
    ),
    "a PartitionSpec on a mesh": (P(("mp", "dp")), MESH, named(P(("mp", "dp")))),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "device", "wanted"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("outside", ["argument", "result"])
def test_each_device_holds_its_piece(entry, device, wanted, outside):
    ins, outs = ((entry,), (entry,)) if outside == "argument" else (None, (entry,))
    result = shardfn.shard(lambda x: x + 1, ins, outs, device)(X)
    assert held(result) == held(jax.device_put(X, wanted))
    np.testing.assert_array_equal(result, X + 1)


def test_a_result_alone_may_bring_the_mesh():
    last = Mesh(np.array(DEVICES[4:]), ("i",))
    result = shardfn.shard(dense, None, (NamedSharding(last, P("i")),))(X, W)
    assert result.sharding.device_set == set(DEVICES[4:]) and result.sharding.spec == P("i", None)


def test_on_one_device_the_drawn_is_checked_and_whole():
    plan = shardfn.plan(dense, X, W, in_strategy=(ON("dp", "None"), AUTO), device=DEVICES[:1])
    assert plan.inputs[0].strategy == (1, 1)
    with pytest.raises(StrategyError, match="not divisible"):
        shardfn.plan(dense, X[:7], W, in_strategy=(ON("dp", "None"), AUTO), device=DEVICES[:1])


def test_ints_on_a_given_mesh_take_its_axes():
    plan = shardfn.plan(dense, X, W, in_strategy=((4, 1), (1, 2)), device=MESH)
    assert plan.mesh == MESH and list(plan.mesh.devices.flat) == DEVICES
    assert [d.spec for d in plan.inputs] == [(("mp",), ()), ((), ("dp",))]


@pytest.mark.parametrize(
    ("entry", "drawn", "mesh"),
    [(ON("dp"), True, None), (P("dp"), True, None), (named(P("dp")), True, MESH), ((2,), False, None),
     (None, False, None), (AUTO, False, None), (named(P("dp"), AbstractMesh((2,), ("dp",))), True, None)],
    ids=str,
)  # fmt: skip
def test_names_axes_and_mesh_of(entry, drawn, mesh):
    assert names_axes(Leaf("x", "x", (8,), "float32", entry)) == drawn
    assert mesh_of([entry]) is mesh


@pytest.mark.slow
def test_the_result_equals_the_unsharded_one():
    for strategy, device, *_ in DRAWN.values():
        if not isinstance(getattr(strategy[0], "mesh", None), AbstractMesh):
            np.testing.assert_allclose(shardfn.shard(dense, strategy, None, device)(X, W), jnp.matmul(X, W), rtol=1e-5)

"""Integers and searches on a mesh that the user gave: the plan has its names and shape."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import AUTO, shard
from shardfn.errors import DeviceError, StrategyError
from shardfn.planning.meshes.given_mesh import _possible, _specs

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(2, 4), ("data", "model"))
CUBE = Mesh(DEVICES[::-1].reshape(2, 2, 2), ("a", "b", "c"))
X, W1, W2 = np.ones((16, 32), np.float32), np.full((32, 64), 0.5, np.float32), np.full((64, 32), 0.25, np.float32)


def mlp(x, w1, w2):
    return jnp.tanh(x @ w1) @ w2


PLACED = {
    "each on its own axis": (MESH, ((2, 1), (1, 4), (4, 1)), [(("data",), ()), ((), ("model",)), (("model",), ())]),
    "the other way": (MESH, ((4, 1), (1, 2), (2, 1)), [(("model",), ()), ((), ("data",)), (("data",), ())]),
    "all devices on a dimension": (MESH, ((8, 1), AUTO, AUTO), [(("data", "model"), ()), None, None]),
    "data parallel": (MESH, (None, AUTO, AUTO), [(("data", "model"), ()), None, None]),
    "tied dimensions": (CUBE, ((2, 1), (1, 2), (2, 2)), [(("a",), ()), ((), ("b",)), (("b",), ("c",))]),
    "a part of the axes": (CUBE, ((2, 1), (1, 4), (2, 1)), [(("a",), ()), ((), ("b", "c")), (("b",), ())]),
    "beside PartitionSpecs": (CUBE, ((2, 1), P(None, ("a", "b")), AUTO), [(("c",), ()), ((), ("a", "b")), None]),
    "an axis of size 1": (Mesh(DEVICES.reshape(8, 1), ("data", "one")), ((8, 1), AUTO, AUTO), [(("data",), ()), None, None]),
}  # fmt: skip


@pytest.mark.parametrize(("mesh", "strategy", "specs"), PLACED.values(), ids=PLACED)
def test_integers_on_a_given_mesh_take_its_axes(mesh, strategy, specs):
    f = shard(mlp, strategy, device=mesh)
    plan = f.plan(X, W1, W2)
    assert plan.mesh == mesh and plan.axes == tuple(mesh.shape.items())
    assert [spec for spec in specs if spec] == [d.spec for d, spec in zip(plan.inputs, specs, strict=True) if spec]
    result = f(X, W1, W2)
    np.testing.assert_allclose(result, mlp(X, W1, W2), rtol=1e-4)
    assert result.sharding.mesh == mesh


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["auto", "recursive_programming"])
def test_search_on_a_given_mesh_keeps_it(level, mode):
    for mesh in (MESH, jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))):
        plan = shardfn.plan(mlp, X, W1, W2, device=mesh, level=level, search_mode=mode)
        assert plan.axes == tuple(mesh.shape.items())
        assert plan.mesh == mesh


@pytest.mark.parametrize("strategy", [(2, 2), (3, 1), (16, 1)])
def test_integers_that_a_given_mesh_has_no_axes_for_name_those_it_has(strategy):
    x = jnp.ones((48, 48))
    with pytest.raises(StrategyError) as error:
        shardfn.plan(jnp.tanh, x, in_strategy=(strategy,), device=MESH)
    if strategy != (2, 2):  # no mesh of 8 devices has it
        return
    (problem,) = error.value.problems
    assert problem.fix.startswith("write (1, 2) or (2, 1) or (2, 4) or (4, 2) there")
    for mend in ((1, 2), (2, 1), (2, 4), (4, 2)):
        assert shardfn.plan(jnp.tanh, x, in_strategy=(mend,), device=MESH).inputs[0].strategy == mend
    assert problem.fix.endswith("device=jax.devices()")
    assert shardfn.plan(jnp.tanh, x, in_strategy=(strategy,), device=jax.devices()).inputs[0].strategy == strategy


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2), (6,), (1, 8)])
def test_strategies_of_a_mesh_are_those_with_a_sharding(sizes):
    axes = tuple((f"x{i}", n) for i, n in enumerate(sizes))
    shape = (math.prod(sizes),) * 2
    possible = _possible(shape, axes)
    for one in itertools.product(range(1, 9), repeat=2):
        specs = list(_specs(one, axes))
        assert bool(specs) == (one in possible)
        for spec in specs:
            assert tuple(math.prod(dict(axes)[a] for a in dim) for dim in spec) == one
            used = [a for dim in spec for a in dim]
            assert len(set(used)) == len(used)


# ---- the mesh of a `shard_map` inside


def mapped(mesh):
    summed = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "model"), mesh=mesh, in_specs=(P("data", "model"), P("model")),
                           out_specs=P("data"))  # fmt: skip
    return lambda x, w: jnp.sin(summed(jnp.cos(x), w))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_call_without_a_mesh_takes_that_of_its_shard_map(level):
    f = shard(mapped(MESH), level=level)
    plan = f.plan(X, W1)
    assert plan.axes == (("data", 2), ("model", 4))
    assert plan.inputs[1].spec == (("model",), ())
    assert not any("mesh of their own" in text for text in plan.diagnostics)
    kinds = plan.verify().to_dict()["compiled"]["kinds"].values()
    assert plan.cost.bytes_sent == sum(kind["compiled"]["bytes_sent"] for kind in kinds)
    np.testing.assert_allclose(f(X, W1), np.sin(np.cos(X) @ W1), rtol=1e-4)


@pytest.mark.parametrize("entries", [((2, 4), (4, 1)), ((8, 1), (1, 1))])
def test_strategies_go_on_the_mesh_of_the_shard_map(entries):
    plan = shard(mapped(MESH), in_strategy=entries).plan(X, W1)
    assert plan.axes == (("data", 2), ("model", 4)) and tuple(d.strategy for d in plan.inputs) == entries
    kinds = plan.verify().to_dict()["compiled"]["kinds"].values()
    assert plan.cost.bytes_sent == sum(kind["compiled"]["bytes_sent"] for kind in kinds)


@pytest.mark.parametrize("devices", [DEVICES[:4].reshape(2, 2), DEVICES[::-1].reshape(2, 4)], ids=["fewer", "reversed"])
def test_shard_map_on_other_devices_is_refused_and_the_fix_works(devices):
    mesh = Mesh(devices, ("data", "model"))
    with pytest.raises(DeviceError, match=r"a shard_map in `<lambda>`(.|\n)*test_given_mesh.py(.|\n)*device=mesh"):
        shard(mapped(mesh))(X, W1)
    np.testing.assert_allclose(shard(mapped(mesh), device=mesh)(X, W1), np.sin(np.cos(X) @ W1), rtol=1e-4)

"""Calls inside `jax.set_mesh` and `jax.shard_map`: the plan uses that mesh, and types with Explicit axes are kept."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import AUTO, shard
from shardfn.errors import DeviceError, StrategyError
from tests.marks import some_slow

AXES = (("data", 2), ("model", 4))
KINDS = {"Explicit": (AxisType.Explicit,) * 2, "Auto": (AxisType.Auto,) * 2,
         "mixed": (AxisType.Explicit, AxisType.Auto)}  # fmt: skip
MESHES = {name: jax.make_mesh((2, 4), ("data", "model"), axis_types=types) for name, types in KINDS.items()}
EXPLICIT = MESHES["Explicit"]
KEYS = jax.random.split(jax.random.key(0), 3)
X, W1, W2 = (np.asarray(jax.random.normal(k, s)) for k, s in zip(KEYS, ((16, 32), (32, 64), (64, 32)), strict=True))
ARGS = X, W1, W2
SPECS = P("data"), P(None, "model"), P("model")
STRATEGY = (2, 1), (1, 4), (4, 1)


def mlp(x, w1, w2):
    return jnp.tanh(x @ w1) @ w2


def loss(f):
    return lambda *args: (f(*args) ** 2).sum()


def close(result, wanted):
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-3, atol=2e-3)


def typed(mesh=EXPLICIT):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(ARGS, SPECS, strict=True)]


def kept(mesh, spec):
    """The Explicit axes of a spec over `data`, as its type has them."""
    return P(*(axis if axis in mesh.explicit_axes else None for axis in spec))


PLACES = {"nothing given": None, "integers": STRATEGY, "PartitionSpecs": SPECS}


@pytest.mark.parametrize("strategy", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", MESHES)
def test_call_inside_set_mesh_uses_that_mesh(name, strategy):
    mesh, f = MESHES[name], shard(mlp, strategy)
    with jax.set_mesh(mesh):
        assert f.plan(*ARGS).axes == AXES
        result = f(*ARGS)
        close(result, mlp(*ARGS))
        assert result.sharding.mesh == mesh
        if strategy is not None:
            assert [d.spec for d in f.plan(*ARGS).inputs] == [(("data",), ()), ((), ("model",)), (("model",), ())]
            assert jax.typeof(result).sharding.spec == kept(mesh, ("data", None))
        close(f(*ARGS), result)  # the later call


@pytest.mark.parametrize("name", some_slow([*MESHES], ["mixed"]))
def test_transformations_inside_set_mesh_keep_values_and_types(name):
    mesh, f = MESHES[name], shard(mlp, STRATEGY)
    with jax.set_mesh(mesh):
        args = typed(mesh)
        twice = jax.jit(lambda *args: 2 * f(*args))(*args)
        close(twice, 2 * mlp(*ARGS))
        assert jax.typeof(twice).sharding.spec == kept(mesh, ("data", None))
        grads = jax.jit(jax.grad(loss(f), (0, 1, 2)))(*args)
        close(grads, jax.jit(jax.grad(loss(mlp), (0, 1, 2)))(*ARGS))
        assert [jax.typeof(g) for g in grads] == [jax.typeof(x) for x in args]
        close(jax.grad(loss(f), 1)(*args), grads[1])
        close(jax.vmap(f, (None, 0, None))(X, np.stack([W1] * 3), W2), np.stack([mlp(*ARGS)] * 3))


@pytest.mark.parametrize("is_set", [True, False], ids=["in set_mesh", "types alone"])
def test_explicit_types_are_entries_and_results_have_types(is_set):
    f, args = shard(mlp), typed()
    with jax.set_mesh(EXPLICIT) if is_set else contextlib.nullcontext():
        plan = f.plan(*args)
        assert [d.spec for d in plan.inputs] == [(("data",), ()), ((), ("model",)), (("model",), ())]
        assert plan.inputs[0].reason == "jax.typeof(x)" and plan.inputs[0].source == "you"
        result = f(*args)
        close(result, mlp(*ARGS))
        assert jax.typeof(result).sharding.spec == P("data", None) and result.sharding.mesh == EXPLICIT
        assert result.sharding == f.lower(*args).compile().output_shardings


def test_entries_of_the_user_go_before_explicit_types():
    with jax.set_mesh(EXPLICIT):
        args = typed()
        plan = shardfn.plan(mlp, *args, in_strategy=((4, 1), AUTO, AUTO))
        assert plan.inputs[0].spec == (("model",), ()) and plan.inputs[1].source == "searched"
        result = shard(mlp, ((4, 1), AUTO, AUTO), ((2, 4),))(*args)
        close(result, mlp(*ARGS))
        assert jax.typeof(result).sharding.spec == P("data", "model")


def test_results_that_come_back_as_arguments_need_no_new_plan():
    def step(w, x):
        return jax.tree.map(lambda one: one - 0.1 * jnp.mean(x), w), jnp.mean(x)

    f, w = shard(step, level=1), [jnp.ones((32, 64)), jnp.ones((64, 32))]
    with jax.set_mesh(EXPLICIT):
        first = f.plan(w, X)
        for _ in range(3):
            w, _ = f(w, X)
        assert any(jax.typeof(one).sharding.spec != P(None, None) for one in w)
        assert f.plan(w, X) is first


def test_same_function_inside_and_outside_of_meshes():
    f, args = shard(mlp), typed()
    for mesh in (None, EXPLICIT, MESHES["Auto"], None):
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            result = f(*ARGS)
            close(result, mlp(*ARGS))
            assert (f.plan(*ARGS).axes == AXES) == (mesh is not None)
            assert bool(result.sharding.mesh.explicit_axes) == (mesh is EXPLICIT)
    assert jax.typeof(f(*args)).sharding.spec == P("data", None)  # types alone
    assert not f(*ARGS).sharding.mesh.explicit_axes


@pytest.mark.parametrize("name", [*MESHES, None])
def test_nested_sharded_functions_share_the_mesh(name):
    inner = shard(lambda x, w: jnp.tanh(x @ w), ((2, 1), (1, 4)))
    outer = shard(lambda x, w1, w2: inner(x, w1) @ w2, device=None if name else MESHES["Auto"])
    with jax.set_mesh(MESHES[name]) if name else contextlib.nullcontext():
        close(outer(*ARGS), mlp(*ARGS))
        assert outer.plan(*ARGS).axes == AXES


@pytest.mark.parametrize("name", some_slow([*MESHES], ["mixed"]))
def test_call_inside_shard_map_is_planned_over_the_other_axes(name):
    mesh, planned = MESHES[name], []
    f = shard(mlp, ((1, 1), (1, 4), (4, 1)))

    def inside(*args):
        planned.append(f.plan(*args))
        return f(*args)

    with jax.set_mesh(mesh):
        mapped = jax.jit(
            jax.shard_map(inside, in_specs=(P("data"), P(), P()), out_specs=P("data"), axis_names={"data"})
        )
        args = [
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(ARGS, (P("data"), P(), P()), strict=True)
        ]
        close(mapped(*args), mlp(*ARGS))
        assert planned[0].axes == (("model", 4),) and planned[0].inputs[0].shape == (8, 32)
        if "model" in mesh.auto_axes:  # JAX has no gradient of a shard_map with other Explicit axes
            close(jax.grad(loss(mapped), 1)(*args), jax.grad(loss(mlp), 1)(*ARGS))


@pytest.mark.slow
def test_state_of_nnx_modules_inside_an_explicit_mesh():
    nnx = pytest.importorskip("flax.nnx")
    with jax.set_mesh(EXPLICIT):
        module, count = nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(()))

        @shard
        def step(module, count, x):
            count[...] += 1
            return module(x)

        for _ in range(2):
            result = step(module, count, X)
        close(result, X @ np.asarray(module.kernel[...]))
        assert count[...] == 2 and jax.typeof(result).sharding.mesh.explicit_axes


PSUM = shard(lambda x: jax.lax.psum(x, "data"))
PERMUTED = shard(lambda x: jnp.sin(jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])))
REFUSED = {
    "a closed-over array that is traced outside": (
        lambda x, w: jax.grad(lambda w: shard(lambda x: x @ w)(x).sum())(w), StrategyError, "closes over an array", "as an argument",
    ),
    "a closed-over array that is sharded as no op takes it": (
        lambda x, w: shard(lambda x: x @ w @ w.T)(x), StrategyError, "closes over an array", "as an argument",
    ),
    "Explicit code": (
        lambda x, w: shard(lambda x, w: jnp.dot(x, w, out_sharding=P("data")))(x, w), StrategyError, "asks for Explicit axes",
        "with_sharding_constraint",
    ),
    "integers that the mesh has no axes for": (
        lambda x, w: shard(jnp.dot, ((2, 2), AUTO))(x, w), StrategyError, "cannot be sharded (2, 2) on the mesh data=2 x model=4",
        "write (1, 2) or (2, 1) or",
    ),
    "a shard_map on the Explicit mesh": (
        lambda x, w: shard(lambda x: jax.shard_map(jnp.sin, mesh=EXPLICIT, in_specs=P("data"), out_specs=P("data"))(x))(x),
        StrategyError, "on a mesh with Explicit axes", "leave `mesh` out",
    ),
    "other devices": (lambda x, w: shard(jnp.dot, device=jax.devices()[:4])(x, w), DeviceError, "4 devices", "name no other devices"),
    "another mesh": (
        lambda x, w: shard(jnp.dot, device=jax.make_mesh((8,), ("a",)))(x, w), DeviceError, "on the mesh a=8", "no other mesh",
    ),
    "a mapped dimension on an axis of the plan": (
        lambda x, w: jax.vmap(shard(jnp.dot, ((2, 1), (1, 1))), (0, None))(jax.reshard(jnp.ones((4, 16, 32)), P("data")), w),
        StrategyError, "is mapped along a dimension", "shard(jax.vmap(f))",
    ),
    "a collective of the shard_map": (
        lambda x, w: jax.jit(jax.shard_map(lambda x: PSUM(x), in_specs=P("data"), out_specs=P(), axis_names={"data"}))(x),
        StrategyError, "`data` of the shard_map", "in the function of the shard_map",
    ),
    "a permutation along the shard_map": (
        lambda x, w: jax.jit(jax.shard_map(lambda x: PERMUTED(x), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))(x),
        StrategyError, "`data` of the shard_map", "in the function of the shard_map",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "what", "fix"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_on_an_explicit_mesh_is_one_error(call, kind, what, fix):
    x, w, _ = typed()
    with jax.set_mesh(EXPLICIT), pytest.raises(kind) as error:
        call(x, w)
    (problem,) = error.value.problems
    assert what in problem.what and fix in problem.fix


@pytest.mark.parametrize("is_late", [False, True], ids=["made before set_mesh", "as numpy"])
def test_closed_over_array_without_a_type_works_inside_an_explicit_mesh(is_late):
    table = jnp.asarray(W1)
    with jax.set_mesh(EXPLICIT):
        if is_late:
            table = np.asarray(jnp.asarray(W1))
        close(shard(lambda x: x @ table * table[0, 0])(X), X @ W1 * W1[0, 0])


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
CLOSED_OVER = {
    "an element": lambda x, w, key: x * w[0, 0],
    "one branch": lambda x, w, key: jax.lax.cond(x[0, 0] > 0, lambda: w, lambda: jnp.ones((32, 64)) * x[0, 0]),
    "loops": lambda x, w, key: jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ w) @ w.T, x),
    "a result": lambda x, w, key: (x @ w, w),
    "a custom JVP": lambda x, w, key: jax.nn.relu(x @ w),
    "a custom VJP": lambda x, w, key: sine(x @ w) + sine(w[0]),
    "a linear solve": lambda x, w, key: jnp.linalg.solve(w @ w.T + jnp.eye(32), x.T),
    "a random key": lambda x, w, key: x + jax.random.normal(key, x.shape),
    "checkpoint": jax.checkpoint(lambda x, w, key: jnp.sin(jnp.sin(x @ w))),
    "a gradient inside": lambda x, w, key: jax.grad(lambda x: (jax.nn.relu(x @ w) ** 2).sum())(x),
    "a sharded function inside": lambda x, w, key: shard(lambda x: x @ w, ((2, 1),))(x) + 1,
}


@pytest.mark.parametrize(
    "function", some_slow(CLOSED_OVER, {"a sharded function inside", "a gradient inside", "a linear solve"})
)
def test_closed_over_array_with_a_type_works_inside_an_explicit_mesh(function):
    wanted = jax.vjp(lambda x: function(x, W1, KEYS[0]), X)
    with jax.set_mesh(EXPLICIT):
        w, key = jnp.array(W1), jax.random.wrap_key_data(jnp.array(jax.random.key_data(KEYS[0])))
        assert jax.typeof(w).sharding.mesh.explicit_axes
        sharded = shard(lambda x: function(x, w, key))
        value, pullback = jax.vjp(sharded, jnp.array(X))
        close(value, wanted[0])
        close(pullback(value), wanted[1](wanted[0]))
        assert sharded.plan(X).axes == AXES


def test_argument_with_a_type_on_another_mesh_than_the_one_around_is_refused():
    x = typed()[0]
    with (
        jax.set_mesh(jax.make_mesh((8,), ("z",))),
        pytest.raises(StrategyError, match="the mesh around the call is z=8"),
    ):
        shard(jnp.sin)(x)


@pytest.mark.slow
def test_hardware_that_is_not_here_is_planned_for_inside_a_mesh():
    with jax.set_mesh(EXPLICIT):
        assert shardfn.plan(mlp, *typed(), device="tpu-v5e:4x4").hardware.count == 16


@pytest.mark.parametrize("name", MESHES)
def test_reshard_in_a_traced_function_changes_the_type(name):
    mesh = MESHES[name]
    wanted = NamedSharding(mesh, P("model", "data"))
    with jax.set_mesh(mesh):
        result = jax.jit(lambda x: shardfn.reshard(x, wanted))(typed(mesh)[0])
        assert result.sharding == wanted
        np.testing.assert_array_equal(result, X)
        close(shard(lambda x: shardfn.reshard(jnp.sin(x), wanted))(typed(mesh)[0]), np.sin(X))


def test_shard_map_inside_a_sharded_function_uses_the_mesh_around():
    with jax.set_mesh(EXPLICIT):
        total = shard(lambda x: jax.shard_map(lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P())(x))
        close(total(X), X[:8] + X[8:])

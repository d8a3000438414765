"""Arrays in another memory of their devices: where they are taken from, and where results go, as in `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import AUTO, shard

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
ON_DEVICE = NamedSharding(MESH, P("a"))
ON_HOST = NamedSharding(MESH, P("a"), memory_kind="pinned_host")
X = np.arange(32, dtype=np.float32).reshape(8, 4)
ARRAYS = {
    "NumPy": lambda: X,
    "uncommitted": lambda: jnp.asarray(X),
    "on the devices": lambda: jax.device_put(X, ON_DEVICE),
    "on the host": lambda: jax.device_put(X, ON_HOST),
}


def double(x):
    return x * 2


def fetched(x):
    return jax.device_put(x, DEVICE) * 2


def stored(x):
    return jax.device_put(x * 2, HOST)


def kind(array):
    return array.sharding.memory_kind


@pytest.mark.parametrize("x", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize(
    ("function", "entries", "wanted"),
    [
        (double, ((ON_HOST,), None), "pinned_host"),
        (double, ((ON_HOST,), (ON_DEVICE,)), "device"),
        (double, ((ON_DEVICE,), None), "device"),
        (double, ((ON_DEVICE,), (ON_HOST,)), "pinned_host"),
        (double, (None, (ON_HOST,)), "pinned_host"),
        (double, ((Format(None, ON_HOST),), None), "pinned_host"),
        (fetched, ((ON_HOST,), None), "device"),
        (stored, ((ON_DEVICE,), None), "pinned_host"),
        (stored, ((ON_DEVICE,), (ON_DEVICE,)), "device"),
    ],
)
def test_entries_say_which_memory(function, entries, wanted, x):
    sharded = shard(function, *entries)
    for _ in range(2):
        result = sharded(x())
        np.testing.assert_array_equal(result, X * 2)
        assert kind(result) == wanted
    inside = jax.jit(lambda x: sharded(x))(x())
    np.testing.assert_array_equal(inside, X * 2)
    assert kind(inside) == wanted


@pytest.mark.parametrize("entries", [None, (AUTO,), ((2, 4),)])
@pytest.mark.parametrize("memory", ["pinned_host", "unpinned_host"])
def test_without_a_named_sharding_arrays_stay_where_they_are(entries, memory):
    x = jax.device_put(X, ON_DEVICE.with_memory_kind(memory))
    for function in (double, fetched, stored):
        sharded = shard(function, entries)
        assert kind(sharded(x)) == kind(jax.jit(function)(x)), function
        assert kind(sharded(jnp.asarray(X))) == kind(jax.jit(function)(jnp.asarray(X))), function
        assert kind(sharded(x)) == kind(jax.jit(function)(x)), "after a call of another kind"
        assert [kind_of.memory_kind for kind_of in sharded.plan(x).in_shardings] == [memory]


def test_stages_reports_and_checks():
    x, sharded = jax.device_put(X, ON_HOST), shard(fetched, (ON_HOST,))
    for compiled in (sharded.lower(X).compile(), sharded.lower(jax.ShapeDtypeStruct((8, 4), "float32")).compile()):
        np.testing.assert_array_equal(compiled(x), X * 2)
    np.testing.assert_array_equal(sharded.lower(x=x).compile()(x=x), X * 2)
    assert "f32<host>[8,4]" in str(sharded.trace(X).jaxpr)
    assert "x: in pinned_host memory" in str(sharded.explain(x, compiled=True))
    assert sharded.check(x).agrees


def test_a_plan_is_for_plain_jit_too():
    made = shardfn.plan(fetched, X, in_strategy=(ON_HOST,))
    jitted = jax.jit(made.apply(fetched), in_shardings=made.in_shardings, out_shardings=made.out_shardings)
    np.testing.assert_array_equal(jitted(jax.device_put(X, *made.in_shardings)), X * 2)
    on_paper = NamedSharding(MESH.abstract_mesh, P("a"), memory_kind="pinned_host")
    elsewhere = shardfn.plan(fetched, X, in_strategy=(on_paper,), device="tpu-v5e:2x4")
    assert elsewhere.in_shardings[0].memory_kind == "pinned_host"
    assert elsewhere.out_shardings.memory_kind is None


def test_the_state_of_an_object_stays_in_host_memory():
    class Counter:
        def __init__(self):
            self.w = jax.device_put(X, ON_HOST)

        @shard
        def __call__(self, x):
            self.w = self.w + jax.device_put(x, HOST)
            return jax.device_put(self.w, DEVICE).sum()

    counter = Counter()
    assert [float(counter(X)) for _ in range(2)] == [2 * X.sum(), 3 * X.sum()]
    assert kind(counter.w) == "pinned_host"


@pytest.mark.parametrize("types", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_on_the_mesh_around(types):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(types,) * 2)
    x = jax.device_put(X, NamedSharding(mesh, P("a"), memory_kind="pinned_host"))
    with jax.set_mesh(mesh):
        assert kind(shard(double)(x)) == "pinned_host"
        assert kind(shard(fetched)(x)) == "device"


def test_a_function_inside_another_one():
    inner = shard(fetched, (ON_HOST,), (ON_HOST,))
    result = shard(lambda x: inner(x * 3), (ON_DEVICE,))(X)
    np.testing.assert_array_equal(result, X * 6)
    assert kind(result) == "pinned_host"
    assert kind(shard(lambda x: shard(double, (ON_DEVICE,))(x), (ON_HOST,))(X)) == "device"


def test_gradients_of_what_is_fetched():
    x = jax.device_put(X, ON_HOST)
    gradient = jax.grad(lambda x: (shard(fetched, (ON_HOST,))(x) ** 2).sum())(x)
    np.testing.assert_array_equal(gradient, 8 * X)
    assert kind(gradient) == "pinned_host"


def test_two_memories_in_one_op_are_jaxs_error():
    x = jax.device_put(X, ON_HOST)
    for transform in (jax.jit, shard):
        with pytest.raises(ValueError, match="memory_space of all inputs passed to `add` must be the same"):
            transform(lambda x, w: x + w)(x, jnp.ones((8, 4)))

"""JAX refs as arguments of a sharded function: it reads and writes them, as `jax.jit` does."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import REPLICATED, shard
from shardfn.errors import StrategyError

MESH = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDED = NamedSharding(MESH, P("a"))
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def add(ref, x):
    ref[...] += x
    return x.sum()


def in_a_loop(ref, x):
    return jax.lax.fori_loop(0, 3, lambda i, total: total + add(ref, x * i), 0.0)


def multiply(ref, x):
    ref[...] = (x @ x.T) @ ref[...] / 1000
    return ref[...].max()


def one_row(ref, x):
    ref[2] = x[1]
    return x.sum()


def read_only(ref, x):
    return (ref[...] * x).sum()


OPTIONS = {
    "open": {},
    "entries": {"in_strategy": ((2, 1), (2, 4))},
    "another sharding than it comes with": {"in_strategy": ((1, 4), REPLICATED)},
    "by time": {"level": "time", "search_mode": "dynamic_programming"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("function", [add, in_a_loop, multiply, one_row, read_only])
def test_a_call_reads_and_writes_a_ref(function, options):
    for start in (X, jax.device_put(X, SHARDED)):
        plain, own = jax.new_ref(jnp.asarray(X)), jax.new_ref(jnp.asarray(start))
        before, jitted, sharded = own.sharding, jax.jit(function), shard(function, **options)
        for _ in range(3):
            np.testing.assert_allclose(sharded(own, X), jitted(plain, X), rtol=1e-5)
            np.testing.assert_allclose(own[...], plain[...], rtol=1e-5)
        assert own.sharding == before


def test_refs_anywhere_among_the_arguments():
    def count(ref, *, counters):
        counters["n"][...] += 1
        ref[...] += counters["step"]
        return None

    ref, counters = jax.new_ref(jnp.zeros((8, 4))), {"n": jax.new_ref(0), "step": X}
    sharded = shard(count, parameter_plan={"counters/step": (8, 1)})
    for _ in range(2):
        assert sharded(ref, counters=counters) is None
    np.testing.assert_array_equal(ref[...], 2 * X)
    assert counters["n"][...] == 2
    refs = [jax.new_ref(jnp.zeros((8, 4))) for _ in range(2)]
    shard(lambda *refs: add(refs[0], X) + add(refs[1], 2 * X))(*refs)
    np.testing.assert_array_equal(refs[1][...], 2 * refs[0][...])


def test_keys_and_weak_types_and_arrays_in_the_place_of_refs():
    def draw(key, x):
        key[...], one = jax.random.split(key[...])
        return jax.random.normal(one, x.shape)

    for make in (jax.jit, shard):
        key = jax.new_ref(jax.random.key(0))
        first, second = (make(draw)(key, X) for _ in range(2))
        assert not np.array_equal(first, second)
    sharded = shard(lambda ref: ref[...].sum())
    assert [float(sharded(value)) for value in (jnp.asarray(X), jax.new_ref(jnp.asarray(X)), jnp.asarray(X))] == [
        496
    ] * 3


def test_refs_inside_transformations():
    ref = jax.new_ref(jax.device_put(jnp.zeros((8, 4)), SHARDED))
    inside = jax.jit(lambda ref, x: shard(add)(ref, x))
    assert inside(ref, X) == inside(ref, X) == X.sum()
    np.testing.assert_array_equal(ref[...], 2 * X)
    jax.jit(jax.vmap(shard(add)))(ref, X)
    np.testing.assert_array_equal(ref[...], 3 * X)

    def of_start(start, transform):
        ref = jax.new_ref(start)
        transform(add)(ref, X)
        return (ref[...] ** 2).sum()

    wanted = jax.grad(of_start)(jnp.asarray(X), jax.jit)
    np.testing.assert_allclose(jax.jit(jax.grad(functools.partial(of_start, transform=shard)))(jnp.asarray(X)), wanted)
    jax.vmap(shard(add))(ref, X)
    np.testing.assert_array_equal(ref[...], 4 * X)
    with pytest.raises(StrategyError, match=r"put jax\.jit around the transformation"):
        jax.vmap(shard(add))(jax.new_ref(jnp.asarray(X)), X)


def test_refs_beside_objects():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    class Sum:
        def __init__(self):
            self.total = jnp.zeros((8, 4))

        @shard
        def __call__(self, ref, model, x):
            self.total = self.total + x
            ref[...] += model(x)
            model.bias[...] += 1

    total, ref = Sum(), jax.new_ref(jnp.zeros((8, 4)))
    wanted = model(X) * 2 + 1
    for _ in range(2):
        total(ref, model, X)
    np.testing.assert_allclose(ref[...], wanted, rtol=1e-5)
    np.testing.assert_array_equal(total.total, 2 * X)
    np.testing.assert_array_equal(model.bias[...], [2] * 4)


def test_plans_reports_checks_and_stages_leave_refs_as_they_are():
    ref, sharded = jax.new_ref(jnp.asarray(X)), shard(add, ((4, 1), (4, 1)))
    made = sharded.plan(ref, X)
    assert [(d.path, d.strategy) for d in (*made.inputs, *made.outputs)] == [
        ("ref", (4, 1)), ("x", (4, 1)), ("result", ()), ("state/ref", (4, 1)),
    ]  # fmt: skip
    assert "ref" in str(sharded.explain(ref, X, compiled=True))
    assert sharded.check(ref, X).agrees
    assert made.check(ref, X).agrees
    assert sharded.eval_shape(ref, X).shape == ()
    total, changed = sharded.lower(ref, X).compile()(*jax.device_put((ref[...], X), made.in_shardings))
    assert (total, list(changed)) == (X.sum(), ["ref"])
    applied = made.apply(add)
    _, changed = jax.jit(applied, in_shardings=made.in_shardings)(
        *jax.device_put(applied.arguments(ref, X), made.in_shardings)
    )
    np.testing.assert_array_equal(changed["ref"], 2 * X)
    np.testing.assert_array_equal(ref[...], X)
    assert shardfn.plan(add, ref, X, in_strategy=((4, 1), (4, 1))) == made


def test_what_jax_refuses_is_refused():
    ref = jax.new_ref(jnp.asarray(X))
    with pytest.raises(StrategyError, match="takes one ref twice"):
        shard(lambda a, b: add(a, X) + add(b, X))(ref, ref)
    for make in (jax.jit, shard):
        with pytest.raises(ValueError, match="cannot be returned"):
            make(lambda ref: ref)(ref)


def test_donated_refs_keep_their_memory():
    ref = jax.new_ref(jnp.asarray(X))
    sharded = shard(add, donate_argnums=0)
    for _ in range(2):
        sharded(ref, X)
    np.testing.assert_array_equal(ref[...], 3 * X)

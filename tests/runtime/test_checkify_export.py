"""`jax.experimental.checkify` and `jax.export` of a sharded function, as of one from `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from shardfn import shard
from shardfn.errors import StrategyTypeError

X = jnp.arange(1, 33.0).reshape(8, 4)
W = jnp.ones((4, 8))
STRATEGY = ((2, 1), (1, 4))


def checked(x):
    checkify.check(jnp.all(x >= 0), "{least} is negative", least=x.min())
    return jnp.log(x + 1)


def in_a_loop(x):
    def body(i, x):
        checkify.check(x.max() < 70, "too large in step {i}", i=i)
        return 2 * x

    return jax.lax.fori_loop(0, 3, body, x)


def in_a_branch(x):
    def positive(x):
        checkify.check(x.max() < 30, "too large")
        return x

    return jax.lax.cond(x.sum() > 0, positive, lambda x: -x, x)


def in_a_jit(x):
    return jax.jit(checked)(x) @ W


def in_a_checkpoint(x):
    return jax.checkpoint(checked)(x) @ W


def for_debugging(x):
    checkify.debug_check(x.min() > 0, "not positive")
    return x


MAKES = {
    "open": shard,
    "entries": lambda f: shard(f, ((2, 4),)),
    "by time": lambda f: shard(f, level="time", search_mode="dynamic_programming"),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("function", [checked, in_a_loop, in_a_branch, in_a_jit, in_a_checkpoint, for_debugging])
@pytest.mark.parametrize("errors", [checkify.user_checks, checkify.all_checks])
def test_checkify_around_a_sharded_function(function, make, errors):
    found = []
    for x in (X / 32, X, X - 3):
        wanted = checkify.checkify(jax.jit(function), errors=errors)(x)
        error, result = checkify.checkify(make(function), errors=errors)(x)
        assert error.get() == wanted[0].get()
        np.testing.assert_allclose(result, wanted[1], rtol=1e-6)
        found.append(error.get())
    assert found[0] is None and any(found), found


def test_checkify_inside_and_under_transformations():
    x = X - 3
    message = "-2.0 is negative (`check` failed)"
    for call in (
        shard(checkify.checkify(checked), ((2, 4),)),
        jax.jit(checkify.checkify(shard(checked))),
        checkify.checkify(jax.jit(lambda x: shard(checked)(x))),
        checkify.checkify(jax.vmap(shard(checked))),
        checkify.checkify(jax.grad(lambda x: shard(checked)(x).sum())),
    ):
        assert call(x)[0].get() == message
    with pytest.raises(checkify.JaxRuntimeError, match="is negative"):
        checkify.checkify(shard(checked))(x)[0].throw()
    assert checkify.checkify(shard(jnp.log), errors=checkify.float_checks)(-X)[0].get().startswith("nan generated")


def test_a_check_without_checkify_is_jaxs_error():
    for make in (jax.jit, shard):
        with pytest.raises(ValueError, match=r"functionalizing it through `checkify\.checkify`"):
            make(checked)(X)
    sharded = shard(checked)
    assert sharded.plan(X).inputs[0].path == "x"
    assert checkify.checkify(sharded)(X)[0].get() is None


def test_an_exported_function_runs_with_the_planned_shardings():
    sharded = shard(lambda x, w: x @ w, STRATEGY)
    exported, made = jax.export.export(sharded)(X, W), sharded.plan(X, W)
    placed = jax.device_put((X, W), made.in_shardings)
    assert exported.nr_devices == 8
    for call in (exported.call, jax.jit(exported.call)):
        result = call(*placed)
        np.testing.assert_allclose(result, X @ W)
        assert result.sharding.is_equivalent_to(made.out_shardings, 2)
    np.testing.assert_allclose(jax.grad(lambda x: exported.call(x, placed[1]).sum())(placed[0]), np.full((8, 4), 8))
    inside = jax.export.export(jax.jit(lambda x: sharded(x, W)))(jax.ShapeDtypeStruct((8, 4), "float32"))
    np.testing.assert_allclose(inside.call(placed[0]), X @ W)


def test_exports_of_keywords_static_values_and_methods_and_for_other_platforms():
    class Dense:
        def __init__(self):
            self.w = W

        @shard
        def __call__(self, x):
            return x @ self.w

    shape = jax.ShapeDtypeStruct((8, 4), "float32")
    assert len(jax.export.export(shard(lambda x, *, k: x * k))(shape, k=shape).in_avals) == 2
    assert len(jax.export.export(shard(lambda x, n: x * n, static_argnums=1))(shape, 3).in_avals) == 1
    assert [a.shape for a in jax.export.export(Dense().__call__)(shape).in_avals] == [(4, 8), (8, 4)]
    assert jax.export.export(shard(jnp.tanh), platforms=("tpu", "cuda"))(shape).platforms == ("tpu", "cuda")
    elsewhere = jax.export.export(shard(jnp.tanh, device="tpu-v5e:4x4"), platforms=("tpu",))(shape)
    assert (elsewhere.nr_devices, elsewhere.platforms) == (16, ("tpu",))


def test_serialised_exports_come_back():
    pytest.importorskip("flatbuffers")  # JAX serialises with it, and does not install it
    sharded = shard(lambda x, w: x @ w, STRATEGY)
    exported = jax.export.deserialize(jax.export.export(sharded)(X, W).serialize(vjp_order=1))
    placed = jax.device_put((X, W), sharded.plan(X, W).in_shardings)
    np.testing.assert_allclose(exported.call(*placed), X @ W)
    np.testing.assert_allclose(jax.grad(lambda x: exported.call(x, placed[1]).sum())(placed[0]), np.full((8, 4), 8))


@pytest.mark.parametrize("strategy", [None, ((2, 1),)])
def test_symbolic_dimensions_are_refused(strategy):
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
    sharded = shard(jnp.tanh, strategy)
    for call in (jax.export.export(sharded), sharded.plan, sharded.lower, sharded.eval_shape):
        with pytest.raises(StrategyTypeError, match="argument 0 `x` has symbolic dimensions"):
            call(symbolic)

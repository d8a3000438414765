"""`check`: right functions agree, whatever they are made of, and a wrong one is found with its place and both values."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardfn
from shardfn import AUTO, shard
from shardfn.errors import CheckError, DeviceError, StrategyError, StrategyTypeError

P = PartitionSpec
X, W = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(16, 8), (8, 16)]))


@custom_partitioning
def row_sums(x):
    return x.sum(0)


# A rule of the user's that forgets the all-reduce: each device has the sum of its own rows.
row_sums.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: NamedSharding(mesh, P()),
    partition=lambda mesh, args, result: (mesh, lambda x: x.sum(0), NamedSharding(mesh, P()), (args[0].sharding,)),
    sharding_rule="i j -> j",
)


@jax.custom_vjp
def wrong_gradient(x):
    return x * 1


wrong_gradient.defvjp(lambda x: (x * 1, None), lambda _, g: (g + row_sums(g),))


def kinds(result):
    return {row.what for row in result.rows}


def test_a_right_function():
    result = shard(lambda x, w: jnp.tanh(x @ w), ((2, 1), (1, 4))).check(X, W)
    assert result.agrees and not result.notes
    assert result.reference == "the unsharded function on one CPU device"
    assert [f"{row.what} {row.path}" for row in result.rows] == [
        "result result", "gradient x", "gradient w", "gradient inside x", "gradient inside w"]  # fmt: skip
    assert any(row.difference for row in result.rows)  # the programs are not one


def test_a_wrong_result():
    sharded = shard(row_sums, ((4, 1),), check=True)
    for _ in range(2):  # each call, until it is right
        with pytest.raises(CheckError) as caught:
            sharded(X)
    (problem,) = caught.value.problems
    row = caught.value.result.differing[0]
    assert row.path == "result" and np.isclose(row.reference, X.sum(0)[row.index])
    for text in (f"result[{row.index[0]}]", f"{row.sharded:.8g} as sharded", f"{row.reference:.8g} there"):
        assert text in problem.what
    assert "rounding explains" in problem.why and "f.check(*args)" in problem.fix and "another strategy" in problem.fix
    assert "NotImplementedError" in caught.value.result.notes[0]


def test_a_wrong_gradient():
    sharded = shard(wrong_gradient, ((4, 1),), check=True)
    with pytest.raises(CheckError, match="the gradient, taken inside, by `x"):
        sharded(X)
    result = sharded.check(X)
    assert {row.what for row in result.differing} == {"gradient inside"}
    assert all(row.agrees for row in result.rows if row.what == "result")


def test_a_first_call_checks_and_later_ones_do_not():
    calls = []
    sharded = shard(lambda x: calls.append(0) or x * 2, ((4, 1),), check=True)
    first = sharded(X)
    assert (first == X * 2).all() and "checked: 3 arrays agree" in " ".join(sharded.plan(X).diagnostics)
    traced = len(calls)
    sharded(X)
    assert len(calls) == traced
    sharded(X[:8])  # other shapes
    assert len(calls) > traced


def test_donated_arguments_are_there_for_the_call():
    sharded = shard(lambda p, x: {"w": p["w"] - 0.1 * x.T}, ({"w": (1, 4)}, (4, 1)), donate_argnums=0, check=True)
    params = {"w": jax.device_put(W, jax.devices()[0])}
    assert sharded.check(params, X).agrees and not params["w"].is_deleted()
    assert np.allclose(sharded(params, X)["w"], W - 0.1 * X.T, atol=1e-6)


def auto_mesh():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def held_sharded():
    return jax.device_put(W, NamedSharding(auto_mesh(), P("a", "b")))


def psum(x):
    return jax.shard_map(lambda x: jax.lax.psum(x, "a"), mesh=auto_mesh(), in_specs=P("a"), out_specs=P())(x)


@pytest.mark.parametrize(
    ("make", "args", "kwargs"),
    [
        pytest.param(lambda: shard(lambda x, *, s: x * s, ((4, 1),)), (X,), {"s": X}, id="keywords"),
        pytest.param(lambda: shard(lambda x, n: x * n, ((4, 1),), static_argnums=1), (X, 3), {}, id="static"),
        pytest.param(lambda: shard(lambda x, s: x * s, ((4, 1), ())), (X, 0.5), {}, id="numbers"),
        pytest.param(lambda: shard(lambda p, x: {"y": x @ p["w"] + p["b"], "n": len(p)}), ({"w": W, "b": W[0]}, X), {}, id="pytrees"),
        pytest.param(lambda: shard(lambda x: x @ W, ((4, 1),)), (X,), {}, id="closed over"),
        pytest.param(lambda: shard(lambda x: x @ W, closed_over="argument"), (X,), {}, id="closed over as argument"),
        pytest.param(lambda: (lambda c: shard(lambda x: x @ c, ((4, 1),)))(held_sharded()), (X,), {}, id="closed over, sharded"),
        pytest.param(lambda: shard(lambda k, x: (jax.random.split(k)[0], x * jax.random.bernoulli(k, 0.5, x.shape))),
                     (jax.random.key(1), X), {}, id="keys"),
        pytest.param(lambda: shard(lambda x: jnp.fft.fft(x), ((4, 1),)), (X + 1j * X,), {}, id="complex"),
        pytest.param(lambda: shard(lambda x: (jnp.log(x), 1 / jnp.where(x > 1, 0, x)), ((4, 1),)), (X,), {}, id="NaN and inf"),
        pytest.param(lambda: shard(lambda x: (x[:, :0], x * 2), ((4, 1),)), (X,), {}, id="no elements"),
        pytest.param(lambda: shard(lambda x, w: x @ w, ((2, 1), (1, 2))), (np.asarray(X, "float64"), np.asarray(W)), {}, id="NumPy"),
        pytest.param(lambda: shard(lambda x: shard(jnp.sin, ((4, 1),))(x) * 2, ((4, 1),)), (X,), {}, id="sharded inside"),
        pytest.param(lambda: shard(lambda x, w: shardfn.reshard(x @ w, NamedSharding(auto_mesh(), P("b"))), (P("a"), P()), device=auto_mesh()),
                     (X, W), {}, id="a constraint inside"),
        pytest.param(lambda: shard(lambda x, w: (x @ w).astype(jnp.float32), ((1, 8), (8, 1))),
                     (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)), {}, id="bfloat16"),
        pytest.param(lambda: shard(lambda x: x * 2, ((1, 1),), device=jax.devices()[:1]), (X,), {}, id="one device"),
    ],
)  # fmt: skip
def test_what_a_call_may_be(make, args, kwargs):
    result = make().check(*args, **kwargs)
    assert result.agrees, result
    assert result.reference.startswith("the unsharded function") and not result.notes
    assert kinds(result) == {"result", "gradient", "gradient inside"}


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (lambda x: jnp.cumsum(x), (jnp.arange(16),), "no argument has a floating-point dtype"),
        (lambda x: x > 0, (X[:, 0],), "no result has a floating-point dtype"),
        (lambda x: jax.lax.while_loop(lambda c: c.sum() < 1e3, lambda c: c + 1, x), (X[:, 0],), "Reverse-mode differentiation"),
        (lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), (X[:, 0],), "do not support JVP"),
    ],
)  # fmt: skip
def test_a_function_without_gradients_says_why(function, args, why):
    with pytest.warns(UserWarning, match=why):
        sharded = shard(function, ((4,),), check=True)
        sharded(*args)
    (note,) = sharded.check(*args).notes
    assert why in note and note.startswith("gradients are not compared")
    assert any(why in line for line in sharded.plan(*args).diagnostics)


def test_a_mesh_around_or_inside_is_compared_with_replicated_arrays():
    every = "every array replicated on all devices"
    assert every in shard(psum, (P("a"),), device=auto_mesh()).check(X).reference
    with jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"))):
        placed = jax.device_put(X, P("a"))
        result = shard(lambda x, w: jnp.sin(x) @ w, (P("a"), P(None, "b"))).check(placed, W)
    assert result.agrees and every in result.reference and kinds(result) == {"result", "gradient", "gradient inside"}


def test_what_does_not_fit_on_one_device_is_compared_with_another_sharding():
    x, w = jnp.ones((256, 64)), jnp.ones((64, 64)) / 64
    result = shard(lambda x, w: jnp.sin(x @ w), ((8, 1), (1, 1)), memory_limit="120KiB").check(x, w)
    assert (
        result.agrees and result.reference.startswith("another sharding (") and "120 KiB is there" in result.reference
    )


class Scaled:
    """An object that holds an array, which its call changes."""

    def __init__(self):
        self.scale = jnp.ones(8)

    @shard(in_strategy=((4, 1),), check=True)
    def __call__(self, x):
        return x * self.scale


def test_modules_and_methods():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    sharded, before = shard(model, ((4, 1),)), np.asarray(model.mean[...])
    result = sharded.check(X)
    assert result.agrees and (np.asarray(model.mean[...]) == before).all()
    assert {"state/mean", "state/var"} < {row.path for row in result.rows if row.what == "result"}
    sharded(X)
    assert (np.asarray(model.mean[...]) != before).any()
    with pytest.raises(StrategyError, match="has no arrays of the object"):
        sharded.plan(X).check(X)
    called = shard(lambda model, x: model(x), (None, (4, 1)))
    assert called.plan(model, X).check(model, X).agrees
    assert (Scaled()(X) == X).all()


def test_a_plan_checks_the_arguments_of_its_call():
    made = shardfn.plan(lambda x, w: x @ w, X, W, in_strategy=((4, 1), (1, 2)))
    assert made.check(X, w=W).agrees
    for wrong, kind, text in [
        ((X[:8], W), StrategyError, "other arguments than it was planned for"),
        ((X,), StrategyError, "do not fit"),
        ((jax.ShapeDtypeStruct(X.shape, X.dtype), W), StrategyTypeError, "a shape in the place of an array"),
    ]:
        with pytest.raises(kind, match=text):
            made.check(*wrong)


def test_devices_that_are_not_here_are_refused():
    made = shardfn.plan(lambda x, w: x @ w, X, W, in_strategy=((4, 1), (1, 2)), device="h100:8")
    with pytest.raises(DeviceError, match="cannot be checked on h100:8") as caught:
        made.check(X, W)
    assert "plan.verify()" in caught.value.problems[0].fix


def test_a_call_in_a_transformation_is_not_checked_and_says_so():
    sharded = shard(lambda x: (x * 2).sum(), ((4, 1),), check=True)
    with pytest.warns(UserWarning, match="does not see the values"):
        jax.grad(sharded)(X)
    sharded(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(sharded)(X)


def test_check_is_true_or_false():
    with pytest.raises(StrategyTypeError, match="check"):
        shard(jnp.sin, check="yes")
    with pytest.raises(StrategyTypeError, match="did you mean 'check'"):
        shard(jnp.sin, verify=True)


def test_what_the_search_chose():
    assert shard(lambda x, w: jax.nn.softmax(x @ w), (AUTO, AUTO)).check(X, W).agrees

"""A plan with `jax.jit` alone, and the methods of `jax.jit` on what `shard` returns, for functions and modules."""

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import shard
from shardfn.errors import ShardError, StrategyError, StrategyTypeError
from shardfn.mindspore import Cell

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
W = jnp.ones((16, 4), jnp.float32)


class Scale(Cell):
    def __init__(self):
        super().__init__()
        self.w, self.calls = W, jnp.zeros(())

    def construct(self, x):
        self.calls = self.calls + 1
        return x @ self.w


def power(x, w, *, n, flag=False):
    return -((x @ w) ** n) if flag else (x @ w) ** n


MODULES = {
    "nnx": lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)),
    "nnx that changes": lambda: nnx.BatchNorm(16, rngs=nnx.Rngs(0)),
    "equinox": lambda: jax.vmap(eqx.nn.MLP(16, 8, 8, 1, key=jax.random.key(0))),
    "equinox module": lambda: eqx.nn.Lambda(lambda x: 2 * x),
    "cell": Scale,
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_apply_of_a_module_fits_the_plan_s_shardings(make):
    wanted, module = make()(X), make()
    plan = shard(module, ((8, 1),)).plan(X)
    applied = plan.apply(module)
    arrays = getattr(applied, "arrays", None)
    args = (X,) if arrays is None else (arrays, X)
    jitted = jax.jit(applied, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    found = jitted(*jax.device_put(args, plan.in_shardings))
    result, changed = (found, {}) if arrays is None else found
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    assert result.sharding.is_equivalent_to(NamedSharding(plan.mesh, plan.decision("result").partition_spec), 2)
    assert set(changed) <= set(arrays or ())


CALLS = {
    "a module among the arguments": (lambda m, x: m(x), lambda: (nnx.Linear(16, 8, rngs=nnx.Rngs(0)), X), {}),
    "a module itself": (nnx.Linear(16, 8, rngs=nnx.Rngs(0)), lambda: (X,), {}),
    "a keyword, a default": (lambda m, x, k=2, *, s: m(x) * s * k, lambda: (nnx.Linear(16, 8, rngs=nnx.Rngs(0)), X), {"s": W[0, 0]}),
    "no module": (lambda x, w: x @ w, lambda: (X, W), {}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS.values(), ids=CALLS)
def test_arguments_of_apply_are_those_of_the_jitted_function(function, args, kwargs):
    plan = shard(function).plan(*args(), **kwargs)
    applied = plan.apply(function)
    jitted = jax.jit(applied, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    found = jax.tree.leaves(jitted(*applied.arguments(*args(), **kwargs)))[0]
    np.testing.assert_allclose(found, function(*args(), **kwargs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_methods_of_jit_for_a_module(make):
    module = make()
    sharded, wanted = shard(module, ((8, 1),)), jax.ShapeDtypeStruct(make()(X).shape, X.dtype)
    assert sharded.eval_shape(X) == wanted and not sharded._calls.entries
    assert sharded.trace(X).lower().compile() is not None
    assert sharded.lower(X).compile() is not None


@pytest.mark.parametrize("flag", [False, True])
def test_static_keyword_arguments(flag):
    sharded = shard(power, ((2, 1), (1, 4)), static_argnames=("n", "flag"))
    shapes = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype)
    wanted = power(X, W, n=2, flag=flag)
    assert sharded.eval_shape(*shapes, n=2, flag=flag) == jax.ShapeDtypeStruct(wanted.shape, wanted.dtype)
    for stage in (sharded.lower(*shapes, n=2, flag=flag), sharded.trace(*shapes, n=2, flag=flag).lower()):
        np.testing.assert_allclose(stage.compile()(X, W), wanted, rtol=1e-4, atol=1e-4)
    plan = sharded.plan(*shapes, n=2, flag=flag)
    applied = plan.apply(power)  # keyword arguments follow by position
    jitted = jax.jit(applied, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings, static_argnums=(2, 3))
    for function in (applied, jitted):
        np.testing.assert_allclose(function(X, W, 2, flag), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "other",
    [lambda x, w: x @ w + 1, lambda x, w: jnp.sin(x @ w), lambda x, w: (x @ w, x)],
    ids=["op", "name", "results"],
)
def test_apply_refuses_another_program(other):
    plan = shardfn.plan(lambda x, w: x @ w, X, W, in_strategy=((2, 1), (1, 4)))
    assert plan.apply(lambda a, b: a @ b) is not None
    with pytest.raises(StrategyError, match="is another function than"):
        plan.apply(other)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda x: x, "do not fit `<lambda>`: too many positional arguments"),
        (lambda x, w, b, c: x @ w + b, "missing 2 required arguments: 'b', 'c'"),
        (
            lambda x, *, w: x @ w,
            r"where: plan.apply\(<lambda>\): <lambda>\(x, \*, w\); planned: x: float32\[8,16\], w: float32",
        ),
        (3, "takes a function, not an int"),
    ],
    ids=["fewer", "more", "a keyword", "no function"],
)
def test_apply_refuses_a_function_that_does_not_take_the_planned_arguments(other, text):
    plan = shardfn.plan(lambda x, w: x @ w, X, W, in_strategy=((2, 1), (1, 4)))
    with pytest.raises(StrategyTypeError, match=text) as error:
        plan.apply(other)
    assert error.value.problems[0].fix


def fails(x, w):
    return x[:, :3] @ w


def raises(x, w):
    raise KeyError("mine")


def needs_value(x, w):
    return x if x[0, 0] > 0 else w


@pytest.mark.parametrize("other", [fails, raises, needs_value])
def test_error_in_the_function_of_apply_is_that_of_shard(other):
    plan = shardfn.plan(lambda x, w: x @ w, X, W, in_strategy=((2, 1), (1, 4)))
    with pytest.raises(Exception) as expected:
        shard(other)(X, W)
    with pytest.raises(expected.type) as error:
        plan.apply(other)
    assert str(error.value) == str(expected.value) and not isinstance(error.value, ShardError)
    assert "with the arguments that were planned: x: float32[8,16], w: float32[16," in error.value.__notes__[-1]
    assert [f.name for f in error.traceback][-1] == other.__name__ or other is fails  # none of this library's


def test_apply_names_the_argument_whose_value_a_function_needs():
    plan = shardfn.plan(lambda x, n: x * n, X, 3)
    with pytest.raises(StrategyTypeError, match="needs the value of argument `n`"):
        plan.apply(lambda x, n: jnp.zeros(n))


def rows(params, x, n):
    return x[:n] @ params["w"]


OTHER = {
    "shape": (({"w": W}, X[:4], 2), "x: float32[4,16], planned: float32[8,16]"),
    "dtype": (({"w": W.astype("bfloat16")}, X, 2), "params/w: bfloat16[16,4], planned: float32[16,4]"),
    "static value": (({"w": W}, X, 3), "n = 3, planned: 2"),
    "structure": (({"w": W, "b": W}, X, 2), "params/b is new"),
    "less structure": (({}, X, 2), "params/w is missing"),
    "another structure": (([W], X, 2), "params/w is missing, params/0 is new"),
    "number": (({"w": W}, 1.0, 2), "x: float32[], weakly typed, planned: float32[8,16]"),
    "fewer": (({"w": W}, X), "2 given, planned: 3 (params, x, n)"),
    "several": (({"w": W[:, :2]}, X[:4], 3), "params/w: float32[16,2], planned: float32[16,4], x: float32[4,16]"),
}


@pytest.mark.parametrize(("args", "text"), OTHER.values(), ids=OTHER)
def test_other_arguments_than_planned_are_told_with_what_differs(args, text):
    applied = shardfn.plan(rows, {"w": W}, X, 2, static_argnums=2).apply(rows)
    with pytest.raises(StrategyError, match="other arguments than it was planned for") as error:
        applied(*args)
    assert text in error.value.problems[0].where


@pytest.mark.parametrize("name", ["shape", "static value"])
def test_the_code_in_the_error_plans_other_arguments(name):
    args = OTHER[name][0]
    plan = shardfn.plan(rows, {"w": W}, X, 2, static_argnums=2)
    jitted = jax.jit(
        plan.apply(rows), static_argnums=2, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings
    )
    with pytest.raises(StrategyError) as error:
        jitted(*args)
    code = error.value.problems[0].fix.partition("these arguments: ")[2]
    params, x, n = args
    again = eval(code, {"shardfn": shardfn, "rows": rows, "plan": plan, "params": params, "x": x, "n": n})
    np.testing.assert_allclose(jax.jit(again.apply(rows), static_argnums=2)(*args), rows(*args), rtol=1e-5)


def test_a_module_in_the_place_of_its_arrays_is_told_how_it_is_taken_apart():
    module = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    applied = shard(lambda m, x: m(x)).plan(module, X).apply(lambda m, x: m(x))
    with pytest.raises(StrategyError, match=r"arguments\(\.\.\.\), which takes modules apart"):
        applied(module, X)


@pytest.mark.parametrize("method", ["plan", "lower", "trace", "eval_shape", "__call__", "explain"])
def test_a_missing_argument_is_told_with_the_signature(method):
    with pytest.raises(StrategyTypeError, match="missing a required argument: 'w'") as error:
        getattr(shard(lambda x, w: x @ w), method)(X)
    assert "(x, w)" in error.value.problems[0].fix


@pytest.mark.parametrize("method", ["plan", "lower", "trace", "eval_shape", "explain"])
def test_all_missing_arguments_are_told_and_that_shapes_do(method):
    sharded = shard(lambda x, w, *, s: x @ w * s)
    with pytest.raises(StrategyTypeError, match="missing 3 required arguments: 'x', 'w', 's'") as error:
        getattr(sharded, method)()
    shape = eval(error.value.problems[0].fix.rpartition(": ")[2])
    assert getattr(sharded, method)(
        shape, jax.ShapeDtypeStruct((128, 4), "float32"), s=jax.ShapeDtypeStruct((), "float32")
    )


@pytest.mark.parametrize("method", ["plan", "eval_shape"])
def test_an_argument_that_is_no_array_is_told(method):
    with pytest.raises(StrategyTypeError, match="which JAX does not take as an array"):
        getattr(shard(lambda x, w: x), method)(X, "text")


def test_apply_function_that_calls_a_sharded_one_planned_for_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x = jnp.arange(64.0).reshape(8, 8)
    double = shard(lambda a: a * 2, in_strategy=((2, 1),))

    def f(a):
        return double(a) + 1

    made = shard(f).plan(jax.device_put(x, NamedSharding(mesh, P("x"))))
    applied = jax.jit(made.apply(f), in_shardings=made.in_shardings, out_shardings=made.out_shardings)
    np.testing.assert_array_equal(applied(x), x * 2 + 1)

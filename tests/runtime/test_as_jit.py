"""What `jax.jit` does, and `shard` with it: the rows of the table in docs/from/jax.md, and where both do the same."""

import copy
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardfn import shard
from shardfn.errors import ShardError, StrategyError, StrategyTypeError

X = jnp.arange(32.0).reshape(8, 4)
DEVICES = jax.devices()
MESH = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
TWO = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def double(x):
    return 2 * x


def traces(make, *calls):
    """How often a function is traced in some calls."""
    seen = []
    function = make(lambda x: (seen.append(0), x)[1])
    for call in calls:
        function.clear_cache() if call is None else function(call)
    return len(seen)


def within(context, make, function=double, x=X):
    made = make(function)
    made(x)
    with context:
        return made(x)


def callbacks(make, call):
    """What a host callback sees in one call."""
    seen = []
    result = make(lambda x: call(seen, x))(X)
    jax.block_until_ready(result)
    jax.effects_barrier()
    return result, len(seen)


def custom(x):
    function = jax.custom_vjp(double)
    function.defvjp(lambda x: (2 * x, None), lambda _, g: (5 * g,))
    return function(x)


SAME = {
    "a wrapped function": lambda j: (j(double).__wrapped__ is double, j(double).__name__, str(inspect.signature(j(double)))),
    "a stage of JAX": lambda j: isinstance(j(double), jax.stages.Wrapped),
    "copies": lambda j: copy.deepcopy(copy.copy(j(double)))(X),
    "hashes": lambda j: j(double) in {j(double)},
    "a decorator with options": lambda j: j(static_argnames="n")(lambda x, n: x * n)(X, n=3),
    "a partial": lambda j: j(functools.partial(lambda n, x: n * x, 3))(X),
    "no arguments": lambda j: j(lambda: jnp.ones(3))(),
    "no array": lambda j: j(lambda a, b: a if b is None else b)(X, None),
    "an empty array": lambda j: j(double)(jnp.ones((0, 4))),
    "odd sizes": lambda j: j(double)(jnp.ones((7, 3))),
    "numbers": lambda j: j(lambda numbers: numbers[0] * numbers[1])([2.0, 3]),
    "weak types": lambda j: (j(double)(2.0).weak_type, j(lambda x, s: x * s)(X.astype("bfloat16"), 2.0).dtype == "bfloat16"),
    "NumPy": lambda j: j(double)(np.asarray(X, "float64")),
    "typed keys": lambda j: jax.random.key_data(j(jax.random.split)(jax.random.key(0))),
    "raw keys": lambda j: j(lambda key: jax.random.normal(key, (8,)))(jax.random.PRNGKey(0)),
    "a constant result": lambda j: isinstance(j(lambda x: 3)(X), jax.Array),
    "a global": lambda j: j(lambda x: x * jnp.asarray(SCALE))(X),
    "traced once": lambda j: traces(j, X, X, 2 * X),
    "traced again for another shape, dtype or number": lambda j: traces(j, X, X[0], X.astype("int32"), 1, 2, 2.0),
    "traced again after clear_cache": lambda j: traces(j, X, None, X),
    "eval_shape": lambda j: (jax.eval_shape(j(double), X), j(double).eval_shape(X)),
    "trace": lambda j: (str(j(double).trace(X).jaxpr), j(double).trace(X).fun_name),
    "lower": lambda j: (j(double, donate_argnums=0).lower(X).donate_argnums, j(double).lower(X).in_tree),
    "lower from trace": lambda j: j(double).trace(X).lower().as_text().count("multiply"),
    "compile": lambda j: (j(double).lower(X).compile()(X), j(double).lower(X).compile().memory_analysis() is not None),
    "make_jaxpr": lambda j: len(jax.make_jaxpr(j(double))(X).jaxpr.eqns),
    "jit of it": lambda j: jax.jit(j(double))(X),
    "shard of it": lambda j: shard(j(double))(X),
    "vmap": lambda j: (jax.vmap(j(double))(X), jax.vmap(j(double), in_axes=1, out_axes=1)(X)),
    "grad": lambda j: jax.grad(lambda x: j(double)(x).sum())(X),
    "value_and_grad": lambda j: jax.value_and_grad(j(lambda x: (x**2).sum()))(X),
    "jvp": lambda j: jax.jvp(j(double), (X,), (X,)),
    "linearize": lambda j: jax.linearize(j(double), X)[1](X),
    "linear_transpose": lambda j: jax.linear_transpose(j(double), X)(X),
    "second derivatives": lambda j: jax.hessian(j(lambda x: (x**3).sum()))(X[0]),
    "Jacobians": lambda j: (jax.jacfwd(j(jnp.sin))(X[0]), jax.jacrev(j(jnp.sin))(X[0])),
    "checkpoint": lambda j: jax.grad(lambda x: jax.checkpoint(j(jnp.sin))(x).sum())(X),
    "custom_vjp": lambda j: jax.grad(lambda x: j(custom)(x).sum())(X),
    "scan": lambda j: jax.lax.scan(lambda total, row: (total + j(jnp.sum)(row), None), 0.0, X)[0],
    "while_loop": lambda j: jax.lax.while_loop(lambda x: x.sum() < 1000, j(double), X),
    "cond": lambda j: jax.lax.cond(True, j(double), lambda x: x, X),
    "map": lambda j: jax.lax.map(j(double), X),
    "a shard_map inside": lambda j: j(jax.shard_map(lambda x: x.sum(0), mesh=MESH, in_specs=P("a"), out_specs=P("a")))(X),
    "a shard_map over other axes around": lambda j: jax.jit(
        jax.shard_map(j(double), mesh=TWO, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    )(X),
    "debug.print": lambda j: j(lambda x: (jax.debug.print("{}", x.sum()), x)[1])(X),
    "debug.callback": lambda j: callbacks(j, lambda seen, x: (jax.debug.callback(seen.append, x.sum()), x)[1]),
    "pure_callback": lambda j: j(lambda x: jax.pure_callback(lambda a: np.asarray(a) * 2, x, x))(X),
    "io_callback": lambda j: callbacks(
        j, lambda seen, x: jax.experimental.io_callback(lambda a: (seen.append(0), np.asarray(a))[1], x, x)
    ),
    "disable_jit": lambda j: within(jax.disable_jit(), j, lambda x: x * (2 if isinstance(x, jax.core.Tracer) else 3)),
    "checking_leaks": lambda j: within(jax.checking_leaks(), j),
    "log_compiles": lambda j: within(jax.log_compiles(False), j),
    "no_tracing": lambda j: within(jax.no_tracing(True), j),
    "default_matmul_precision": lambda j: within(jax.default_matmul_precision("float32"), j, lambda x: x @ x.T),
    "compiler_options": lambda j: j(double, compiler_options={"xla_cpu_enable_fast_math": True})(X),
}  # fmt: skip
SCALE = 3.0


@pytest.mark.parametrize("call", SAME.values(), ids=SAME)
def test_shard_does_as_jit(call):
    wanted, found = (jax.tree.flatten(call(make)) for make in (jax.jit, shard))
    assert found[1] == wanted[1]
    for one, other in zip(found[0], wanted[0], strict=True):
        if isinstance(other, jax.Array | np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-6)
        else:
            assert one == other


def leaked(make):
    """The argument of a function while it was traced."""
    kept = []
    make(lambda x: (kept.append(x), x)[1])(X)
    return kept[0]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda j: within(jax.debug_nans(True), j, jnp.log, -X), FloatingPointError),
        (lambda j: j(lambda x: int(x.sum()))(X), jax.errors.ConcretizationTypeError),
        (lambda j: j(lambda x: x if x.sum() > 0 else -x)(X), jax.errors.TracerBoolConversionError),
        (lambda j: j(lambda x: 1 / 0)(X), ZeroDivisionError),
        (lambda j: j(lambda x: x @ x)(X), TypeError),
        (lambda j: j(lambda x: (x, "text"))(X), TypeError),
        (lambda j: j(lambda x: (y for y in [x]))(X), TypeError),
        (lambda j: leaked(j) + 1, jax.errors.UnexpectedTracerError),
        (lambda j: j(lambda x, n: x * n, static_argnums=1)(X, [2]), (ValueError, ShardError)),
    ],
)  # fmt: skip
def test_the_same_errors_come_out(call, error):
    for make in (jax.jit, shard):
        with pytest.raises(error):
            call(make)


ELSEWHERE = jax.device_put(X, DEVICES[5])
ON_PLAN = jax.device_put(X, NamedSharding(MESH, P("a")))


def test_devices_are_those_of_the_plan():
    assert shard(double, device=DEVICES[3])(X).devices() == {DEVICES[3]}
    assert len(jax.jit(double)(ELSEWHERE).devices()) == 1 and len(shard(double)(ELSEWHERE).devices()) == 8
    np.testing.assert_array_equal(shard(jnp.add)(ELSEWHERE, jax.device_put(X, DEVICES[1])), 2 * X)
    with jax.default_device(DEVICES[2]):
        assert jax.jit(double)(np.asarray(X)).devices() == {DEVICES[2]}
        assert len(shard(double)(np.asarray(X)).devices()) == 8


def test_transfers_are_guarded_where_arrays_come_with_other_shardings():
    for make in (jax.jit, shard):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            within(jax.transfer_guard("disallow"), make, x=np.asarray(X))
        np.testing.assert_array_equal(within(jax.transfer_guard("disallow"), make, x=ON_PLAN), 2 * X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed device-to-device"):
        within(jax.transfer_guard("disallow"), shard)


def test_donated_arrays_are_taken_where_they_come_as_planned():
    for x, is_taken in ((X + 0, False), (jax.device_put(X + 0, NamedSharding(MESH, P("a"))), True)):
        shard(double, ((8, 1),), donate_argnums=0)(x)
        assert x.is_deleted() == is_taken
    x = X + 0
    with pytest.raises(StrategyError, match="takes one array twice"):
        shard(jnp.add, donate_argnums=(0, 1))(x, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard(double, keep_unused=True), r"leave it out; jax\.jit\(plan\.apply\(f\), keep_unused=\.\.\.\) takes it"),
        (lambda: shard(double, inline=True), r"leave it out; jax\.jit\(plan\.apply\(f\), inline=\.\.\.\) takes it"),
        (lambda: shard(double, backend="cpu"), "did you mean 'device'"),
        (lambda: shard(double, in_shardings=None), "did you mean 'in_strategy'"),
        (lambda: shard(lambda x: (jax.debug.print("{}", x, ordered=True), x))(X), "calls back into Python in order"),
        (lambda: jax.vmap(shard(lambda x: x - jax.lax.pmean(x, "i")), axis_name="i")(X), "axis `i` of a vmap around it"),
        (lambda: jax.pmap(shard(double))(X), "is called inside a pmap"),
        (lambda: jax.shard_map(shard(double), mesh=MESH, in_specs=P("a"), out_specs=P("a"))(X), "is called inside a shard_map"),
        (lambda: shard(double)("text"), "which JAX does not take as an array"),
    ],
)  # fmt: skip
def test_what_shard_refuses(call, message):
    with pytest.raises((StrategyError, StrategyTypeError, ShardError), match=message):
        call()


def test_what_shard_takes_and_jit_does_not():
    with pytest.raises(TypeError):
        jax.jit(lambda x: {"x": x, "f": jnp.sin})(X)
    assert shard(lambda x: {"x": x, "f": jnp.sin})(X)["f"] is jnp.sin
    pair = {"static_argnums": 1, "static_argnames": "flag"}
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x, n, flag: x * n if flag else x, **pair)(X, 3, True)
    np.testing.assert_array_equal(shard(lambda x, n, flag: x * n if flag else x, **pair)(X, 3, True), 3 * X)
    with pytest.raises(ValueError, match="does not support kwargs"):
        jax.jit(double, in_shardings=NamedSharding(MESH, P("a")))(x=X)
    np.testing.assert_array_equal(shard(double, ((8, 1),))(x=X), 2 * X)


def test_compiled_functions_take_arrays_with_the_planned_shardings():
    compiled = shard(double, ((8, 1),)).lower(X).compile()
    np.testing.assert_array_equal(compiled(X), 2 * X)
    np.testing.assert_array_equal(compiled(ON_PLAN), 2 * X)
    with pytest.raises(ValueError, match="compiled for input shardings that disagree"):
        compiled(ELSEWHERE)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_array_of_a_weak_type_has_a_plan_of_its_own(order):
    inner = shard(lambda x, w: x * w, ((8, 1), (1,)))

    def function(x, w):
        return inner(x, w) + inner(2 * x, w)

    arrays = jnp.full(4, 2.0), jnp.ones(4)
    assert [w.weak_type for w in arrays] == [True, False]
    sharded = shard(function, ((8, 1), (1,)))
    for i in (*order, *order):
        np.testing.assert_array_equal(sharded(X, arrays[i]), 3 * X * arrays[i])
    assert len(sharded._calls.entries) == 2


def test_without_jit_the_function_runs_as_it_is():
    class Counter:
        def __init__(self):
            self.n = 0

        @shard
        def __call__(self, x):
            self.n += 1
            return float(x.sum()) + self.n

    counter = Counter()
    with jax.disable_jit():
        assert [counter(X), counter(X)] == [497.0, 498.0]
        assert Counter.__call__(counter, X) == 499.0
    assert counter.n == 3


@pytest.mark.parametrize("value", [3, 3.0, True, 2 + 1j])
def test_numbers_of_python_are_differentiated_as_by_jit(value):
    def scaled(n, x):
        return jnp.abs(n * jnp.sum(x))

    def pulled(f):
        result, pull = jax.vjp(f, value, X)
        return [result, *map(np.asarray, pull(result))]

    for a, b in zip(pulled(shard(scaled)), pulled(jax.jit(scaled)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert error(lambda: jax.grad(shard(scaled))(3, X)) == error(lambda: jax.grad(scaled)(3, X))


def error(call):
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs") as caught:
        call()
    return str(caught.value)

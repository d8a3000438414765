"""`shard`, `plan`, `explain`, `reshard`: whatever arguments and results a function has, the sharded one equals it.

What is transformed inside and outside is in runtime/test_sharded_function.py, kinds of callable in frontend/test_callee.py, errors in
test_bad_input.py.
"""

import collections
import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import AUTO, explain, plan, reshard, shard
from shardfn.errors import DeviceError
from shardfn.mindspore import Layout
from tests.marks import some_slow
from tests.messages import refusal, told

RNG = np.random.default_rng(0)
Pair = collections.namedtuple("Pair", "w b")


def randn(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, W, V = randn(8, 16), randn(16, 4), randn(16, 16)
PARAMS = {"w": W, "b": randn(4)}
MESH = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))


def plain(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    return np.asarray(array, bool if array.dtype == bool else np.complex128)


def close(found, wanted, tol=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        assert not hasattr(b, "dtype") or a.dtype == b.dtype
        np.testing.assert_allclose(plain(jnp.asarray(a)), plain(jnp.asarray(b)), rtol=tol, atol=tol)


def dense(x, w):
    return x @ w


# function, arguments, keyword arguments, in_strategy, out_strategy, further options
CALLS = {
    # pytrees and prefixes
    "dict": (lambda p, x: x @ p["w"] + p["b"], (PARAMS, X), {}, ({"w": (1, 4), "b": (4,)}, (2, 1)), None, {}),
    "one entry for a tree": (lambda p, x: x @ p[0] @ p[1], ([V, V], X), {}, ((2, 1), (4, 1)), None, {}),
    "None for a tree": (lambda p, x: x @ p["w"] + p["b"], (PARAMS, X), {}, (None, None), None, {}),
    "named tuple": (lambda p, x: Pair(x @ p.w, p.b), (Pair(W, PARAMS["b"]), X), {}, (Pair((1, 4), (4,)), (2, 1)),
                    ((2, 4), AUTO), {}),
    "half of a tree": (lambda p, x: [x @ w for w in p], ([W, V], X), {}, ([(1, 4), AUTO], (2, 1)), None, {}),
    "empty dict": (lambda p, x: x, ({}, X), {}, ((), (8, 1)), None, {}),
    "None among the arguments": (lambda x, bias: x if bias is None else x + bias, (X, None), {}, ((8, 1), None), None, {}),
    # the ways to pass them
    "by keyword": (dense, (X,), {"w": W}, ((8, 1), AUTO), None, {}),
    "all by keyword": (dense, (), {"w": W, "x": X}, ((2, 1), (1, 4)), None, {}),
    "keyword-only": (lambda x, *, w: x @ w, (X,), {"w": W}, ((2, 1),), None, {"parameter_plan": {"w": (1, 4)}}),
    "any number": (lambda *a: a[0] @ a[1], (X, W), {}, ((2, 1), (1, 4)), None, {}),
    "any keywords": (lambda **k: k["x"] @ k["w"], (), {"x": X, "w": W}, None, None, {"parameter_plan": {"x": (8, 1)}}),
    "a default": (lambda x, s=2.0: x * s, (X,), {}, ((8, 1),), None, {}),
    "a default that has an entry": (lambda x, s=2.0: x * s, (X,), {}, ((8, 1), ()), None, {}),
    "a default that is given": (lambda x, s=2.0: x * s, (X, 3.0), {}, ((8, 1),), None, {}),
    "a default that is jumped over": (lambda x, a=1.0, b=2.0: x * a + b, (X,), {"b": 5.0}, ((8, 1),), None, {}),
    "an array as default": (lambda x, w=W: x @ w, (X,), {}, ((8, 1),), None, {}),
    "static": (lambda x, how: x + 1 if how == "a" else x, (X, "a"), {}, ((8, 1),), None, {"static_argnums": 1}),
    "static, first": (lambda how, x: x + 1 if how == "a" else x, ("a", X), {}, ((8, 1),), None, {"static_argnums": 0}),
    "static, from the end": (lambda x, n: x**n, (X, 3), {}, ((8, 1),), None, {"static_argnums": -1}),
    "static, by name": (lambda x, n=2: x**n, (X,), {"n": 3}, ((8, 1),), None, {"static_argnames": "n"}),
    "static, by number and keyword": (lambda x, n=2: x**n, (X,), {"n": 3}, ((8, 1),), None, {"static_argnums": (1,)}),
    "static and keyword-only": (lambda x, *, n: x**n, (X,), {"n": 3}, ((8, 1),), None, {"static_argnames": ["n"]}),
    # what they are
    "numbers": (lambda x, s, i, c: x * s + i + c.real, (X, 2.0, 3, 1j), {}, ((8, 1), (), (), ()), None, {}),
    "a bool": (lambda x, flag: jnp.where(flag, x, -x), (X, True), {}, ((8, 1), ()), None, {}),
    "a NumPy number": (lambda x, s: x * s, (X, np.float64(2)), {}, ((8, 1), ()), None, {}),
    "ints": (lambda i, t: t[i], (jnp.arange(16) % 5, randn(5, 8)), {}, ((8,), (1, 1)), None, {}),
    "bools": (lambda m, x: jnp.where(m, x, 0), (X > 0, X), {}, ((8, 1), (8, 1)), None, {}),
    "bf16": (dense, (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)), {}, ((8, 1), (1, 1)), None, {}),
    "small ints": (lambda x: x + x, (jnp.ones((8, 4), jnp.int8),), {}, ((8, 1),), ((1, 4),), {}),
    "4 bits": (lambda x: x.astype(jnp.int8) + 1, (jnp.ones((8, 4), jnp.int4),), {}, ((8, 1),), None, {}),
    "8-bit floats": (lambda x: x.astype(jnp.float32), (jnp.ones((8, 4), jnp.float8_e4m3fn),), {}, ((8, 1),), None, {}),
    "complex": (jnp.abs, (X + 1j * X,), {}, ((8, 1),), None, {}),
    "a key": (lambda k, x: x + jax.random.normal(k, x.shape), (jax.random.key(0), X), {}, ((), (8, 1)), None, {}),
    "keys": (jax.vmap(lambda k, x: x + jax.random.normal(k, x.shape)), (jax.random.split(jax.random.key(0), 8), X), {},
             ((8,), (8, 1)), None, {}),
    "raw keys": (lambda k, x: x + jax.random.normal(k, x.shape), (jax.random.PRNGKey(0), X), {}, (AUTO, (8, 1)), None, {}),
    "keys returned": (lambda k: jax.random.split(k, 8), (jax.random.key(0),), {}, None, ((8,),), {}),
    "NumPy": (dense, (np.asarray(X), np.asarray(W)), {}, ((8, 1), (1, 4)), None, {}),
    "NumPy's float64": (jnp.matmul, (np.asarray(X, np.float64), np.asarray(W, np.float64)), {}, ((8, 1), (1, 1)), None, {}),
    "NumPy's int64": (lambda x: jnp.add(x, 1), (np.arange(8),), {}, ((8,),), None, {}),
    "no elements": (lambda x: 2 * x, (jnp.zeros((0, 16)),), {}, ((2, 1),), ((8, 1),), {}),
    "no dims": (lambda x: x + 1, (jnp.float32(3),), {}, ((),), ((),), {}),
    "on another device": (dense, (jax.device_put(X, jax.devices()[3]), W), {}, ((8, 1), (1, 4)), None, {}),
    "in another layout": (dense, (jax.device_put(X, NamedSharding(MESH, P(None, "i"))), W), {}, ((8, 1), (1, 4)), None, {}),
    "NumPy ints as cuts": (dense, (X, W), {}, ((np.int64(8), np.int32(1)), (1, 1)), None, {}),
    # results
    "None": (lambda x: None, (X,), {}, ((8, 1),), None, {}),
    "None among results": (lambda x: (x, None), (X,), {}, ((8, 1),), ((1, 8), AUTO), {}),
    "a list": (lambda x: [x, x + 1], (X,), {}, ((8, 1),), ((8, 1), (1, 8)), {}),
    "a dict of tuples": (lambda x: {"a": x, "b": (x, 2 * x)}, (X,), {}, ((8, 1),),
                         ({"a": (8, 1), "b": ((1, 8), AUTO)},), {}),
    "a scalar": (lambda x: x.sum(), (X,), {}, ((8, 1),), ((),), {}),
    "a number": (lambda x: (x, 3.0), (X,), {}, ((8, 1),), None, {}),
    "an argument itself": (lambda x, w: (x, w), (X, W), {}, ((8, 1), AUTO), ((1, 8), AUTO), {}),
    "no arguments": (lambda: jnp.arange(8.0), (), {}, (), ((8,),), {}),
    "an array of the closure": (lambda x: x @ W, (X,), {}, ((8, 1),), None, {}),
    # devices
    "a part of the devices": (dense, (X, W), {}, ((2, 1), (1, 2)), None, {"device": jax.devices()[4:]}),
    "six devices": (dense, (randn(6, 12), randn(12, 6)), {}, ((2, 1), (1, 3)), ((3, 2),), {"device": jax.devices()[:6]}),
    "one device": (dense, (X, W), {}, ((2, 1), (1, 2)), ((1, 4),), {"device": jax.devices()[:1]}),
    "nothing said": (dense, (X, W), {}, None, None, {}),
    "nothing said, level 1": (dense, (X, W), {}, None, None, {"level": 1}),
    "nothing said, level 2": (dense, (X, W), {}, None, None, {"level": 2, "search_mode": "sharding_propagation"}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "args", "kwargs", "ins", "outs", "options"), CALLS.values(), ids=CALLS)
def test_sharded_equals_unsharded(function, args, kwargs, ins, outs, options):
    sharded = shard(function, ins, outs, **options)
    wanted = function(*args, **kwargs)
    tol = 2e-2 if any(getattr(a, "dtype", None) == jnp.bfloat16 for a in args) else 1e-5
    close(sharded(*args, **kwargs), wanted, tol)
    result = sharded(*args, **kwargs)  # on the short way through `__call__`, where there is one
    close(result, wanted, tol)
    made = sharded.plan(*args, **kwargs)
    assert len(sharded._calls.entries) == 1
    for array, decision in zip(jax.tree.leaves(result), made.outputs, strict=True):
        assert array.sharding.is_equivalent_to(NamedSharding(made.mesh, decision.partition_spec), array.ndim)
        assert array.sharding.shard_shape(array.shape) == decision.local_shape


def test_positional_order_is_mindspore_s():
    assert list(inspect.signature(shard).parameters)[:5] == ["fn", "in_strategy", "out_strategy", "device", "level"]
    result = shard(dense, ((2, 1), (1, 4)), ((2, 4),), "CPU", 2)(X, W)
    assert result.sharding.shard_shape(result.shape) == (4, 1)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_sharded_function_is_copied_and_pickled_by_what_it_was_made_of(again):
    sharded = shard(dense, ((2, 1), (1, 4)), level=1)
    sharded(X, W)
    other = again(sharded)
    assert other.options == sharded.options
    close(other(X, W), X @ W)


# ---- donation


@pytest.mark.parametrize(
    ("options", "donated"),
    [
        ({}, [False, False]),
        ({"donate_argnums": 0}, [True, False]),
        ({"donate_argnums": -1}, [False, True]),
        ({"donate_argnames": "a"}, [True, False]),
        ({"donate_argnames": ("b",), "donate_argnums": (0,)}, [True, True]),
    ],
)
def test_donation(options, donated):
    sharded = shard(lambda a, b: (a + b, a * b), ((8, 1), (8, 1)), ((8, 1), (8, 1)), **options)
    wanted = X + X, X * X
    a, b = jax.device_put((np.array(X), np.array(X)), sharded.plan(X, X).in_shardings)
    close(sharded(a, b), wanted)
    assert [a.is_deleted(), b.is_deleted()] == donated


def test_a_state_that_is_donated_goes_round_and_round():
    step = shard(lambda s, x: {"n": s["n"] + 1, "v": s["v"] + x}, ({"n": (), "v": (8, 1)}, (8, 1)), donate_argnums=0)
    state = {"n": jnp.int32(0), "v": jnp.zeros((8, 16))}
    for _ in range(3):
        before, state = state, step(state, X)
    assert before["v"].is_deleted()
    close(state, {"n": jnp.int32(3), "v": 3 * X})
    assert len(step._calls.entries) == 1


# ---- plans and reports


def test_plans_are_made_from_shapes_alone():
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, X))

    def mlp(p, x):
        return x @ p["w"] + p["b"]

    sharded = shard(mlp, ({"w": (1, 4), "b": AUTO}, (2, 1)))
    made = sharded.plan(*shapes)
    assert [(d.path, d.strategy, d.source == "you") for d in (*made.inputs, *made.outputs)] == [
        ("p/b", (4,), False),
        ("p/w", (1, 4), True),
        ("x", (2, 1), True),
        ("result", (2, 4), False),
    ]
    assert made.mesh.axis_sizes == (4, 2)
    assert sharded.plan(PARAMS, X) is made and len(sharded._calls.entries) == 1
    close(sharded(PARAMS, X), mlp(PARAMS, X))
    assert len(sharded._calls.entries) == 1


def test_plan_and_explain_take_functions_and_sharded_functions():
    made = plan(dense, X, W, in_strategy=((4, 1), (1, 2)), out_strategy=((4, 2),), device="CPU", level=2)
    assert made.inputs[0].strategy == (4, 1) and made.outputs[0].strategy == (4, 2) and made.level == 2
    sharded = shard(dense, ((4, 1), (1, 2)), level=1)
    assert plan(sharded, X, W) is sharded.plan(X, W)
    other = plan(sharded, X, W, level=2, in_strategy=((2, 1), AUTO))
    assert (other.level, other.inputs[0].strategy, sharded.options.level) == (2, (2, 1), 1)
    assert plan(lambda x, *, level_: x * level_, X, level_=2.0, level=1).level == 1
    assert isinstance(explain(dense, X, W, in_strategy=((4, 1), (1, 2))), shardfn.Report)
    assert isinstance(sharded.explain(X, W, compiled=True), shardfn.Report)


def test_a_plan_that_is_there_is_explained():
    sharded = shard(dense, ((4, 1), (1, 2)), level=1)
    made = sharded.plan(X, W)
    assert explain(made) == sharded.explain(X, W)
    assert explain(made, compiled=True).to_dict()["compiled"]
    assert explain(pickle.loads(pickle.dumps(made))).to_dict()["arguments"] == explain(made).to_dict()["arguments"]
    assert told(refusal(lambda: explain(made, 3, level=2))) == "StrategyTypeError: explain(plan, 3, level=2)"


@pytest.mark.slow
def test_a_plan_for_hardware_that_is_not_here():
    shapes = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
    made = plan(dense, *shapes, in_strategy=((16, 1), (1, 16)), device="tpu-v5e:16x16")
    assert made.mesh.axis_sizes == (16, 16) and made.outputs[0].local_shape == (256, 256)
    assert plan(dense, *shapes, device="cpu:4096").hardware.count == 4096


def test_what_lies_elsewhere_is_reported():
    sharded = shard(dense, ((8, 1), (1, 1)))
    moved = jax.device_put(X, jax.devices()[3])
    assert "is transferred in every call" in str(sharded.explain(moved, W))
    assert "is transferred in every call" not in str(sharded.explain(X, W))


def test_lower_gives_jax_s_own_stages():
    sharded = shard(dense, ((2, 1), (1, 4)))
    for args in ((X, W), (jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype))):
        compiled = sharded.lower(*args).compile()
        close(compiled(X, W), X @ W)
        assert compiled.memory_analysis() is not None and "ENTRY" in compiled.as_text()


# ---- reshard

GRID = Layout((2, 4), ("dp", "mp"))


@pytest.mark.parametrize("layout", [GRID("dp", "mp"), GRID(("mp", "dp"), "None"), GRID("None", "None")], ids=str)
@pytest.mark.parametrize("how", ["eager", "jit", "shard", "grad"])
def test_reshard(layout, how):
    if how == "eager":
        result = reshard(X, layout)
    elif how == "jit":
        result = jax.jit(lambda x: reshard(x, layout))(X)
    elif how == "shard":
        result = shard(lambda x: reshard(x, layout), ((8, 1),))(X)
    else:
        result = jax.jit(jax.grad(lambda x: (reshard(x, layout) ** 2).sum() / 2))(X)
    close(result, X)
    if how in ("eager", "jit"):
        assert result.sharding.is_equivalent_to(layout.sharding(), 2)


def test_reshard_on_a_part_of_the_devices():
    layout = Layout((2, 2), ("a", "b"))("b", "a")
    result = reshard(np.asarray(X), layout)
    assert result.sharding.device_set == set(jax.devices()[:4])
    close(result, X)


# ---- the public API


def test_all_of_shardfn_lists_what_it_has_and_dir_shows_it():
    assert {n for n in vars(shardfn) if n in shardfn.__all__} == set(shardfn.__all__) <= set(dir(shardfn))


def test_dir_of_the_facade_is_mindspore_s_names():
    assert set(dir(shardfn.mindspore)) == set(shardfn.mindspore.__all__)
    assert all(hasattr(shardfn.mindspore, name) for name in shardfn.mindspore.__all__)


@pytest.mark.parametrize("ask", [plan, explain], ids=["plan", "explain"])
def test_an_option_that_is_a_parameter_of_the_function_is_refused(ask):
    def zoom(x, level):
        return x * level

    for function in (zoom, shard(zoom)):
        with pytest.raises(shardfn.ShardError, match=r"`level` is a parameter of the function") as error:
            ask(function, X, level=2)
        assert "shard(f, level=...).plan(...)" in error.value.problems[0].fix
    assert shard(zoom, level=1).plan(X, level=2.0).level == 1


def test_explain_compiled_of_a_function_with_a_parameter_compiled_is_refused():
    def run(x, compiled=False):
        return x

    with pytest.raises(shardfn.ShardError, match="`compiled` is a parameter"):
        explain(run, X, compiled=True)
    assert explain(shard(run, static_argnums=1).plan(X, compiled=True), compiled=True).to_dict()["compiled"]


def test_a_sharded_function_has_the_methods_of_a_jitted_one():
    sharded = shard(dense, ((2, 1), (1, 4)))
    shapes = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype)
    assert sharded.__wrapped__ is dense and sharded.__name__ == "dense"
    assert sharded.eval_shape(*shapes) == jax.jit(dense).eval_shape(*shapes) and not sharded._calls.entries
    traced = sharded.trace(*shapes)
    assert traced.out_info.shape == (8, 4) and "dot_general" in str(traced.jaxpr)
    close(traced.lower().compile()(X, W), X @ W)
    close(sharded(X, W), X @ W)
    sharded.clear_cache()
    assert not sharded._calls.entries
    close(sharded(X, W), X @ W)


def test_eval_shape_takes_static_arguments():
    sharded = shard(lambda x, n: x**n, static_argnums=1)
    assert sharded.eval_shape(X, 3).shape == X.shape


class Counted:
    """A module whose method says how often it was traced."""

    width = 2

    def __init__(self):
        self.w, self.calls = X, jnp.zeros(())

    def __call__(self, x):
        TRACES.append(self.width)
        self.calls = self.calls + 1
        return {"y": (x * self.w)[: self.width], "weak": 2 * 3.0}


TRACES: list[int] = []


@pytest.mark.parametrize("before", ["__call__", "plan", "lower", "eval_shape"])
@pytest.mark.parametrize("shapes_of", [lambda f, x: f.eval_shape(x), jax.eval_shape], ids=["method", "jax"])
def test_eval_shape_traces_no_call_that_was_traced(before, shapes_of):
    module = Counted()
    sharded, shape = shard(module), jax.ShapeDtypeStruct(X.shape, X.dtype)
    getattr(sharded, before)(X)
    TRACES.clear()
    wanted = {
        "y": jax.ShapeDtypeStruct((2, *X.shape[1:]), X.dtype),
        "weak": jax.ShapeDtypeStruct((), X.dtype, weak_type=True),
    }
    assert sharded.eval_shape(X) == sharded.eval_shape(shape) == wanted and not TRACES
    assert jax.tree.map(jnp.shape, shapes_of(sharded, shape)) == jax.tree.map(jnp.shape, wanted)
    assert not TRACES or before == "eval_shape"  # `jax.eval_shape` plans the call
    module.width = 3
    assert sharded.eval_shape(X)["y"].shape == (3, *X.shape[1:]) and TRACES[-1] == 3


def test_plans_of_a_sharded_function_are_dropped_beyond_a_bound_but_not_those_in_use():
    sharded = shard(lambda x: x + 1, ((1,),))
    first, second = (sharded.plan(jnp.ones(n)) for n in (1, 2))
    for size in range(3, 140):
        sharded.plan(np.ones(size, np.float32))
        assert sharded.plan(jnp.ones(1)) is first
    assert sharded.plan(jnp.ones(2)) is not second


def test_reshard_takes_a_named_sharding():
    result = reshard(X, NamedSharding(MESH, P(None, "i")))
    assert result.sharding.spec == P(None, "i")
    close(jax.jit(lambda x: reshard(x, NamedSharding(MESH, P("i"))))(X), X)


@pytest.mark.parametrize("options", [{}, {"device": "tpu-v5e:4x2"}], ids=["here", "elsewhere"])
def test_replicated_is_for_arrays_of_any_rank(options):
    made = shard(lambda p, x: x @ p["w"] + p["b"], (shardfn.REPLICATED, shardfn.DATA_PARALLEL), **options).plan(
        PARAMS, X
    )
    assert [(d.path, d.strategy, d.source) for d in made.inputs] == [
        ("p/b", (1,), "you"), ("p/w", (1, 1), "you"), ("x", (8, 1), "you"),
    ]  # fmt: skip
    assert shard(dense, (P(), (8, 1)), **options).plan(X.T @ X, X.T @ X).inputs[0].strategy == (1, 1)


@pytest.mark.parametrize(("word", "level"), [("communication", 0), ("memory", 1), ("time", 2), (2, 2)])
def test_a_level_is_a_word_or_a_number(word, level):
    made = plan(dense, X, W, level=word)
    assert made.level == level and made.inputs == plan(dense, X, W, level=level).inputs
    assert shard(dense, level=word).options.level == level


@pytest.mark.parametrize("asked", ["communication", 0, None])
def test_an_explicit_level_goes_before_that_of_the_layout(asked):
    layout = plan(dense, X, W, level="memory")
    assert shard(dense, layout=layout, level=asked).plan(X, W).level == (1 if asked is None else 0)


@pytest.mark.parametrize(
    ("device", "fix"), [("tpu-v9:8", "did you mean"), ("h100:4x4", "h100:16"), ("tpu-v5e", "tpu-v5e:8")]
)
def test_a_target_that_is_none_is_refused_by_shard(device, fix):
    with pytest.raises(DeviceError, match=fix):
        shard(dense, device=device)


def test_a_plan_is_used_by_jax_alone():
    def mlp(p, x, n):
        return {"y": jnp.tanh(x @ p["w"] + p["b"]) ** n}

    made = shard(mlp, level="memory", static_argnums=2).plan(PARAMS, X, 2)
    args = jax.device_put((PARAMS, X), made.in_shardings)
    for function in (mlp, made.apply(mlp)):
        jitted = jax.jit(function, in_shardings=made.in_shardings, out_shardings=made.out_shardings, static_argnums=2)
        result = jitted(*args, 2)
        close(result, mlp(PARAMS, X, 2))
        assert result["y"].sharding.is_equivalent_to(made.out_shardings["y"], 2)
    assert args[0]["w"].sharding.is_equivalent_to(made.in_shardings[0]["w"], 2)


@pytest.mark.parametrize("entry", some_slow([(4, AUTO), (AUTO, 2), (AUTO, 1)], [(AUTO, 2), (AUTO, 1)]), ids=str)
@pytest.mark.parametrize("level", ["communication", pytest.param("memory", marks=pytest.mark.slow)])
def test_a_dimension_that_is_auto_is_searched_and_the_other_kept(entry, level):
    made = shard(dense, (entry, AUTO), level=level).plan(X, W)
    assert all(ways is AUTO or own == ways for own, ways in zip(made.inputs[0].strategy, entry, strict=True))
    close(shard(dense, (entry, AUTO), level=level)(X, W), X @ W)
    out = shard(dense, out_strategy=(entry,), level=level).plan(X, W).outputs[0].strategy
    assert all(ways is AUTO or own == ways for own, ways in zip(out, entry, strict=True))


def test_explain_keyword_that_is_a_parameter_is_refused():
    def scaled(x, detail=1.0):
        return x * detail

    sharded = shardfn.shard(scaled, device="cpu:8")
    with pytest.raises(shardfn.ShardError, match="`detail` is a parameter of the function and an option of `explain`"):
        sharded.explain(jnp.ones((8, 4)), detail=jnp.float32(2))
    assert "scaled" in str(sharded.explain(jnp.ones((8, 4)), 2.0))


def test_strategy_of_open_dimensions_only_has_the_rank_of_the_array():
    x = jax.ShapeDtypeStruct((8, 4), "float32")
    with pytest.raises(shardfn.ShardError, match="dimension"):
        shardfn.plan(jnp.tanh, x, in_strategy=((shardfn.AUTO,) * 3,), device="cpu:8")
    made = shardfn.plan(jnp.tanh, x, in_strategy=((8, 1),), device="cpu:8")
    assert made.what_if({"x": jax.sharding.PartitionSpec()}).inputs[0].strategy == (1, 1)

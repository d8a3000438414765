"""Arrays that a function closes over: counted, listed, and arguments on demand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn import explain, plan, shard
from shardfn.errors import ShardError, StrategyError, StrategyTypeError

RNG = np.random.default_rng(0)
W, N = (RNG.normal(size=(512, 512)).astype(np.float32) for _ in range(2))
X = RNG.normal(size=(16, 512)).astype(np.float32)
PARAMS = {"layer": {"w": jnp.asarray(W)}}
INNER = jax.jit(lambda x: x @ PARAMS["layer"]["w"])


def _model(x):
    return jnp.tanh(INNER(x)) @ N


def test_plan_counts_closed_over_arrays_in_memory_as_xla_does():
    report = shard(_model, ((8, 1),)).explain(X, compiled=True)
    data = report.to_dict()
    assert [(a["name"], a["bytes"]) for a in data["closed_over"]] == [("N", W.nbytes), ("PARAMS/layer/w", W.nbytes)]
    assert data["memory"]["constants"] == 2 * W.nbytes
    assert data["compiled"]["memory"]["closed_over"] == {"predicted": 2 * W.nbytes, "compiled": 2 * W.nbytes}
    peak = data["compiled"]["memory"]["together"]
    assert peak["compiled"] == pytest.approx(peak["predicted"], rel=0.02) and peak["predicted"] > 2 * W.nbytes
    assert "Arrays that the function closes over" in str(report)
    (note,) = [text for text in data["diagnostics"] if "closes over" in text]
    assert "`N` (1 MiB)" in note and 'closed_over="argument"' in note


def test_uniform_closed_over_array_that_xla_broadcasts_is_counted_once():
    ones = jnp.ones((512, 512))
    peak = shard(lambda x: x @ ones, ((8, 1),)).explain(X, compiled=True).to_dict()["compiled"]["memory"]["together"]
    assert peak["compiled"] == pytest.approx(peak["predicted"], rel=0.02)


def test_memory_limit_below_closed_over_arrays_is_an_error_whose_fix_works():
    with pytest.raises(StrategyError, match="2 MiB of arrays that the function closes over") as error:
        plan(_model, X, memory_limit="1MiB")
    assert 'closed_over="argument"' in error.value.problems[0].fix
    assert plan(_model, X, memory_limit="1MiB", closed_over="argument").cost.memory.peak <= 1 << 20


def test_small_closed_over_array_is_listed_without_a_note():
    table = np.arange(8.0, dtype=np.float32)
    report = explain(lambda x: x.reshape(-1, 8) * table, X, device="cpu:8")
    assert report.to_dict()["closed_over"][0]["name"] == "table"
    assert not [text for text in report.to_dict()["diagnostics"] if "closes over" in text]


def test_function_that_refers_to_a_dict_whose_keys_have_no_order_is_planned():
    cache = {(1, "a"): 2.0, None: 3.0}
    report = explain(lambda x: x @ N * cache[None], X, device="cpu:8")
    assert [a["name"] for a in report.to_dict()["closed_over"]] == ["N"]


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"level": "memory"}, {"in_strategy": ((8, 1),)}], ids=str
)
def test_closed_over_argument_gives_the_value_and_derivative_with_sharded_arrays(options):
    sharded = shard(_model, closed_over="argument", **options)
    for _ in range(2):
        np.testing.assert_allclose(sharded(X), _model(X), rtol=1e-3, atol=1e-2)
    gradients = [jax.grad(lambda x, f=f: jnp.sin(f(x)).sum())(jnp.asarray(X)) for f in (sharded, _model)]
    np.testing.assert_allclose(*gradients, rtol=1e-2, atol=2e-2)
    made = sharded.plan(X)
    assert [d.path for d in made.inputs] == ["closed_over/N", "closed_over/PARAMS/layer/w", "x"]
    assert made.closed_over == () and made.cost.memory.constants == 0
    if options == {"level": "memory"}:
        assert all(np.prod(d.strategy) == 8 for d in made.inputs)


def test_closed_over_argument_takes_entries_by_path_and_traces_the_function_once():
    traces = []

    def model(x):
        traces.append(1)
        return x @ N

    entries = {"closed_over/N": (1, 8)}
    sharded = shard(model, ((1, 1),), closed_over="argument", parameter_plan=entries)
    np.testing.assert_allclose(sharded(X), X @ N, rtol=1e-3, atol=1e-3)
    sharded(X)
    made = sharded.plan(X)
    assert made.inputs[0].strategy == (1, 8) and made.outputs[0].strategy == (1, 8) and len(traces) == 1
    applied = made.apply(model)
    assert [*applied.arrays] == ["closed_over/N"]
    run = jax.jit(applied, in_shardings=made.in_shardings, out_shardings=made.out_shardings)
    np.testing.assert_allclose(run(applied.arrays, X), X @ N, rtol=1e-3, atol=1e-3)
    with pytest.raises(StrategyError, match="another function"):
        made.apply(lambda x: x @ N + 1)


def test_closed_over_argument_of_a_method_keeps_its_state_apart():
    class Model:
        def __init__(self):
            self.scale = jnp.full((512,), 2.0)

        def __call__(self, x, *, power):
            return (x @ N * self.scale) ** power

    model = Model()
    sharded = shard(model, closed_over="argument", static_argnames="power")
    np.testing.assert_allclose(sharded(X, power=2), model(X, power=2), rtol=1e-3, atol=1e-2)
    assert [d.path for d in sharded.plan(X, power=2).inputs] == ["closed_over/N", "scale", "x"]


def test_closed_over_argument_without_such_arrays_changes_nothing():
    sharded = shard(functools.partial(jnp.multiply, 2.0), closed_over="argument")
    np.testing.assert_allclose(sharded(X), 2 * X)
    assert [d.path for d in sharded.plan(X).inputs] == [
        d.path for d in shard(functools.partial(jnp.multiply, 2.0)).plan(X).inputs
    ]


def test_closed_over_argument_inside_jit_leaves_traced_values_alone():
    @jax.jit
    def outer(x, w):
        return shard(lambda x: x @ w @ N, closed_over="argument")(x)

    np.testing.assert_allclose(outer(X, W), X @ W @ N, rtol=1e-2, atol=0.5)


@pytest.mark.parametrize(("value", "kind"), [("arguments", StrategyError), (True, StrategyTypeError)])
def test_closed_over_of_another_value_is_refused(value, kind):
    with pytest.raises(kind, match="`closed_over` cannot be"):
        shard(_model, closed_over=value)


def test_layout_file_with_closed_over_arrays_names_the_option_that_it_needs(tmp_path):
    def model(x):
        return x @ N

    file = tmp_path / "plan.toml"
    plan(model, X, parameter_plan={"closed_over/N": (1, 8)}, closed_over="argument").save(file)
    with pytest.raises(StrategyError) as error, pytest.warns(UserWarning, match="has changed"):
        plan(model, X, layout=file)
    assert 'pass closed_over="argument"' in error.value.problems[0].fix
    made = plan(model, X, layout=file, closed_over="argument")
    assert made.decision("closed_over/N").strategy == (1, 8)
    with pytest.raises(StrategyError) as error:
        plan(model, X, parameter_plan={"closed_over/N": (1, 8)})
    assert 'closed_over="argument"' in error.value.problems[0].fix


def add(ref, x):
    ref[...] += x.sum()
    return x


class Holder:
    def __init__(self, ref):
        self.ref = ref

    def __call__(self, x):
        return add(self.ref, x)


TOTAL = jax.new_ref(jnp.zeros(8))
REFS = {
    "in a closure": lambda ref: lambda x: add(ref, x),
    "in a partial": lambda ref: functools.partial(lambda ref, x: add(ref, x), ref),
    "in an object": Holder,
    "in a method": lambda ref: Holder(ref).__call__,
    "in a loop": lambda ref: lambda x: jax.lax.fori_loop(0, 3, lambda i, x: add(ref, x), x),
    "in a branch": lambda ref: lambda x: jax.lax.cond(x.sum() > 0, lambda x: add(ref, x), lambda x: x, x),
    "in a jit": lambda ref: lambda x: jax.jit(lambda x: add(ref, x))(x),
    "beside an array": lambda ref: lambda x: add(ref, x) + jnp.asarray(np.arange(8.0)),
}
OPTIONS = {"open": {}, "argument": {"closed_over": "argument"}, "entries": {"in_strategy": ((4, 2),)}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", REFS.values(), ids=REFS)
def test_a_ref_that_is_closed_over_is_read_and_written(make, options):
    plain, own = jax.new_ref(jnp.zeros(8)), jax.new_ref(jnp.zeros(8))
    jitted, sharded, x = jax.jit(make(plain)), shard(make(own), **options), jnp.ones((8, 8))
    for k in (1, 2, 3):
        np.testing.assert_allclose(sharded(k * x), jitted(k * x))
        np.testing.assert_allclose(own[...], plain[...])
    own[...] = plain[...] = jnp.ones(8)
    sharded(x), jitted(x)
    np.testing.assert_allclose(own[...], plain[...])


def test_a_closed_over_ref_has_a_path_and_a_sharding():
    sharded = shard(lambda x: add(TOTAL, x), parameter_plan={"closed_over/TOTAL": (8,)})
    made = sharded.plan(jnp.ones((8, 8)))
    assert made.decision("closed_over/TOTAL").strategy == (8,)
    assert made.decision("state/closed_over/TOTAL").strategy == (8,)
    assert sharded.check(jnp.ones((8, 8))).agrees
    assert sharded.eval_shape(jnp.ones((8, 8))).shape == (8, 8)
    assert "closed_over/TOTAL" in str(sharded.explain(jnp.ones((8, 8)), compiled=True))
    assert not TOTAL[...].any(), "plans, reports and checks leave it as it is"


def test_a_closed_over_ref_beside_one_as_argument_and_another_one_later():
    inside, argument, x = jax.new_ref(jnp.zeros(8)), jax.new_ref(jnp.zeros(8)), jnp.ones((8, 8))
    sharded = shard(lambda ref, x: add(inside, add(ref, x)))
    for k in (64, 128):
        sharded(argument, x)
        assert inside[...].tolist() == argument[...].tolist() == [k] * 8
    holder = Holder(inside)
    call = shard(holder)
    call(x)
    holder.ref = argument
    call(x)
    assert inside[...].tolist() == argument[...].tolist() == [192] * 8
    shard(lambda x: shard(lambda x: add(inside, x))(x))(x)
    assert inside[...].tolist() == [256] * 8
    placed = jax.new_ref(jax.device_put(jnp.zeros(8), *call.plan(x).in_shardings[0].values()))
    around = jax.jit(lambda x: shard(lambda x: add(placed, x))(x))
    around(x), around(x)
    assert placed[...].tolist() == [128] * 8
    assert shard(lambda x: add(jax.new_ref(jnp.zeros(3)), x))(x).sum() == 64


def test_an_iterator_as_argument_is_refused_with_a_tuple_as_fix():
    with pytest.raises(ShardError, match=r"pass a tuple: tuple\(xs\)"):
        shard(lambda xs: sum(xs))(iter([jnp.ones(8)]))

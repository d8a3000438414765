"""Derivatives of sharded functions that are taken from outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardfn
from shardfn.compiled.executable import read
from shardfn.planning.plan import answered_call
from shardfn.runtime.derivatives import Residuals

X, W = jnp.arange(32.0).reshape(8, 4) / 10, jnp.cos(jnp.arange(16.0)).reshape(4, 4)


def f(x, w):
    return jnp.sin(jnp.pad(x[1:], ((0, 1), (0, 0))) @ w)


def total(function):
    return lambda *args: jnp.sum(jnp.real(function(*args)) ** 2)


def assert_same(got, want, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


SHARDED = shardfn.shard(f, ((8, 1), (1, 1)))


def scanned(function):
    def run(x, w):
        last, sums = jax.lax.scan(lambda c, _: (function(c, w), c.sum()), x, None, length=3)
        return last.sum() + sums.sum()

    return run


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("taken", [
    pytest.param(lambda g: jax.grad(total(g), 1), id="grad by one argument"),
    pytest.param(lambda g: jax.grad(total(g), (0, 1)), id="grad"),
    pytest.param(lambda g: lambda x, w: jax.vjp(g, x, w)[1](x), id="vjp"),
    pytest.param(lambda g: lambda x, w: jax.jvp(g, (x, w), (x, w)), id="jvp"),
    pytest.param(lambda g: lambda x, w: jax.linearize(functools.partial(g, x), w)[1](w), id="linearize"),
    pytest.param(lambda g: jax.jacfwd(total(g), 1), id="jacfwd"),
    pytest.param(lambda g: jax.jacrev(g, 0), id="jacrev"),
    pytest.param(lambda g: jax.hessian(total(g), 1), id="hessian"),
    pytest.param(lambda g: jax.jacrev(jax.jacrev(total(g), 1), 1), id="reverse over reverse"),
    pytest.param(lambda g: lambda x, w: jax.jvp(jax.grad(total(g)), (x, w), (x, w)), id="forward over reverse"),
    pytest.param(lambda g: lambda x, w: jax.vmap(jax.grad(total(g)), (0, None))(jnp.stack([x, x + 1]), w), id="vmap of grad"),
    pytest.param(lambda g: lambda x, w: jax.grad(lambda xs: jax.vmap(total(g), (1, None))(xs, w).sum())(jnp.stack([x, x + 1], 1)),
                 id="grad of vmap"),
    pytest.param(lambda g: jax.grad(scanned(g), (0, 1)), id="scan"),
    pytest.param(lambda g: jax.grad(jax.checkpoint(scanned(g)), (0, 1)), id="checkpoint"),
    pytest.param(lambda g: jax.grad(lambda x, w: jax.lax.cond(x.sum() > 0, g, lambda x, w: x, x, w).sum()), id="cond"),
])  # fmt: skip
def test_every_derivative_equals_that_of_the_function(taken, is_jitted):
    wrap = jax.jit if is_jitted else lambda g: g
    assert_same(wrap(taken(SHARDED))(X, W), jax.jit(taken(f))(X, W), 1e-3)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("is_set", [False, True], ids=["argument", "set_mesh"])
def test_derivative_on_the_mesh_of_the_user(types, is_set):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(types,) * 2)
    x = X if is_set else jax.device_put(X, NamedSharding(mesh, PartitionSpec("a", None)))
    with jax.set_mesh(mesh if is_set else jax.sharding.get_mesh()):
        got = jax.tree.map(np.asarray, jax.jit(jax.grad(total(SHARDED), (0, 1)))(x, W))
    assert_same(got, jax.grad(total(f), (0, 1))(X, W))


def test_derivative_of_an_applied_plan():
    applied = SHARDED.plan(X, W).apply(f)
    assert_same(jax.jit(jax.grad(total(applied), (0, 1)))(X, W), jax.grad(total(f), (0, 1))(X, W))


def results_of_many_kinds(x):
    return {"float": jnp.sin(x[1:]), "int": jnp.argmax(x, 1), "python": 3, "again": x, "bool": x > 1}


@pytest.mark.parametrize(("function", "strategy", "args"), [
    pytest.param(lambda x: results_of_many_kinds(x)["float"], ((8, 1),), (X,), id="other results"),
    pytest.param(lambda i, w: w[i], ((8,), (1, 1)), (jnp.arange(8) % 4, W), id="integers"),
    pytest.param(lambda x, s: x[1:] * s, ((8, 1), ()), (X, 2.0), id="a Python number"),
    pytest.param(lambda x: jnp.sort(x, 0)[1:], ((2, 4),), (X.astype("bfloat16"),), id="bfloat16"),
    pytest.param(lambda x: jnp.fft.fft(x * (1 + 1j), axis=1)[1:], ((8, 1),), (X,), id="complex"),
    pytest.param(lambda x: jnp.cumprod(x, 0)[::3], ((8, 1),), (X / 3,), id="cumulative"),
    pytest.param(lambda k, x: (x * jax.random.normal(k, x.shape))[1:], ((), (8, 1)), (jax.random.key(0), X), id="a random key"),
    pytest.param(lambda x: jnp.roll(x.T, (1, 1), (0, 1)) * x.T, ((2, 1),), (X,), id="rotations"),
])  # fmt: skip
def test_gradient_of_arguments_and_results_of_many_kinds(function, strategy, args):
    sharded, which = shardfn.shard(function, strategy), len(args) - 1
    want = jax.grad(total(function), which)(*args)
    assert_same(jax.grad(total(sharded), which)(*args), want, 1e-2 if want.dtype == "bfloat16" else 1e-4)


def test_has_aux_of_results_of_many_kinds():
    def loss(function):
        return lambda x: (function(x)["float"].sum(), function(x))

    got = jax.value_and_grad(loss(shardfn.shard(results_of_many_kinds, ((8, 1),))), has_aux=True)(X)
    assert_same(got, jax.value_and_grad(loss(results_of_many_kinds), has_aux=True)(X))


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def test_function_with_a_derivative_rule_of_its_own():
    def function(x):
        return doubled(x[::2])

    sharded = shardfn.shard(function, ((4, 1),), device=jax.devices()[:4])
    assert_same(jax.grad(total(sharded))(X), jax.grad(total(function))(X))
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(sharded, (X,), (X,))


def test_loop_of_unknown_length_has_a_forward_derivative_only():
    def grown(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1000, lambda x: x * 1.1 + 1, x)

    sharded = shardfn.shard(grown, ((8, 1),))
    assert_same(jax.jvp(sharded, (X,), (X,)), jax.jvp(grown, (X,), (X,)))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(total(sharded))(X)


def pooled(x):
    """Its gradient, as JAX transposes it, is wrong along a sharded dimension."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 1), (1, 1), [(1, 1), (0, 0)])


ROWS = jnp.sin(jnp.arange(64.0)).reshape(32, 2) ** 2


@pytest.mark.parametrize("wrap", [lambda g: g, jax.jit], ids=["eager", "jit"])
def test_function_with_side_effects_has_a_planned_derivative(wrap, capfd):
    def printed(x):
        jax.debug.print("seen")
        return pooled(x)

    got = wrap(jax.grad(total(shardfn.shard(printed, ((8, 1),)))))(ROWS)
    jax.effects_barrier()
    assert_same(got, jax.grad(total(pooled))(ROWS))
    assert "seen" in capfd.readouterr().out


@pytest.mark.parametrize("wrap", [lambda g: g, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("places", [0, 1, (0, 1)], ids=["argument", "captured", "both"])
def test_function_that_closes_over_traced_arrays_has_a_planned_derivative(wrap, places):
    def loss(wrapped):
        return lambda x, c: (wrapped(lambda x: pooled(x * c) + jnp.roll(x, 1, 0) @ jnp.ones((2, 2)))(x) ** 2).sum()

    c = jnp.linspace(1.0, 2.0, 64).reshape(32, 2)
    got = wrap(jax.grad(loss(lambda g: shardfn.shard(g, ((8, 1),))), places))(ROWS, c)
    assert_same(got, jax.grad(loss(lambda g: g), places)(ROWS, c))


def test_rotation_in_a_shard_map_has_its_type():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rows, columns = PartitionSpec("a"), PartitionSpec()

    def mapped(function):
        return jax.shard_map(function, mesh=mesh, axis_names={"a"}, in_specs=(rows, columns), out_specs=rows)

    def rolled(x, w):
        return jnp.roll(x, 1, 1) * w

    sharded = jax.jit(mapped(shardfn.shard(rolled, ((1, 4), (4,)))))
    assert_same(sharded(ROWS.reshape(8, 8), jnp.arange(8.0)), rolled(ROWS.reshape(8, 8), jnp.arange(8.0)))
    got = jax.jit(jax.grad(lambda x, w: sharded(x, w).sum()))(ROWS.reshape(8, 8), jnp.arange(8.0))
    assert_same(got, jax.grad(lambda x, w: rolled(x, w).sum())(ROWS.reshape(8, 8), jnp.arange(8.0)))


def in_shard_map(function, check_vma):
    """A function of (8, 16), of which each of two devices along an axis has rows, with the other four for the function."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rows = PartitionSpec("a")
    return jax.jit(
        jax.shard_map(function, mesh=mesh, axis_names={"a"}, in_specs=rows, out_specs=rows, check_vma=check_vma)
    )


MOVING = {
    "set": lambda x: x.at[:, 2:5].set(7.0).at[:, -1].add(x[:, 0] * 2),
    "pooled": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3), (1, 1), "SAME"),
    "sorted": lambda x: jnp.sort(x, 1)[:, ::-1] * x,
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 2)), mode="edge")[:, 1:-2] * x,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("is_outside", [False, True])
def test_derivatives_in_a_shard_map_without_checks_are_planned(name, is_outside):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), "float32")
    sharded = shardfn.shard(MOVING[name], ((1, 4),))
    if is_outside:
        got = jax.grad(lambda x: (in_shard_map(sharded, False)(x) ** 2).sum())(x)
    else:
        got = in_shard_map(jax.grad(lambda x: (sharded(x) ** 2).sum()), False)(x)
    assert_same(got, jax.grad(lambda x: (MOVING[name](x) ** 2).sum())(x))


@pytest.mark.parametrize("name", MOVING)
def test_values_in_a_shard_map_with_checks_are_as_planned(name):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), "float32")
    assert_same(in_shard_map(shardfn.shard(MOVING[name], ((1, 4),)), True)(x), MOVING[name](x))


def test_derivatives_in_a_shard_map_with_checks_warn():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), "float32")
    sharded = shardfn.shard(MOVING["set"], ((1, 4),))
    gradient = in_shard_map(jax.grad(lambda x: (sharded(x) ** 2).sum()), True)
    with pytest.warns(UserWarning, match="check_vma=False"):
        assert_same(gradient(x), jax.grad(lambda x: (MOVING["set"](x) ** 2).sum())(x))


def test_settings_of_jax_hold_for_each_derivative():
    def precisions():
        text = jax.jit(jax.grad(total(SHARDED), (0, 1))).lower(X, W).as_text()
        return {word for word in ("DEFAULT", "HIGHEST") if word in text}

    assert precisions() == {"DEFAULT"}
    with jax.default_matmul_precision("highest"):
        assert precisions() == {"HIGHEST"}


@pytest.mark.parametrize("wrap", [lambda g: g, jax.jit], ids=["eager", "jit"])
def test_linear_function_is_transposed_without_a_derivative(wrap):
    def linear(x):
        return jnp.roll(x, 1, 0) * 2 + x[::-1]

    sharded = wrap(shardfn.shard(linear, ((8, 1),)))
    assert_same(jax.linear_transpose(sharded, X)(X), jax.linear_transpose(linear, X)(X))


def test_gradient_of_a_stencil_sends_its_halo():
    def laplacian(u):
        return jnp.pad(u[2:] - 2 * u[1:-1] + u[:-2], ((1, 1), (0, 0)))

    u = jax.ShapeDtypeStruct((4096, 512), "float32")
    gradient = jax.jit(jax.grad(total(shardfn.shard(laplacian, ((8, 1),)))))
    sent = read(gradient.lower(u).compile()).collectives
    assert {c.kind for c in sent} == {"collective-permute"}
    assert sum(c.bytes_sent for c in sent) == 4 * 512 * 4  # a row each way, forwards and back
    assert all(c.where.rpartition("/")[2].startswith("test_derivatives.py") for c in sent)


def test_masks_of_positions_and_arguments_are_not_handed_on():
    def forward(x, y):
        mask = jnp.arange(8) > 2
        return x * y, mask, x, jnp.sin(y)

    shape = jax.ShapeDtypeStruct((8,), "float32")
    residuals = Residuals(jax.make_jaxpr(forward)(shape, shape), 1)
    assert len(jax.eval_shape(residuals.forward, shape, shape)) == 2
    assert residuals.handed_on(["sine"], ["x", "y"]) == ["x", "sine"]
    mask, *others = residuals.whole(["x", "sine"])
    assert others == ["x", "sine"]
    assert mask.tolist() == [False] * 3 + [True] * 5


@pytest.mark.parametrize("wrap", [lambda g: g, jax.jit], ids=["eager", "jit"])
def test_gradient_runs_the_function_once_in_python(wrap):
    traces = []

    def counted(x):
        traces.append(1)
        return jnp.sin(x[1:])

    sharded = shardfn.shard(counted, ((8, 1),))
    for _ in range(2):
        assert_same(wrap(jax.grad(total(sharded)))(X), jax.grad(total(lambda x: jnp.sin(x[1:])))(X))
    assert len(traces) == 1


def test_movement_is_looked_at_only_where_it_may_matter():
    """Where every sharding is given and no row moves along a sharded dimension, the program stays as it is written."""

    def function(x):
        return jnp.pad(x[1:], ((0, 1), (0, 0)))

    def of(strategy):
        return answered_call(shardfn.plan(function, X, in_strategy=strategy)).posed.call.function

    along, across, searched = of(((8, 1),)), of(((1, 4),)), of(None)
    assert along.shifted and not along.unshifted
    assert across.unshifted and not across.shifted
    assert searched.shifted


@jax.custom_vjp
def _one_gradient(x, c):
    return jnp.sin(jnp.roll(x, 1)) * c, x.at[1:].add(x[:-1])


def _forward(x, c):
    if not x.perturbed or c.perturbed:
        raise TypeError("only the first argument has a gradient")
    return _one_gradient(x.value, c.value), (x.value, c.value)


def _backward(kept, cotangents):
    x, c = kept
    one, other = [jnp.zeros(t.shape) if isinstance(t, jax.custom_derivatives.SymbolicZero) else t for t in cotangents]
    return jnp.roll(one * c, -1) * jnp.cos(x) + other, None


_one_gradient.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.custom_jvp
def _one_tangent(x, c):
    return jnp.sin(x) * c, x.at[1:].add(x[:-1])


def _tangents(primals, tangents):
    (x, c), (dx, dc) = primals, tangents
    if not isinstance(dc, jax.custom_derivatives.SymbolicZero):
        raise TypeError("only the first argument has a tangent")
    return _one_tangent(x, c), (jnp.cos(x) * c * dx, dx.at[1:].add(dx[:-1]))


_one_tangent.defjvp(_tangents, symbolic_zeros=True)


@pytest.mark.parametrize("rule", [_one_gradient, _one_tangent])
@pytest.mark.parametrize("results", [1, 2])
def test_a_rule_that_refuses_gradients_of_some_arguments_is_asked_for_the_others_alone(rule, results):
    """As those of Equinox and Diffrax."""

    def f(x, c):
        one, *other = rule(x, jax.lax.stop_gradient(c))[:results]
        return sum(other, one).at[2:].add(x[:-2])

    x = jnp.arange(16.0) / 7
    sharded = shardfn.shard(f, ((8,), (1,)), device=jax.devices())
    for places in (0, (0, 1)):
        want, got = (jax.grad(lambda *xs, f=f: jnp.sin(f(*xs)).sum(), places)(x, jnp.cos(x)) for f in (f, sharded))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), got, want)


@pytest.mark.parametrize("devices", [4, 8])
def test_rotations_are_resharded_for_what_is_around_them(devices):
    """The results are sharded along columns, by an axis that shards rows too."""
    x = jnp.sin(jnp.arange(128.0)).reshape(16, 8)
    sharded = shardfn.shard(lambda x: jnp.gradient(x, axis=0), ((devices, 1),), ((1, devices // 2),),
                            device=jax.devices()[:devices])  # fmt: skip
    got = jax.jit(jax.grad(lambda x: jnp.sin(sharded(x)).sum()))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sin(jnp.gradient(x, axis=0)).sum())(x), 1e-5, 1e-5)


def test_what_does_not_move_leaves_no_residuals():
    """JAX divides by the spacing, a constant: nothing of the way is kept for its gradient."""
    sharded = shardfn.shard(lambda x: jnp.gradient(x, axis=0), ((8, 1),))
    made = jax.make_jaxpr(jax.linearize(sharded, jnp.ones((16, 8)))[1])(jnp.ones((16, 8)))
    assert not [c for c in made.consts if c.dtype == jnp.float32]

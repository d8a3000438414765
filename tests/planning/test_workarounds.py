"""Shardings for which XLA computes wrong values get a workaround and a diagnostic; others get neither."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.planning.workarounds.self_updates import selected_scatter
from tests.marks import some_slow


def drawn(seed, *shape):
    """Normal numbers without a compilation."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = drawn(0, 8, 8, 16, 16)
K = drawn(1, 8, 8, 3, 3)
MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
REPLICATED = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())


def conv(x, k):
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")


gradient_of_loss = jax.jit(jax.grad(lambda x, k: jnp.sin(conv(x, k)).sum(), argnums=(0, 1)))


CASES = [
    (((1, 1, 2, 1), (8, 1, 1, 1)), True),  # the kernel sharded over an axis of the image, others unused
    (((2, 1, 2, 1), (2, 2, 1, 1)), True),
    (((1, 1, 4, 1), (1, 1, 1, 1)), True),  # half of the devices without a shard of the image
    (((1, 1, 8, 1), (1, 1, 1, 1)), False),
    (((2, 1, 4, 1), (1, 1, 1, 1)), False),
    (((8, 1, 1, 1), (1, 1, 1, 1)), False),
]


@pytest.mark.parametrize(("strategy", "mended"), CASES)
def test_convolutions_with_cut_images_are_right_in_value_and_gradient(strategy, mended):
    sharded = shardfn.shard(conv, strategy)
    np.testing.assert_allclose(sharded(X, K), conv(X, K), rtol=1e-3, atol=1e-3)
    found = jax.grad(lambda x, k: jnp.sin(sharded(x, k)).sum(), argnums=(0, 1))(X, K)
    for mine, theirs in zip(found, gradient_of_loss(X, K), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3)
    said = [f for f in sharded.plan(X, K).diagnostics if "shardfn gathers" in f]
    assert bool(said) == mended
    if said:
        assert "test_workarounds.py" in said[0]


def test_a_step_with_its_gradient_inside_is_right_too():
    step = jax.grad(lambda x, k, n: jnp.sin(conv(x, k) * n).sum(), argnums=1)
    sharded = shardfn.shard(step, ((1, 1, 4, 1), None), static_argnums=2)
    np.testing.assert_allclose(sharded(X, K, 2), jax.jit(step)(X, K, 2), rtol=1e-3, atol=1e-3)


def test_a_mended_program_is_planned_on_a_grid_as_any_other():
    """Its constraints name no axis, so that they bring no mesh along: 512 devices were nine axes of two there."""
    shape = jax.ShapeDtypeStruct((4, 8, 256, 256), "float32"), jax.ShapeDtypeStruct((8, 8, 3, 3), "float32")
    made = shardfn.plan(conv, *shape, in_strategy=((1, 1, 16, 16), None), device="h100:512")
    assert any("shardfn gathers" in text for text in made.diagnostics)
    assert len(made.axes) <= 3


def test_what_is_taken_for_ops_that_are_right_names_the_search():
    shapes = jax.ShapeDtypeStruct((3, 8, 32, 32), "float32"), jax.ShapeDtypeStruct((8, 8, 3, 3), "float32")
    made = shardfn.plan(conv, *shapes, device="cpu:16", level=1)
    assert made.policy.startswith("search at level 1")
    assert "; replaced by a plan that avoids an XLA bug: " in made.policy


def test_a_pointwise_convolution_is_left_alone():
    kernel = K[:, :, :1, :1]
    sharded = shardfn.shard(conv, ((1, 1, 4, 1), (1, 1, 1, 1)))
    np.testing.assert_allclose(sharded(X, kernel), conv(X, kernel), rtol=1e-3, atol=1e-3)
    assert not [f for f in sharded.plan(X, kernel).diagnostics if "shardfn gathers" in f]


@pytest.mark.parametrize(("window", "stride", "mended"), [(3, 1, True), (4, 2, True), (3, 2, False), (2, 2, False)])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_the_gradient_of_max_pooling_is_right(window, stride, mended, padding):
    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, window, 1), (1, 1, stride, 1), padding)

    step = jax.grad(lambda x: jnp.sin(pooled(x)).sum())
    x = drawn(2, 4, 4, 24, 8)
    expected = jax.jit(step)(x)
    sharded = shardfn.shard(step, ((2, 1, 4, 1),))
    np.testing.assert_allclose(sharded(x), expected, rtol=1e-3, atol=1e-4)
    assert any("shardfn gathers" in f for f in sharded.plan(x).diagnostics) == mended
    batched = shardfn.shard(step, ((4, 1, 1, 2),))
    np.testing.assert_allclose(batched(x), expected, rtol=1e-3, atol=1e-4)
    assert not any("shardfn gathers" in f for f in batched.plan(x).diagnostics)


def test_workaround_of_one_kind_leaves_right_convolutions_as_they_are():
    def step(conv, x, k, rows):
        return conv(x, k), jnp.cumsum(rows[1:-1], 0)

    @jax.custom_vjp
    def own(x, k):
        return conv(x, k)

    own.defvjp(lambda x, k: (conv(x, k), (x, k)), lambda r, _: r)
    rows, strategy = jnp.arange(64.0).reshape(32, 2), ((1, 1, 8, 1), (1, 1, 1, 1))
    plan = shardfn.plan(conv, X, K, in_strategy=strategy)
    for f in (conv, own):
        both = shardfn.shard(functools.partial(step, f), (*strategy, (8, 1)))
        made = both.plan(X, K, rows)
        assert [text.split(" at ")[0] for text in made.diagnostics] == [
            "shardfn gathers the dimensions along which elements move"
        ]
        assert made.cost.bytes_sent == plan.cost.bytes_sent + 7 * rows.nbytes / 8
        for got, want in zip(both(X, K, rows), step(conv, X, K, rows), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def filtered(x, w):
    return jnp.fft.ifft(jnp.fft.fft(x) * w).real


SIGNAL = X[:2].reshape(16, 256), jnp.linspace(0, 1, 256).astype("complex64")


@pytest.mark.parametrize(
    ("strategy", "mended"),
    [(((1, 8), (1,)), True), (((1, 1), (8,)), True), (((4, 2), (1,)), True), (((8, 1), (1,)), False)],
)
def test_fourier_transforms_of_cut_arrays_run(strategy, mended):
    sharded = shardfn.shard(filtered, strategy)
    np.testing.assert_allclose(sharded(*SIGNAL), filtered(*SIGNAL), rtol=1e-3, atol=1e-3)
    said = [f for f in sharded.plan(*SIGNAL).diagnostics if "may stop when it runs" in f]
    assert bool(said) == mended
    assert all(
        "test_workarounds.py" in text and "shard one dimension that they do not transform" in text for text in said
    )


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 8), (2, 4, 8)])
@pytest.mark.parametrize("axis", [0, -1])
def test_gradients_of_fourier_transforms_from_outside_run(shape, axis):
    def loss(function):
        return lambda x: jnp.sum(jnp.sin(function(x)))

    def function(x):
        return jnp.fft.ifft(jnp.fft.fft(jnp.sin(x), axis=axis) * 2, axis=axis).real

    x = np.linspace(0, 1, math.prod(shape), dtype="float32").reshape(shape)
    last = (*(1 for _ in shape[1:]), 8)
    for entries in ((None, (last,)), ((last,), None), ((last,), (last,))):
        sharded = shardfn.shard(function, *entries)
        np.testing.assert_allclose(sharded(x), function(x), rtol=1e-3, atol=1e-3)
        got, want = jax.jit(jax.grad(loss(sharded)))(x), jax.grad(loss(function))(x)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_fourier_transform_of_one_element_in_each_shard_runs():
    def function(x):
        return jnp.fft.irfft(x + 1j * x, axis=0, n=1)

    x = np.linspace(0, 1, 4, dtype="float32").reshape(1, 4)
    sharded = shardfn.shard(function, ((1, 4),), ((1, 2),))
    np.testing.assert_allclose(sharded(x), function(x), atol=1e-6)
    assert not any("shardfn gathers" in text for text in sharded.plan(x).diagnostics)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_fourier_transforms_run_as_they_are_planned(level):
    np.testing.assert_allclose(shardfn.shard(filtered, level=level)(*SIGNAL), filtered(*SIGNAL), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(IS_BEFORE_JAX_0_12, reason="JAX 0.10 compiles it")
def test_resharding_that_ends_the_process_is_avoided_or_refused():
    def doubled(x):
        return 2 * x

    x, entries = np.ones((6, 16), "float32"), (((1, 2),), ((6, 1),))
    with pytest.raises(shardfn.ShardError, match=r"ends the process in JAX 0\.12"):
        shardfn.plan(doubled, x, in_strategy=entries[0], out_strategy=entries[1], device=jax.devices()[:6])
    with pytest.raises(shardfn.ShardError, match="leave one of the two dimensions unsharded"):
        shardfn.shard(doubled, *entries, device=jax.devices()[:6])(x)
    np.testing.assert_array_equal(shardfn.shard(doubled, ((1, 2),), ((3, 2),), device=jax.devices()[:6])(x), 2 * x)


def test_gradient_of_a_roll_from_outside_exchanges_rows():
    def curved(u):
        return jnp.roll(u, 1, 0) + jnp.roll(u, (-1, 2), (0, 1)) - 2 * u

    def loss(function):
        return lambda u: jnp.sum(function(u) ** 2)

    u = drawn(3, 32, 16)
    sharded = shardfn.shard(curved, ((8, 1),))
    gradient = jax.jit(jax.grad(loss(sharded)), in_shardings=sharded.plan(u).in_shardings)
    assert "all-gather" not in gradient.lower(u).compile().as_text()
    np.testing.assert_allclose(gradient(u), jax.grad(loss(curved))(u), rtol=1e-4, atol=1e-4)


def test_candidates_of_a_program_without_shared_halos_are_not_asked_of_one_with_them():
    def energy(image):
        p = jnp.pad(image, 1, mode="edge")
        m = p[:-2, 2:] + p[1:-1, 2:] + p[2:, 2:] - p[:-2, :-2]
        return jnp.sum(jnp.hypot(m, p[2:, 1:-1]) ** 2)

    plan = shardfn.plan(jax.grad(energy), jax.ShapeDtypeStruct((32, 16), "float32"), device="cpu:8", budget="fast")
    assert plan.inputs[0].shape == (32, 16)


def grouped(groups, dilation):
    def convolved(a, b):
        return jax.lax.conv_general_dilated(a, b, (1, 1), "SAME", rhs_dilation=(dilation,) * 2, feature_group_count=groups,
                                            dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip

    return convolved


@pytest.mark.parametrize(
    ("groups", "dilation", "level"),
    [(4, 1, 2), *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((2, 1, 0), (2, 1, 1), (2, 1, 2), (2, 2, 0), (2, 2, 1), (2, 2, 2), (4, 1, 0), (4, 1, 1))
    )],
)  # fmt: skip
def test_convolutions_in_groups_and_their_gradients(groups, dilation, level):
    """XLA stops, or ends the process, where shards do not divide the groups."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 16, 16, 4)).astype("f"), rng.normal(size=(3, 3, 4 // groups, 8)).astype("f")
    both = lambda a, b: jax.grad(lambda a, b: (grouped(groups, dilation)(a, b) ** 2).sum(), (0, 1))(a, b)  # noqa: E731
    for x, y in zip(shardfn.shard(both, level=level)(a, b), jax.jit(both)(a, b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_a_kernels_gradient_in_groups_is_not_added_up_for_idle_devices(batch):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(8, 8, 8, 4)).astype("f"), rng.normal(size=(3, 3, 2, 8)).astype("f")
    gradient = lambda a, b: jax.grad(lambda b: (grouped(2, 1)(a, b) ** 2).sum())(b)  # noqa: E731
    sharded = shardfn.shard(gradient, in_strategy=((batch, 1, 1, 1), (1, 1, 1, 1)))
    np.testing.assert_allclose(sharded(a, b), jax.jit(gradient)(a, b), rtol=1e-3, atol=1e-2)
    assert any("grouped convolutions" in f for f in sharded.plan(a, b).diagnostics) == (batch < 8)


REDUCTIONS = [
    (lambda x: jax.lax.reduce(x, np.int32(0), jax.lax.bitwise_xor, (0,)), True),
    (lambda x: jax.lax.reduce(x, np.int32(-1), jax.lax.bitwise_and, (0,)), True),
    (lambda x: jax.lax.reduce(x > 3, False, jax.lax.bitwise_xor, (0,)), True),
    (lambda x: jax.lax.reduce(x, np.int32(0), lambda a, b: a + b + a * b * 0, (0,)), True),
    (lambda x: (x > 3).all(0), False),
    (lambda x: x.sum(0), False),
    (lambda x: x.argmax(0), False),
]


@pytest.mark.parametrize(("reduction", "mended"), REDUCTIONS)
def test_reductions_that_xla_has_no_all_reduce_for(reduction, mended):
    """On CPU it stops with "Unsupported reduction computation" where a reduced dimension is sharded."""
    x = np.arange(128, dtype="int32").reshape(16, 8)
    looped = lambda x: jax.lax.map(reduction, jnp.stack([x, 2 * x]))[1]  # noqa: E731
    for f, strategy, is_sharded in ((reduction, (4, 2), True), (reduction, (1, 8), False), (looped, (2, 4), True)):
        sharded = shardfn.shard(f, (strategy,))
        np.testing.assert_array_equal(sharded(x), jax.jit(f)(x))
        said = [text for text in sharded.plan(x).diagnostics if "shardfn gathers" in text]
        assert bool(said) == (mended and is_sharded)
        assert all(
            text.startswith("shardfn gathers the reduced dimensions at ") and "test_workarounds.py" in text
            for text in said
        )
    assert not shardfn.plan(reduction, x, in_strategy=((4, 1),), device="tpu-v5e:2x2").diagnostics


HIDDEN = {
    "a Fourier transform": (lambda x: jnp.fft.fft(x).real, (1, 8)),
    "a pad": (lambda x: jax.lax.pad(x, 0.0, [(0, 0, 0), (-1, 2, 1)]), (1, 8)),
    "a scatter": (lambda x: jnp.zeros((16, 16)).at[jnp.arange(13) * 5 % 16].add(x[:13]), (8, 1)),
    "movement": (lambda x: jnp.cumsum(x[1:-1]), (8, 1)),
    "an update": (lambda x: (2 * x).at[0].set(1.0), (8, 1)),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_wrong_op_in_a_function_with_rules_of_its_own_is_right_and_keeps_its_rules(what):
    function, strategy = HIDDEN[what]
    own = jax.custom_vjp(function)
    own.defvjp(lambda x: (function(x), x), lambda x, g: (0.5 * x,))
    x = jnp.cos(jnp.arange(256.0)).reshape(16, 16)
    sharded = shardfn.shard(own, (strategy,))
    np.testing.assert_allclose(sharded(x), function(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(sharded(x)))(x), 0.5 * x, rtol=1e-4)
    inside = shardfn.shard(jax.grad(lambda x: jnp.sum(own(x))), (strategy,))
    np.testing.assert_allclose(inside(x), 0.5 * x, rtol=1e-4)


def test_wrong_op_out_of_reach_is_refused():
    def function(x):
        return jnp.cumsum(x[1:-1])

    own = jax.custom_batching.custom_vmap(function)
    own.def_vmap(lambda size, is_batched, x: (jax.vmap(function)(x), True))
    with pytest.raises(shardfn.ShardError, match="an op inside a `custom_vmap_call` might be computed wrongly"):
        shardfn.plan(own, jax.ShapeDtypeStruct((16, 16), "float32"), in_strategy=((8, 1),))


def poisson(b):
    def applied(v):
        return 3 * v - jnp.pad(v[1:], ((0, 1), (0, 0))) - jnp.pad(v[:-1], ((1, 0), (0, 0)))

    return jax.scipy.sparse.linalg.cg(applied, b, maxiter=30)[0]


@jax.custom_jvp
def pairs(x, n):
    return x.at[1:].add(x[:-1] ** n), n + 1


@pairs.defjvp
def _(primals, tangents):
    (x, n), (t, _) = primals, tangents
    return pairs(x, n), (
        t.at[1:].add(3 * x[:-1] * t[:-1]),
        np.zeros((), jax.dtypes.float0),
    )  # no derivative, but the rule


@jax.custom_vjp
def clipped(x, n):
    return x.at[1:-1].add(0.5 * (x[2:] - x[:-2])) * n


clipped.defvjp(lambda x, n: (clipped(x, n), (x, n)), lambda r, g: (jnp.clip(g, -0.1, 0.1) * r[0].at[0].set(r[1]), None))


RULES = {
    "a linear solve": poisson,
    "a jvp": lambda x: pairs(x, 2)[0],
    "a vjp": lambda x: clipped(x, 2),
}


@pytest.mark.parametrize("strategy", [(8, 1), (2, 1)])
@pytest.mark.parametrize("what", RULES)
def test_stencil_in_a_function_with_rules_of_its_own_sends_its_halo(what, strategy):
    function, x = RULES[what], jnp.linspace(-1, 1, 24 * 8).reshape(24, 8)
    sharded = shardfn.shard(function, (strategy,))
    assert "all-gather" not in {c.kind for c in sharded.plan(x).collectives}
    assert not any("gathers" in text for text in sharded.plan(x).diagnostics)

    def gradient(f):
        return jax.grad(lambda x: jnp.sum(f(x) * jnp.cos(x)))

    want = jax.jit(gradient(function))(x)
    np.testing.assert_allclose(sharded(x), jax.jit(function)(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(shardfn.shard(gradient(function), (strategy,))(x), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradient(sharded)(x), want, rtol=1e-4, atol=1e-4)


NHWC = ("NHWC", "HWIO", "NHWC")


def conv2(x, k, **options):
    return jax.lax.conv_general_dilated(x, k, options.pop("strides", (1, 1)), "SAME", dimension_numbers=NHWC, **options)


def kernels_gradient(x, k):
    return jax.grad(lambda k: jnp.mean(conv2(x, k) ** 2))(k)


def in_batch_groups(x, k):
    return conv2(x, k, batch_group_count=4)


def strided_pointwise(x, k):
    return conv2(x, k, strides=(2, 1))


WRONG = [
    (conv2, (8, 8, 8, 8), (3, 3, 8, 8), ((1, 1, 1, 2), (3, 1, 1, 1)), 6),  # the kernel sharded along its window
    (conv2, (8, 8, 8, 8), (3, 3, 8, 8), ((1, 2, 1, 1), (3, 1, 1, 1)), 6),
    (
        kernels_gradient,
        (2, 16, 16, 8),
        (3, 3, 8, 16),
        ((1, 2, 1, 2), (1, 1, 1, 1)),
        4,
    ),  # an axis idle in the result's gradient
    (kernels_gradient, (2, 16, 16, 8), (3, 3, 8, 16), ((1, 1, 4, 2), (1, 1, 1, 1)), 8),
    (in_batch_groups, (8, 8, 8, 4), (3, 3, 4, 16), ((1, 1, 1, 2), (1, 1, 1, 4)), 4),
    (strided_pointwise, (8, 24, 4, 8), (1, 1, 8, 8), ((1, 2, 1, 1), (1, 1, 4, 1)), 4),
]


@pytest.mark.parametrize(("function", "image", "kernel", "strategy", "devices"), WRONG)
def test_more_layouts_that_xla_mistakes_are_mended(function, image, kernel, strategy, devices):
    rng = np.random.default_rng(0)
    x, k = rng.normal(size=image).astype("f"), rng.normal(size=kernel).astype("f")
    sharded = shardfn.shard(function, strategy, device=jax.devices()[:devices])
    np.testing.assert_allclose(sharded(x, k), jax.jit(function)(x, k), rtol=1e-3, atol=1e-3)
    assert any("shardfn gathers" in text for text in sharded.plan(x, k).diagnostics)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
def test_what_is_searched_avoids_them(level):
    """Groups of batches, where XLA ended the process; kernels sharded along their window on six devices."""
    rng = np.random.default_rng(0)
    step = lambda x, k: jax.grad(lambda k: jnp.mean(conv2(x, k).mean((1, 2)) ** 2))(k)  # noqa: E731
    for function, shapes, devices in (
        (in_batch_groups, ((8, 8, 8, 4), (3, 3, 4, 16)), 8),
        (step, ((1, 32, 32, 32), (3, 3, 32, 32)), 6),
    ):
        x, k = (rng.normal(size=shape).astype("f") for shape in shapes)
        sharded = shardfn.shard(function, level=level, device=jax.devices()[:devices])
        np.testing.assert_allclose(sharded(x, k), jax.jit(function)(x, k), rtol=1e-3, atol=1e-3)


def pooled(x, initial, combine):
    return jax.lax.reduce_window(x, initial, combine, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def morphological_gradient(x):
    return pooled(x, -jnp.inf, jax.lax.max) - pooled(x, jnp.inf, jax.lax.min)


def in_a_loop(x):
    return jax.lax.scan(lambda x, _: (morphological_gradient(x), None), x, None, length=2)[0]


def padded_twice(x):
    return [jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)), constant_values=value) for value in (0.0, 7.0)]


def convolved_and_pooled(x):
    return conv2(x, jnp.ones((3, 3, 4, 4))), pooled(x, -jnp.inf, jax.lax.max)


def pooled_gradient(x):
    return jax.grad(lambda x: jnp.sum(pooled(x, -jnp.inf, jax.lax.max) * pooled(x, 0.0, jax.lax.add)))(x)


def running(x):
    return jax.lax.cummax(x, axis=1), jax.lax.cummin(x, axis=1), jnp.cumsum(x, 1), jnp.cumprod(x, 1)


LONG = (convolved_and_pooled, running)
OVER_ONE_ARRAY = [morphological_gradient, in_a_loop, padded_twice, convolved_and_pooled, pooled_gradient, running]


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        *((function, {"in_strategy": ((1, 8, 1, 1),)}) for function in OVER_ONE_ARRAY),
        *(pytest.param(function, {"level": level}, marks=[] if i % 2 == level and function not in LONG else pytest.mark.slow)
          for i, function in enumerate(OVER_ONE_ARRAY) for level in (0, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_windows_over_one_array_keep_their_own_padding(function, asked):
    """Before JAX 0.12 the partitioner gave one the padding of another, with zero, one and infinity the same."""
    x = drawn(0, 2, 32, 32, 4)
    for mine, theirs in zip(
        *map(jax.tree.leaves, (shardfn.shard(function, **asked)(x), jax.jit(function)(x))), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3)


def test_windows_over_arrays_of_their_own_are_left_alone():
    x = drawn(0, 2, 32, 32, 4)
    text = lambda function: shardfn.shard(function, ((1, 8, 1, 1),)).lower(x).as_text()  # noqa: E731
    kept = "stablehlo.optimization_barrier"
    assert kept not in text(lambda x: pooled(pooled(x, 0.0, jax.lax.add), -jnp.inf, jax.lax.max))
    assert kept not in text(lambda x: jax.grad(lambda x: jnp.sum((x[:, 1:] - x[:, :-1]) ** 2))(x))
    assert (kept in text(morphological_gradient)) == IS_BEFORE_JAX_0_12


def test_lookup_along_uneven_shards_keeps_its_batch_sharded():
    def looked_up(x, i):
        return jnp.take_along_axis(jnp.cumsum(x[:, 1:-1], 1), i, 1)

    x, i = drawn(5, 8, 16), jnp.asarray(np.random.default_rng(6).integers(0, 14, (8, 14)))
    sharded = shardfn.shard(looked_up, ((2, 4), (2, 1)))
    assert sharded.plan(x, i).cost.bytes_sent == 3 / 4 * x.nbytes / 2
    np.testing.assert_allclose(sharded(x, i), looked_up(x, i), rtol=1e-5, atol=1e-5)


def test_what_if_of_a_plan_with_a_workaround_applies_right():
    """The workarounds are those of the new shardings, in its values, its cost and its verification alike."""

    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

    step = jax.grad(lambda x: (pooled(x) ** 2).sum())
    x = drawn(0, 8, 16, 16, 4)
    expected = jax.jit(step)(x)
    for first, second in ((8, 1, 1, 1), (1, 2, 1, 1)), ((1, 2, 1, 1), (8, 1, 1, 1)), ((1, 2, 1, 1), (1, 1, 4, 1)):
        made = shardfn.shard(step, (first,)).plan(x).what_if({"x": second})
        direct = shardfn.shard(step, (second,)).plan(x)
        assert made.cost == direct.cost
        applied = jax.jit(made.apply(step), in_shardings=made.in_shardings, out_shardings=made.out_shardings)
        np.testing.assert_allclose(applied(x), expected, rtol=1e-5, atol=1e-5)


POOLS = {
    "max": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 3), (1, 1), "SAME"),
    "min": lambda x: jax.lax.reduce_window(x, jnp.inf, jax.lax.min, (4, 2), (2, 1), "VALID"),
}


@pytest.mark.parametrize("strategy", [(8, 1), (2, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("pool", some_slow(POOLS, {"max"}))
def test_gradient_of_overlapping_pooling_outside_the_sharded_function_is_right(pool, strategy):
    x = drawn(0, 16, 16)
    weights = drawn(1, *pool(x).shape)
    sharded = shardfn.shard(pool, (strategy,))

    def gradient(f):
        return jax.grad(lambda x: (f(x) * weights).sum())

    expected = jax.jit(gradient(pool))(x)
    np.testing.assert_allclose(gradient(sharded)(x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(gradient(sharded))(x), expected, rtol=1e-5, atol=1e-5)
    batch = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(gradient(sharded))(batch)[1], expected, rtol=1e-5, atol=1e-5)
    tangents = (jax.jvp(f, (x,), (2 * x,))[1] for f in (sharded, jax.jit(pool)))
    np.testing.assert_allclose(*tangents, rtol=1e-5, atol=1e-5)
    made = sharded.plan(x)
    applied = jax.jit(made.apply(pool), in_shardings=made.in_shardings, out_shardings=made.out_shardings)
    np.testing.assert_allclose(gradient(applied)(x), expected, rtol=1e-5, atol=1e-5)
    assert sharded(x).sharding.spec == made.out_shardings.spec, "values take no constraint"


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_associative_scan_and_its_gradient_are_right_as_searched(reverse):
    """`associative_scan` interleaves by `lax.pad`, and its last levels have fewer rows than there are devices."""

    def loss(x):
        found = jax.lax.associative_scan(lambda a, b: 0.9 * a + jnp.tanh(b), x, reverse=reverse)
        return (found**2).sum(), found

    x = drawn(3, 16, 4)
    step = jax.value_and_grad(loss, has_aux=True)
    for mine, theirs in zip(*map(jax.tree.leaves, (shardfn.shard(step)(x), jax.jit(step)(x))), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [(0, 1, 1), (1, 0, 1), (-1, 0, 0), (2, 1, 2), (1, -1, 0)])
@pytest.mark.parametrize("rows", [2, 8])
def test_padding_of_a_replicated_dimension_into_shards_is_right_in_value_and_gradient(rows, padding):
    """Without the workaround XLA refuses the program, or computes wrong values."""
    size = rows + padding[0] + padding[1] + (rows - 1) * padding[2]
    x = drawn(4, rows, 4)

    def padded(x):
        return jax.lax.pad(x, 0.0, (padding, (0, 0, 0)))

    ways = next(n for n in (8, 4, 2, 1) if size % n == 0)
    sharded = shardfn.shard(padded, ((1, 1),), ((ways, 1),))
    np.testing.assert_allclose(sharded(x), padded(x))
    found = jax.grad(lambda x: jnp.sin(sharded(x)).sum())(x)
    expected = jax.jit(jax.grad(lambda x: jnp.sin(padded(x)).sum()))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


SLICES = {
    "array and slice": lambda x: (x, x[:-1]),
    "two slices": lambda x: (x[:-2], x[:-1]),
    "a slice of a slice": lambda x: (x, x[:-1][:-1]),
    "fewer shards": lambda x: (x, x[:16]),
    "another end": lambda x: (x, x[1:]),
    "the slice alone": lambda x: (x[:-1],),
}


@pytest.mark.parametrize("parts", SLICES.values(), ids=SLICES)
def test_array_and_its_first_elements_gathered_from_one_shard_compile(parts):
    """Without the workaround XLA refuses the program."""

    def sums(x):
        gathered = [jax.lax.with_sharding_constraint(part, REPLICATED) for part in parts(x)]
        return [jnp.cumsum(jnp.sin(part)) for part in gathered]

    x = drawn(9, 32)
    sharded = shardfn.shard(sums, ((8,),), device=MESH)
    for mine, theirs in zip(sharded(x), sums(x), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_padding_between_elements_and_cropping_in_front_does_not_end_the_process():
    x = drawn(7, 8, 4)
    padded = lambda x: jax.lax.pad(x, 0.0, ((-1, 2, 1), (0, 0, 0)))  # noqa: E731
    sharded = shardfn.shard(padded, ((8, 1),), ((8, 1),))
    np.testing.assert_allclose(sharded(x), padded(x))


@pytest.mark.parametrize("initial", [0.0, -jnp.inf])
@pytest.mark.parametrize(("edges", "between"), [((0, 0), 1), ((1, 1), 1), ((1, 3), 2), ((-1, 1), 0)])
def test_windows_over_padding_between_elements_of_a_replicated_dimension_are_right(edges, between, initial):
    """Without the workaround XLA ends the process, or computes wrong values."""
    combine = jax.lax.max if initial else jax.lax.add

    def windowed(x):
        padding = (edges, (0, 0))
        return jax.lax.reduce_window(x, initial, combine, (3, 1), (1, 1), padding, (between + 1, 1))

    x = drawn(8, 6, 4)
    ways = next(n for n in (8, 4, 3, 2, 1) if windowed(x).shape[0] % n == 0)
    sharded = shardfn.shard(windowed, ((1, 1),), ((ways, 1),), device=jax.devices()[: 6 if ways == 3 else 8])
    np.testing.assert_allclose(sharded(x), windowed(x), rtol=1e-5)
    assert any("padded between" in text for text in sharded.plan(x).diagnostics) == (ways > 1)


PADDINGS = {
    "in front": (3, 0, 0),
    "cropped": (-1, 2, 0),
    "shifted": (1, -1, 0),
    "between": (0, 1, 1),
    "all": (2, -1, 2),
}
TRANSPOSED = {
    "strided slice": lambda x: x[1::3],
    "reversed slice": lambda x: x[::-2],
    "odd slice": lambda x: x[:-1:2],
    **{f"pad {name}": (lambda x, p=p: jax.lax.pad(x, x[0, 0], (p, (0, 0, 0)))) for name, p in PADDINGS.items()},
    "mean pool": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (2, 1), ((5, 1), (0, 0))),
    "dilated pool": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME", (2, 1), (2, 1)),
    "cumprod": lambda x: jnp.cumprod(x, axis=0),
    "cummax": lambda x: jax.lax.cummax(x, reverse=True),
    "cumlogsumexp": jax.lax.cumlogsumexp,
    "associative_scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "recomputed": lambda x: jax.checkpoint(lambda x: jnp.sin(x[::2]))(x),
    "in a loop": lambda x: jax.lax.scan(lambda c, _: (jnp.tile(c[::2], (2, 1)), c[1::2]), x, None, length=2)[1],
}


@pytest.mark.parametrize("function", some_slow(TRANSPOSED, {"cumlogsumexp", "cummax", "associative_scan"}))
def test_gradients_outside_whose_transposes_pad_between_elements_or_crop_are_right(function):
    """JAX writes the transpose of a strided slice, a pad or a strided window as a pad that XLA may compute wrongly."""
    x = 1 + 0.1 * np.random.default_rng(5).normal(size=(16, 2)).astype("float32")
    shape = jax.eval_shape(function, x).shape
    weights = np.cos(np.arange(np.prod(shape), dtype="float32")).reshape(shape)

    def gradient(f):
        return jax.grad(lambda x: (f(x) ** 2 * weights).sum())

    def second(f):
        return lambda x: jax.jvp(gradient(f), (x,), (weights.sum() * jnp.sin(x),))[1]

    sharded = shardfn.shard(function, ((8, 1),))
    value, *expected = jax.jit(lambda x: (function(x), gradient(function)(x), second(function)(x)))(x)
    np.testing.assert_allclose(sharded(x), value, rtol=1e-5, atol=1e-5)
    both = jax.jit(lambda x: (gradient(sharded)(x), second(sharded)(x)))(x)
    for mine, theirs in zip((*both, gradient(sharded)(x)), (*expected, expected[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["max", "associative_scan"])
def test_gradients_outside_on_the_mesh_around_are_right(name, axis_type):
    function = {**POOLS, **TRANSPOSED}[name]
    x = drawn(6, 16, 16)
    gradient = lambda f: jax.grad(lambda x: (jnp.sin(f(x)) ** 2).sum())  # noqa: E731
    expected = jax.jit(gradient(function))(x)
    with jax.set_mesh(jax.make_mesh((8,), ("a",), (axis_type,))):
        sharded = shardfn.shard(function, (jax.P("a", None),))
        np.testing.assert_allclose(jax.jit(gradient(sharded))(x), expected, rtol=1e-4, atol=1e-4)


def test_limit_that_only_a_candidate_without_the_bug_keeps_is_not_refused():
    def step(k, x):
        grouped = lambda k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=4)  # noqa: E731
        return k - 0.1 * jax.grad(lambda k: jnp.square(jax.nn.relu(grouped(k))).sum())(k)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 4, 3, 3), (8, 16, 16, 16))]
    options = {"device": "cpu:8", "level": "memory", "budget": 500}
    limit = shardfn.plan(step, *arrays, **options).cost.memory.peak
    assert shardfn.plan(step, *arrays, **options, memory_limit=limit).cost.memory.peak <= limit


def test_slices_of_a_scan_need_no_clamp():
    # Their places count the iterations; no equation of the user's stands for them.
    def loss(w, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()

    made = shardfn.shard(jax.grad(loss), ((8, 1, 1), (1, 1)), ((8, 1, 1),)).plan(
        jnp.ones((8, 16, 16)), jnp.ones((4, 16))
    )
    assert not made.diagnostics


def test_only_slices_of_the_shapes_that_xla_gets_wrong_are_clamped():
    def parts(x, y, i):
        return jax.lax.dynamic_slice_in_dim(x, i, 8), jax.lax.dynamic_slice_in_dim(y, i, 8)

    made = shardfn.shard(parts, ((8, 1), (1, 1), ()), ((8, 1), (1, 1)))
    x, y = jnp.arange(32.0).reshape(16, 2), jnp.arange(36.0).reshape(12, 3)
    (note,) = made.plan(x, y, 14).diagnostics
    assert "dynamic_slice of (16, 2) to (8, 2)" in note and "(12, 3)" not in note
    assert all(map(np.array_equal, made(x, y, 14), parts(x, y, 14)))


def test_gradient_outside_of_what_moves_to_another_dimension_over_axes_of_2_and_3():
    """The resharding back would end the process in JAX 0.12."""
    x = np.linspace(-1.0, 1.0, 6, dtype=np.float32)

    def twice(x):
        rows = jnp.stack([x, x], 1)
        return jnp.concatenate([rows, rows], 0)

    sharded = shardfn.shard(twice, ((6,),), ((1, 2),), device=jax.devices()[:6])
    want, got = (jax.jit(jax.grad(lambda x, f=f: jnp.sin(f(x)).sum()))(x) for f in (twice, sharded))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_array_equal(jax.jvp(sharded, (x,), (x,))[1], twice(x))


def test_kernel_made_of_one_row_is_not_summed_over_axes_that_replicate_it():
    """XLA drops the reshapes between slice and pad, so that the convolution's kernel would be sharded."""

    def function(x, y):
        kernel = jnp.zeros((4,), x.dtype).at[jnp.array([0])].set(x[:1])
        return jnp.correlate(kernel, jnp.ones(5)), y.at[3:].set(0.0)

    x, y = jnp.arange(1.0, 5.0), jnp.ones(48)
    sharded = shardfn.shard(function, ((2,), (6,)), device=jax.devices()[:6])
    for got, want in zip(sharded(x, y), function(x, y), strict=True):
        np.testing.assert_allclose(got, want)


@pytest.mark.parametrize(
    ("batch", "summed", "result"),
    [("a", "bc", "ab"), ("a", "bc", "cb"), ("b", "ac", "bc"), ("c", "ab", "ba"), ("a", "bc", "bc")],
)
def test_batched_matmul_scattered_over_other_axes_than_it_sums_over_is_right(batch, summed, result):
    layout = shardfn.mindspore.Layout((2, 2, 2), ("a", "b", "c"))
    entry = layout(tuple(batch), tuple(summed))
    x, y = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)
    product = lambda x, y: jnp.einsum("ij,ij->i", x, y)  # noqa: E731
    sharded = shardfn.shard(product, (entry, entry), (layout(tuple(result)),), device=jax.devices()[:8])
    np.testing.assert_allclose(sharded(x, y), product(x, y), rtol=1e-4, atol=1e-4)
    noted = any("batch dimensions of the results of the matmuls" in text for text in sharded.plan(x, y).diagnostics)
    assert noted == (summed != result)


def test_sum_of_batched_matmuls_of_differently_sharded_rows_is_right():
    x, y = np.random.default_rng(0).normal(size=(2, 64, 12)).astype(np.float32)
    squares = lambda x, y: jnp.einsum("ij,ij->i", x, x) + jnp.einsum("ij,ij->i", y, y)  # noqa: E731
    sharded = shardfn.shard(squares, ((4, 1), (2, 4)), device=jax.devices()[:8])
    np.testing.assert_allclose(sharded(x, y), squares(x, y), rtol=1e-4)


def test_a_movement_for_which_nothing_is_gathered_has_no_note():
    """The gradient of a wrapped stencil pads zeros, which every device has."""

    def stencil(x):
        p = jnp.pad(x, 1, mode="wrap")
        return sum(p[i : i + 64, j : j + 64] for i in range(3) for j in range(3))

    gradient = jax.grad(lambda x: jnp.sum(stencil(x) ** 2))
    x = jnp.arange(64 * 64.0).reshape(64, 64) % 7
    sharded = shardfn.shard(gradient, ((8, 1),))
    made = sharded.plan(x)
    assert {c.kind for c in made.collectives} == {"collective-permute"} and not made.diagnostics
    np.testing.assert_allclose(sharded(x), gradient(x))


def inner_rows(update):
    return lambda x: getattr(x.at[1:-1], update)(x[2:] + x[:-2])


UPDATED = {
    **{update: lambda x, u=update: inner_rows(u)(x)[:, None] for update in ("set", "add", "multiply", "min", "max")},
    "reshaped before": lambda x: inner_rows("set")(x.reshape(16, 4, 2)).sum(2),
    "sorted": lambda x: jnp.sort(inner_rows("set")((2 * x).reshape(16, 4, 2)), 0),
    "two dimensions": lambda x: x.at[5:14, 2:6].set(jnp.sin(x[5:14, 2:6])[::-1])[:, :, None],
    "windows": lambda x: jax.lax.reduce_window(
        x.at[3:8].set(x[2:7])[None], -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME"
    ),
    "convolution": lambda x: jax.lax.conv_general_dilated(
        inner_rows("set")(x)[:, None], jnp.ones((2, 1, 3)), (1,), "SAME"
    ),
}
"""Updates of rows by rows of the same array, which is reshaped: on CPU, `jax.jit` computes them wrongly, on one device too."""


@pytest.mark.parametrize(
    ("name", "columns", "devices"), [*((name, 1, 4) for name in UPDATED), ("set", 1, 1), ("set", 2, 4)]
)
def test_update_made_of_the_array_it_goes_into_is_right(name, columns, devices):
    x = drawn(0, 16, 8)
    with jax.disable_jit():
        want = UPDATED[name](x)
    sharded = shardfn.shard(UPDATED[name], ((1, columns),), device=jax.devices()[:devices])
    np.testing.assert_allclose(sharded(x), want, rtol=1e-4, atol=1e-5)


def test_gradients_of_an_update_made_of_the_array_it_goes_into_are_right():
    def loss(function):
        return lambda x: (function(x) ** 2).sum()

    x = drawn(0, 16, 8)
    with jax.disable_jit():
        want = jax.grad(loss(UPDATED["set"]))(x)
    options = {"in_strategy": ((1, 2),), "device": jax.devices()[:4]}
    outside = jax.grad(loss(shardfn.shard(UPDATED["set"], **options)))(x)
    inside = shardfn.shard(jax.grad(loss(UPDATED["set"])), **options)(x)
    np.testing.assert_allclose(outside, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(inside, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
@pytest.mark.parametrize("place", [-3, 0, 9, 12, 16])
@pytest.mark.parametrize("combine", ["scatter", "scatter_add", "scatter_mul"])
def test_scatter_of_one_window_is_the_select_that_takes_its_place(combine, place, mode):
    if mode == "promise_in_bounds" and not 0 <= place <= 12:
        pytest.skip("outside")
    numbers = jax.lax.ScatterDimensionNumbers((0, 1), (), (0,))

    def scattered(x, index, update):
        return getattr(jax.lax, combine)(x, index, update, numbers, mode=mode)

    args = drawn(0, 16, 8), jnp.asarray([place]), drawn(1, 4, 8)
    (eqn,) = [e for e in jax.make_jaxpr(scattered)(*args).jaxpr.eqns if e.primitive.name.startswith("scatter")]
    np.testing.assert_allclose(selected_scatter(eqn, args), scattered(*args), rtol=1e-6)
    with jax.enable_x64(True):  # where Python's numbers have another type than the index
        np.testing.assert_allclose(selected_scatter(eqn, args), scattered(*args), rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "size", "low", "stride", "dilation"),
    [(24, 2, 1, 2, 1), (18, 3, 2, 3, 1), (24, 4, 2, 4, 1), (18, 2, 1, 3, 2)],
)
@pytest.mark.parametrize("devices", [2, 3])
def test_windows_that_leave_the_last_rows_unread_have_sharded_results(rows, size, low, stride, dilation, devices):
    def pooled(x):
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (size,), (stride,), [(low, 0)], None, (dilation,))

    x = drawn(0, rows)
    sharded = shardfn.shard(pooled, ((1,),), ((devices,),), device=jax.devices()[:devices])
    np.testing.assert_allclose(sharded(x), pooled(x), rtol=1e-6)
    derivative = jax.jit(jax.grad(lambda x: jnp.sin(sharded(x)).sum()))
    np.testing.assert_allclose(derivative(x), jax.grad(lambda x: jnp.sin(pooled(x)).sum())(x), atol=1e-6)


@pytest.mark.parametrize("rows", [15, 1, 4])
def test_a_rotation_that_is_written_as_slices_is_resharded_for_it(rows):
    def function(x):
        return x - jnp.concatenate([x[rows:], x[:rows]])

    x = jnp.sin(jnp.arange(64.0)).reshape(16, 4)
    sharded = shardfn.shard(function, ((4, 1),), ((1, 2),), device=jax.devices()[:4])
    np.testing.assert_array_equal(sharded(x), function(x))
    got, want = (jax.grad(lambda x: jnp.sin(one(x)).sum()) for one in (sharded, function))  # noqa: B023
    np.testing.assert_allclose(jax.jit(got)(x), want(x), 1e-5, 1e-5)


def test_rotations_that_are_written_in_two_ways_are_resharded_for_it():
    def function(x):
        return x * jnp.concatenate([x[3:], x[:3]]) + jnp.roll(x, 1, 1)

    x = jnp.sin(jnp.arange(256.0)).reshape(8, 4, 8)
    sharded = shardfn.shard(function, ((8, 1, 1),), ((1, 2, 2),))
    np.testing.assert_allclose(sharded(x), function(x), 1e-6, 1e-6)

"""Ops on windows as ops on shifted values: convolutions of each feature by itself, and pooling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn
from shardfn.movement import with_shifts


def _draw(*shape, dtype="float32"):
    random = np.random.default_rng(sum(shape))
    if dtype == "complex64":
        return jnp.asarray(random.normal(size=shape) + 1j * random.normal(size=shape), dtype)
    return jnp.asarray(3 * random.normal(size=shape), dtype)


def _grid(x, kernel, padding="SAME", **options):
    """A batch of grids of one feature."""
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=names, **options)


def _sequence(x, kernel, padding="SAME", **options):
    """Each feature of a sequence by itself."""
    groups = {"feature_group_count": x.shape[-1], "dimension_numbers": ("NWC", "WIO", "NWC")}
    return lax.conv_general_dilated(x, kernel, (1,), padding, **groups, **options)


def _is_convolved(function, *args):
    return "conv_general_dilated" in str(jax.make_jaxpr(with_shifts(function))(*args))


GRIDS = {
    "same": lambda x, k: _grid(x, k),
    "full": lambda x, k: _grid(x, k, [(2, 2), (4, 4)]),
    "dilated": lambda x, k: _grid(x, k, "SAME", rhs_dilation=(2, 3)),
    "reversed kernel": lambda x, k: _grid(x, k[::-1]),
    "behind a pad": lambda x, k: _grid(jnp.pad(x, ((0, 0), (1, 1), (2, 2), (0, 0)), mode="reflect"), k, "VALID"),
    "in front of a crop": lambda x, k: _grid(x, k, [(2, 2), (4, 4)])[:, 1:-1, 2:-2],
    "greatest of ghost cells": lambda x, k: lax.reduce_window(
        jnp.pad(x, ((0, 0), (1, 1), (1, 0), (0, 0)), mode="edge"),
        -jnp.inf,
        lax.max,
        (1, 3, 2, 1),
        (1, 1, 1, 1),
        "VALID",
    ),
    "sums of ghost cells": lambda x, k: lax.reduce_window(
        jnp.pad(x, ((0, 0), (1, 1), (2, 2), (0, 0)), mode="wrap"), 0.0, lax.add, (1, 3, 5, 1), (1, 1, 1, 1), "VALID"
    ),
    "least of ghost cells": lambda x, k: lax.reduce_window(
        jnp.pad(x, ((0, 0), (1, 0), (0, 1), (0, 0))), jnp.inf, lax.min, (1, 2, 2, 1), (1, 1, 1, 1), "VALID"
    ),
}


def _compare(function, args, strategies):
    sharded = shardfn.shard(function, strategies, device=jax.devices())
    np.testing.assert_allclose(sharded(*args), function(*args), 1e-4, 1e-4)
    want, got = (jax.grad(lambda *args, f=f: jnp.sin(f(*args)).sum(), (0, 1))(*args) for f in (function, sharded))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, 1e-3, 1e-3)


@pytest.mark.parametrize("strategy", [(1, 8, 1, 1), (1, 2, 4, 1), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("function", GRIDS.values(), ids=GRIDS)
def test_windows_of_grids_have_the_values_and_gradients_of_the_program(function, strategy):
    _compare(function, (_draw(2, 16, 24, 1), _draw(3, 5, 1, 1)), (strategy, (1, 1, 1, 1)))


@pytest.mark.parametrize("strategy", [(1, 8, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("padding", ["SAME", [(4, 0)], [(3, 3)]], ids=str)
def test_windows_of_sequences_have_the_values_and_gradients_of_the_program(padding, strategy):
    _compare(lambda x, k: _sequence(x, k, padding), (_draw(2, 32, 4), _draw(5, 1, 4)), (strategy, (1, 1, 1)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "complex64"])
def test_a_convolution_of_any_dtype_has_the_values_of_the_program(dtype):
    x, kernel = _draw(1, 16, 2, dtype=dtype), _draw(3, 1, 2, dtype=dtype)
    assert not _is_convolved(lambda x, k: _sequence(x, k) + 0 * x, x, kernel)
    sharded = shardfn.shard(_sequence, ((1, 8, 1), (1, 1, 1)), device=jax.devices())
    np.testing.assert_allclose(
        sharded(x, kernel).astype("complex64"), _sequence(x, kernel).astype("complex64"), 1e-2, 0.1
    )


def test_the_gradient_of_a_kernel_in_half_precision_is_summed_in_single():
    x, kernel = jnp.ones((1, 4096, 2), "bfloat16"), jnp.ones((3, 1, 2), "bfloat16")
    want, got = (
        jax.grad(lambda k, f=f: f(x, k).astype("float32").sum())(kernel) for f in (_sequence, with_shifts(_sequence))
    )
    np.testing.assert_array_equal(got, want)


def test_a_sum_in_half_precision_is_rounded_once():
    x = jnp.asarray([256.0, 1.0, 1.0, 1.0, -256.0, 0.0, 0.0, 0.0], "bfloat16")

    def function(x):
        return jnp.convolve(x, jnp.ones(5, "bfloat16"), "same")

    np.testing.assert_array_equal(with_shifts(function)(x), function(x))


def test_a_short_convolution_along_a_sharded_sequence_sends_its_halo():
    """As in state-space models: four taps of each feature, of this step and of those before."""

    def function(x, taps):
        x = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        return jax.nn.silu(lax.conv_general_dilated(
            x, taps, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=16
        ))  # fmt: skip

    x, taps = _draw(2, 64, 16), _draw(4, 1, 16)
    for strategy, halo in (((1, 8, 1), 2 * 3 * 16 * 4), ((2, 2, 2), 3 * 8 * 4)):
        sharded = shardfn.shard(function, (strategy, (1, 1, strategy[2])), device=jax.devices())
        assert sharded.plan(x, taps).cost.bytes_sent == halo
        np.testing.assert_allclose(sharded(x, taps), function(x, taps), 1e-5, 1e-5)


@pytest.mark.parametrize("function", [
    lambda x, k: lax.conv(x, k, (1, 1), "SAME"),  # mixes features
    lambda x, k: lax.conv(x[:, :1], k[:1, :1], (2, 1), "SAME"),  # strides
    lambda x, k: lax.conv_general_dilated(x[:, :1], k[:1, :1], (1, 1), [(1, 1)] * 2, lhs_dilation=(2, 1)),
    lambda x, k: lax.conv(x[:, :1], jnp.ones((1, 1, 8, 8)), (1, 1), "SAME"),  # many elements
    lambda x, k: lax.conv(x[:, :1], k[:1, :1], (1, 1), "VALID"),  # fewer rows
    lambda x, k: lax.conv_general_dilated(x[:, :1], k[:1, :1], (1, 1), [(-1, 3)] * 2),
    lambda x, k: lax.conv_general_dilated(x, k[:, :1], (1, 1), "SAME", feature_group_count=3),  # of a network
])  # fmt: skip
def test_other_convolutions_stay_as_they_are(function):
    assert _is_convolved(function, _draw(1, 3, 16, 16), _draw(3, 3, 3, 3))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3b11fnuz"])
def test_numbers_without_an_infinity_stay_as_they_are(name):
    def pooled(x):
        return lax.reduce_window(jnp.pad(x, 1, mode="edge"), np.asarray(-8, name), lax.max, (3,), (1,), "VALID")

    def convolved(x):
        return jnp.convolve(x, jnp.ones(3, name), "same")

    x = jnp.arange(16.0).astype(name)
    for function in (pooled, convolved):
        np.testing.assert_array_equal(with_shifts(function)(x).astype("float32"), function(x).astype("float32"))


@pytest.mark.parametrize("combine", [lax.max, lax.min])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "float16"])
def test_pooling_pads_with_what_changes_nothing(combine, dtype):
    x = (_draw(16, 4) > 0).astype(dtype)
    ends = {"float16": (-jnp.inf, jnp.inf), "bool": (False, True)}.get(dtype) or (
        jnp.iinfo(dtype).min,
        jnp.iinfo(dtype).max,
    )
    initial = np.asarray(ends[combine is lax.min], dtype)

    def function(x):
        return lax.reduce_window(jnp.pad(x, 1, mode="edge"), initial, combine, (3, 5), (1, 1), [(0, 0), (1, 1)])

    assert "reduce_window" not in str(jax.make_jaxpr(with_shifts(function))(x))
    np.testing.assert_array_equal(with_shifts(function)(x), function(x))


@pytest.mark.parametrize("combine", [lax.max, lax.min])
def test_of_equal_elements_of_a_window_the_first_has_the_gradient(combine):
    def function(x):
        start = -jnp.inf if combine is lax.max else jnp.inf
        return lax.reduce_window(jnp.pad(x, ((1, 1), (0, 0))), start, combine, (3, 3), (1, 1), [(0, 0), (1, 1)])

    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, (16, 8)), "float32")
    weights = _draw(16, 8)
    want, got = (jax.grad(lambda x, f=f: (f(x) * weights).sum())(x) for f in (function, with_shifts(function)))
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


def test_a_window_with_a_nan_is_one():
    def function(x):
        return lax.reduce_window(jnp.pad(x, 1), -jnp.inf, lax.max, (3,), (1,), "VALID")

    x = jnp.arange(8.0).at[3].set(jnp.nan)
    np.testing.assert_array_equal(with_shifts(function)(x), function(x))

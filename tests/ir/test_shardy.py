"""Modules that the MLIR bindings do not read in full."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn import shard

INNER = shard(lambda x: x + 1, ((8, 1),))
INNER_3D = shard(lambda x: x + 1, ((8, 1, 1),))


def _fourier_block(x, weights, bypass):
    modes = jnp.fft.rfft(INNER_3D(x), axis=1)[:, : weights.shape[0]]
    mixed = jnp.einsum("bmi,mio->bmo", modes, weights * 2j)
    return jax.nn.gelu(jnp.fft.irfft(mixed, n=x.shape[1], axis=1) + x @ bypass)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: INNER(x) * 2j,
        lambda x: INNER(x) * np.array([[1j, 2]], np.complex64),
        lambda x: jax.lax.reduce(INNER(x), np.complex64(1), lambda a, b: a * b + 1j, (1,)),
    ],
    ids=["scalar", "array", "inside a reduction"],
)
def test_shard_complex_constant_beside_an_inner_mesh_gives_the_value(function):
    x = jnp.arange(16, dtype=jnp.complex64).reshape(8, 2)
    np.testing.assert_allclose(shard(function)(x), function(x), rtol=1e-5)


@pytest.mark.slow
def test_shard_fourier_neural_operator_gives_value_and_gradient():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (8, 16, 4))
    weights = jax.random.normal(keys[1], (5, 4, 4), jnp.complex64)
    bypass = jax.random.normal(keys[2], (4, 4))

    def loss(x, weights, bypass):
        return _fourier_block(x, weights, bypass).sum()

    found, expected = (f(x, weights, bypass) for f in (shard(jax.value_and_grad(loss, 2)), jax.value_and_grad(loss, 2)))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-3)


def test_an_op_inside_a_library_function_has_the_line_of_its_call():
    def function(x):
        return jnp.fft.fft2(x)

    plan = shard(function, ((8, 1),), device=jax.devices()).plan(jnp.ones((16, 16), "complex64"))
    line = function.__code__.co_firstlineno + 1
    assert [one.where.rpartition(":")[2] for one in plan.collectives] == [str(line)]

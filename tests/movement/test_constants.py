"""Indices that are computed while tracing are those that XLA computes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn
from shardfn.movement import with_shifts
from shardfn.movement.constants import folded

EDGES = np.array([0, 1, 2, 7, 100, -1, -7, -128, 127], "int32")
OPS = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min, "lt": lax.lt, "ge": lax.ge, "eq": lax.eq,
    "and": lax.bitwise_and, "or": lax.bitwise_or, "rem": lax.rem, "clamp": lambda x, y: lax.clamp(y, x, y),
    "neg": lambda x, y: lax.neg(x), "sign": lambda x, y: lax.sign(x), "not": lambda x, y: lax.bitwise_not(x),
    "convert_element_type": lambda x, y: lax.convert_element_type(x, "int16"),
    "select_n": lambda x, y: lax.select(np.arange(81) % 2 == 0, x, y),
    "broadcast_in_dim": lambda x, y: lax.broadcast_in_dim(x, (2, 81), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
@pytest.mark.parametrize("name", OPS)
def test_folded_integers_are_those_of_xla(name, dtype):
    x, y = (part.astype(dtype) for part in (np.repeat(EDGES, 9), np.tile(EDGES, 9)))
    y = np.where(y == 0, 3, y).astype(dtype) if name == "rem" else y
    closed = jax.make_jaxpr(OPS[name])(x, y)
    (eqn,) = closed.eqns
    known = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, x, y], strict=True))
    found = folded(eqn, [np.asarray(known[v]) for v in eqn.invars])
    assert found is not None
    np.testing.assert_array_equal(found, jax.jit(OPS[name])(x, y))


@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_places_of_floats_and_remainders_by_zero_are_those_of_xla(mode):
    places, zeros = np.array([1e30, -1e30, np.nan, np.inf, 2.7, 0.0], "float32"), np.zeros(3, "int32")

    def added(x):
        x = x.at[lax.convert_element_type(places, "int32")].add(1.0, mode=mode)
        return x.at[lax.rem(jnp.arange(3), lax.convert_element_type(zeros, "int32"))].add(x[1:4], mode=mode)

    x = jnp.arange(8.0)
    with warnings.catch_warnings(action="ignore"):  # JAX 0.12 converts with NumPy, which warns
        warnings.filterwarnings("error", module="shardfn")
        np.testing.assert_array_equal(jax.jit(with_shifts(added))(x), jax.jit(added)(x))


def test_rows_of_keys_are_padded_by_a_key():
    def rows(u):
        keys = jax.random.wrap_key_data(jnp.stack([u, u], 1).astype(jnp.uint32))
        return jax.random.key_data(jnp.concatenate([keys[3][None], keys[:5]]))

    u = jnp.arange(16.0)
    assert (shardfn.shard(rows, in_strategy=((8,),))(u) == rows(u)).all()

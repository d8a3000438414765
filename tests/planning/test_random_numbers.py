"""Random numbers that every device draws alike have a diagnostic; others have none."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import train

X, KEY = jnp.ones((16, 8)), jax.random.key(0)
ALIKE = "every device draws the same random numbers"


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def loss(params, x, key):
    return (dropout(x @ params["w"], key) ** 2).mean()


def plain(params, x, key):
    return ((x @ params["w"]) ** 2).mean()


@pytest.mark.parametrize(
    ("function", "mode", "is_told"),
    [
        (loss, "data_parallel", True),
        (loss, "hybrid_parallel", True),
        (loss, "auto_parallel", False),
        (loss, "stand_alone", False),
        (plain, "data_parallel", False),
    ],
)
def test_dropout_in_a_step(function, mode, is_told):
    step = train.step(function, optax.sgd(0.1), mode=mode)
    params = {"w": jnp.ones((8, 8))}
    state = step.init(params) if mode in ("data_parallel", "hybrid_parallel") else step.init(params, X, KEY)
    told = [text for text in step.plan(state, X, KEY).diagnostics if ALIKE in text]
    assert bool(told) == is_told and all("fix: in train.step draw them for the global batch" in text for text in told)


def in_shard_map(function, key_spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), key_spec), out_specs=P("data"))
    return shardfn.shard(mapped(function), device=mesh)


@pytest.mark.parametrize(
    ("function", "key", "spec", "is_told"),
    [
        (dropout, KEY, P(), True),
        (lambda x, key: dropout(x, jax.random.fold_in(key, jax.lax.axis_index("data"))), KEY, P(), False),
        (lambda x, keys: dropout(x, keys[0]), jax.random.split(KEY, 8), P("data"), False),
        (lambda x, key: x, KEY, P(), False),
    ],
)
def test_a_shard_map_of_the_user(function, key, spec, is_told):
    made = in_shard_map(function, spec).plan(X, key)
    assert any(ALIKE in text for text in made.diagnostics) == is_told

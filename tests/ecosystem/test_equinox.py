"""Equinox: modules are pytrees with functions among their leaves."""

import equinox as eqx
import jax
import jax.numpy as jnp

from tests.ecosystem.rows import Row, check, integers, normal, table

KEY = jax.random.key(0)


def batched(module):
    return lambda module, x: jax.vmap(module)(x)


def training_step():
    model = eqx.nn.MLP(16, 8, 64, 2, key=KEY)

    def step(model, x, y):
        grads = eqx.filter_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: None if g is None else -0.1 * g, grads))

    return Row(step, (model, normal(64, 16), normal(64, 8)), batch=(1, 2), gradient=False)


def sequential():
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(16, 64, key=KEY), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Linear(64, 8, key=KEY)]
    )
    return Row(lambda m, x: jax.vmap(m)(x), (model, normal(64, 16)), batch=(1,))


def module(make, *args):
    return lambda: Row(lambda m, *xs: jax.vmap(m)(*xs), (make(), *args), batch=tuple(range(1, 1 + len(args))))


def recurrent():
    cell = eqx.nn.GRUCell(8, 32, key=KEY)

    def run(cell, xs):  # xs [batch, time, features]
        return jax.vmap(lambda x: jax.lax.scan(lambda h, at: (cell(at, h), None), jnp.zeros(32), x)[0])(xs)

    return Row(run, (cell, normal(16, 12, 8)), batch=(1,))


def tuple_of_modules():
    layers = tuple(eqx.nn.Linear(16, 16, key=k) for k in jax.random.split(KEY, 3))

    def run(layers, x):
        for layer in layers:
            x = jnp.tanh(jax.vmap(layer)(x))
        return x

    return Row(run, (layers, normal(32, 16)), batch=(1,))


def error_if():
    def run(x):
        return eqx.error_if(x, jnp.any(x > 1e6), "too large") * 2

    return Row(run, (normal(64, 16),), gradient=False)


ROWS = {
    "MLP": module(lambda: eqx.nn.MLP(16, 8, 64, 2, key=KEY), normal(64, 16)),
    "training step": training_step,
    "Sequential": sequential,
    "tuple of modules": tuple_of_modules,
    "Conv2d": module(lambda: eqx.nn.Conv2d(4, 16, 3, padding=1, key=KEY), normal(16, 4, 16, 16)),
    "LayerNorm": module(lambda: eqx.nn.LayerNorm(32), normal(64, 32)),
    "MultiheadAttention": module(
        lambda: eqx.nn.MultiheadAttention(4, 32, key=KEY), normal(8, 16, 32), normal(8, 16, 32), normal(8, 16, 32)
    ),
    "Embedding": module(lambda: eqx.nn.Embedding(128, 32, key=KEY), integers(128, 64)),
    "GRUCell": recurrent,
    "error_if": error_if,
}


@table(__name__, ROWS)
def test_equinox_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

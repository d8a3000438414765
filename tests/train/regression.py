"""A small regression problem that every test of training uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def mean_square(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def start():
    """Parameters of two layers, 16 x 32 x 8."""
    k1, k2 = jax.random.split(jax.random.key(0))
    return {
        "w1": 0.3 * jax.random.normal(k1, (16, 32)),
        "b1": jnp.zeros(32),
        "w2": 0.3 * jax.random.normal(k2, (32, 8)),
    }


def data(batch=32):
    k1, k2 = jax.random.split(jax.random.key(1))
    return jax.random.normal(k1, (batch, 16)), jax.random.normal(k2, (batch, 8))


@pytest.fixture(scope="session")
def alone():
    """The losses of 20 steps on one device, by plain JAX and optax."""
    import optax

    cache = {}

    def losses(optimizer=None, steps=20, name="adamw"):
        if (name, steps) not in cache:
            opt = optimizer or optax.adamw(1e-2)
            params, found = start(), []
            state = opt.init(params)

            @jax.jit
            def one(params, state, x, y):
                value, grads = jax.value_and_grad(mean_square)(params, x, y)
                updates, state = opt.update(grads, state, params)
                return optax.apply_updates(params, updates), state, value

            for _ in range(steps):
                params, state, value = one(params, state, *data())
                found.append(float(value))
            cache[name, steps] = np.array(found)
        return cache[name, steps]

    return losses


def run(step, *, make=start, batch=None, steps=20):
    """The losses of a run, and its last state."""
    batch = batch or data()
    state, found = step.init(make, *batch), []
    for _ in range(steps):
        state, value = step(state, *batch)
        found.append(float(value[0] if isinstance(value, tuple) else value))
    return np.array(found), state

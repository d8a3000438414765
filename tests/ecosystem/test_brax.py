"""Brax: batches of environments."""

import jax
import jax.numpy as jnp
from brax import envs
from brax.training.acme import running_statistics

from tests.ecosystem.rows import Row, check, normal, table, uniform


def step(name):
    def make():
        env = envs.get_environment(name, backend="positional")
        state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 8))
        return Row(
            lambda state, action: jax.vmap(env.step)(state, action).obs,
            (state, uniform(8, env.action_size)), batch=(0, 1), gradient=False, tolerance=5e-3,
        )  # fmt: skip

    return make


def statistics():
    return Row(
        running_statistics.update,
        (running_statistics.init_state(jnp.zeros(8)), normal(64, 8)),
        batch=(1,),
        gradient=False,
    )


ROWS = {"inverted pendulum": step("inverted_pendulum"), "running statistics": statistics}


@table(__name__, ROWS)
def test_brax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

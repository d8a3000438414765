"""Pgx: board games."""

import jax
import pgx

from tests.ecosystem.rows import Row, check, integers, table


def moves(name, steps=3):
    def make():
        env = pgx.make(name)
        state = jax.jit(jax.vmap(env.init))(jax.random.split(jax.random.PRNGKey(0), 8))

        def run(state, actions):
            for action in actions:
                state = jax.vmap(env.step)(state, action, jax.random.split(jax.random.PRNGKey(1), action.shape[0]))
            return state.observation, state.rewards

        return Row(run, (state, integers(7, steps, 8)), batch=(0,), gradient=False)

    return make


ROWS = {"connect four": moves("connect_four"), "2048": moves("2048")}


@table(__name__, ROWS)
def test_pgx_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

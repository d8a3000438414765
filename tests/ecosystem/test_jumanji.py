"""Jumanji: environments for planning and games."""

import jax
import jumanji

from tests.ecosystem.rows import Row, check, integers, table


def episode(name, steps=3):
    def make():
        env = jumanji.make(name)
        state, _ = jax.vmap(env.reset)(jax.random.split(jax.random.PRNGKey(0), 8))

        def run(state, actions):
            def one(state, at):
                state, timestep = jax.vmap(env.step)(state, at)
                return state, timestep.reward

            return jax.lax.scan(one, state, actions)[1]

        return Row(run, (state, integers(2, steps, 8)), batch=(0,), gradient=False)

    return make


ROWS = {"Game2048": episode("Game2048-v1"), "Snake": episode("Snake-v1")}


@table(__name__, ROWS)
def test_jumanji_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

"""evosax: evolution strategies."""

import jax
import jax.numpy as jnp
from evosax.algorithms import CMA_ES, Open_ES

from tests.ecosystem.rows import Row, check, table


def generation(make):
    def build():
        strategy = make(population_size=16, solution=jnp.zeros(8))
        params = strategy.default_params
        state = strategy.init(jax.random.key(0), jnp.zeros(8), params)

        def run(state, key):
            ask, tell = jax.random.split(key)
            population, state = strategy.ask(ask, state, params)
            state, _ = strategy.tell(tell, population, jnp.sum(population**2, -1), state, params)
            return state.mean

        return Row(run, (state, jax.random.key(1)), batch=(), gradient=False, tolerance=5e-3)

    return build


ROWS = {"CMA-ES": generation(CMA_ES), "OpenAI-ES": generation(Open_ES)}


@table(__name__, ROWS)
def test_evosax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

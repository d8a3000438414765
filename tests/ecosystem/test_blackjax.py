"""BlackJAX: sampling kernels."""

import blackjax
import jax
import jax.numpy as jnp

from tests.ecosystem.rows import Row, check, normal, table


def kernel(make):
    def build():
        def run(key, x, data):
            def logdensity(w):
                return -0.5 * jnp.sum((data @ w - 1.0) ** 2) / data.shape[0]

            sampler = make(logdensity)
            state, _ = sampler.step(key, sampler.init(x))
            return state.position

        return Row(run, (jax.random.key(0), normal(8), normal(64, 8)), batch=(2,), gradient=False, tolerance=2e-3)

    return build


def smc():
    def run(key, particles):
        weights = jax.nn.softmax(-0.5 * jnp.sum(particles**2, -1))
        return particles[blackjax.smc.resampling.systematic(key, weights, particles.shape[0])]

    return Row(run, (jax.random.key(0), normal(64, 4)), batch=(1,), gradient=False)


ROWS = {
    "HMC": kernel(lambda f: blackjax.hmc(f, 0.01, jnp.ones(8), 4)),
    "NUTS": kernel(lambda f: blackjax.nuts(f, 0.1, jnp.ones(8), max_num_doublings=3)),
    "MALA": kernel(lambda f: blackjax.mala(f, 0.01)),
    "systematic resampling": smc,
}


@table(__name__, ROWS)
def test_blackjax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

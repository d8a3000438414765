"""TensorFlow Probability on JAX."""

import jax
import jax.numpy as jnp
from tensorflow_probability.substrates import jax as tfp

from tests.ecosystem.rows import Row, check, normal, table, uniform

tfd = tfp.distributions


def gaussian_process():
    def run(x, y, scale):
        kernel = tfp.math.psd_kernels.ExponentiatedQuadratic(length_scale=jnp.exp(scale))
        return tfd.GaussianProcess(kernel, x, observation_noise_variance=0.5).log_prob(y)

    return Row(run, (normal(32, 2), normal(32), normal()), batch=(0, 1), tolerance=1e-3)


def kalman():
    def run(obs, transition):
        model = tfd.LinearGaussianStateSpaceModel(
            num_timesteps=8,
            transition_matrix=transition,
            transition_noise=tfd.MultivariateNormalDiag(scale_diag=jnp.ones(2)),
            observation_matrix=jnp.ones((1, 2)),
            observation_noise=tfd.MultivariateNormalDiag(scale_diag=jnp.ones(1)),
            initial_state_prior=tfd.MultivariateNormalDiag(scale_diag=jnp.ones(2)),
        )
        return model.log_prob(obs)

    return Row(run, (normal(16, 8, 1), 0.5 * normal(2, 2)), tolerance=1e-3)


ROWS = {
    "GaussianProcess log_prob": gaussian_process,
    "LinearGaussianStateSpaceModel log_prob": kalman,
    "Dirichlet log_prob": lambda: Row(
        lambda x, c: tfd.Dirichlet(jnp.exp(c)).log_prob(jax.nn.softmax(x)), (normal(64, 8), normal(8)), tolerance=1e-3
    ),
    "betainc": lambda: Row(
        lambda a, x: tfp.math.betainc(1 + a, 2.0, x), (uniform(64), uniform(64, seed=1)), batch=(0, 1), gradient=False
    ),
}


@table(__name__, ROWS)
def test_tfp_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

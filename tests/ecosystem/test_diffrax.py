"""diffrax: differential equations."""

import diffrax
import jax
import jax.numpy as jnp

from tests.ecosystem.rows import Row, check, normal, table


def solve(solver, steps=None, adjoint=None):
    def make():
        def run(y0, w):
            result = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w)), solver, 0.0, 1.0, 0.1, y0, w,
                stepsize_controller=steps or diffrax.ConstantStepSize(), max_steps=32,
                adjoint=adjoint or diffrax.RecursiveCheckpointAdjoint(),
            )  # fmt: skip
            return result.ys

        return Row(run, (normal(16, 8), normal(8, 8) / 3), tolerance=1e-3)

    return make


def stochastic():
    def run(y0, key):
        path = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, y0.shape, key)
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, _: -y), diffrax.ControlTerm(lambda t, y, _: diffrax_noise(y), path)
        )
        return diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.05, y0, throw=False).ys

    return Row(run, (normal(16), jax.random.key(0)), gradient=False, tolerance=1e-3)


def diffrax_noise(y):
    import lineax

    return lineax.DiagonalLinearOperator(0.1 * jnp.ones(y.shape))


ROWS = {
    "Tsit5, constant steps": solve(diffrax.Tsit5()),
    "Euler": solve(diffrax.Euler()),
    "Dopri5, adaptive steps": solve(diffrax.Dopri5(), diffrax.PIDController(1e-3, 1e-5)),
    "stochastic": stochastic,
}


@table(__name__, ROWS)
def test_diffrax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

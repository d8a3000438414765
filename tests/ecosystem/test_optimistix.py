"""optimistix: minimisation, least squares, roots, fixed points."""

import jax.numpy as jnp
import optimistix as optx

from tests.ecosystem.rows import Row, check, normal, table


def least_squares(solver):
    def make():
        def run(x, y, w):
            return optx.least_squares(lambda w, _: x @ w - y, solver, w, max_steps=16, throw=False).value

        return Row(run, (normal(64, 8), normal(64), normal(8)), batch=(0, 1), gradient=False, tolerance=2e-3)

    return make


def minimise():
    def run(x, w):
        return optx.minimise(
            lambda w, _: jnp.mean((jnp.tanh(x @ w) - 0.5) ** 2), optx.BFGS(1e-4, 1e-4), w, max_steps=8, throw=False
        ).value

    return Row(run, (normal(64, 8), normal(8)), gradient=False, tolerance=5e-3)


def fixed_point():
    def run(a, b):
        return optx.fixed_point(
            lambda y, _: jnp.tanh(a @ y * 0.1 + b), optx.FixedPointIteration(1e-5, 1e-5), b, max_steps=64, throw=False
        ).value

    return Row(run, (normal(16, 16), normal(16)), tolerance=1e-3)


def newton():
    def run(a, y):
        return optx.root_find(
            lambda y, _: y + 0.1 * jnp.sin(y) - a, optx.Newton(1e-5, 1e-5), y, max_steps=16, throw=False
        ).value

    return Row(run, (normal(16), normal(16)), batch=(0, 1), gradient=False, tolerance=1e-3)


ROWS = {
    "least_squares, Levenberg-Marquardt": least_squares(optx.LevenbergMarquardt(1e-4, 1e-4)),
    "least_squares, Gauss-Newton": least_squares(optx.GaussNewton(1e-4, 1e-4)),
    "minimise, BFGS": minimise,
    "fixed_point": fixed_point,
    "root_find, Newton": newton,
}


@table(__name__, ROWS)
def test_optimistix_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

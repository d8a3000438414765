"""jaxopt: solvers that are differentiated implicitly."""

import jax.numpy as jnp
import jaxopt

from tests.ecosystem.rows import Row, check, normal, table


def ridge(w, x, y):
    return jnp.mean((x @ w - y) ** 2) + 0.1 * jnp.sum(w**2)


def solver(make_solver):
    def make():
        def run(w, x, y):
            return make_solver(ridge).run(w, x, y).params

        return Row(run, (jnp.zeros(8), normal(64, 8), normal(64)), batch=(1, 2), tolerance=2e-3)

    return make


def projected():
    def run(w, x, y):
        return jaxopt.ProjectedGradient(ridge, jaxopt.projection.projection_simplex, maxiter=20).run(w, x=x, y=y).params

    return Row(run, (jnp.ones(8) / 8, normal(64, 8), normal(64)), batch=(1, 2), gradient=False, tolerance=2e-3)


ROWS = {
    "GradientDescent": solver(lambda f: jaxopt.GradientDescent(f, maxiter=20)),
    "LBFGS": solver(lambda f: jaxopt.LBFGS(f, maxiter=10)),
    "ProjectedGradient": projected,
}


@table(__name__, ROWS)
def test_jaxopt_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

"""lineax: linear solves."""

import jax
import lineax as lx

from tests.ecosystem.rows import Row, check, normal, table


def solve(solver, make_operator):
    def make():
        def run(a, b):
            return lx.linear_solve(make_operator(a), b, solver, throw=False).value

        a = normal(32, 32)
        return Row(run, (a @ a.T / 32 + jax.numpy.eye(32), normal(32)), tolerance=2e-3)

    return make


def checked():
    def run(a, b):
        return lx.linear_solve(lx.MatrixLinearOperator(a), b).value

    return Row(run, (normal(32, 32) + 8 * jax.numpy.eye(32), normal(32)), gradient=False, tolerance=2e-3)


POSITIVE = lx.positive_semidefinite_tag
ROWS = {
    "LU": solve(lx.LU(), lx.MatrixLinearOperator),
    "Cholesky": solve(lx.Cholesky(), lambda a: lx.MatrixLinearOperator(a, POSITIVE)),
    "QR": solve(lx.QR(), lx.MatrixLinearOperator),
    "CG": solve(lx.CG(1e-5, 1e-5), lambda a: lx.MatrixLinearOperator(a, POSITIVE)),
    "GMRES": solve(lx.GMRES(1e-5, 1e-5), lx.MatrixLinearOperator),
    "with error checks": checked,
}


@table(__name__, ROWS)
def test_lineax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

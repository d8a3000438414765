"""tinygp: Gaussian processes."""

import jax.numpy as jnp
from tinygp import GaussianProcess, kernels

from tests.ecosystem.rows import Row, check, normal, table, uniform


def density():
    def run(x, y, scale):
        return GaussianProcess(jnp.exp(scale) * kernels.Matern32(1.5), x, diag=0.5).log_probability(y)

    return Row(run, (jnp.sort(uniform(32)) * 8, normal(32), normal()), batch=(0, 1), tolerance=1e-3)


def conditioned():
    def run(x, y, at):
        return GaussianProcess(kernels.ExpSquared(1.0), x, diag=0.5).condition(y, at).gp.mean

    return Row(run, (uniform(32) * 8, normal(32), uniform(16) * 8), batch=(0, 1, 2), tolerance=1e-3)


def quasiseparable():
    def run(x, y):
        return GaussianProcess(kernels.quasisep.Matern32(1.5), x, diag=0.5).log_probability(y)

    return Row(run, (jnp.sort(uniform(32)) * 8, normal(32)), batch=(1,), gradient=False, tolerance=1e-3)


ROWS = {"log_probability": density, "condition": conditioned, "quasiseparable": quasiseparable}


@table(__name__, ROWS)
def test_tinygp_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

"""GPJax: posteriors of Gaussian processes."""

import gpjax as gpx

from tests.ecosystem.rows import Row, check, normal, table, uniform


def objective():
    def run(x, y):
        prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF())
        posterior = prior * gpx.likelihoods.Gaussian()
        return gpx.objectives.conjugate_mll(posterior, gpx.Dataset(X=x, y=y))

    return Row(run, (8 * uniform(32, 1), normal(32, 1)), batch=(0, 1), tolerance=1e-3)


ROWS = {"marginal log likelihood": objective}


@table(__name__, ROWS)
def test_gpjax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

"""GPJax: posteriors of Gaussian processes."""

import inspect

import gpjax as gpx

from tests.ecosystem.rows import Row, check, normal, table, uniform

# GPJax before 1.0 wants the number of data points.
COUNT = (
    {"num_datapoints": 32}
    if "num_datapoints" in inspect.signature(gpx.likelihoods.Gaussian.__init__).parameters
    else {}
)


def objective():
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF())
    posterior = prior * gpx.likelihoods.Gaussian(
        **COUNT
    )  # not in `run`: GPJax before 1.0 checks values when it makes it

    def run(x, y):
        return gpx.objectives.conjugate_mll(posterior, gpx.Dataset(X=x, y=y))

    return Row(run, (8 * uniform(32, 1), normal(32, 1)), batch=(0, 1), tolerance=1e-3)


ROWS = {"marginal log likelihood": objective}


@table(__name__, ROWS)
def test_gpjax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

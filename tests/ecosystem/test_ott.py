"""OTT: optimal transport."""

from ott.geometry import costs, geometry, pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn
from ott.tools import soft_sort

from tests.ecosystem.rows import Row, check, normal, table, uniform


def sinkhorn_cost(**options):
    def make():
        def run(x, y):
            problem = linear_problem.LinearProblem(pointcloud.PointCloud(x, y, epsilon=0.5, **options))
            return sinkhorn.Sinkhorn(max_iterations=20, min_iterations=20, inner_iterations=10)(problem).reg_ot_cost

        return Row(run, (normal(32, 4), normal(32, 4, seed=1)), tolerance=1e-3)

    return make


def matrix():
    def run(c):
        problem = linear_problem.LinearProblem(geometry.Geometry(c, epsilon=0.5))
        return sinkhorn.Sinkhorn(max_iterations=20, min_iterations=20, inner_iterations=10)(problem).matrix

    return Row(run, (uniform(32, 32),), tolerance=1e-3)


ROWS = {
    "Sinkhorn, points": sinkhorn_cost(),
    "Sinkhorn, cosine": sinkhorn_cost(cost_fn=costs.Cosine()),
    "Sinkhorn, cost matrix": matrix,
    "soft sort": lambda: Row(
        lambda x: soft_sort.sort(x, axis=-1, epsilon=0.1), (normal(16, 12),), gradient=False, tolerance=1e-3
    ),
}


@table(__name__, ROWS)
def test_ott_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

"""jaxlie: Lie groups."""

import jax
import jaxlie

from tests.ecosystem.rows import Row, check, normal, table

ROWS = {
    "SE3 exp and apply": lambda: Row(
        lambda t, p: jax.vmap(lambda t, p: jaxlie.SE3.exp(t) @ p)(t, p), (normal(64, 6), normal(64, 3)), batch=(0, 1)
    ),
    "SO3 log": lambda: Row(lambda t: jaxlie.SO3.exp(t).log(), (0.3 * normal(64, 3),), tolerance=1e-3),
}


@table(__name__, ROWS)
def test_jaxlie_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

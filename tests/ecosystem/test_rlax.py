"""RLax: losses of reinforcement learning."""

import jax
import rlax

from tests.ecosystem.rows import Row, check, integers, normal, table, uniform

ROWS = {
    "vmapped Q learning": lambda: Row(
        lambda q, a, r, d, qn: jax.vmap(rlax.q_learning)(q, a, r, d, qn),
        (normal(64, 4), integers(4, 64), normal(64), uniform(64), normal(64, 4, seed=1)), batch=(0, 1, 2, 3, 4),
    ),
    "lambda returns": lambda: Row(
        lambda r, d, v: jax.vmap(rlax.lambda_returns, (0, 0, 0, None))(r, d, v, 0.9),
        (normal(16, 12), uniform(16, 12), normal(16, 12, seed=1)), batch=(0, 1, 2),
    ),
    "V-trace": lambda: Row(
        lambda v, vn, r, d, rho: jax.vmap(rlax.vtrace)(v, vn, r, d, rho),
        (normal(16, 12), normal(16, 12, seed=1), normal(16, 12, seed=2), uniform(16, 12), uniform(16, 12, seed=1)),
        batch=(0, 1, 2, 3, 4),
    ),
}  # fmt: skip


@table(__name__, ROWS)
def test_rlax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

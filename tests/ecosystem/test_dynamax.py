"""Dynamax: state space models."""

import jax
from dynamax.hidden_markov_model import hmm_filter, hmm_posterior_mode, parallel_hmm_smoother

from tests.ecosystem.rows import Row, check, normal, table


def arguments():
    return jax.nn.softmax(normal(4)), jax.nn.softmax(normal(4, 4)), normal(32, 4)


ROWS = {
    "hmm_filter": lambda: Row(lambda *a: hmm_filter(*a).filtered_probs, arguments(), batch=(2,), tolerance=1e-3),
    "parallel smoother": lambda: Row(
        lambda *a: parallel_hmm_smoother(*a).smoothed_probs, arguments(), batch=(2,), gradient=False, tolerance=1e-3
    ),
    "posterior mode": lambda: Row(hmm_posterior_mode, arguments(), batch=(2,), gradient=False),
    "hmm_filter, batch": lambda: Row(
        lambda i, t, ls: jax.vmap(lambda lik: hmm_filter(i, t, lik).marginal_loglik)(ls),
        (*arguments()[:2], normal(16, 32, 4)), batch=(2,), tolerance=1e-3,
    ),
}  # fmt: skip


@table(__name__, ROWS)
def test_dynamax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

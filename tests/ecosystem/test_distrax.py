"""distrax: distributions and bijectors."""

import distrax
import jax.numpy as jnp

from tests.ecosystem.rows import Row, check, integers, normal, table


def flow():
    def run(x, shift, scale):
        bijector = distrax.Block(distrax.ScalarAffine(shift, jnp.exp(scale)), 1)
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return distrax.Transformed(base, bijector).log_prob(x)

    return Row(run, (normal(64, 8), normal(8), normal(8)))


def hidden_markov():
    def run(logits, obs):
        hmm = distrax.HMM(
            distrax.Categorical(logits=jnp.zeros(4)), distrax.Categorical(logits=logits),
            distrax.Normal(jnp.arange(4.0), jnp.ones(4)),
        )  # fmt: skip
        return hmm.forward_backward(obs)[2]

    return Row(run, (normal(4, 4), normal(16)), batch=(1,))


def spline():
    return Row(
        lambda x, p: distrax.RationalQuadraticSpline(p, -3.0, 3.0).forward(x),
        (normal(64), normal(64, 13)),
        batch=(0, 1),
    )


ROWS = {
    "flow log_prob": flow,
    "HMM": hidden_markov,
    "RationalQuadraticSpline": spline,
    "Categorical log_prob": lambda: Row(
        lambda logits, v: distrax.Categorical(logits=logits).log_prob(v),
        (normal(64, 16), integers(16, 64)),
        batch=(0, 1),
    ),
}


@table(__name__, ROWS)
def test_distrax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

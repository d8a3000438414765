"""mctx: Monte Carlo tree search."""

import jax
import jax.numpy as jnp
import mctx

from tests.ecosystem.rows import Row, check, normal, table


def search(policy):
    def make():
        def run(key, x, w):
            def recurrent(params, key, action, embedding):
                embedding = jnp.tanh(embedding @ params + action[:, None])
                output = mctx.RecurrentFnOutput(
                    reward=embedding[:, 0],
                    discount=jnp.full(action.shape, 0.9),
                    prior_logits=embedding[:, :4],
                    value=embedding[:, 1],
                )
                return output, embedding

            root = mctx.RootFnOutput(prior_logits=x[:, :4], value=x[:, 0], embedding=x)
            return policy(w, key, root, recurrent, num_simulations=4).action_weights

        return Row(run, (jax.random.key(0), normal(16, 8), normal(8, 8)), batch=(1,), gradient=False)

    return make


ROWS = {"MuZero": search(mctx.muzero_policy), "Gumbel MuZero": search(mctx.gumbel_muzero_policy)}


@table(__name__, ROWS)
def test_mctx_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

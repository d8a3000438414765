"""NumPyro: log densities, inference steps and predictions."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, autoguide
from numpyro.infer.util import log_density

from tests.ecosystem.rows import Row, check, integers, normal, table


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def density():
    return Row(
        lambda w, x, y: log_density(model, (x, y), {}, {"w": w})[0],
        (normal(8), normal(64, 8), integers(2, 64)),
        batch=(1, 2),
    )


def elbo():
    guide = autoguide.AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO())
    x, y = normal(64, 8), integers(2, 64)
    state = svi.init(jax.random.PRNGKey(0), x, y)
    return Row(svi.update, (state, x, y), batch=(1, 2), gradient=False)


def hamiltonian():
    def run(key, x, y):
        mcmc = MCMC(NUTS(model, max_tree_depth=3), num_warmup=2, num_samples=2, progress_bar=False)
        mcmc.run(key, x, y)
        return mcmc.get_samples()["w"].shape[0] * jnp.ones(())

    return Row(run, (jax.random.PRNGKey(0), normal(64, 8), integers(2, 64)), batch=(1, 2), gradient=False)


def mixture():
    def run(x, means):
        weights = dist.Categorical(probs=jnp.ones(4) / 4)
        return dist.MixtureSameFamily(weights, dist.Normal(means, 1.0)).log_prob(x)

    return Row(run, (normal(64), normal(4)))


ROWS = {"log_density": density, "SVI update": elbo, "NUTS": hamiltonian, "mixture log_prob": mixture}


@table(__name__, ROWS)
def test_numpyro_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

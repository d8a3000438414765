"""MCMC with NumPyro: 16 chains over 100 million observations on 8 H100.

A hierarchical logistic regression: each of 2,000 groups has coefficients of its own, drawn around those that all share. NumPyro
makes the log density from the model and moves the chains by Hamiltonian Monte Carlo. The chains are few, so the observations are
to be sharded too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpyro
from numpyro import distributions as dist
from numpyro.infer import HMC

from examples.gallery import Program, show


@dataclasses.dataclass(frozen=True)
class Config:
    observations: int = 100_000_000
    features: int = 32
    groups: int = 2000
    chains: int = 16
    leaps: int = 32


TINY = Config(observations=64, features=4, groups=4, chains=2, leaps=4)


def model(cfg, x, group, y):
    """Outcomes y [observations] from features x [observations, features] and the group of each."""
    shared = numpyro.sample("shared", dist.Normal(0, 1).expand([cfg.features]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", cfg.groups):
        own = numpyro.sample("own", dist.Normal(0, 1).expand([cfg.features]).to_event(1))
    with numpyro.plate("observations", len(x)):
        logits = jnp.sum(x * (shared + spread * own)[group], axis=-1)
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    sampler = HMC(model, step_size=1e-3, num_steps=cfg.leaps, trajectory_length=None, adapt_step_size=False,
                  adapt_mass_matrix=False)  # fmt: skip

    def start(key, *data):
        return sampler.init(jax.random.split(key, cfg.chains), 0, None, (cfg, *data), {})

    def draw_samples(state, x, group, y):
        """The next sample of each chain."""
        return sampler.sample(state, (cfg, x, group, y), {})

    n = cfg.observations
    data = (
        jax.ShapeDtypeStruct((n, cfg.features), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )
    state = jax.eval_shape(start, jax.random.PRNGKey(0), *data)

    def draw():
        keys = jax.random.split(jax.random.key(1), 3)
        x = jax.random.normal(keys[0], data[0].shape)
        group, y = (jax.random.randint(k, (n,), 0, top) for k, top in ((keys[1], cfg.groups), (keys[2], 2)))
        return jax.jit(start)(jax.random.PRNGKey(0), x, group, y), x, group, y

    options = {"level": "time", "donate_argnums": (0,)}
    return Program(draw_samples, (state, *data), None if size == "tiny" else "h100:8", options, draw=draw)


if __name__ == "__main__":
    show(program)
